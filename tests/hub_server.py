"""The smallest Hugging Face Hub that huggingface_hub's client is content with: what it calls to publish and to load.

Everything is held in memory. Writing, and reading what is private, takes the one token.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_ofATestThatNobodyMaySee"
Files = dict[str, bytes]


@dataclass
class Repo:
    private: bool
    commits: dict[str, Files] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    messages: list[str] = field(default_factory=list)

    def at(self, revision: str) -> Files:
        return self.commits[self.branches.get(revision, revision)]


class Answer(NamedTuple):
    status: int
    body: Any = None
    """JSON, or bytes."""
    headers: dict[str, str] = {}


class Hub:
    """`with Hub() as hub:` serves at `hub.endpoint`; `hub.repos` is what it holds, `hub.asked` what it was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: Files = {}
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, body: bytes, token: str | None) -> Answer:
        """The routes, by the first that fits; what is not known is a 404 that names itself."""
        name = r"([\w.-]+/[\w.-]+?)"
        routes: dict[str, Callable[..., Answer]] = {
            r"POST /api/repos/create": self._create,
            r"POST /api/validate-yaml": self._validate,
            rf"GET /api/models/{name}(?:/revision/([^/]+))?": self._info,
            rf"POST /api/models/{name}/branch/([^/]+)": self._branch,
            rf"POST /api/models/{name}/preupload/([^/]+)": self._preupload,
            rf"POST /api/models/{name}/commit/([^/]+)": self._commit,
            rf"GET /api/models/{name}/tree/([^/]+)": self._tree,
            rf"POST /{name}\.git/info/lfs/objects/batch": self._batch,
            r"PUT /lfs/(\w+)": self._store,
            rf"(?:GET|HEAD) /{name}/resolve/([^/]+)/(.+)": self._resolve,
        }
        self.asked.append(f"{method} {path}")
        for pattern, route in routes.items():
            if match := re.fullmatch(pattern, f"{method} {path}"):
                repo = self.repos.get(match[1]) if match.groups() else None
                writes = method == "POST" and "validate" not in path
                if token != TOKEN and (writes or (repo is not None and repo.private)):
                    return Answer(401, {"error": "a token is wanted"})
                if name in pattern and repo is None:
                    return Answer(404, {"error": f"no repository {match[1]}"}, {"X-Error-Code": "RepoNotFound"})
                groups = [unquote(part) if part else part for part in match.groups()]
                return route(body, *([repo, *groups[1:]] if repo is not None else groups))
        return Answer(404, {"error": f"this server does not know {method} {path}"})

    def _create(self, body: bytes) -> Answer:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        found = {"url": f"{self.endpoint}/{name}", "name": name}
        if name in self.repos:
            return Answer(409, {**found, "error": "it is there already"})
        self.repos[name] = Repo(asked.get("visibility") == "private")
        return Answer(200, found)

    def _validate(self, body: bytes) -> Answer:
        head = json.loads(body)["content"].split("---\n")[1]
        faults = [] if isinstance(yaml.safe_load(head).get("license"), str) else [{"message": "license is missing"}]
        return Answer(400 if faults else 200, {"errors": faults, "warnings": []})

    def _info(self, _: bytes, repo: Repo, revision: str | None) -> Answer:
        sha = repo.branches.get(revision or "main", revision)
        if sha not in repo.commits:
            return Answer(404, {"error": f"no revision {revision}"}, {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        return Answer(
            200, {"id": self._name(repo), "private": repo.private, "sha": sha, "siblings": siblings, "tags": []}
        )

    def _name(self, repo: Repo) -> str:
        return next(name for name, one in self.repos.items() if one is repo)

    def _branch(self, _: bytes, repo: Repo, name: str) -> Answer:
        if name in repo.branches:
            return Answer(409, {"error": "it is there already"})
        repo.branches[name] = repo.branches["main"]
        return Answer(200, {})

    def _preupload(self, body: bytes, repo: Repo, _: str) -> Answer:
        files = [
            {"path": file["path"], "uploadMode": _mode(file["path"]), "shouldIgnore": False, "oid": None}
            for file in json.loads(body)["files"]
        ]
        return Answer(200, {"files": files})

    def _batch(self, body: bytes, repo: Repo) -> Answer:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.endpoint}/lfs/{one['oid']}"}}}
            for one in json.loads(body)["objects"]
        ]
        return Answer(200, {"transfer": "basic", "objects": objects})

    def _store(self, body: bytes, oid: str) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return Answer(400, {"error": "these bytes have another hash"})
        self.blobs[oid] = body
        return Answer(200)

    def _commit(self, body: bytes, repo: Repo, revision: str) -> Answer:
        files = dict(repo.at(revision))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = hashlib.sha1(f"{len(self.asked)}".encode()).hexdigest()
        repo.commits[sha], repo.branches[revision] = files, sha
        return Answer(200, {"commitOid": sha, "commitUrl": f"{self.endpoint}/{self._name(repo)}/commit/{sha}"})

    def _tree(self, _: bytes, repo: Repo, revision: str) -> Answer:
        return Answer(200, [_entry(path, content) for path, content in repo.at(revision).items()])

    def _resolve(self, _: bytes, repo: Repo, revision: str, path: str) -> Answer:
        if path not in (files := repo.at(revision)):
            return Answer(404, {"error": f"no file {path}"}, {"X-Error-Code": "EntryNotFound"})
        entry = _entry(path, files[path])
        tag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        return Answer(200, files[path], {"ETag": f'"{tag}"', "X-Repo-Commit": repo.branches.get(revision, revision)})

    def _handler(hub: "Hub") -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
                answer = hub.answer(self.command, urlsplit(self.path).path, body, token)
                raw = isinstance(answer.body, bytes)
                content = answer.body if raw else json.dumps(answer.body).encode()
                self.send_response(answer.status)
                kind = "application/octet-stream" if raw else "application/json"
                for name, value in {**answer.headers, "Content-Type": kind, "Content-Length": len(content)}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        return Handler


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


def _entry(path: str, content: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "oid": git, "size": len(content)}
    if _mode(path) == "lfs":
        oid = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
    return entry


if __name__ == "__main__":  # for scripts/demo --full and for a look by hand: HF_ENDPOINT is what it prints
    with Hub() as served:
        print(served.endpoint, flush=True)
        threading.Event().wait()

"""Served mode against servers that are played: counters before and after, the tokens of each answer, and what is said
where a server is not there, does not speculate, or serves others meanwhile."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from models import tiny_model

from specdraft.config import SpecdraftError
from specdraft.drafters.lookup import LookupDrafter
from specdraft.evaluation import served_server
from specdraft.evaluation.served import Ask, confront, decode_both
from specdraft.evaluation.served_counts import Counts
from specdraft.evaluation.served_server import ServerEngine, samples
from specdraft.target import FrozenTarget

ASK = Ask([[5, 6, 7, 5, 6], [9, 8, 9, 8]], 16, 2)
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a \\"b\\", {{c}}"}} {drafts}.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.78e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {draft_tokens}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted} 1700000000000
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
vllm:spec_decode_num_drafts_total{{engine="1"}} 7.0
vllm:request_success_total{{engine="0",finished_reason="stop"}} {answered}
vllm:request_success_total{{engine="1",finished_reason="length"}} 5.0
"""


class Played:
    """What the server has counted and what it will answer, one reply a prompt."""

    def __init__(self, replies: list[tuple[list[int] | None, Counts]]) -> None:
        self.replies, self.asked = list(replies), list[dict[str, Any]]()
        self.counts, self.answered = Counts(drafts=40, draft_tokens=80, accepted=9, per_position=(6, 3)), 11
        self.speculates, self.lag, self.others = True, 0, 0

    def metrics(self) -> str:
        if self.lag:
            self.lag -= 1
            return self.before
        first, second = self.counts.per_position
        known = self.counts.model_dump(exclude={"per_position"})
        text = METRICS.format(**known, first=first, second=second, answered=self.answered)
        return text if self.speculates else "vllm:num_requests_running 0.0\n"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.before = self.metrics()
        self.asked.append(body)
        tokens, counts = self.replies.pop(0)
        self.counts += counts
        self.answered += 1 + self.others
        self.lag = 2  # counted a moment after it was answered
        return {"choices": [{"text": "..."} | ({} if tokens is None else {"token_ids": tokens})]}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        tokens, counts = self.replies.pop(0)
        first, second = counts.per_position
        meta = {"completion_tokens": len(tokens or [])}
        if self.speculates:
            histogram = [counts.drafts - first, first - second, second]
            meta |= {"spec_correct_drafts_histogram": histogram, "spec_num_proposed_drafts": counts.draft_tokens}
        return {"output_ids": tokens, "meta_info": meta}


@contextmanager
def serving(played: Played) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/metrics": played.metrics, "/health": lambda: "", "/v1/models": lambda: '{"data": [{"id": "m"}]}'}
            self.reply(pages[self.path]().encode()) if self.path in pages else self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = played.complete if self.path == "/v1/completions" else played.generate
            self.reply(json.dumps(answer(body)).encode())

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_given: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_model())


def as_here(target: FrozenTarget) -> Any:
    """Plain and chain decoding, and the replies of a server that does the same."""
    plain, chain = decode_both(target, LookupDrafter(), ASK)
    replies = [(g.tokens, Counts.of_rounds(g.rounds, ASK.gamma)) for g in chain]
    assert all(counts.accepted for _, counts in replies), "random models repeat themselves"
    return plain, chain, replies


def test_samples_are_read_from_prometheus_text() -> None:
    text = 'a_total{x="1, \\"}",y="2"} 3.0\n# TYPE b gauge\nb 1e3\n\nc{} NaN\nnot a sample\n'
    found = samples(text)
    assert found[:2] == [("a_total", {"x": '1, \\"}', "y": "2"}, 3.0), ("b", {}, 1000.0)]
    assert [name for name, _, _ in found] == ["a_total", "b", "c"]


def test_e28_counters_are_differences_summed_over_engines(target: FrozenTarget) -> None:
    plain, chain, replies = as_here(target)
    with serving(played := Played(replies)) as url:
        engine = ServerEngine(kind="server", url=url)
        engine.ready(LookupDrafter())
        served = confront(engine, target, LookupDrafter(), ASK, plain, chain)
    assert served.equal, served.reason
    assert served.answers == "identical"
    assert served.theirs.accepted > 0
    assert [body["prompt"] for body in played.asked] == ASK.prompts
    sent = {"model": "m", "temperature": 0, "max_tokens": 16, "stop_token_ids": [2], "ignore_eos": True}
    assert sent.items() <= played.asked[0].items()


def test_a_server_that_gives_no_token_ids_is_judged_by_its_counts(target: FrozenTarget) -> None:
    plain, chain, replies = as_here(target)
    with serving(Played([(None, counts) for _, counts in replies])) as url:
        served = confront(ServerEngine(kind="server", url=url + "/"), target, LookupDrafter(), ASK, plain, chain)
    assert (served.equal, served.answers) == (True, None)


def test_other_traffic_is_an_error(target: FrozenTarget) -> None:
    plain, chain, replies = as_here(target)
    played = Played(replies)
    played.others = 1
    with serving(played) as url, pytest.raises(SpecdraftError, match="answered 2 requests where 1 was sent"):
        confront(ServerEngine(kind="server", url=url), target, LookupDrafter(), ASK, plain, chain)


def test_a_server_that_never_counts_is_an_error(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_server, "_SETTLE", 0.05)
    plain, chain, replies = as_here(target)
    played = Played(replies)
    played.others = -1
    with serving(played) as url, pytest.raises(SpecdraftError, match="does not count its answers"):
        confront(ServerEngine(kind="server", url=url), target, LookupDrafter(), ASK, plain, chain)


def test_x13_a_server_without_speculation_or_none_at_all_is_an_error_at_once() -> None:
    played = Played([])
    played.speculates = False
    with serving(played) as url:
        with pytest.raises(SpecdraftError, match="has no vllm:spec_decode_num_drafts_total: speculation is off"):
            ServerEngine(kind="server", url=url).ready(LookupDrafter())
        with pytest.raises(SpecdraftError, match=r"/v2/metrics answers 404"):
            ServerEngine(kind="server", url=url + "/v2").ready(LookupDrafter())
    for gone in (url, "nonsense"):
        with pytest.raises(SpecdraftError, match="cannot be reached"):
            ServerEngine(kind="server", url=gone).ready(LookupDrafter())


def test_sglang_tells_the_counts_of_each_answer(target: FrozenTarget) -> None:
    plain, chain, replies = as_here(target)
    with serving(played := Played(replies)) as url:
        engine = ServerEngine(kind="server", url=url, api="sglang")
        engine.ready(LookupDrafter())
        served = confront(engine, target, LookupDrafter(), ASK, plain, chain)
    assert served.equal, served.reason
    assert [body["input_ids"] for body in played.asked] == ASK.prompts
    played = Played(replies)
    played.speculates = False
    with serving(played) as url, pytest.raises(SpecdraftError, match="tells nothing of drafts"):
        confront(ServerEngine(kind="server", url=url, api="sglang"), target, LookupDrafter(), ASK, plain, chain)

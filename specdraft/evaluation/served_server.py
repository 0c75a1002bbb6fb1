"""Served mode with a server that already runs: vLLM's counters from /metrics, SGLang's from each of its answers."""

import json
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from specdraft.config import Recipe, SpecdraftError
from specdraft.drafters.base import Drafter
from specdraft.evaluation.served import Ask, Replies
from specdraft.evaluation.served_counts import Counts
from specdraft.target import FrozenTarget

_SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIX = "vllm:spec_decode_num_"
_ANSWERED = "vllm:request_success_total"
_SETTLE = 10.0
"""Seconds within which a server must have counted what it has answered."""


class ServerEngine(Recipe):
    kind: Literal["server"]
    """A server that already runs, with this drafter and the chain's draft length, and that nobody else uses."""
    url: str
    """Its address without /v1, such as http://localhost:8000."""
    api: Literal["vllm", "sglang"] = "vllm"
    """vLLM: prompts go to /v1/completions, counts come from /metrics. SGLang: both by /generate."""
    model: str | None = None
    """The name that it gives to the target. Unset: the first one that it lists. vLLM only."""
    timeout: float = Field(default=600.0, gt=0)
    """Most seconds for one answer."""

    def ready(self, drafter: Drafter) -> None:
        if self.api == "vllm":
            _counted(self._metrics(), self.url)
        else:
            self._fetch("/health")

    def serve(self, target: FrozenTarget, drafter: Drafter, ask: Ask, written: Path | None) -> Replies:
        """The drafter is the server's own business. Raises SpecdraftError for a server that cannot be reached, that
        does not speculate, or that answers others meanwhile."""
        replies = self._vllm(ask, target.end_ids) if self.api == "vllm" else self._sglang(ask, target.end_ids)
        tokens = [answer for answer, _ in replies if answer is not None]
        return Replies(
            f"{'vLLM' if self.api == 'vllm' else 'SGLang'} at {self.url}",
            tokens if len(tokens) == len(replies) else None,
            [counts for _, counts in replies],
        )

    def _vllm(self, ask: Ask, end_ids: Sequence[int]) -> list[tuple[list[int] | None, Counts]]:
        model = self.model or self._json("/v1/models")["data"][0]["id"]
        before, answered = _counted(self._metrics(), self.url)
        replies = []
        for prompt in ask.prompts:
            body = {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": ask.max_new_tokens,
                "temperature": 0,
                "stop_token_ids": list(end_ids),
                "ignore_eos": True,
                "return_token_ids": True,
            }
            reply = self._json("/v1/completions", body)
            after, answered = self._settled(answered)
            replies.append((reply["choices"][0].get("token_ids"), after - before))
            before = after
        return replies

    def _settled(self, answered: int) -> tuple[Counts, int]:
        """The counters once they hold one more answer: a server counts a moment after it has answered."""
        until = time.monotonic() + _SETTLE
        while True:
            counts, now = _counted(self._metrics(), self.url)
            if now > answered + 1:
                raise SpecdraftError(
                    f"{self.url} answered {now - answered} requests where 1 was sent: others use it, and its counters "
                    "hold theirs too. Measure when nobody does"
                )
            if now == answered + 1:
                return counts, now
            if time.monotonic() > until:
                raise SpecdraftError(f"{self.url} does not count its answers in {_ANSWERED}: its counts are not known")
            time.sleep(0.02)

    def _sglang(self, ask: Ask, end_ids: Sequence[int]) -> list[tuple[list[int] | None, Counts]]:
        sampling = {
            "temperature": 0,
            "max_new_tokens": ask.max_new_tokens,
            "stop_token_ids": list(end_ids),
            "ignore_eos": True,
        }
        replies: list[tuple[list[int] | None, Counts]] = []
        for prompt in ask.prompts:
            reply = self._json("/generate", {"input_ids": list(prompt), "sampling_params": sampling})
            replies.append((reply.get("output_ids"), _of_meta(reply["meta_info"], ask.gamma, self.url)))
        return replies

    def _metrics(self) -> str:
        return self._fetch("/metrics").decode()

    def _json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        said = self._fetch(path, body)
        try:
            return json.loads(said)
        except ValueError as error:
            raise SpecdraftError(f"{self.url}{path} answers no JSON ({error}): {said[:200]!r}") from error

    def _fetch(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        try:
            asked = urllib.request.Request(self.url.rstrip("/") + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=self.timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            told = error.read()[:200].decode(errors="replace")
            raise SpecdraftError(f"{self.url}{path} answers {error.code} {error.reason}: {told}") from error
        except (OSError, ValueError) as error:
            raise SpecdraftError(
                f"engine.url: {self.url} cannot be reached ({error}); start the server, or correct the address"
            ) from error


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample in Prometheus' text format."""
    found = []
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SAMPLE.fullmatch(line.strip())):
            found.append((match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"])))
    return found


def _counted(metrics: str, url: str) -> tuple[Counts, int]:
    """The counters over all engines behind a server, and how many requests they have answered.

    Raises SpecdraftError where there are none: the server does not speculate.
    """
    sums: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    for name, labels, value in samples(metrics):
        short = name.removesuffix("_total").removeprefix(_PREFIX)
        if name == _ANSWERED:
            sums[_ANSWERED] += value
        elif name.startswith(_PREFIX) and not name.endswith("_created"):
            if short == "accepted_tokens_per_pos":
                positions[int(labels["position"])] += value
            else:
                sums[short] += value
    reached = [positions[place] for place in range(1 + max(positions, default=-1))]
    try:
        counts = Counts.of_counters({**sums, "accepted_tokens_per_pos": reached})
    except KeyError as error:
        raise SpecdraftError(
            f"{url}/metrics has no {_PREFIX}{error.args[0]}_total: speculation is off there, or it is no vLLM server"
        ) from error
    return counts, int(sums[_ANSWERED])


def _of_meta(meta: dict[str, Any], gamma: int, url: str) -> Counts:
    """Of one answer of SGLang: rounds by the number of tokens accepted in each, under the names of several versions."""
    histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram")
    drafted = meta.get("spec_num_proposed_drafts", meta.get("spec_proposed_drafts", meta.get("spec_draft_token_num")))
    if meta.get("completion_tokens") == 1:  # the prompt's own pass wrote it
        return Counts(per_position=(0,) * gamma)
    if histogram is None or drafted is None:
        raise SpecdraftError(
            f"{url}/generate tells nothing of drafts (it has {', '.join(sorted(meta))}): speculation is off there, or "
            "this version does not count by answer"
        )
    reached = [*accumulate(reversed(histogram))][::-1][1:]
    reached += [0] * (gamma - len(reached))
    return Counts(
        drafts=sum(histogram), draft_tokens=drafted, accepted=sum(reached), per_position=tuple(map(int, reached))
    )

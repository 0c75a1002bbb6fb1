"""Served mode: a serving engine's acceptance beside ours, to the count, and its answers beside plain decoding's.

Engines accept greedily drafted tokens by the same rule, so that what an evaluation measures here is not merely near to
what is served: in float32 it is the same, prompt by prompt. Where it is not, weights, layers, positions or prompts are
not what they were taken for.
"""

import json
import logging
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field

from specdraft.config import Recipe, SpecdraftError
from specdraft.decoding import Generation, generate
from specdraft.drafters import kind_of
from specdraft.drafters.base import Drafter, TrainableDrafter
from specdraft.drafters.lookup import LookupDrafter
from specdraft.drafters.shapes import Chain
from specdraft.evaluation import served_worker
from specdraft.evaluation.lossless import TIE_FACTOR, compare_greedy
from specdraft.evaluation.served_counts import Counts, Served, Unequal
from specdraft.formats import FORMATS, Naming
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

log = logging.getLogger(__name__)

_LAYOUTS = {kind: name for name, one in reversed(FORMATS.items()) if "vLLM" in one.methods for kind in one.drafters}
"""The layout in which vLLM is given a kind of drafter: the first that it loads."""
_SLACK = 16
"""Tokens of context beyond the last one, within which vLLM would draft less."""


class Ask(NamedTuple):
    """What is asked of both sides, greedily."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    gamma: int
    """Length of the chain."""
    batch_size: int = 1
    """Prompts decoded together, and then also counted together."""


class Replies(NamedTuple):
    engine: str
    """What answered, for people."""
    answers: list[list[int]] | None
    """Token ids of each answer; None where the engine does not give them."""
    counts: list[Counts]
    """Of each batch of prompts."""
    batch_size: int = 1


class Engine(Protocol):
    """Something that serves the target with speculation."""

    def ready(self, drafter: Drafter) -> None:
        """Raise SpecdraftError at once for what would fail after minutes of decoding."""
        ...

    def serve(self, target: FrozenTarget, drafter: Drafter, ask: Ask, written: Path | None) -> Replies:
        """`written`: a folder that already holds the drafter in the layout that the engine loads."""
        ...


class VllmEngine(Recipe):
    kind: Literal["vllm"]
    """vLLM, started for this by the Python of an environment of its own, since its pins clash with ours. The drafter is
    written to the temporary folder for it, in the layout that it loads; mtp: into a copy of the target's checkpoint."""
    python: Path = Field(default=Path(".venv-serve/bin/python"), validate_default=False)
    """The interpreter of that environment."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of target and drafter in the engine. `auto`: the target's here."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """More arguments of vllm.LLM, such as gpu_memory_utilization; the target is also loaded here, beside it."""

    def ready(self, drafter: Drafter) -> None:
        if not self.python.is_file():
            raise SpecdraftError(
                f"engine.python: {self.python} is not there. Make the environment (python -m venv .venv-serve && "
                ".venv-serve/bin/pip install vllm), or name the Python of one that has vLLM"
            )
        kind = kind_of(drafter) if isinstance(drafter, TrainableDrafter) else type(drafter).__name__
        if not isinstance(drafter, LookupDrafter) and kind not in _LAYOUTS:
            raise SpecdraftError(f"vLLM does not serve {kind}; it serves {', '.join(_LAYOUTS)} and lookup")

    def serve(self, target: FrozenTarget, drafter: Drafter, ask: Ask, written: Path | None) -> Replies:
        """Raises SpecdraftError with vLLM's last words where it fails, and where it does not speculate."""
        if target.name.endswith(".gguf"):
            raise SpecdraftError(f"vLLM loads no .gguf file: give target.name a checkpoint's folder, not {target.name}")
        with tempfile.TemporaryDirectory(prefix="specdraft-served-") as name:
            scratch = Path(name)
            model, speculation = _speculation(target, drafter, ask.gamma, written or scratch / "drafter")
            dtype = str(target.dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
            llm: dict[str, Any] = {
                "model": model,
                "dtype": dtype,
                "max_model_len": max(map(len, ask.prompts)) + ask.max_new_tokens + ask.gamma + _SLACK,
                "max_num_seqs": ask.batch_size,
                "seed": 0,
                "enforce_eager": True,
                "enable_prefix_caching": False,
                "disable_log_stats": False,
                "speculative_config": speculation,
                **self.options,
            }
            job = {
                "llm": llm,
                "prompts": [list(prompt) for prompt in ask.prompts],
                "batch_size": ask.batch_size,
                "max_new_tokens": ask.max_new_tokens,
                "end_ids": list(target.end_ids),
            }
            log.info("vLLM decodes %d prompts with %s", len(ask.prompts), speculation)
            found = _run(self.python, job, scratch)
        try:
            counters = [Counts.of_counters(one) for one in found["counters"]]
        except KeyError as error:
            raise SpecdraftError(f"vLLM has no counter {error}: it did not speculate with {speculation}") from error
        counts = [after - before for before, after in pairwise(counters)]
        return Replies(f"vLLM {found['version']}, {dtype}", found["answers"], counts, ask.batch_size)


def _speculation(target: FrozenTarget, drafter: Drafter, gamma: int, folder: Path) -> tuple[str, dict[str, Any]]:
    """The model that vLLM is to load and its speculative_config; writes the drafter into `folder` if it is not there.

    Raises SpecdraftError for a drafter that cannot be written so.
    """
    asked: dict[str, Any] = {"num_speculative_tokens": gamma}
    if isinstance(drafter, LookupDrafter):
        lengths = {"prompt_lookup_min": drafter.shortest, "prompt_lookup_max": drafter.longest}
        return target.name, {"method": "ngram", **asked, **lengths}
    assert isinstance(drafter, TrainableDrafter), "by ready"
    layout = FORMATS[_LAYOUTS[kind_of(drafter)]]
    method = layout.methods["vLLM"]
    if not folder.exists():
        layout.write(drafter, Naming(target, target.name), folder)
    if method == "mtp":
        return str(folder), {"method": method, **asked}
    return target.name, {"method": method, "model": str(folder), **asked}


def _run(python: Path, job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """`served_worker` in another environment. Raises SpecdraftError with its last words if it fails."""
    (scratch / "job.json").write_text(json.dumps(job))
    # isolated: neither this environment's modules nor those beside the worker, such as `statistics`, are to be found
    command = [str(python), "-I", served_worker.__file__, str(scratch / "job.json"), str(scratch / "replies.json")]
    with (scratch / "log").open("w+", encoding="utf-8", errors="replace") as said:
        done = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False)
        said.seek(0)
        last = "\n".join(said.read().strip().splitlines()[-12:])
    if done.returncode or not (scratch / "replies.json").exists():
        raise SpecdraftError(f"vLLM failed (exit code {done.returncode}) with {job['llm']}; it last said:\n{last}")
    return json.loads((scratch / "replies.json").read_text())


def decode_both(target: FrozenTarget, drafter: Drafter, ask: Ask) -> tuple[list[Generation], list[Generation]]:
    """The prompts decoded here, plainly and with the chain. Sets `drafter.shape`."""
    drafter.shape = Chain(ask.gamma)
    plain, chain = (
        generate(
            target,
            who,
            ask.prompts,
            warp=Warp(0.0),
            max_new_tokens=ask.max_new_tokens,
            batch_size=ask.batch_size,
        ).generations
        for who in (None, drafter)
    )
    return plain, chain


def confront(
    engine: Engine,
    target: FrozenTarget,
    drafter: Drafter,
    ask: Ask,
    plain: Sequence[Generation],
    chain: Sequence[Generation],
    *,
    written: Path | None = None,
    tie_factor: float = TIE_FACTOR,
) -> Served:
    """Have the engine answer, and compare with `plain` decoding and the `chain` of the same prompts, made here.

    Raises SpecdraftError where the engine cannot be asked.
    """
    replies = engine.serve(target, drafter, ask, written)
    ours = [Counts.of_rounds(generation.rounds, ask.gamma) for generation in chain]
    return judge(target, drafter, ask, plain, ours, replies, tie_factor)


def judge(
    target: FrozenTarget,
    drafter: Drafter,
    ask: Ask,
    plain: Sequence[Generation],
    ours: Sequence[Counts],
    replies: Replies,
    tie_factor: float = TIE_FACTOR,
) -> Served:
    """The verdict on an engine's replies; `ours`: what each prompt's rounds here count."""
    starts = range(0, len(ours), replies.batch_size)
    batches = [(start, sum(ours[start : start + replies.batch_size], Counts())) for start in starts]
    pairs = zip(batches, replies.counts, strict=True)
    unequal = [Unequal(prompt=start, ours=one, theirs=other) for (start, one), other in pairs if one != other]
    total = sum(ours, Counts()), sum(replies.counts, Counts())
    found, told = None, ["the engine gives no token ids, so that answers are not compared"]
    if replies.answers is not None:
        served = [Generation(tokens=tokens) for tokens in replies.answers]
        found = compare_greedy(target, ask.prompts, plain, served, tie_factor)
        told = [found.reason]
        told += [
            f"first in prompt {d.prompt} at token {d.position}: {d.plain_token} here, {d.speculative_token} there"
            for d in found.divergences[:1]
        ]
    if unequal:
        first = unequal[0]
        told.append(
            f"the counts differ in {len(unequal)} of {len(batches)} batches of {replies.batch_size}, first from prompt "
            f"{first.prompt} on: {first.ours} here, {first.theirs} there"
        )
        told += _causes(target, drafter, *total)
    else:
        told.append(f"the counts are equal in every batch of {replies.batch_size}")
    return Served(
        engine=replies.engine,
        system=f"chain of {ask.gamma}",
        prompts=len(ours),
        ours=total[0],
        theirs=total[1],
        unequal=unequal,
        answers=None if found is None else found.verdict,  # type: ignore[arg-type]
        reason="; ".join(told),
    )


def _causes(target: FrozenTarget, drafter: Drafter, ours: Counts, theirs: Counts) -> list[str]:
    """What may have made the counts differ."""
    told = []
    if target.dtype not in (torch.float32, torch.float64):
        told.append(
            f"in {str(target.dtype).removeprefix('torch.')}, rounding may decide a draft otherwise: use float32"
        )
    if isinstance(drafter, TrainableDrafter) and drafter.dtype != target.dtype:
        told.append(f"the drafter computes in {drafter.dtype} here, and in the target's dtype in an engine")
    if isinstance(drafter, LookupDrafter):
        if drafter.occurrence == "latest":
            told.append("vLLM drafts what followed the earliest occurrence: set drafter.occurrence to earliest")
    elif ours.draft_tokens * theirs.drafts != theirs.draft_tokens * ours.drafts:
        each = [counts.draft_tokens / max(counts.drafts, 1) for counts in (ours, theirs)]
        told.append(f"{each[0]:.3g} tokens a round are drafted here, {each[1]:.3g} there: make them the same")
    return told

"""Peak memory of the training loss: hidden states in, their gradients and the head's out, on random weights.

A drafter's own head over the whole vocabulary at every depth, and the target's head, in bfloat16. Every run has a
process of its own. What is counted is the peak above a baseline in which the hidden states, both heads, and the
gradients of the hidden states and of the drafter's head exist already. Beside it stands the loss written densely, on so
few tokens that it fits. The table is told on stdout, and on its last line one JSON object.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import machine
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from specdraft.objectives import OBJECTIVES, Mixture, Prediction
from specdraft.reduction import CHUNK, IGNORED, Teacher, law_positions, reduce

GOAL = 0.6e9
"""Bytes that the loss may add at 8,192 tokens, 4 depths and 151,936 ids."""


@dataclass(frozen=True)
class Job:
    system: str
    term: str
    tokens: int
    depths: int
    vocabulary: int
    width: int
    rows: int
    chunk: int


class RandomTarget:
    """A target of which only the output layer matters."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def head(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight)

    def restricted_head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return linear(hidden, self.weight[ids])


class Case:
    """`tokens` positions of depth 1, shared among the rows; each row begins with a prompt of one token."""

    def __init__(self, job: Job, device: torch.device) -> None:
        torch.manual_seed(0)
        length = job.tokens // job.rows + 2
        self.labels = torch.randint(job.vocabulary, (job.rows, length), device=device)
        self.labels[:, 0] = IGNORED
        self.target = RandomTarget(_random(job.vocabulary, job.width, device=device))
        self.head = nn.Linear(job.width, job.vocabulary, bias=False, device="meta")
        self.head.weight = nn.Parameter(_random(job.vocabulary, job.width, device=device))
        self.hidden = _random(job.rows, length, job.width, device=device)
        self.states = [_random(job.rows, length, job.width, device=device).requires_grad_() for _ in range(job.depths)]

    def leaves(self) -> list[Tensor]:
        return [*self.states, self.head.weight]


def _random(*shape: int, device: torch.device) -> Tensor:
    """bfloat16, filled row by row, so that no wider copy is ever made."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for row in tensor.flatten(0, -2).split(4096):
        row.normal_(std=shape[-1] ** -0.25)
    return tensor


def chunked(case: Case, job: Job) -> Tensor:
    predictions = [Prediction(d, d, state, case.head, None) for d, state in enumerate(case.states, 1)]
    teacher, mixture = Teacher(case.target, case.hidden), Mixture({job.term: 1.0})
    return reduce(predictions, teacher, case.labels, mixture=mixture, weights=[1.0] * job.depths, chunk=job.chunk).loss


def dense(case: Case, job: Job) -> Tensor:
    """Cross-entropy with p, the shortest that a loss can be written: logits of all supervised positions at once."""
    items, total = (case.labels != IGNORED).sum(), torch.zeros((), device=case.labels.device)
    with torch.no_grad():
        p = case.target.head(case.hidden[law_positions(case.labels, 1)]).float().softmax(-1)
    for shift, state in enumerate(case.states, 1):
        held = law_positions(case.labels, shift)
        mine = p if shift == 1 else p[held[law_positions(case.labels, 1)]]
        log_q = case.head(state[held.roll(-shift, 1)]).float().log_softmax(-1)
        total = total - torch.linalg.vecdot(mine, log_q).sum() / items
    return total


SYSTEMS: dict[str, Callable[[Case, Job], Tensor]] = {"chunked": chunked, "dense": dense}


def measure(job: Job) -> dict[str, Any]:
    """One loss and its backward pass, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = replace(job, tokens=8 * job.rows, vocabulary=512, width=64)
    SYSTEMS[job.system](Case(small, device), small).backward()  # kernels and libraries are loaded by then
    case = Case(job, device)
    gradients = [torch.ones_like(leaf) for leaf in case.leaves()]
    before = _held(device)
    del gradients
    begun = time.perf_counter()
    loss = SYSTEMS[job.system](case, job)
    loss.backward()
    seconds = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else machine.peak_resident()
    counts = [int(law_positions(case.labels, shift).sum()) for shift in range(1, job.depths + 1)]
    return {
        **asdict(job),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "loss": loss.item(),
        "positions": counts,
        "baseline_bytes": before,
        "added_bytes": peak - before,
        "seconds": seconds,
    }


def _held(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return machine.resident()


def in_a_process(job: Job) -> dict[str, Any]:
    print(f"{job.system}: {job.tokens} tokens, {job.depths} depths", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-3000:]}\nthe {job.system} run failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("term", "tokens", "depths", "vocabulary", "width", "rows", "chunk")
    job = Job("chunked", **{name: getattr(arguments, name) for name in names})
    ours = in_a_process(job)
    theirs = in_a_process(replace(job, system="dense", tokens=arguments.dense_tokens))
    factor = sum(ours["positions"]) / sum(theirs["positions"])
    return {
        "bench": "memory",
        "machine": machine.facts("bfloat16"),
        "chunked": ours,
        "dense": theirs,
        "dense_at_as_many_tokens_bytes": round(theirs["added_bytes"] * factor),
        "goal_bytes": GOAL,
        "goal_met": ours["added_bytes"] < GOAL,
    }


def table(result: dict[str, Any]) -> str:
    ours, theirs, about = result["chunked"], result["dense"], result["machine"]
    place = about["cpu"] if ours["device"] == "cpu" else ours["device"]
    return "\n".join(
        [
            f"{ours['vocabulary']} ids, width {ours['width']}, {ours['depths']} depths, bfloat16 heads and hidden "
            f"states, {ours['term']}, {ours['chunk']} positions at once; {place}",
            "",
            "| | tokens | added at the peak | seconds |",
            "|---|---:|---:|---:|",
            f"| specdraft | {ours['tokens']} | {ours['added_bytes'] / 1e9:.2f} GB | {ours['seconds']:.0f} |",
            f"| dense cross-entropy | {theirs['tokens']} | {theirs['added_bytes'] / 1e9:.2f} GB | "
            f"{theirs['seconds']:.0f} |",
            f"| dense, in proportion | {ours['tokens']} | {result['dense_at_as_many_tokens_bytes'] / 1e9:.1f} GB | |",
            "",
            f"added: above {ours['baseline_bytes'] / 1e9:.2f} GB of process, hidden states, heads and gradients. The "
            f"goal, {result['goal_bytes'] / 1e9:.1f} GB, is {'met' if result['goal_met'] else 'NOT met'}.",
            "",
        ]
    )


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench memory", description=__doc__)
    parser.add_argument("--term", choices=sorted(OBJECTIVES), default="forward_kl", help="what is minimised")
    parser.add_argument("--tokens", type=int, default=8192, help="supervised positions of depth 1")
    parser.add_argument("--depths", type=int, default=4, help="predictions at each position")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="ids of both heads")
    parser.add_argument("--width", type=int, default=1024, help="of both hidden states")
    parser.add_argument("--rows", type=int, default=8, help="rows of the batch")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="positions worked on at once")
    parser.add_argument("--dense-tokens", type=int, default=128, help="positions of the dense computation")
    return parser.parse_args(words)


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        print(json.dumps(measure(Job(**json.loads(sys.argv[2])))))
        return
    result = compare(parse(sys.argv[1:]))
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

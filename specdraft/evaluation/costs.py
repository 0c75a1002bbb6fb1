"""The parts of a round, timed one by one: what drafting should gain, and which chain length would gain most.

Nothing here looks at the seconds of the decoding that it predicts: parts are timed by themselves, on other rows, and
how often each is paid follows from what was accepted.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from specdraft import theory
from specdraft.causal import Observation, Session
from specdraft.decoding import pad
from specdraft.dice import SeededDice
from specdraft.drafters.base import Drafter, Memory
from specdraft.drafters.shapes import Chain, Shape
from specdraft.evaluation.report import Acceptance, Costs, GammaPoint
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Probed, Verdict, verify
from specdraft.warping import Warp

_LONGEST = 10  # chain lengths that are weighed against each other
SIZES = (1, 2, 3, 5, 8, _LONGEST + 1)
"""Tokens a row of the passes that every chain length is weighed by."""
_REPEATS = 5
_Result = TypeVar("_Result")


class Parts(NamedTuple):
    """Seconds, medians over repeats, for a batch of so many rows."""

    passes: dict[int, float]
    """A target pass, head and warping included, by tokens a row."""
    plain_rest: float
    """What plain decoding does beside its pass: choosing the token, committing it."""
    drafts: list[float]
    """Drafting, by shape."""
    targets: list[float]
    """The target's pass over what was drafted, probes included, by shape."""
    rests: list[float]
    """What a round does beside drafting and its pass, by shape: verification, commit, the drafter's reading of it."""
    begin: float
    """The drafter's reading of the contexts, once a batch."""


def nodes_of(shape: Shape) -> int:
    return shape.gamma if isinstance(shape, Chain) else shape.nodes


def depth_of(shape: Shape) -> int:
    return shape.gamma if isinstance(shape, Chain) else shape.depth


@torch.no_grad()
def time_parts(
    target: FrozenTarget,
    drafter: Drafter,
    shapes: Sequence[Shape],
    contexts: Sequence[Sequence[int]],
    warp: Warp,
    sizes: Sequence[int] = SIZES,
) -> Parts:
    """The parts of rounds below `contexts` (token ids, a row each), for `shapes` and target passes of `sizes`.

    The parts are taken in turn, so that a busy machine slows all alike, and in the order of decoding, so that each
    finds the caches as it does there. The contexts grow by what is accepted.
    """
    bench = _Bench(target, drafter, contexts, warp)
    passes: dict[int, list[float]] = {n: [] for n in sorted({1, *sizes})}
    taken: list[list[tuple[float, float, float]]] = [[] for _ in shapes]
    plain: list[float] = []
    for _ in range(_REPEATS + 1):
        for n in [n for n in passes if n > 1]:
            passes[n].append(bench.score(DraftTree.chain(bench.roots[:, None].expand(-1, n - 1))))
            bench.session.discard()
        seconds, rest = bench.plain_round()
        passes[1].append(seconds)
        plain.append(rest)
        for place, shape in enumerate(shapes):
            taken[place].append(bench.round(shape))
    by_shape = [_medians(found) for found in taken]
    return Parts(
        passes={n: median(found[1:]) for n, found in passes.items()},
        plain_rest=median(plain[1:]),
        drafts=[draft for draft, _, _ in by_shape],
        targets=[target for _, target, _ in by_shape],
        rests=[rest for _, _, rest in by_shape],
        begin=bench.begun,
    )


class _Bench:
    """A batch in the middle of its answers, whose rounds are taken apart."""

    def __init__(self, target: FrozenTarget, drafter: Drafter, contexts: Sequence[Sequence[int]], warp: Warp) -> None:
        self.target, self.drafter, self.warp = target, drafter, warp
        self.dice = SeededDice(range(len(contexts)))
        tokens, mask = pad(contexts, target.device)
        self.session: Session = target.session(drafter.taps, len(contexts))
        seen = self.session.read(tokens, mask)
        last = seen.hidden[torch.arange(len(tokens), device=tokens.device), mask.sum(1) - 1]
        self.roots = target.head(last).argmax(-1)
        drafter.begin(seen, self.roots, self.session)  # warms up
        self.begun, self.memory = self._timed(lambda: drafter.begin(seen, self.roots, self.session))
        self.p = self.roots  # what the last pass said
        self.empty = DraftTree.empty(len(tokens), target.device)

    def score(self, tree: DraftTree) -> float:
        """Seconds of a target pass over a tree; its law stays in `p`."""

        def score() -> Tensor:
            logits = self.target.head(self.session.extend(self.roots, tree).hidden)
            return logits.argmax(-1) if self.warp.greedy else self.warp(logits)

        seconds, self.p = self._timed(score)
        return seconds

    def plain_round(self) -> tuple[float, float]:
        """Seconds of plain decoding's pass and of what is done beside it; the drafter follows without being timed."""
        seconds = self.score(self.empty)
        rest, (verdict, seen) = self._timed(lambda: self._settle(self.empty))
        self.memory = self.drafter.remember(self.memory, verdict, seen)
        return seconds, rest

    def round(self, shape: Shape) -> tuple[float, float, float]:
        """Seconds of drafting, of the target's pass, and of everything else."""
        self.drafter.shape = shape
        draft, tree = self._timed(lambda: self.drafter.propose(self.memory, warp=self.warp, dice=self.dice))
        seconds = self.score(tree)

        def rest() -> Memory:
            verdict, seen = self._settle(tree)
            return self.drafter.remember(self.memory, verdict, seen)

        others, self.memory = self._timed(rest)
        return draft, seconds, others

    def _settle(self, tree: DraftTree) -> tuple[Verdict, Observation]:
        verdict = verify(tree, self.p, self.dice)
        if not torch.equal(tree.candidate, tree.present):
            verdict = verdict._replace(probed=Probed(tree, self.p if self.warp.greedy else self.p.argmax(-1)))
        self.roots = verdict.token
        return verdict, self.session.commit(verdict)

    def _timed(self, work: Callable[[], _Result]) -> tuple[float, _Result]:
        start = time.perf_counter()
        result = work()
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter() - start, result


def costs(parts: Parts, place: int, shape: Shape, found: Acceptance) -> Costs:
    """What the timed parts say of one system, whose shape is in that place of them."""
    passes, depth, nodes = parts.passes, depth_of(shape), found.proposed / max(found.rounds, 1)
    sizes, step, unit = sorted(passes), parts.drafts[place] / max(depth, 1), passes[1] + parts.plain_rest

    def seconds(n: float) -> float:
        return float(np.interp(n, sizes, [passes[size] for size in sizes]))

    def v(n: float) -> float:
        """A pass with all that a round does beside it and drafting, in steps of plain decoding."""
        return 1.0 if n == 1 else (seconds(n) + parts.rests[place]) / unit

    chain, points, best = isinstance(shape, Chain) and shape.stop_below == 0, [], None
    alphas, offers = _rates(found)
    if chain and alphas:
        reaches = theory.reaches(alphas, offers)
        for gamma in range(1, _LONGEST + 1):
            tokens = 1 + sum(reaches[:gamma])
            predicted = theory.speedup(tokens, gamma, step / unit, v)
            points.append(GammaPoint(gamma=gamma, tau=tokens, predicted_speedup=predicted, measured=gamma <= depth))
        best = theory.best_gamma(alphas, step / unit, v, offers)[0]
    round_cost = (parts.drafts[place] + parts.targets[place] + parts.rests[place]) / unit
    return Costs(
        pass_seconds=passes,
        draft_step_seconds=step,
        rest_seconds=parts.rests[place],
        c=step / passes[1],
        nodes=nodes,
        v=parts.targets[place] / passes[1],
        round_cost=round_cost,
        predicted_speedup=(found.tau.value or 1.0) / round_cost,
        break_even_alpha=theory.break_even_alpha(depth, step / unit, v) if chain else None,
        best_gamma=best,
        by_gamma=points,
    )


def _rates(found: Acceptance) -> tuple[list[float], list[float]]:
    """alpha and offer by depth, to the longest chain weighed: the last measured depth's are carried on."""
    measured = [(d.alpha.value, d.offer.value) for d in found.depths]
    known = [(alpha, offer) for alpha, offer in measured if alpha is not None and offer is not None][:_LONGEST]
    known += known[-1:] * (_LONGEST - len(known))
    return [alpha for alpha, _ in known], [offer for _, offer in known]


def _medians(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """The median of each column, the first row left out: it warmed up."""
    draft, target, rest = (median(column) for column in zip(*rows[1:], strict=True))
    return draft, target, rest

"""The parts of a round, timed one by one: what drafting should have gained, and which chain length would gain most."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from specdraft import theory
from specdraft.decoding import pad
from specdraft.dice import SeededDice
from specdraft.drafters.base import Chain, Drafter, Shape
from specdraft.evaluation.report import Acceptance, Costs, GammaPoint
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.warping import Warp

_LONGEST = 10  # chain lengths that are weighed against each other
_SIZES = (1, 2, 3, 5, 8, _LONGEST + 1)
_REPEATS = 7


def nodes_of(shape: Shape) -> int:
    return shape.gamma if isinstance(shape, Chain) else shape.nodes


def depth_of(shape: Shape) -> int:
    return shape.gamma if isinstance(shape, Chain) else shape.depth


@torch.no_grad()
def time_parts(
    target: FrozenTarget, drafter: Drafter, shapes: Sequence[Shape], prompts: Sequence[Sequence[int]], warp: Warp
) -> tuple[dict[int, float], list[float]]:
    """Seconds of a target pass (head and warping included) by tokens a row, and of each shape's draft, on `prompts`.

    Medians over repeats, the parts taken in turn so that a busy machine slows all alike.
    """
    tokens, mask = pad(prompts, target.device)
    session = target.session(drafter.taps, len(prompts))
    seen = session.read(tokens, mask)
    roots = tokens[:, 0].clone()
    memory = drafter.begin(seen, roots, session)
    dice = SeededDice(range(len(prompts)))
    sizes = sorted({*_SIZES, *(1 + nodes_of(shape) for shape in shapes)})
    trees = {n: DraftTree.chain(roots[:, None].expand(-1, n - 1)) for n in sizes}

    def score(tree: DraftTree) -> None:
        logits = target.head(session.extend(roots, tree).hidden)
        _ = logits.argmax(-1) if warp.greedy else warp(logits)
        session.discard()

    def draft(shape: Shape) -> None:
        drafter.shape = shape
        drafter.propose(memory, warp=warp, dice=dice)

    passes: dict[int, list[float]] = {n: [] for n in sizes}
    drafts: list[list[float]] = [[] for _ in shapes]
    for _ in range(_REPEATS + 1):
        for n, tree in trees.items():
            passes[n].append(_seconds(lambda tree=tree: score(tree), target.device))  # type: ignore[misc]
        for place, shape in enumerate(shapes):
            drafts[place].append(_seconds(lambda shape=shape: draft(shape), target.device))  # type: ignore[misc]
    return {n: median(taken[1:]) for n, taken in passes.items()}, [median(taken[1:]) for taken in drafts]


def costs(passes: dict[int, float], draft_seconds: float, shape: Shape, found: Acceptance) -> Costs:
    """What the timed parts say of one system: `passes` and `draft_seconds` as `time_parts` gives them."""
    sizes = sorted(passes)

    def v(n: float) -> float:
        return float(np.interp(n, sizes, [passes[size] for size in sizes])) / passes[1]

    depth, nodes = depth_of(shape), found.proposed / max(found.rounds, 1)
    step = draft_seconds / depth
    c = step / passes[1]
    chain = isinstance(shape, Chain)
    alphas, offers = _rates(found)
    points = []
    best = None
    if chain and alphas:
        reaches = theory.reaches(alphas, offers)
        for gamma in range(1, _LONGEST + 1):
            tokens = 1 + sum(reaches[:gamma])
            predicted = theory.speedup(tokens, gamma, c, v)
            points.append(GammaPoint(gamma=gamma, tau=tokens, predicted_speedup=predicted, measured=gamma <= depth))
        best = theory.best_gamma(alphas, c, v, offers)[0]
    return Costs(
        pass_seconds=passes,
        draft_step_seconds=step,
        c=c,
        nodes=nodes,
        v=v(1 + nodes),
        predicted_speedup=theory.speedup(found.tau.value or 1.0, depth, c, lambda _: v(1 + nodes)),
        break_even_alpha=theory.break_even_alpha(depth, c, v) if chain else None,
        best_gamma=best,
        by_gamma=points,
    )


def _rates(found: Acceptance) -> tuple[list[float], list[float]]:
    """alpha and offer by depth, to the longest chain weighed: the last measured depth's are carried on."""
    measured = [(d.alpha.value, d.offer.value) for d in found.depths]
    known = [(alpha, offer) for alpha, offer in measured if alpha is not None and offer is not None][:_LONGEST]
    known += known[-1:] * (_LONGEST - len(known))
    return [alpha for alpha, _ in known], [offer for _, offer in known]


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start

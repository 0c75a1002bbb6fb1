"""Draft length that adapts: before each round, the shape that promises most tokens a second is drafted.

A `Choice` says which shapes are allowed and what a round of each costs: the target's pass over its nodes, the drafting
and all the rest, measured once for the batch size. What a round brings is learned while decoding. For every depth d of
a shape let r_d be the share of the rounds that reached depth d - 1 in which a token at depth d was accepted. A shape of
depth D then promises

    1 + sum_{d=1}^{D} prod_{i<=d} r_i   tokens,

and the shape with the most of these over its cost is drafted next; a chain of 0 tokens is plain decoding.

r_d is a mean over past rounds, whose weight halves every `half_life` rounds, and `_DOUBTS` rounds that never happened,
which show r_{d-1}, and at depth 1 `prior`. Chains count as one, since a longer one begins as a shorter one does; every
tree has rates of its own. Fading is what explores: where a shape has not been drafted for long, its rates go back to
where they start from, and as soon as these make it the best it is tried again, plain decoding left again. Only where no
shape pays even at `prior` is nothing ever drafted.

Which shape is drafted is settled by rounds that are over, before anything is drawn, so the emitted law is p and greedy
answers are the target's own. The rows of a batch share one target pass, and so they share the shape, by the rates of
all of them: in a batch, what a sampled row *draws* depends on the rows beside it, the law that it draws from does not.
All that is learned lies in the memory of one batch and goes with it: what was decoded before changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from specdraft import theory
from specdraft.causal import Observation, Session
from specdraft.dice import Dice
from specdraft.drafters.base import Drafter, Memory
from specdraft.drafters.shapes import Chain, Choice, Fixed, Shape
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

_DOUBTS = 2.0

Evidence = Mapping[Fixed, Sequence[tuple[float, float]]]
"""By shape (see `_kin`) and depth, faded sums over rows and rounds: the chance with which a token was accepted there (1
or 0 where decoding is greedy), and how often the depth above was reached."""


@dataclass(frozen=True)
class AdaptiveMemory:
    """What the drafter knows of a batch, and what its rounds have taught."""

    inner: Memory
    roots: Tensor
    """int64 [batch]"""
    evidence: Evidence


class AdaptiveDrafter:
    """`drafter`, told before every round what to draft where its shape is a choice; another shape is simply drafted."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.taps = drafter.taps
        self.shape: Shape = drafter.shape

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> AdaptiveMemory:
        return AdaptiveMemory(self.drafter.begin(seen, roots, session), roots, {})

    def propose(self, memory: AdaptiveMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        shape = self._next(memory)
        if shape.nodes == 0:
            return DraftTree.empty(len(memory.roots), memory.roots.device)
        self.drafter.shape = shape
        return self.drafter.propose(memory.inner, warp=warp, dice=dice)

    def remember(self, memory: AdaptiveMemory, verdict: Verdict, seen: Observation) -> AdaptiveMemory:
        inner, evidence = self.drafter.remember(memory.inner, verdict, seen), memory.evidence
        if isinstance(self.shape, Choice):
            evidence = learned(evidence, self._next(memory), verdict, self.shape.half_life)
        return AdaptiveMemory(inner, verdict.token, evidence)

    def keep(self, memory: AdaptiveMemory, rows: Sequence[int]) -> AdaptiveMemory:
        inner = self.drafter.keep(memory.inner, rows)
        return AdaptiveMemory(inner, memory.roots[list(rows)], memory.evidence)

    def _next(self, memory: AdaptiveMemory) -> Fixed:
        return best(self.shape, memory.evidence) if isinstance(self.shape, Choice) else self.shape


def learned(evidence: Evidence, shape: Fixed, verdict: Verdict, half_life: float) -> Evidence:
    """What is known after one more round, in which `shape` was drafted."""
    fade, won, accepted = 0.5 ** (1 / half_life), verdict.chance.sum(0).tolist(), verdict.accepted.tolist()
    known = {kin: [(fade * w, fade * r) for w, r in seen] for kin, seen in evidence.items()}
    seen = known.setdefault(_kin(shape), [])
    seen += [(0.0, 0.0)] * (shape.depth - len(seen))
    for place in range(shape.depth):
        w, r = seen[place]
        seen[place] = w + (won[place] if place < len(won) else 0), r + sum(count >= place for count in accepted)
    return known


def rates(evidence: Evidence, shape: Fixed, prior: float) -> list[float]:
    """r_d of every depth of `shape`."""
    found, rate, seen = [], prior, evidence.get(_kin(shape), ())
    for place in range(shape.depth):
        won, reached = seen[place] if place < len(seen) else (0.0, 0.0)
        rate = (won + _DOUBTS * rate) / (reached + _DOUBTS)
        found.append(rate)
    return found


def best(choice: Choice, evidence: Evidence) -> Fixed:
    """The shape that promises most tokens over its cost."""
    speeds = [
        theory.tau(rates(evidence, shape, choice.prior)) / cost
        for shape, cost in zip(choice.shapes, choice.costs, strict=True)
    ]
    return choice.shapes[speeds.index(max(speeds))]


def _kin(shape: Fixed) -> Fixed:
    """What stands for all shapes that begin alike."""
    return replace(shape, gamma=0) if isinstance(shape, Chain) else shape

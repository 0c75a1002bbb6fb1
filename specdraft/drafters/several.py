"""Several drafters at work on the same rows: each reads everything that is committed, and has a memory of its own.

What becomes of their proposals is a subclass's matter.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdraft.causal import Observation, Session
from specdraft.config import SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.base import Drafter, Memory
from specdraft.drafters.shapes import Shape
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp


@dataclass(frozen=True)
class Memories:
    """One memory a drafter, in their order."""

    parts: tuple[Memory, ...]


class SeveralDrafters(ABC):
    """A drafter made of drafters. `taps` is the union of theirs, and each is shown its own."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if len(drafters) < 2:
            raise SpecdraftError(f"{type(self).__name__} is made of at least 2 drafters, and was given {len(drafters)}")
        self.drafters = tuple(drafters)
        self.taps: tuple[int, ...] = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """What they are asked to draft; setting it sets theirs."""

    @shape.setter
    @abstractmethod
    def shape(self, shape: Shape) -> None: ...

    @abstractmethod
    def propose(self, memory: Memories, *, warp: Warp, dice: Dice) -> DraftTree:
        """One tree a row, of what the drafters propose."""

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> Memories:
        return Memories(tuple(one.begin(self._shown(one, seen), roots, session) for one in self.drafters))

    def remember(self, memory: Memories, verdict: Verdict, seen: Observation) -> Memories:
        pairs = zip(self.drafters, memory.parts, strict=True)
        return Memories(tuple(one.remember(part, verdict, self._shown(one, seen)) for one, part in pairs))

    def keep(self, memory: Memories, rows: Sequence[int]) -> Memories:
        return Memories(tuple(one.keep(part, rows) for one, part in zip(self.drafters, memory.parts, strict=True)))

    def _shown(self, drafter: Drafter, seen: Observation) -> Observation:
        if drafter.taps == self.taps:
            return seen
        layers = seen.taps.unflatten(-1, (len(self.taps), -1)) if self.taps else seen.taps
        places = [self.taps.index(tap) for tap in drafter.taps]
        return seen._replace(taps=layers[..., places, :].flatten(-2))

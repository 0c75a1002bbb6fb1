"""What every drafter is: something that proposes a tree, and, if it learns, something that predicts laws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from specdraft.dice import Dice
from specdraft.target import Observation
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

Memory = Any
"""What a drafter knows of the committed tokens of a batch; opaque to everyone but the drafter that made it."""


@dataclass(frozen=True)
class Chain:
    """Draft `gamma` tokens one below the other; sampled decoding draws each from the warped q."""

    gamma: int = 4


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (Li et al. 2024, arXiv 2406.16858): at each depth the `width` likeliest nodes are expanded into
    their `width` likeliest children, and of all of them the `nodes` likeliest are kept: chosen, at any temperature."""

    depth: int = 5
    width: int = 4
    nodes: int = 15


Shape = Chain | DynamicTree
"""What a drafter drafts below a root. One that knows only chains raises SpecdraftError when it is given a tree."""


class Drafter(Protocol):
    """A drafter at decode time. Rows of a batch are independent: what a row gets does not depend on its neighbours.

    A drafter's memory holds committed tokens only; whatever it computes while drafting is scratch.
    """

    taps: tuple[int, ...]
    """The target layers that `seen.taps` must hold; empty if the drafter reads none."""
    shape: Shape
    """What it drafts below a root; set it before decoding begins."""

    def begin(self, seen: Observation, roots: Tensor) -> Memory:
        """Read the whole prompt. `roots` int64 [batch]: the first token that the target emitted."""
        ...

    def propose(self, memory: Memory, *, warp: Warp, dice: Dice) -> DraftTree:
        """Draft below each row's root; tokens drawn from a law are drawn by `dice` from the warped q that is handed on."""
        ...

    def remember(self, memory: Memory, verdict: Verdict, seen: Observation) -> Memory:
        """Read what was committed (`seen`: the root and its accepted nodes); `verdict.token` is the new root."""
        ...

    def keep(self, memory: Memory, rows: Sequence[int]) -> Memory:
        """The memory of `rows` alone, in that order: the other rows have ended."""
        ...

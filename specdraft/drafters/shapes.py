"""What can be drafted below a root: chains, EAGLE-2's dynamic trees, static trees, or a choice among them."""

from dataclasses import dataclass

from specdraft.config import SpecdraftError


@dataclass(frozen=True)
class Chain:
    """Draft `gamma` tokens one below the other; sampled decoding draws each from the warped q. Of 0: draft nothing."""

    gamma: int = 4
    stop_below: float = 0.0
    """Draft no token that the drafter finds less likely than this, with all above it, in [0, 1): a row ends before the
    depth at which the product of its confidences, that depth's included, falls below. A depth's confidence is the
    unwarped probability of its likeliest token, so it is known before anything is drawn there."""

    @property
    def depth(self) -> int:
        return self.gamma

    @property
    def nodes(self) -> int:
        return self.gamma


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (Li et al. 2024, arXiv 2406.16858): at each depth the `width` likeliest nodes are expanded into
    their `width` likeliest children, and of all of them the `nodes` likeliest are kept: chosen, at any temperature."""

    depth: int = 5
    width: int = 4
    nodes: int = 15
    stop_below: float = 0.0
    """Keep no node that the drafter finds less likely than this, with all above it, in [0, 1), and expand none: a row
    ends at the depth at which none is left."""


@dataclass(frozen=True)
class StaticTree:
    """The same tree in every round: node (r1, r2, ...) is the token of rank r2 (0: the likeliest) below the token of
    rank r1 below the root, as in Medusa (Cai et al. 2024, arXiv 2401.10774). Chosen, at any temperature."""

    paths: tuple[tuple[int, ...], ...]
    """Shorter ones first, parents before children, siblings in the order in which they are tried."""

    def __post_init__(self) -> None:
        known: set[tuple[int, ...]] = {()}
        for path in self.paths:
            if not path or path[:-1] not in known or path in known:
                raise SpecdraftError(f"a static tree's node {path} is there twice or stands before its parent")
            known.add(path)
        if not self.paths or [*map(len, self.paths)] != sorted(map(len, self.paths)):
            raise SpecdraftError("a static tree has nodes, the shorter paths first")

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def nodes(self) -> int:
        return len(self.paths)


Fixed = Chain | DynamicTree | StaticTree
"""What every drafter knows, or some of it: one that knows only chains raises SpecdraftError when it is given a tree."""


@dataclass(frozen=True)
class Choice:
    """Before every round, whichever of `shapes` promises most tokens a second: for `adaptive.AdaptiveDrafter` alone.

    Raises SpecdraftError without a shape, or for a figure out of range.
    """

    shapes: tuple[Fixed, ...]
    """Of equally good ones the first is drafted. A chain of 0 is plain decoding."""
    costs: tuple[float, ...]
    """What a round of each costs, the target's pass included, in any unit of time, above 0."""
    prior: float = 0.8
    """Share of tokens accepted where nothing is known, in (0, 1)."""
    half_life: float = 32.0
    """Rounds after which a round counts half."""

    def __post_init__(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.costs) or min(self.costs) <= 0:
            raise SpecdraftError(
                f"a choice names shapes and what a round of each costs, above 0; got {len(self.shapes)} shapes and the "
                f"costs {list(self.costs)}"
            )
        if not (0 < self.prior < 1 and self.half_life > 0):
            raise SpecdraftError(
                f"prior must lie in (0, 1) and half_life above 0, got {self.prior} and {self.half_life}"
            )

    @property
    def depth(self) -> int:
        return max(shape.depth for shape in self.shapes)

    @property
    def nodes(self) -> int:
        return max(shape.nodes for shape in self.shapes)


Shape = Fixed | Choice
"""What a drafter is asked to draft below a root."""

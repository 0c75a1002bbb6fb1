"""What an evaluation compares: the systems, by what they draft below a root, and the rules of acceptance."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.batches import DataRecipe, build_rows
from specdraft.data.chat import ChatFormat
from specdraft.drafters.adaptive import AdaptiveDrafter
from specdraft.drafters.base import Drafter, TrainableDrafter
from specdraft.drafters.proposals import best_paths
from specdraft.drafters.shapes import Chain, Choice, DynamicTree, Fixed, StaticTree
from specdraft.evaluation.calibrate import rank_accuracies
from specdraft.evaluation.costs import time_parts
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

_MOST = 2048  # tokens of an answer that calibration reads


class ChainSystem(Recipe):
    kind: Literal["chain"] = "chain"
    """Tokens drafted one below the other."""
    gamma: int = Field(default=4, ge=1)
    """Draft length; with `stop_below`, the greatest."""
    stop_below: float = Field(default=0.0, ge=0, lt=1)
    """Draft no token that the drafter finds less likely than this, with all above it. 0: always `gamma` tokens."""

    @property
    def name(self) -> str:
        return f"chain of {self.gamma}{_stops(self.stop_below)}"

    def shape(self) -> Chain:
        return Chain(self.gamma, self.stop_below)


class TreeSystem(Recipe):
    kind: Literal["tree"] = "tree"
    """The likeliest nodes of a tree (EAGLE-2)."""
    depth: int = Field(default=5, ge=1)
    """Greatest depth below the root."""
    width: int = Field(default=4, ge=1)
    """Nodes expanded at each depth, and children of each."""
    nodes: int = Field(default=15, ge=1)
    """Nodes kept for the target's pass; with `stop_below`, at most."""
    stop_below: float = Field(default=0.0, ge=0, lt=1)
    """Keep no node that the drafter finds less likely than this, with all above it. 0: always `nodes` nodes."""

    @property
    def name(self) -> str:
        return f"tree of {self.nodes}{_stops(self.stop_below)}"

    def shape(self) -> DynamicTree:
        return DynamicTree(self.depth, self.width, self.nodes, self.stop_below)


class StaticTreeSystem(Recipe):
    kind: Literal["static_tree"]
    """The same tree in every round, of the nodes that accept most on answers (Medusa)."""
    nodes: int = Field(default=15, ge=1)
    """Nodes of the tree."""
    depth: int | None = Field(default=None, ge=1)
    """Greatest depth below the root. Unset: as deep as the drafter was trained."""
    calibrate: tuple[str, ...] = ()
    """JSONL files or datasets of answers, best the target's own. Unset: the answers that the drafter was trained on."""
    answers: int = Field(default=64, ge=1)
    """How many of them are read."""
    paths: tuple[tuple[int, ...], ...] | None = None
    """The nodes, where they are known: (r1, r2) is the token of rank r2, 0 the likeliest, below that of rank r1. A
    report names those that it found. Unset: calibrated."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.paths is not None and (idle := self.model_fields_set - {"kind", "paths"}):
            raise ValueError(f"{', '.join(sorted(idle))} has no effect where paths says what the tree is: give either")
        return self

    @property
    def name(self) -> str:
        return f"static tree of {self.nodes if self.paths is None else len(self.paths)}"

    def shape(self) -> StaticTree:
        """Raises SpecdraftError for paths that are no tree, or that are still to be found."""
        if self.paths is None:
            raise SpecdraftError(f"the {self.name} has no paths yet: it is to be calibrated")
        return StaticTree(self.paths)

    def settled(
        self,
        target: FrozenTarget,
        drafter: Drafter,
        answers: tuple[str, ...],
        template_args: Mapping[str, bool | int | str],
    ) -> "StaticTreeSystem":
        """With its paths found; `answers`: what to calibrate on where the recipe does not say.

        Raises SpecdraftError for a drafter that was not trained, no answers, or more depth than was trained.
        """
        if self.paths is not None:
            return self
        if not isinstance(drafter, TrainableDrafter):
            raise SpecdraftError(f"only a trained drafter can be calibrated for a {self.name}: give its paths")
        if not (sources := self.calibrate or answers):
            raise SpecdraftError(
                f"a {self.name} is calibrated on answers: name some as its calibrate, or give its paths"
            )
        data = DataRecipe.model_validate({"answers": sources, "limit": self.answers, "max_length": _MOST})
        rows = build_rows(data, ChatFormat(target.tokenizer, dict(template_args), target.end_ids))
        accuracies = rank_accuracies(drafter, target, rows, self.nodes)
        if self.depth is not None and self.depth > len(accuracies):
            raise SpecdraftError(
                f"the drafter was trained {len(accuracies)} deep, and its {self.name} asks for {self.depth}"
            )
        paths = best_paths(accuracies[: self.depth], self.nodes).paths
        return self.model_copy(update={"paths": paths})


class AdaptiveSystem(Recipe):
    kind: Literal["adaptive"]
    """Before every round, the shape that promises most tokens a second, by what was accepted so far and what each
    costs."""
    longest: int = Field(default=8, ge=0)
    """Chains of no token (plain decoding) up to so many are weighed."""
    trees: tuple[TreeSystem, ...] = ()
    """Trees that are weighed beside them."""
    prior: float = Field(default=0.8, gt=0, lt=1)
    """Share of tokens accepted where nothing is known: as a batch begins, and after long plain decoding."""
    half_life: float = Field(default=32.0, gt=0)
    """Rounds after which what a round taught counts half."""
    costs: tuple[float, ...] | None = None
    """Seconds of a round of each shape: of the chains, then of the trees. A report names those that it found. Unset:
    measured before decoding begins, for the evaluation's batch size."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.longest == 0 and not self.trees:
            raise ValueError("longest 0 without trees leaves nothing to draft: raise it, or name trees")
        if len({tree.shape() for tree in self.trees}) < len(self.trees):
            raise ValueError("two of the trees are the same: name each once")
        if self.costs is not None and (len(self.costs) != len(self.shapes) or min(self.costs) <= 0):
            raise ValueError(f"costs must be {len(self.shapes)} numbers above 0, one a shape, got {list(self.costs)}")
        return self

    @property
    def name(self) -> str:
        trees = ", ".join(f"{tree.name} ({tree.depth} deep, {tree.width} wide)" for tree in self.trees)
        chains = f"up to {self.longest}" if self.longest else ""
        return "adaptive, " + " or ".join(filter(None, (chains, trees)))

    @property
    def shapes(self) -> tuple[Fixed, ...]:
        return (*map(Chain, range(self.longest + 1)), *(tree.shape() for tree in self.trees))

    def shape(self) -> Choice:
        """For an `AdaptiveDrafter`. Raises SpecdraftError while costs are still to be measured."""
        if self.costs is None:
            raise SpecdraftError(f"{self.name}: its costs have not been measured yet")
        return Choice(self.shapes, self.costs, self.prior, self.half_life)

    def settled(
        self, target: FrozenTarget, drafter: Drafter, contexts: Sequence[Sequence[int]], warp: Warp
    ) -> "AdaptiveSystem":
        """With its costs measured below `contexts` (token ids, a row each)."""
        if self.costs is not None:
            return self
        parts = time_parts(target, AdaptiveDrafter(drafter), self.shapes, contexts, warp, ())
        rounds = zip(parts.drafts, parts.targets, parts.rests, strict=True)
        return self.model_copy(update={"costs": tuple(map(sum, rounds))})


def _stops(below: float) -> str:
    return f", stop below {below:g}" if below else ""


System = Annotated[ChainSystem | TreeSystem | StaticTreeSystem | AdaptiveSystem, Field(discriminator="kind")]


class ExactAcceptance(Recipe):
    kind: Literal["exact"] = "exact"
    """Speculative sampling: answers follow the target's own law."""


class TypicalAcceptance(Recipe):
    kind: Literal["typical"]
    """LOSSY: accept whatever the target finds likely enough (Medusa). Answers are no longer the target's own."""
    epsilon: float = Field(default=0.09, gt=0, lt=1)
    """A drafted token above this probability is always accepted."""
    delta: float = Field(default=0.3, gt=0)
    """Where the target is unsure (entropy H), one above delta * exp(-H) is accepted as well."""


Acceptance = Annotated[ExactAcceptance | TypicalAcceptance, Field(discriminator="kind")]

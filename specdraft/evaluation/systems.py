"""What an evaluation compares: the systems, by what they draft below a root, and the rules of acceptance."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.batches import DataRecipe, build_rows
from specdraft.data.chat import ChatFormat
from specdraft.drafters.base import Chain, Drafter, DynamicTree, Shape, StaticTree, TrainableDrafter
from specdraft.drafters.proposals import best_paths
from specdraft.evaluation.calibrate import rank_accuracies
from specdraft.target import FrozenTarget

_MOST = 2048  # tokens of an answer that calibration reads


class ChainSystem(Recipe):
    kind: Literal["chain"] = "chain"
    """Tokens drafted one below the other."""
    gamma: int = Field(default=4, ge=1)
    """Draft length."""

    @property
    def name(self) -> str:
        return f"chain of {self.gamma}"

    def shape(self) -> Shape:
        return Chain(self.gamma)


class TreeSystem(Recipe):
    kind: Literal["tree"] = "tree"
    """The likeliest nodes of a tree (EAGLE-2)."""
    depth: int = Field(default=5, ge=1)
    """Greatest depth below the root."""
    width: int = Field(default=4, ge=1)
    """Nodes expanded at each depth, and children of each."""
    nodes: int = Field(default=15, ge=1)
    """Nodes kept for the target's pass."""

    @property
    def name(self) -> str:
        return f"tree of {self.nodes}"

    def shape(self) -> Shape:
        return DynamicTree(self.depth, self.width, self.nodes)


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


System = Annotated[ChainSystem | TreeSystem | StaticTreeSystem, Field(discriminator="kind")]


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

"""A stage of the command line without a model: what tests/test_cli.py runs, and a recipe for tests/test_config.py."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from specdraft.config import Recipe, SpecdraftError


class Wide(Recipe):
    kind: Literal["wide"] = "wide"
    """A drafter with a width."""
    width: int
    """Hidden width."""


class Deep(Recipe):
    kind: Literal["deep"] = "deep"
    """A drafter with layers."""
    layers: int = 2
    """Number of layers."""


class Training(Recipe):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """The peak
    rate."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the rate falls."""
    files: tuple[Path, ...] = ()
    """What to read."""


class Toy(Recipe):
    drafter: Annotated[Wide | Deep, Field(discriminator="kind")] = Deep()
    """What is trained."""
    training: Training = Training(learning_rate=2e-3)
    """How."""
    terms: dict[str, float] = {"kl": 1.0}
    """Weights of the terms."""
    check: Training | None = None
    """Checked while training."""
    fail: bool = False
    """Fail with an error for people."""

    @model_validator(mode="after")
    def _some_term(self) -> "Toy":
        if not self.terms:
            raise ValueError("terms: at least one is wanted")
        return self


def run(recipe: Toy) -> dict[str, Any]:
    print("a library prints this")
    if recipe.fail:
        raise SpecdraftError("the disk is full: 3 MB are free, 40 MB are needed; set output to another folder")
    return {"rate": recipe.training.learning_rate}

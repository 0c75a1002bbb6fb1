"""Every drafter, and the way back from a folder to one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from specdraft.config import SpecdraftError
from specdraft.drafters.base import DrafterRecipe, TrainableDrafter, read_servable
from specdraft.drafters.eagle import Eagle1Drafter, Eagle3Drafter

DRAFTERS: dict[str, type[TrainableDrafter]] = {
    "eagle1": Eagle1Drafter,
    "eagle3": Eagle3Drafter,
}
"""Trainable drafters by the name that recipes (`drafter.kind`) and checkpoints give them."""

if TYPE_CHECKING:
    AnyRecipe = DrafterRecipe
else:
    AnyRecipe = Annotated[
        Union[tuple(drafter.recipe_class for drafter in DRAFTERS.values())],  # noqa: UP007
        Field(discriminator="kind"),
    ]
"""The recipe of any method in DRAFTERS; `kind` says which."""


def load_drafter(folder: Path | str) -> TrainableDrafter:
    """A trained drafter from a folder that training wrote, in eval mode; attach it to its target before use.

    Raises SpecdraftError if there is none, if it is of an unknown kind, or if a tensor is missing, extra or misshapen.
    """
    written = read_servable(Path(folder))
    kind = written.get("specdraft", {}).get("drafter")
    if kind not in DRAFTERS:
        raise SpecdraftError(
            f"{folder}/config.json describes no drafter of ours (specdraft.drafter is {kind!r}); "
            f"known are {', '.join(DRAFTERS)}"
        )
    return DRAFTERS[kind].from_pretrained(folder)

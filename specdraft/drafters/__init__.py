"""Every drafter, and the way back from a folder to one."""

from pathlib import Path

from specdraft.config import SpecdraftError
from specdraft.drafters.base import TrainableDrafter, read_servable
from specdraft.drafters.eagle import Eagle1Drafter, Eagle3Drafter
from specdraft.drafters.early_exit import EarlyExitDrafter
from specdraft.drafters.hydra import HydraDrafter
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.medusa import MedusaDrafter
from specdraft.drafters.mtp import MTPDrafter

DRAFTERS: dict[str, type[TrainableDrafter]] = {
    "lm": LMDrafter,
    "eagle1": Eagle1Drafter,
    "eagle3": Eagle3Drafter,
    "early_exit": EarlyExitDrafter,
    "hydra": HydraDrafter,
    "medusa": MedusaDrafter,
    "mtp": MTPDrafter,
}
"""Trainable drafters by the name that recipes (`drafter.kind`) and checkpoints give them."""


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

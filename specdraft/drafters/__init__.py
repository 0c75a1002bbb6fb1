"""Every drafter, and the way back from a folder to one."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import HFValidationError, validate_repo_id

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


def kind_of(drafter: TrainableDrafter) -> str:
    """Its name in DRAFTERS."""
    return next(name for name, kind in DRAFTERS.items() if isinstance(drafter, kind))


_FETCHED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""What a drafter is made of, tokenizers included; never code or pickles."""


def checkpoint_of(name: Path | str, revision: str | None = None, subfolder: str | None = None) -> Path:
    """The folder of a drafter: `name` if there is such a folder, else the Hub's repository of that name, fetched.

    Raises SpecdraftError if there is neither, or a `revision` is given of a folder, which has none.
    """
    if Path(name).is_dir():
        if revision is not None:
            raise SpecdraftError(f"revision {revision!r} has no effect: {name} is a folder on this machine")
        return Path(name) / (subfolder or "")
    try:
        validate_repo_id(str(name))
        inside = "" if subfolder is None else f"{subfolder}/"
        fetched = snapshot_download(
            str(name),
            revision=revision,
            allow_patterns=[inside + pattern for pattern in _FETCHED],
            ignore_patterns=[f"{inside}*/*"],  # other variants
        )
    except HFValidationError as error:
        raise SpecdraftError(f"{name} is neither a folder nor the name of a repository: {error}") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise SpecdraftError(f"there is no folder {name}, and the Hub gives none: {error}") from error
    return Path(fetched) / inside


def load_drafter(name: Path | str, revision: str | None = None, subfolder: str | None = None) -> TrainableDrafter:
    """A trained drafter in eval mode, from a folder or a Hub repository; attach it to its target before use.

    Raises SpecdraftError if there is none, if it is of an unknown kind, or if a tensor is missing, extra or misshapen.
    """
    folder = checkpoint_of(name, revision, subfolder)
    written = read_servable(folder)
    kind = written.get("specdraft", {}).get("drafter")
    if kind not in DRAFTERS:
        raise SpecdraftError(
            f"{name}/config.json describes no drafter of ours (specdraft.drafter is {kind!r}); "
            f"known are {', '.join(DRAFTERS)}"
        )
    return DRAFTERS[kind].from_pretrained(folder)

"""Checkpoints as others write them, and drafters whose every weight is its own."""

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdraft.drafters.base import TrainableDrafter
from specdraft.formats import FORMATS, Folder, Naming
from specdraft.target import FrozenTarget

D = TypeVar("D", bound=TrainableDrafter)
Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]


@torch.no_grad()
def shaken(drafter: D) -> D:
    """No zeros and no copies of the target are left in it."""
    for weight in drafter.parameters():
        weight.add_(0.1 * torch.randn_like(weight))
    return drafter.eval()


def write(name: str, drafter: TrainableDrafter, out: Path) -> Checkpoint:
    """In the layout of that name: config.json and the tensors that were written."""
    FORMATS[name].write(drafter, Naming(drafter.target, "org/target"), out)
    return json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")


def put(checkpoint: Checkpoint, out: Path) -> Folder:
    """A checkpoint into a folder."""
    config, tensors = checkpoint
    out.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return Folder(out)


def read(name: str, folder: Folder, target: FrozenTarget) -> TrainableDrafter:
    drafter = FORMATS[name].read(folder, target)
    drafter.attach(target)
    return drafter


def assert_same(one: TrainableDrafter, other: TrainableDrafter) -> None:
    """Bit for bit, config and tensors."""
    assert type(one) is type(other)
    assert one.servable_config() == other.servable_config()
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        assert tensor.dtype == theirs[key].dtype
        assert torch.equal(tensor, theirs[key]), key

"""A drafter as config and tensors: read from a folder and written to one, ours or in another layout's words.

A layout is a pair of pure translations, `to_theirs` and `to_ours`. Writing translates there and back and compares bit
for bit before a byte is written, so that no tensor is lost, added or made up.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdraft import lowbit
from specdraft.config import SpecdraftError
from specdraft.drafters import DRAFTERS
from specdraft.drafters.base import TrainableDrafter, check_tensors, read_servable
from specdraft.target import FrozenTarget

INDEX = "model.safetensors.index.json"


class Contents(NamedTuple):
    """What a checkpoint says, whoever laid it out."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class Folder:
    """A checkpoint's folder as it lies: config.json, and which safetensors file holds which tensor.

    Raises SpecdraftError if there is no config.json, no safetensors file (pickles are never loaded), or an index that
    names a tensor which is not in its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_servable(path)
        self.files: dict[str, Path] = {}
        """The file of each tensor."""
        for file in sorted(path.glob("*.safetensors")):
            try:
                with safe_open(file, "pt") as stream:
                    self.files |= dict.fromkeys(stream.keys(), file)
            except (OSError, SafetensorError) as error:
                raise SpecdraftError(f"{file} cannot be read: {error}") from error
        if not self.files:
            raise SpecdraftError(
                f"{path} has no weights in a .safetensors file; other files are not loaded, as they may run code: "
                "convert them where you trust them"
            )
        self._check_index()

    def _check_index(self) -> None:
        if not (self.path / INDEX).exists():
            return
        try:
            listed = json.loads((self.path / INDEX).read_text())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise SpecdraftError(f"{self.path / INDEX} cannot be read: {error}") from error
        found = {name: file.name for name, file in self.files.items()}
        if wrong := sorted(name for name, file in listed.items() if found.get(name) != file):
            raise SpecdraftError(f"{self.path / INDEX} places {wrong[0]} in {listed[wrong[0]]}, where it is not")

    def contents(self) -> Contents:
        """Config and all tensors, without a "model." that some writers put before every name."""
        tensors: dict[str, Tensor] = {}
        for file in sorted(set(self.files.values())):
            tensors |= load_file(file)
        return Contents(dict(self.config), {name.removeprefix("model."): t for name, t in tensors.items()})


@dataclass(frozen=True)
class Naming:
    """What a layout may have to name beside the drafter's own."""

    target: FrozenTarget
    target_name: str
    """Where the engine finds the target."""


class Layout(NamedTuple):
    """A layout as translations of a whole checkpoint. Both raise SpecdraftError for what the other side cannot say."""

    to_theirs: Callable[[Contents, Naming], Contents]
    to_ours: Callable[[Contents, FrozenTarget], Contents]
    integers: bool = False
    """Whether its readers take quantised layers, as `lowbit` describes them: they travel as they are."""

    def write(self, drafter: TrainableDrafter, naming: Naming, out: Path) -> None:
        """Raises SpecdraftError, and writes nothing, unless what is written reads back bit for bit."""
        ours, quantized = _without_integers(contents_of(drafter))
        if quantized and not self.integers:
            raise SpecdraftError(f"{out}: quantised layers are not loaded in this layout; export the drafter in full")
        theirs = _with_integers(self.to_theirs(ours, naming), quantized)
        again = self._drafter(theirs, naming.target, str(out))
        mine, read = drafter.state_dict(), again.state_dict()
        check_tensors(read, mine, str(out))
        changed = [name for name in mine if not _same(mine[name], read[name])]
        changed += ["config.json"] if again.servable_config() != drafter.servable_config() else []
        if changed:
            raise SpecdraftError(f"{out}: {', '.join(changed)} would not come back as it is; nothing was written")
        out.mkdir(parents=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in theirs.tensors.items()}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(theirs.config, indent=2) + "\n")

    def read(self, folder: Folder, target: FrozenTarget) -> TrainableDrafter:
        """A drafter in eval mode. Raises SpecdraftError on a missing, extra or misshapen tensor."""
        return self._drafter(folder.contents(), target, str(folder.path))

    def _drafter(self, theirs: Contents, target: FrozenTarget, where: str) -> TrainableDrafter:
        theirs, quantized = _without_integers(theirs) if self.integers else (theirs, {})
        return drafter_of(_with_integers(self.to_ours(theirs, target), quantized), where)


def _without_integers(contents: Contents) -> tuple[Contents, dict[str, Any]]:
    """The same without the description of quantised layers, and that."""
    quantized = {name: value for name, value in contents.config.items() if name == lowbit.KEY}
    return Contents(
        {n: value for n, value in contents.config.items() if n not in quantized}, contents.tensors
    ), quantized


def _with_integers(contents: Contents, quantized: dict[str, Any]) -> Contents:
    return Contents({**contents.config, **quantized}, contents.tensors)


def contents_of(drafter: TrainableDrafter) -> Contents:
    """What `save_pretrained` would write, the target's part included."""
    tensors = {**drafter.state_dict()}
    dtype = _dtype(tensors)
    tensors |= {name: tensor.to(dtype) for name, tensor in drafter.borrowed().items()}
    config = drafter.servable_config() | lowbit.config_of(drafter)
    return Contents({**config, "torch_dtype": str(dtype).removeprefix("torch.")}, tensors)


def drafter_of(ours: Contents, where: str) -> TrainableDrafter:
    """The drafter of contents in our words, in eval mode; tensors of several dtypes are all read in the widest."""
    kind = DRAFTERS[ours.config["specdraft"]["drafter"]]
    drafter = kind.unloaded(ours.config, where)
    wanted = drafter.state_dict()
    check_tensors(ours.tensors, {**wanted, **drafter.borrowed()}, where)
    nn.Module.to(drafter, _dtype(ours.tensors))
    drafter.load_state_dict({name: ours.tensors[name] for name in wanted})
    lowbit.check(drafter, where)
    return drafter.eval()


def without_embedding(tensors: dict[str, Tensor], target: FrozenTarget, told: Callable[[str], None]) -> None:
    """Drop a copy of the target's embedding from a checkpoint; `told` hears of one that differs.

    Raises SpecdraftError for one of another shape.
    """
    if (found := tensors.pop("embed_tokens.weight", None)) is None:
        return
    held = target.embedding.weight.detach()
    if found.shape[1:] != held.shape[1:] or len(found) > len(held):
        raise SpecdraftError(
            f"embed_tokens.weight has the shape {tuple(found.shape)}, the target's embedding {tuple(held.shape)}: the "
            "drafter was made for another target"
        )
    if not same_values(found, held[: len(found)]):
        told(
            "embed_tokens.weight is not the target's embedding; it is left out, and the target's is read in its place, "
            "as SGLang does and vLLM does not: acceptance is that of the target's"
        )


def same_values(found: Tensor, held: Tensor) -> bool:
    """Whether a checkpoint's tensor is a copy of the target's, in the less precise dtype of the two."""
    dtype = found.dtype if found.dtype.itemsize <= held.dtype.itemsize else held.dtype
    return found.shape == held.shape and torch.equal(found.to(held.device, dtype), held.to(dtype))


def _dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (t.dtype for t in tensors.values() if t.is_floating_point()))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())

"""MTP modules back into the checkpoint of their target, where engines look for them.

Modules that the checkpoint brought are written over their own bytes, under their own names. New ones go beside the
target's tensors in a further shard, in MiMo's layout, which vLLM serves for any dense target of Llama's kind: its class
is built of Qwen2's layers, so that every layer gets the biases that it expects, of zero.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdraft.config import SpecdraftError
from specdraft.drafters import load_drafter
from specdraft.drafters.base import TrainableDrafter
from specdraft.drafters.mtp import MTPDrafter
from specdraft.drafters.mtp_native import INDEX, SINGLE, Checkpoint, reordered, stored_name
from specdraft.formats.contents import Folder

SHARD = "model-mtp.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SAME_LAYERS = ("llama", "mistral", "qwen2", "mimo")
"""Model types whose layers compute what Qwen2's do, biases aside."""
_SAME_SHAPE = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size rms_norm_eps".split()
_UNREAD = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf"}


def stitch(drafter_folder: Path, target_folder: Path, out_folder: Path) -> None:
    """Write the target's checkpoint with a trained drafter's MTP modules to `out_folder`, which must not exist yet.

    The target's files are linked, or copied from another disk; its tensors are never loaded. Raises SpecdraftError if
    the drafter has no MTP modules, or the target's checkpoint no place for them.
    """
    write(load_drafter(drafter_folder), target_folder, out_folder)


def recognise(folder: Folder) -> bool:
    """Whether a target's checkpoint brings MTP modules."""
    settings = folder.config.get("text_config", folder.config)
    starts = ("model.mtp_layers.", "mtp.layers.", f"model.layers.{settings.get('num_hidden_layers')}.")
    return "fc.weight" not in folder.files and any(name.startswith(starts) for name in folder.files)


def write(drafter: TrainableDrafter, target_folder: Path, out_folder: Path) -> None:
    """`stitch`, of a drafter that has been loaded."""
    if not isinstance(drafter, MTPDrafter):
        raise SpecdraftError(f"a {type(drafter).__name__} has no MTP modules to stitch")
    if out_folder.exists():
        raise SpecdraftError(f"{out_folder} is there already: remove it, or name another folder")
    checkpoint, family = Checkpoint(target_folder), drafter.config.family
    ours = {
        stored_name(family, checkpoint.layers, name): reordered(family, name, tensor)
        for name, tensor in drafter.state_dict().items()
    }
    if ours.keys() <= checkpoint.files.keys():
        _replace(checkpoint, ours, out_folder)
    elif family == "mimo" and not ours.keys() & checkpoint.files.keys():
        _add(checkpoint, drafter, ours, out_folder)
    else:
        missing = sorted(ours.keys() - checkpoint.files.keys())
        raise SpecdraftError(
            f"{target_folder} lacks {', '.join(missing[:3])}{' and more' if missing[3:] else ''}: these modules came "
            "from another checkpoint"
        )


def _replace(checkpoint: Checkpoint, ours: Mapping[str, Tensor], out_folder: Path) -> None:
    """Write over the bytes of the checkpoint's own modules, in copies of the files that hold them."""
    changed = {checkpoint.files[name] for name in ours}
    layouts = {file: _header(checkpoint.folder / file) for file in changed}
    for name, tensor in ours.items():
        found = layouts[checkpoint.files[name]][1][name]
        if found["shape"] != list(tensor.shape) or found["dtype"] not in _DTYPES:
            raise SpecdraftError(
                f"{name} is {found['dtype']} {found['shape']} in {checkpoint.folder} and {list(tensor.shape)} in the "
                f"drafter; handled are equal shapes and {', '.join(_DTYPES)}"
            )
    out_folder.mkdir(parents=True)
    _link_all(checkpoint.folder, out_folder, _others(checkpoint, {"config.json", INDEX}) - changed)
    for file in sorted(changed):
        shutil.copyfile(checkpoint.folder / file, out_folder / file)
        start, header = layouts[file]
        with (out_folder / file).open("r+b") as stream:
            for name in (name for name in ours if checkpoint.files[name] == file):
                stored = ours[name].to(_DTYPES[header[name]["dtype"]]).contiguous().cpu()
                stream.seek(start + header[name]["data_offsets"][0])
                stream.write(stored.view(torch.uint8).numpy().tobytes())


def _add(checkpoint: Checkpoint, drafter: MTPDrafter, ours: dict[str, Tensor], out_folder: Path) -> None:
    """Put the modules into a shard of their own and the config into MiMo's words."""
    settings = _mimo_config(checkpoint, drafter)
    shard = {**ours, **_zero_biases(checkpoint, ours)}
    single = "model-00001-of-00001.safetensors"  # beside an index, `SINGLE` would be taken for the whole
    places = {name: single if file == SINGLE else file for name, file in checkpoint.files.items()}
    places |= dict.fromkeys(shard, SHARD)
    out_folder.mkdir(parents=True)
    others = _others(checkpoint)
    _link_all(checkpoint.folder, out_folder, others - {SINGLE})
    if SINGLE in others:
        link(checkpoint.folder / SINGLE, out_folder / single)
    save_file({name: tensor.contiguous() for name, tensor in shard.items()}, out_folder / SHARD, {"format": "pt"})
    sizes = [(out_folder / file).stat().st_size - _header(out_folder / file)[0] for file in set(places.values())]
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(places.items()))}
    (out_folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (out_folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _mimo_config(checkpoint: Checkpoint, drafter: MTPDrafter) -> dict[str, Any]:
    """The target's config as that of a Qwen2 model with MTP modules. Raises SpecdraftError if it is none."""
    settings, mine = checkpoint.settings, drafter.config
    faults = []
    if (kind := settings.get("model_type")) not in _SAME_LAYERS:
        faults.append(f"is of the type {kind}, and served are {', '.join(_SAME_LAYERS)}")
    if extra := sorted(name for name in checkpoint.files if name.endswith(("o_proj.bias", "mlp.down_proj.bias"))):
        faults.append(f"has {extra[0]}, which Qwen2's layers have not")
    if settings.get("sliding_window") and settings.get("use_sliding_window", kind == "mistral"):
        faults.append("has a sliding window")
    if (width := mine.head_dim * mine.num_attention_heads) != mine.hidden_size:
        faults.append(f"has heads that are {width} wide together, not {mine.hidden_size}")
    heads = settings.get("num_attention_heads")
    shape = {**settings, "num_key_value_heads": settings.get("num_key_value_heads") or heads}
    faults += [
        f"has {name} {shape.get(name)}, the drafter {getattr(mine, name)}"
        for name in _SAME_SHAPE
        if shape.get(name) != getattr(mine, name)
    ]
    if faults:
        raise SpecdraftError(
            f"{checkpoint.folder} {'; '.join(faults)}: its MTP modules cannot be served in MiMo's layout; specdraft "
            "itself drafts with them from their own folder"
        )
    return {
        **settings,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
        "num_nextn_predict_layers": mine.module_count,
    }


def _zero_biases(checkpoint: Checkpoint, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Biases of zero for the queries, keys and values that have none, of the target's layers and of the modules."""
    biases: dict[str, Tensor] = {}
    there = {*checkpoint.files, *ours}
    for name in sorted(there):
        bias = f"{name.removesuffix('.weight')}.bias"
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) or bias in there:
            continue
        if name in ours:
            biases[bias] = ours[name].new_zeros(len(ours[name]))
            continue
        with safe_open(checkpoint.folder / checkpoint.files[name], "pt") as file:
            weight = file.get_slice(name)
            biases[bias] = torch.zeros(weight.get_shape()[0], dtype=_DTYPES[weight.get_dtype()])
    return biases


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors' bytes begin in a safetensors file, and each one's dtype, shape and offsets from there."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return 8 + length, json.loads(file.read(length))


def _others(checkpoint: Checkpoint, more: Iterable[str] = ()) -> set[str]:
    """The files to be taken over as they are: the shards, the tokenizer's and the like; `more`: also these."""
    own = {"config.json", INDEX}
    files = {path.name for path in checkpoint.folder.iterdir() if path.is_file() and path.suffix not in _UNREAD}
    return (files - own) | set(checkpoint.files.values()) | (files & set(more))


def _link_all(source: Path, out_folder: Path, names: Iterable[str]) -> None:
    for name in sorted(names):
        link(source / name, out_folder / name)


def link(source: Path, landing: Path) -> None:
    """A second name for the same bytes; across disks, a copy. What a cache links to is linked, not its link."""
    try:
        os.link(source.resolve(), landing)
    except OSError:
        shutil.copyfile(source, landing)

"""Medusa for vLLM, which is ours, and in the names of FasterDecoding's repository, which vLLM reads too.

vLLM's: blocks.{head}.layers.{l}, and one output layer for all heads or one each. FasterDecoding's: {head}.{l}.linear,
and behind the last block {head}.{layers}, each head's own output layer; a copy of the target's where ours share that.
"""

import re
from typing import Any

import torch
from torch import Tensor

from specdraft.config import SpecdraftError
from specdraft.formats.contents import Contents, Folder, Naming, same_values
from specdraft.target import FrozenTarget

_OURS = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_THEIRS = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PREFIX = "medusa_heads."


def recognise_vllm(folder: Folder) -> bool:
    kind = folder.config.get("model_type") == "medusa" or folder.config.get("architectures") == ["MedusaModel"]
    return kind and "blocks.0.layers.0.weight" in folder.files


def recognise_fasterdecoding(folder: Folder) -> bool:
    return any(_THEIRS.fullmatch(name.removeprefix(_PREFIX)) for name in folder.files)


def to_vllm(ours: Contents, naming: Naming) -> Contents:
    return ours


def to_fasterdecoding(ours: Contents, naming: Naming) -> Contents:
    config, tensors = ours.config, {}
    heads, layers = config["num_heads"], config["num_hidden_layers"]
    for name, tensor in ours.tensors.items():
        if match := _OURS.fullmatch(name):
            tensors[f"{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
    shared = config["original_lm_head"]
    for head in range(heads):
        own = ours.tensors["lm_head.weight" if shared else f"lm_heads.{head}.weight"]
        tensors[f"{head}.{layers}.weight"] = own.clone()
    return Contents(
        {
            "architectures": config["architectures"],
            "model_type": "medusa",
            "base_model_name_or_path": naming.target_name,
            "medusa_num_heads": heads,
            "medusa_num_layers": layers,
            **{name: config[name] for name in ("medusa_fc_bias", "hidden_size", "vocab_size", "torch_dtype")},
            "specdraft": {**config["specdraft"], "head": "target" if shared else "own"},
        },
        tensors,
    )


def from_fasterdecoding(theirs: Contents, target: FrozenTarget) -> Contents:
    """Output layers that are all the target's are shared, unless the config says that they are the heads' own."""
    tensors: dict[str, Tensor] = {}
    layers = _number(theirs.config, "layers")
    for name, tensor in theirs.tensors.items():
        bare = name.removeprefix(_PREFIX)
        if match := _THEIRS.fullmatch(bare):
            tensors[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        elif match := re.fullmatch(rf"(\d+)\.{layers}\.weight", bare):
            tensors[f"lm_heads.{match[1]}.weight"] = tensor
        else:
            tensors[name] = tensor
    own = [name for name in tensors if name.startswith("lm_heads.")]
    said = theirs.config.get("specdraft", {}).get("head")
    if said != "own" and len(own) == _number(theirs.config, "heads"):
        if all(_is_targets(tensors[name], target) for name in own):
            copies = [tensors.pop(name) for name in own]
            return _described(theirs.config, {**tensors, "lm_head.weight": copies[0]}, target)
        if said == "target":
            raise SpecdraftError("config.json says that the heads speak through the target's output layer; it is not")
    return _described(theirs.config, tensors, target)


def from_vllm(theirs: Contents, target: FrozenTarget) -> Contents:
    """One output layer for all that is not the target's becomes each head's own."""
    tensors = dict(theirs.tensors)
    if "lm_head.weight" in tensors and not _is_targets(tensors["lm_head.weight"], target):
        shared = tensors.pop("lm_head.weight")
        tensors |= {f"lm_heads.{head}.weight": shared.clone() for head in range(_number(theirs.config, "heads"))}
    return _described(theirs.config, tensors, target)


def _described(config: dict[str, Any], tensors: dict[str, Tensor], target: FrozenTarget) -> Contents:
    """The contents with our config.json for what the tensors are. Raises SpecdraftError for a mapped vocabulary."""
    vocab = config.get("vocab_size") or target.vocab_size
    if "token_map" in tensors or (config.get("truncated_vocab_size") or vocab) != vocab:
        raise SpecdraftError("the Medusa heads have a truncated vocabulary (token_map), which is not handled")
    if config.get("quantization_config"):
        raise SpecdraftError("the Medusa heads are quantised, which is not handled")
    return Contents(
        {
            "hidden_size": config.get("hidden_size") or target.hidden_size,
            "vocab_size": vocab,
            "num_heads": _number(config, "heads"),
            "num_hidden_layers": _number(config, "layers"),
            "medusa_fc_bias": "blocks.0.layers.0.bias" in tensors,
            "original_lm_head": "lm_heads.0.weight" not in tensors,
            "specdraft": {"drafter": "medusa", "trained_length": config.get("specdraft", {}).get("trained_length")},
        },
        tensors,
    )


def _number(config: dict[str, Any], what: str) -> int:
    for name in {"heads": ("num_heads", "medusa_num_heads"), "layers": ("num_hidden_layers", "medusa_num_layers")}[
        what
    ]:
        if config.get(name) is not None:
            return config[name]
    raise SpecdraftError(f"config.json does not say how many {what} there are: medusa_num_{what} is missing")


def _is_targets(weight: Tensor, target: FrozenTarget) -> bool:
    if len(weight) > target.vocab_size:
        return False
    return same_values(weight, target.head_rows(torch.arange(len(weight), device=target.device)))

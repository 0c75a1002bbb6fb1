"""MTP modules inside a target's checkpoint: how each family names them, and what it does its own way.

Tensors are read from safetensors files by name, one at a time; nothing else of the checkpoint is read.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdraft.config import SpecdraftError
from specdraft.target import FrozenTarget

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Custom:
    """What a family does its own way, as vLLM serves it."""

    prefix: str
    """What precedes the number of a module in the names of its decoder layer."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Its names for what is not of the decoder layer; one with "mtp." stands outside the prefix, for the one module."""
    reads_normed: bool = True
    """The first depth reads the target's last hidden state after the target's final norm."""
    hands_on_normed: bool = True
    """A module gives its output to the next depth after its last norm."""
    reads_first: bool = False
    """The embedding in the slot at position 0 is read; else it is zero."""
    one_plus: bool = False
    """Norms keep w and multiply by 1 + w."""
    embedding_first: bool = True
    """The projection reads cat(embedding, hidden); else cat(hidden, embedding), as ours."""


CUSTOMS = {
    "mimo": Custom("model.mtp_layers.", reads_normed=False, embedding_first=False),
    "deepseek": Custom(
        "model.layers.",
        {
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "eh_proj",
            "final_layernorm": "shared_head.norm",
        },
        hands_on_normed=False,
    ),
    "qwen": Custom(
        "mtp.layers.",
        {
            "token_layernorm": "mtp.pre_fc_norm_embedding",
            "hidden_layernorm": "mtp.pre_fc_norm_hidden",
            "input_proj": "mtp.fc",
            "final_layernorm": "mtp.norm",
        },
        reads_first=True,
        one_plus=True,
    ),
}
"""MiMo; DeepSeek-V3 and GLM-4.x, whose modules are numbered on from the target's layers; Qwen3-Next and Qwen3.5."""

_OURS = re.compile(r"model\.mtp_layers\.(\d+)\.(.+)\.(weight|bias)")
_REPEATED = ("shared_head.head.weight", "embed_tokens.weight")
"""What DeepSeek's modules repeat of the target."""
_KNOWN = {
    *"token_layernorm hidden_layernorm input_proj final_layernorm input_layernorm post_attention_layernorm".split(),
    *(f"self_attn.{part}" for part in "q_proj k_proj v_proj o_proj q_norm k_norm".split()),
    *(f"mlp.{part}" for part in "gate_proj up_proj down_proj".split()),
}
_UNLIKE = {
    r"\.experts\.|shared_experts?\.|mlp\.gate\.": "a mixture of experts",
    r"self_attn\.(q_a|q_b|kv_a|kv_b)_": "multi-head latent attention",
    r"linear_attn\.": "linear attention",
    r"_scale": "quantised weights",
}


class OnePlusNorm(LlamaRMSNorm):
    """RMSNorm with the factors 1 + w; the product is taken in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (normed * (1 + self.weight.float())).to(hidden_states.dtype)


def norm_of(config: PreTrainedConfig, width: int) -> LlamaRMSNorm:
    """A norm as the family of an MTP config keeps it."""
    kind = OnePlusNorm if CUSTOMS[config.family].one_plus else LlamaRMSNorm
    return kind(width, config.rms_norm_eps)


class Checkpoint:
    """A folder with config.json and safetensors files. Raises SpecdraftError where something cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
            if (folder / INDEX).exists():
                places = json.loads((folder / INDEX).read_text())["weight_map"]
            else:
                with safe_open(folder / SINGLE, "pt") as file:
                    places = dict.fromkeys(file.keys(), SINGLE)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise SpecdraftError(f"{folder} is no checkpoint in safetensors files: {error}") from error
        self.files: dict[str, str] = places
        """The file of each tensor, by its name."""

    @property
    def layers(self) -> int:
        return self.settings.get("text_config", self.settings)["num_hidden_layers"]

    def read(self, name: str) -> Tensor:
        try:
            with safe_open(self.folder / self.files[name], "pt") as file:
                return file.get_tensor(name)
        except (OSError, KeyError, SafetensorError) as error:
            raise SpecdraftError(f"{name} cannot be read from {self.folder}: {error}") from error


class Native(NamedTuple):
    family: str
    """A key of CUSTOMS."""
    modules: int
    """How many there are."""
    tensors: dict[str, Tensor]
    """By our names, in the order of our projection, in the checkpoint's dtype."""
    qkv_bias: bool
    qk_norm: bool


def read_native(checkpoint: Checkpoint, target: FrozenTarget) -> Native:
    """The MTP modules of a checkpoint.

    Raises SpecdraftError if it has none, or one that is not a dense layer of the Llama and Qwen kind.
    """
    family = _family(checkpoint)
    places = _places(family, checkpoint)
    _check_kind(checkpoint, target, places)
    for name in [name for name in places if name.endswith(_REPEATED)]:
        _check_repeated(checkpoint.read(places.pop(name)), target, name)
    tensors = {name: checkpoint.read(stored) for name, stored in places.items()}
    count = 1 + max(int(_parts(name)[0]) for name in tensors)
    if family == "qwen" and count > 1:
        raise SpecdraftError(f"{checkpoint.folder} has {count} MTP layers behind one projection; one is handled")
    for name in tensors:
        tensors[name] = reordered(family, name, tensors[name])
    first = "model.mtp_layers.0.self_attn."
    return Native(family, count, tensors, f"{first}q_proj.bias" in tensors, f"{first}q_norm.weight" in tensors)


def stored_name(family: str, layers: int, name: str) -> str:
    """The family's name for a tensor of ours, in a checkpoint of a target with so many layers."""
    custom = CUSTOMS[family]
    number, part, kind = _parts(name)
    theirs = custom.renamed.get(part, part)
    if theirs.startswith("mtp."):
        return f"{theirs}.{kind}"
    return f"{custom.prefix}{int(number) + _offset(family, layers)}.{theirs}.{kind}"


def reordered(family: str, name: str, tensor: Tensor) -> Tensor:
    """Our tensor as the family keeps it, and the other way: the halves of the projection's input change places."""
    if not name.endswith("input_proj.weight") or not CUSTOMS[family].embedding_first:
        return tensor
    return torch.cat(tensor.chunk(2, 1)[::-1], 1)


def _parts(name: str) -> tuple[str, str, str]:
    match = _OURS.fullmatch(name)
    assert match, name
    return match[1], match[2], match[3]


def _offset(family: str, layers: int) -> int:
    return layers if family == "deepseek" else 0


def _family(checkpoint: Checkpoint) -> str:
    starts = {"mimo": "model.mtp_layers.", "qwen": "mtp.layers.", "deepseek": f"model.layers.{checkpoint.layers}."}
    for family, start in starts.items():
        if any(name.startswith(start) for name in checkpoint.files):
            return family
    raise SpecdraftError(
        f"{checkpoint.folder} has no MTP module: no tensor's name begins with {', '.join(starts.values())}"
    )


def _places(family: str, checkpoint: Checkpoint) -> dict[str, str]:
    """The names of the modules' tensors in the checkpoint, by ours."""
    custom, offset = CUSTOMS[family], _offset(family, checkpoint.layers)
    back = {theirs: ours for ours, theirs in custom.renamed.items()}
    numbered = re.compile(re.escape(custom.prefix) + r"(\d+)\.(.+)")
    places = {}
    for name in checkpoint.files:
        part, _, kind = name.rpartition(".")
        if part.startswith("mtp.") and part in back:
            places[f"model.mtp_layers.0.{back[part]}.{kind}"] = name
        elif (match := numbered.fullmatch(name)) and int(match[1]) >= offset:
            part, _, kind = match[2].rpartition(".")
            places[f"model.mtp_layers.{int(match[1]) - offset}.{back.get(part, part)}.{kind}"] = name
    return places


def _check_kind(checkpoint: Checkpoint, target: FrozenTarget, places: Mapping[str, str]) -> None:
    found = [reason for pattern, reason in _UNLIKE.items() if any(re.search(pattern, name) for name in places.values())]
    if not found and (strange := sorted(_strange(places))):
        found = [f"tensors that such a layer has not, {', '.join(strange[:4])}"]
    settings = target.config.to_dict()
    if (activation := settings.get("hidden_act", "silu")) not in ("silu", "swish"):
        found.append(f"the activation {activation}")
    if settings.get("attn_output_gate"):
        found.append("a gate on the output of its attention")
    if found:
        raise SpecdraftError(
            f"the MTP modules of {checkpoint.folder} have {' and '.join(found)}; handled are dense layers of the Llama "
            "and Qwen kind. Train modules of your own: start: target"
        )


def _strange(names: Iterable[str]) -> set[str]:
    """Those of our names that stand for nothing that we have."""
    rests = {name: name.split(".", 3)[3] for name in names}
    return {name for name, rest in rests.items() if rest.rpartition(".")[0] not in _KNOWN and rest not in _REPEATED}


def _check_repeated(tensor: Tensor, target: FrozenTarget, name: str) -> None:
    """What is not read from the checkpoint must be what is read from the target."""
    every = torch.arange(target.vocab_size, device=target.device)
    held = target.embedding.weight if name.endswith("embed_tokens.weight") else target.head_rows(every)
    if tensor.shape != held.shape or not torch.equal(tensor.to(held), held):
        raise SpecdraftError(f"{name} of {target.name} is not the target's own: such a module cannot be handled")

"""Blocks that drafters share: the shape of a decoder layer, rotary positions, attention projections, the gated MLP."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from specdraft.config import SpecdraftError
from specdraft.drafters.base import DrafterConfig
from specdraft.target import FrozenTarget

_SHARED = (
    "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "max_position_embeddings"
).split()
"""What engines' config.json calls as we do."""
_ROPE_FIELDS = frozenset(
    "rope_type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow short_factor "
    "long_factor low_freq_factor high_freq_factor partial_rotary_factor mscale mscale_all_dim truncate".split()
)


def rope_of(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The rotary parameters of a target's config, for a drafter that follows its positions.

    Raises SpecdraftError for kinds that a drafter cannot follow: vision models' multi-part positions, unknown fields.
    """
    rope = settings.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
    rope = rope.get("full_attention", rope)
    kinds = ("default", *ROPE_INIT_FUNCTIONS)
    if (kind := rope.get("rope_type", "default")) not in kinds:
        raise SpecdraftError(
            f"{name} has rotary positions of the type {kind!r}, which a drafter cannot follow; "
            f"known are {', '.join(kinds)}"
        )
    if unknown := set(rope) - _ROPE_FIELDS:
        raise SpecdraftError(
            f"{name} has rotary positions with {', '.join(sorted(unknown))}, which a drafter cannot follow; "
            f"known are {', '.join(sorted(_ROPE_FIELDS))}"
        )
    return dict(rope)


class DecoderConfig(DrafterConfig):
    """Shape of a drafter that is made of decoder layers like the target's."""

    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    unroll: int = 4
    tie_word_embeddings: bool = False

    @classmethod
    def like(cls, target: FrozenTarget, intermediate_size: int | None = None, **more: Any) -> Self:
        """The shape of the target's own layers, dense. Raises SpecdraftError for positions that cannot be followed."""
        settings = target.config.to_dict()
        heads = settings["num_attention_heads"]
        return cls(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=intermediate_size or settings["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=settings.get("num_key_value_heads") or heads,
            head_dim=settings.get("head_dim") or target.hidden_size // heads,
            rms_norm_eps=settings.get("rms_norm_eps") or 1e-5,
            rope_parameters=rope_of(settings, target.name),
            max_position_embeddings=settings["max_position_embeddings"],
            **more,
        )

    def servable(self) -> dict[str, Any]:
        """The shape in the words of a Llama-like config.json; `rope_theta` at the top, where every engine reads it."""
        rope = dict(self.rope_parameters or {})
        written = {
            "model_type": "llama",
            **{name: getattr(self, name) for name in _SHARED},
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rope_theta": rope.pop("rope_theta", 10000.0),
            "tie_word_embeddings": False,
        }
        if rope.get("rope_type", "default") != "default" or "partial_rotary_factor" in rope:
            written["rope_scaling"] = rope
        return written

    @classmethod
    def from_servable(cls, written: dict[str, Any], **more: Any) -> Self:
        """The config that `servable` described; `more`: what it left out."""
        rope = {"rope_type": "default", "rope_theta": written["rope_theta"], **written.get("rope_scaling", {})}
        return cls(**{name: written[name] for name in _SHARED}, rope_parameters=rope, **more)


class Rotary(nn.Module):
    """Rotary positions of any kind that transformers knows, on the first `partial_rotary_factor` of each head."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        rope = config.rope_parameters or {}
        factor = rope.get("partial_rotary_factor", 1.0)
        if rope.get("rope_type", "default") == "default" and factor != 1.0:
            config = type(config)(**{**config.to_dict(), "head_dim": int(config.head_dim * factor)})
        self.angles = LlamaRotaryEmbedding(cast(LlamaConfig, config))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follows its module to another device, not to another dtype: frequencies stay float32, as in engines."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)

    def forward(self, states: Tensor, positions: Tensor) -> Tensor:
        """states [batch, heads, time, head_dim], positions int64 [batch, time]."""
        cos, sin = (part[:, None] for part in self.angles(states, positions))
        turned, kept = states.split([cos.shape[-1], states.shape[-1] - cos.shape[-1]], -1)
        return torch.cat([turned * cos + rotate_half(turned) * sin, kept], -1)


class Projections(nn.Module):
    """The four projections of an attention that reads `width` and writes the hidden size; `bias`: but for the last."""

    def __init__(self, config: PreTrainedConfig, width: int, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def split(self, projected: Tensor) -> Tensor:
        """[batch, time, heads * head_dim] to [batch, heads, time, head_dim]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class GatedMLP(nn.Module):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def copy_layer(mine: nn.Module, target: FrozenTarget, renamed: Mapping[str, str] = MappingProxyType({})) -> None:
    """Copy of the target's last layer whatever fits in name and shape; `renamed`: its name for a module of ours, or
    an empty one for what starts afresh.

    Where a projection of ours reads twice the width, the first half, the embedding's, begins at zero.
    """
    last = dict(target.layers[-1].named_modules())
    for name, module in mine.named_modules():
        theirs = last.get(source) if (source := renamed.get(name, name)) else None
        if isinstance(module, LlamaRMSNorm) and theirs is not None:
            module.weight.copy_(target.gain(theirs))
        elif isinstance(module, nn.Linear) and theirs is not None:
            source, width = theirs.weight, target.hidden_size
            if module.weight.shape == source.shape:
                module.weight.copy_(source)
                if module.bias is not None and theirs.bias is not None:
                    module.bias.copy_(theirs.bias)
            elif module.weight.shape == (len(source), 2 * width):
                module.weight.zero_()[:, width:] = source

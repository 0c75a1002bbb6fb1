"""EAGLE: one decoder layer that drafts from the target's features and recurs on its own output.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840) reads three tapped layers and has an output head of its own, over a reduced
vocabulary if asked. EAGLE-1 (Li et al. 2024, arXiv 2401.15077; EAGLE-2 is the same weights under a dynamic tree) reads
the last hidden state, predicts the next one, and speaks through the target's own head. The unroll and the trees are in
`recurrence`; the module's names are those of the layouts that engines load.
"""

from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdraft.causal import Observation
from specdraft.drafters.base import DrafterRecipe
from specdraft.drafters.blocks import DecoderConfig, GatedMLP, Projections, copy_layer
from specdraft.drafters.recurrence import RecurrentDrafter, SharedHeadDrafter, Slots
from specdraft.drafters.vocabulary import draft_vocabulary, from_tables
from specdraft.target import FrozenTarget


class EagleRecipe(DrafterRecipe):
    """What both have."""

    unroll: int = Field(default=4, ge=1)
    """Depths trained: how many steps the drafter is unrolled on its own outputs."""
    intermediate_size: int | None = None
    """Width of its MLP. Unset: the target's."""


class Eagle3Recipe(EagleRecipe):
    kind: Literal["eagle3"] = "eagle3"
    """The drafting method."""
    start: Literal["target", "random"] = "target"
    """Begin with the target's last layer, final norm and output rows where they fit, or at random."""
    taps: tuple[int, ...] | None = None
    """Target layers that it reads (k: after layer k). Unset: early, middle and late, as every engine defaults to."""
    vocabulary: int | None = None
    """Size of the reduced draft vocabulary, the commonest ids of the training answers. Unset: the target's whole."""


class Eagle1Recipe(EagleRecipe):
    kind: Literal["eagle1"] = "eagle1"
    """The drafting method."""
    start: Literal["identity", "random"] = "identity"
    """Begin by handing the target's feature on as it is, or at random. The target's last layer is no beginning: it
    speaks in the scale of what comes before the final norm, and this one recurs on what comes after it."""


class Eagle3Config(DecoderConfig):
    """Shape of an EAGLE-3 head. `vocab_size` is the target's, `draft_vocab_size` its own."""

    model_type = "specdraft_eagle3"

    draft_vocab_size: int = 0
    taps: list[int] | None = None
    norm_before_residual: bool = False
    """Attention's output is added to the normed feature, as in some heads that others train. Ours never ask for it:
    not every engine honours it."""


class Eagle1Config(DecoderConfig):
    model_type = "specdraft_eagle1"

    fc_bias: bool = False
    """A bias behind the fusion, as in heads that others train; vLLM ignores it, and ours have none."""


class Eagle3Layer(nn.Module):
    """The decoder layer over (embedding, feature): attention reads both, the residual stream is the feature's."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Projections(config, 2 * config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)


class Eagle1Layer(nn.Module):
    """A decoder layer without a norm before its attention: what it reads is fused by `fc`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Projections(config, config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)


class Eagle3Drafter(RecurrentDrafter):
    recipe_class = Eagle3Recipe
    config_class = Eagle3Config
    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, kept_ids: Tensor | None = None) -> None:
        """`kept_ids` int64 [draft_vocab_size], ascending: the target's ids that the head predicts, unless all."""
        super().__init__(config)
        self.taps = tuple(config.taps or ())
        width = config.hidden_size
        self.fc = nn.Linear(len(self.taps) * config.target_hidden_size, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            rows = torch.arange(config.draft_vocab_size)
            ids = rows - 1 if kept_ids is None else kept_ids.cpu()  # -1: not to be used before a load
            self.register_buffer("d2t", ids - rows)  # offsets: row i predicts the target's id i + d2t[i]
            self.register_buffer("t2d", torch.isin(torch.arange(config.vocab_size), ids))
        self.post_init()

    @classmethod
    def for_target(cls, target: FrozenTarget, recipe: Eagle3Recipe, counts: Tensor) -> "Eagle3Drafter":
        kept_ids = draft_vocabulary(counts, recipe.vocabulary, target.end_ids)
        config = Eagle3Config.like(
            target,
            recipe.intermediate_size,
            draft_vocab_size=target.vocab_size if kept_ids is None else len(kept_ids),
            taps=list(recipe.taps or default_taps(target.num_layers)),
            unroll=recipe.unroll,
        )
        drafter = cls(config, kept_ids)
        if recipe.start == "target":
            drafter._start_from(target, kept_ids)
        drafter.attach(target)
        nn.Module.to(drafter, target.device)
        return drafter

    @torch.no_grad()
    def _start_from(self, target: FrozenTarget, kept_ids: Tensor | None) -> None:
        """Copy the target's output rows, and of its last layer and final norm whatever fits in name and shape.

        The layer's input is the latest tap, and what it reads of the embedding begins at zero.
        """
        ids = torch.arange(target.vocab_size) if kept_ids is None else kept_ids
        self.lm_head.weight.copy_(target.head_rows(ids.to(target.device)))
        width = self.config.hidden_size
        self.fc.weight.zero_()[:, -width:] = torch.eye(width)
        copy_layer(self.midlayer, target, renamed={"hidden_norm": "input_layernorm", "input_layernorm": ""})
        self.norm.weight.copy_(target.gain(target.final_norm))

    def attach(self, target: FrozenTarget) -> None:
        """Also raises SpecdraftError for d2t and t2d that do not say which ids are drafted."""
        if self.config.draft_vocab_size < self.config.vocab_size:
            from_tables(self.d2t, self.config.draft_vocab_size, self.config.vocab_size, self.t2d)
        super().attach(target)

    def kept_ids(self) -> Tensor | None:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def enter(self, seen: Observation) -> Tensor:
        return self.fc(seen.taps.to(self.dtype))

    def project(self, embedded: Tensor, feature: Tensor) -> Slots:
        layer, attn = self.midlayer, self.midlayer.self_attn
        normed = layer.hidden_norm(feature)
        both = torch.cat([layer.input_layernorm(embedded), normed], -1)
        residual = normed if self.config.norm_before_residual else feature
        return Slots(residual, *(attn.split(part(both)) for part in (attn.q_proj, attn.k_proj, attn.v_proj)))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        return _after_attention(self.midlayer, residual, attended)

    def read_out(self, feature: Tensor) -> Tensor:
        return self.norm(feature)

    def head(self) -> nn.Module:
        return self.lm_head

    def servable_config(self) -> dict[str, Any]:
        """config.json as vLLM, SGLang and llama.cpp read it, and under `specdraft` what only we know.

        The engines count the same tapped layers in two ways: vLLM from the embedding (as we do), SGLang from 0 at the
        first layer's output. Each finds its own key.
        """
        config, taps = self.config, list(self.taps)
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **config.servable(),
            "draft_vocab_size": config.draft_vocab_size,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            "norm_before_residual": config.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": taps,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
            },
            "specdraft": {
                "drafter": "eagle3",
                "target_hidden_size": config.target_hidden_size,
                "unroll": config.unroll,
                "trained_length": config.trained_length,
            },
        }

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> Eagle3Config:
        own = {name: value for name, value in written["specdraft"].items() if name != "drafter"}
        taps = written["eagle_aux_hidden_state_layer_ids"]
        own |= {name: written[name] for name in ("draft_vocab_size", "norm_before_residual")}
        return Eagle3Config.from_servable(written, taps=taps, **own)


class Eagle1Drafter(SharedHeadDrafter):
    recipe_class = Eagle1Recipe
    predicts_features = True
    config_class = Eagle1Config
    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([Eagle1Layer(config)])
        self.post_init()

    @classmethod
    def for_target(cls, target: FrozenTarget, recipe: Eagle1Recipe, counts: Tensor) -> "Eagle1Drafter":
        drafter = cls(Eagle1Config.like(target, recipe.intermediate_size, unroll=recipe.unroll))
        if recipe.start == "identity":
            with torch.no_grad():
                width = target.hidden_size
                drafter.fc.weight.zero_()[:, width:] = torch.eye(width)
                drafter._layer.self_attn.o_proj.weight.zero_()
                drafter._layer.mlp.down_proj.weight.zero_()
        drafter.attach(target)
        nn.Module.to(drafter, target.device)
        return drafter

    def enter(self, seen: Observation) -> Tensor:
        return seen.hidden.to(self.dtype)

    @property
    def _layer(self) -> Eagle1Layer:
        return cast(Eagle1Layer, self.layers[0])

    def project(self, embedded: Tensor, feature: Tensor) -> Slots:
        fused, attn = self.fc(torch.cat([embedded, feature], -1)), self._layer.self_attn
        return Slots(fused, *(attn.split(part(fused)) for part in (attn.q_proj, attn.k_proj, attn.v_proj)))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        return _after_attention(self._layer, residual, attended)

    def read_out(self, feature: Tensor) -> Tensor:
        return feature

    def servable_config(self) -> dict[str, Any]:
        """config.json as vLLM reads it (SGLang wants another architecture's name, and a bias)."""
        config = self.config
        return {
            "architectures": ["EagleLlamaForCausalLM"],
            **config.servable(),
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            "specdraft": {
                "drafter": "eagle1",
                "target_hidden_size": config.target_hidden_size,
                "fc_bias": config.fc_bias,
                "unroll": config.unroll,
                "trained_length": config.trained_length,
            },
        }

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> Eagle1Config:
        own = {name: value for name, value in written["specdraft"].items() if name != "drafter"}
        return Eagle1Config.from_servable(written, **own)


def default_taps(layers: int) -> tuple[int, ...]:
    """The tapped layers of a target with so many that every engine assumes where a checkpoint names none."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 1)} - {0}))


def _after_attention(layer: Eagle1Layer | Eagle3Layer, residual: Tensor, attended: Tensor) -> Tensor:
    hidden = residual + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

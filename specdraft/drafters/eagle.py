"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer that reads the target's features and recurs on its own.

Slot i reads the token x[i+1] and the target's taps at i (later in a draft: its own last output in their place), and
predicts the law of x[i+2]. It is trained unrolled as it is used at decode time: tokens are the data's, features are its
own. The module's names are those of the layout that vLLM, SGLang and llama.cpp load.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, scaled_dot_product_attention
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdraft.attention import unrolled_attention
from specdraft.config import Recipe, SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.base import Chain, DynamicTree, Shape, TrainableDrafter
from specdraft.drafters.blocks import GatedMLP, Projections, Rotary, rope_of
from specdraft.drafters.vocabulary import from_tables
from specdraft.kvcache import RowCache
from specdraft.objectives import Prediction
from specdraft.target import FrozenTarget, Observation
from specdraft.tree import ROOT, DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

logger = logging.getLogger(__name__)

_SHARED = (
    "vocab_size draft_vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
    "rms_norm_eps max_position_embeddings"
).split()
"""What config.json calls as we do."""


class EagleRecipe(Recipe):
    kind: Literal["eagle3"] = "eagle3"
    """The drafting method."""
    taps: tuple[int, ...] | None = None
    """Target layers that it reads (k: after layer k). Unset: early, middle and late, as every engine defaults to."""
    vocabulary: int | None = None
    """Size of the reduced draft vocabulary, the commonest ids of the training answers. Unset: the target's whole."""
    unroll: int = 4
    """Depths trained: how many steps the drafter is unrolled on its own outputs."""
    start: Literal["target", "random"] = "target"
    """Begin with the target's last layer, final norm and output rows where they fit, or with random weights."""
    intermediate_size: int | None = None
    """Width of its MLP. Unset: the target's."""
    checkpoint: str | None = None
    """Go on from this trained drafter, with its draft vocabulary and shape."""


class EagleConfig(PreTrainedConfig):
    """Shape of an EAGLE-3 head. `vocab_size` is the target's, `draft_vocab_size` its own."""

    model_type = "specdraft_eagle3"

    vocab_size: int = 0
    draft_vocab_size: int = 0
    hidden_size: int = 0
    target_hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    taps: list[int] | None = None
    unroll: int = 4
    trained_length: int | None = None
    tie_word_embeddings: bool = False

    @classmethod
    def for_target(cls, target: FrozenTarget, recipe: EagleRecipe, draft_vocab_size: int) -> "EagleConfig":
        """Raises SpecdraftError for a target whose positions an EAGLE-3 head cannot follow."""
        settings = target.config.to_dict()
        heads, layers = settings["num_attention_heads"], target.num_layers
        taps = recipe.taps or tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 1)} - {0}))
        return cls(
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=recipe.intermediate_size or settings["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=settings.get("num_key_value_heads") or heads,
            head_dim=settings.get("head_dim") or target.hidden_size // heads,
            rms_norm_eps=settings.get("rms_norm_eps") or 1e-5,
            rope_parameters=rope_of(settings, target.name),
            max_position_embeddings=settings["max_position_embeddings"],
            taps=list(taps),
            unroll=recipe.unroll,
        )


class EagleLayer(nn.Module):
    """The decoder layer over (embedding, feature): attention reads both, the residual stream is the feature's."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Projections(config, 2 * config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def project(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, not yet rotated: each [batch, heads, time, head_dim]."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)
        attn = self.self_attn
        return attn.split(attn.q_proj(both)), attn.split(attn.k_proj(both)), attn.split(attn.v_proj(both))

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """feature [batch, time, H] and attended [batch, heads, time, head_dim] to the output [batch, time, H]."""
        hidden = feature + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass(frozen=True)
class EagleMemory:
    cache: RowCache
    """Keys and values of the committed slots; slot t of a row reads the token at t + 1."""
    feature: Tensor
    """[batch, H]: the layer's output at each row's last slot, which reads the root."""


class EagleDrafter(TrainableDrafter):
    config_class = EagleConfig
    config: EagleConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig, kept_ids: Tensor | None = None) -> None:
        """`kept_ids` int64 [draft_vocab_size], ascending: the target's ids that the head predicts, unless all."""
        super().__init__(config)
        self.taps = tuple(config.taps or ())
        self.shape: Shape = Chain()
        width = config.hidden_size
        self.fc = nn.Linear(len(self.taps) * config.target_hidden_size, width, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        if config.draft_vocab_size < config.vocab_size:
            rows = torch.arange(config.draft_vocab_size)
            ids = rows - 1 if kept_ids is None else kept_ids.cpu()  # -1: not to be used before a load
            self.register_buffer("d2t", ids - rows)  # offsets: row i predicts the target's id i + d2t[i]
            self.register_buffer("t2d", torch.isin(torch.arange(config.vocab_size), ids))
        self.post_init()

    @classmethod
    def for_target(cls, target: FrozenTarget, recipe: EagleRecipe, kept_ids: Tensor | None) -> "EagleDrafter":
        """A fresh head for `target`, attached to it."""
        size = target.vocab_size if kept_ids is None else len(kept_ids)
        drafter = cls(EagleConfig.for_target(target, recipe, size), kept_ids)
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
        last = dict(target.layers[-1].named_modules())
        for name, mine in self.midlayer.named_modules():
            theirs = last.get("input_layernorm" if name == "hidden_norm" else name)
            if isinstance(mine, nn.Linear) and theirs is not None:
                source = theirs.weight
                if mine.weight.shape == source.shape:
                    mine.weight.copy_(source)
                elif mine.weight.shape == (len(source), 2 * width):
                    mine.weight.zero_()[:, width:] = source
            elif isinstance(mine, LlamaRMSNorm) and theirs is not None and name != "input_layernorm":
                mine.weight.copy_(target.gain(theirs))
        self.norm.weight.copy_(target.gain(target.final_norm))

    def attach(self, target: FrozenTarget) -> None:
        """Raises SpecdraftError for a target of another width or a smaller vocabulary, and for d2t and t2d that do not
        say which ids are drafted. Ids that the target has gained since training are never drafted, with a warning."""
        config = self.config
        if target.hidden_size != config.target_hidden_size or target.vocab_size < config.vocab_size:
            raise SpecdraftError(
                f"the drafter was made for a target of width {config.target_hidden_size} with {config.vocab_size} ids; "
                f"{target.name} has {target.hidden_size} and {target.vocab_size}"
            )
        if (gained := target.vocab_size - config.vocab_size) > 0:
            logger.warning("%s has %d ids more than the drafter, which never drafts them", target.name, gained)
        if config.draft_vocab_size < config.vocab_size:
            from_tables(self.d2t, config.draft_vocab_size, config.vocab_size, self.t2d)
        super().attach(target)

    def kept_ids(self) -> Tensor | None:
        """int64 [draft_vocab_size]: the target's id of each row of the head; None: all, in order."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        """The unroll: depth d's hidden states, with the tokens x[i+d] of the data and the features of depth d - 1."""
        feature = self.fc(seen.taps.to(self.fc.weight.dtype))
        kept_ids, layer = self.kept_ids(), self.midlayer
        predictions: list[Prediction] = []
        first: tuple[Tensor, Tensor] | None = None
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for depth in range(1, self.config.unroll + 1):
            ahead = torch.cat([tokens[:, depth:], torch.zeros_like(tokens[:, :depth])], 1)
            query, key, value = layer.project(self.embed(ahead), feature)
            positions = seen.positions + depth - 1
            query, key = self.rotary(query, positions), self.rotary(key, positions)
            if first is None:
                first = key, value
            else:
                own_keys.append(key)
                own_values.append(value)
            attended = unrolled_attention(query, *first, _stack(own_keys, key), _stack(own_values, value))
            feature = layer.finish(feature, attended)
            predictions.append(Prediction(depth, depth, self.norm(feature), self.lm_head, kept_ids))
        return predictions

    @torch.no_grad()
    def begin(self, seen: Observation, roots: Tensor) -> EagleMemory:
        return self._read(RowCache(len(roots), roots.device), seen, roots)

    @torch.no_grad()
    def remember(self, memory: EagleMemory, verdict: Verdict, seen: Observation) -> EagleMemory:
        return self._read(memory.cache, seen, verdict.token)

    def keep(self, memory: EagleMemory, rows: Sequence[int]) -> EagleMemory:
        memory.cache.keep(rows)
        return EagleMemory(memory.cache, memory.feature[list(rows)])

    def _read(self, cache: RowCache, seen: Observation, roots: Tensor) -> EagleMemory:
        """Commit the slots of newly committed tokens; the last one reads the root."""
        rows, last = torch.arange(len(roots), device=roots.device), seen.mask.sum(1) - 1
        ahead = torch.cat([seen.tokens[:, 1:], seen.tokens[:, :1]], 1)
        ahead[rows, last] = roots
        steps = torch.arange(ahead.shape[1], device=roots.device)
        attends = (steps[:, None] >= steps).expand(len(roots), -1, -1)
        feature = self.fc(seen.taps.to(self.fc.weight.dtype))
        feature = self._step(cache, ahead, feature, steps.expand_as(ahead), attends)
        cache.commit(steps.expand_as(ahead), last + 1)
        return EagleMemory(cache, feature[rows, last])

    def _step(self, cache: RowCache, tokens: Tensor, feature: Tensor, depths: Tensor, attends: Tensor) -> Tensor:
        """The layer over new slots behind the committed ones: tokens int64 [batch, new], feature [batch, new, H]."""
        positions = cache.lengths[:, None] + depths
        query, key, value = self.midlayer.project(self.embed(tokens), feature)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        mask = cache.mask(positions, attends, query.dtype)
        keys, values = cache.update(key, value, 0)
        attended = scaled_dot_product_attention(query, keys, values, mask, enable_gqa=keys.shape[1] < query.shape[1])
        return self.midlayer.finish(feature, attended)

    def _logits(self, feature: Tensor) -> Tensor:
        return self.lm_head(self.norm(feature))

    @torch.no_grad()
    def propose(self, memory: EagleMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        shape = self.shape
        tree = self._chain(memory, shape.gamma, warp, dice) if isinstance(shape, Chain) else self._tree(memory, shape)
        memory.cache.discard()
        return tree

    def _chain(self, memory: EagleMemory, gamma: int, warp: Warp, dice: Dice) -> DraftTree:
        feature = memory.feature[:, None]
        batch, device = len(feature), feature.device
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for depth in range(gamma):
            if depth > 0:
                attends = torch.ones(batch, 1, depth, dtype=torch.bool, device=device)
                depths = torch.full((batch, 1), depth - 1, device=device)
                feature = self._step(memory.cache, tokens[-1][:, None], feature, depths, attends)
            logits = self._logits(feature[:, 0])
            if warp.greedy:
                tokens.append(self._target_ids(logits.argmax(-1)))
            else:
                laws.append(self._widened(warp(logits)))
                tokens.append(dice.draw(laws[-1], range(batch)))
        return DraftTree.chain(torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None)

    def _tree(self, memory: EagleMemory, shape: DynamicTree) -> DraftTree:
        """Nodes are collected depth by depth; `frontier` holds those of the last depth that are expanded next."""
        batch, width, device = len(memory.feature), shape.width, memory.feature.device
        score, token = self._likeliest(memory.feature[:, None], width)  # [batch, 1, width]
        scores, tokens = [score.flatten(1)], [token.flatten(1)]
        parents = [torch.full_like(tokens[0], ROOT)]
        frontier = torch.arange(width, device=device).expand(batch, -1)
        slot = torch.zeros_like(frontier)  # of a frontier node's parent in the frontier before
        feature = memory.feature[:, None]
        attends = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
        own = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
        rows = torch.arange(batch, device=device)[:, None]
        collected = width
        for depth in range(1, shape.depth):
            attends = torch.cat([attends[rows, slot], own], 2)
            depths = torch.full_like(frontier, depth - 1)
            chosen = torch.cat(tokens, 1)[rows, frontier]
            feature = self._step(memory.cache, chosen, feature[rows, slot], depths, attends)
            score, token = self._likeliest(feature, width)  # [batch, width, width]
            score = score + torch.cat(scores, 1)[rows, frontier][..., None]
            scores.append(score.flatten(1))
            tokens.append(token.flatten(1))
            parents.append(frontier.repeat_interleave(width, 1))
            best = score.flatten(1).topk(width).indices
            frontier, slot = collected + best, best // width
            collected += width * width
        every = torch.cat(scores, 1)
        # stable: of equal scores the parent, which stands first, is kept before its child
        kept = every.sort(dim=1, descending=True, stable=True).indices[:, : shape.nodes].sort(dim=1).values
        place = torch.full((batch, collected + 1), ROOT, device=device)  # the last entry is the root's own
        place.scatter_(1, kept, torch.arange(kept.shape[1], device=device).expand_as(kept))
        parent = place.gather(1, torch.cat(parents, 1).gather(1, kept) % (collected + 1))
        return DraftTree.chosen(torch.cat(tokens, 1).gather(1, kept), parent, torch.ones_like(parent, dtype=torch.bool))

    def _likeliest(self, feature: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The `width` likeliest successors: log q and target ids, each [batch, new, width]."""
        top = log_softmax(self._logits(feature).float(), -1).topk(width)
        return top.values, self._target_ids(top.indices)

    def _target_ids(self, ids: Tensor) -> Tensor:
        return ids if self.config.draft_vocab_size == self.config.vocab_size else ids + self.d2t[ids]

    def _widened(self, law: Tensor) -> Tensor:
        """A law over the draft vocabulary [batch, Vd] as one over the target's [batch, V]."""
        if self.config.draft_vocab_size == self.target.vocab_size:
            return law
        wide = law.new_zeros(len(law), self.target.vocab_size)
        ids = self.kept_ids()
        wide[:, slice(law.shape[1]) if ids is None else ids] = law
        return wide

    def servable_config(self) -> dict[str, Any]:
        """config.json as vLLM, SGLang and llama.cpp read it, and under `specdraft` what only we know.

        The engines count the same tapped layers in two ways: vLLM from the embedding (as we do), SGLang from 0 at the
        first layer's output. Each finds its own key.
        """
        config, taps = self.config, list(self.taps)
        rope = dict(config.rope_parameters or {})
        written = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{name: getattr(config, name) for name in _SHARED},
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rope_theta": rope.pop("rope_theta", 10000.0),
            "tie_word_embeddings": False,
            "torch_dtype": str(self.lm_head.weight.dtype).removeprefix("torch."),
            "norm_before_residual": False,
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
        if rope.get("rope_type", "default") != "default" or "partial_rotary_factor" in rope:
            written["rope_scaling"] = rope
        return written

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> EagleConfig:
        ours = written["specdraft"]
        rope = {"rope_type": "default", "rope_theta": written["rope_theta"], **written.get("rope_scaling", {})}
        return EagleConfig(
            **{name: written[name] for name in _SHARED},
            rope_parameters=rope,
            taps=written["eagle_aux_hidden_state_layer_ids"],
            target_hidden_size=ours["target_hidden_size"],
            unroll=ours["unroll"],
            trained_length=ours["trained_length"],
        )


def _stack(own: Sequence[Tensor], like: Tensor) -> Tensor:
    """[batch, heads, T, D] of each later step to [batch, heads, T, steps, D], also for no step."""
    return torch.stack(list(own), 3) if own else like[:, :, :, None][:, :, :, :0]

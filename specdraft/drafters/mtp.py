"""Multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437): modules that go on where the target ends.

Module k reads, at slot i, the token x[i+k] and h^(k-1)_i, and gives the law of x[i+k+1] through the target's own head;
h^0 is the target's last hidden state. One module may serve every depth, and is then the recurrence of `recurrence`; or
each depth has its own, with keys and values of its own slots. The module's names are MiMo's, which engines load once
`formats.mtp.stitch` has put them into the target's checkpoint. What is computed is what the engines compute there:
whether h^0 is read before or after the target's final norm, for one, is a family's custom (see `Custom`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from specdraft.causal import Observation, Session
from specdraft.config import SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.base import DrafterRecipe, check_tensors, read_servable
from specdraft.drafters.blocks import DecoderConfig, GatedMLP, Projections, copy_layer
from specdraft.drafters.mtp_native import CUSTOMS, Checkpoint, norm_of, read_native
from specdraft.drafters.proposals import Frontier, Words, propose
from specdraft.drafters.recurrence import SharedHeadDrafter, Slots
from specdraft.drafters.shapes import Chain, Shape
from specdraft.kvcache import RowCache
from specdraft.objectives import Prediction
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp


class MTPRecipe(DrafterRecipe):
    kind: Literal["mtp"] = "mtp"
    """The drafting method."""
    depths: int = Field(default=4, ge=1)
    """Depths trained. With a module each, also the deepest that can be drafted."""
    modules: Literal["one", "each"] = "one"
    """One module at every depth, or each depth its own."""
    start: Literal["target", "random", "native"] = "target"
    """Begin with the target's last layer where it fits, at random, or with the modules in the target's checkpoint."""


class MTPConfig(DecoderConfig):
    """Shape of one or more MTP modules; `unroll` is the number of depths."""

    model_type = "specdraft_mtp"

    modules: str = "one"
    qkv_bias: bool = False
    qk_norm: bool = False
    taps: list[int] | None = None
    """The target's last layer, where it is read before the final norm."""
    family: str = "mimo"
    """Whose custom the modules follow, and under whose names they are stitched: a key of CUSTOMS."""

    @property
    def module_count(self) -> int:
        return self.unroll if self.modules == "each" else 1


class MTPAttention(Projections):
    """Projections with a bias (Qwen2) or with norms of queries and keys (Qwen3), where the family has them."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config, config.hidden_size, bias=config.qkv_bias)
        self.q_norm = norm_of(config, config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = norm_of(config, config.head_dim) if config.qk_norm else nn.Identity()

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, time, H] to queries, keys and values, each [batch, its heads, time, head_dim]."""
        query, key, value = (self.split(part(hidden)) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.q_norm(query), self.k_norm(key), value


class MTPModule(nn.Module):
    """Two norms and a projection in front of an ordinary decoder layer, a norm behind it."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.token_layernorm = norm_of(config, width)
        self.hidden_layernorm = norm_of(config, width)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = norm_of(config, width)
        self.self_attn = MTPAttention(config)
        self.post_attention_layernorm = norm_of(config, width)
        self.mlp = GatedMLP(config)
        self.final_layernorm = norm_of(config, width)

    def project(self, embedded: Tensor, feature: Tensor) -> Slots:
        fused = self.input_proj(torch.cat([self.hidden_layernorm(feature), self.token_layernorm(embedded)], -1))
        return Slots(fused, *self.self_attn.heads(self.input_layernorm(fused)))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MTPDrafter(SharedHeadDrafter):
    """One module at every depth."""

    recipe_class = MTPRecipe
    config_class = MTPConfig
    config: MTPConfig

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config)
        self.model = nn.ModuleDict({"mtp_layers": nn.ModuleList(MTPModule(config) for _ in range(config.module_count))})
        self.custom = CUSTOMS[config.family]
        self.taps = tuple(config.taps or ())
        self.post_init()

    @classmethod
    def for_target(cls, target: FrozenTarget, recipe: MTPRecipe, counts: Tensor) -> "MTPDrafter":
        """Raises SpecdraftError for `start: native` where the checkpoint's modules are not what the recipe says."""
        if recipe.start == "native":
            drafter = cls.from_native(target, checkpoint_folder(target.name), recipe.depths)
            if drafter.config.modules != recipe.modules:
                count = drafter.config.module_count
                right = "modules: one" if count == 1 else f"modules: each and depths: {count}"
                raise SpecdraftError(f"{target.name} brings {count} MTP modules: set {right}")
            return drafter
        biased = "self_attn.q_proj.bias" in dict(target.layers[-1].named_parameters())
        shape: dict[str, Any] = {"qkv_bias": biased, "taps": _taps(target, MTPConfig.family)}
        config = MTPConfig.like(target, unroll=recipe.depths, modules=recipe.modules, **shape)
        drafter = _class_for(config.modules)(config)
        if recipe.start == "target":
            drafter._start_from(target)
        return drafter._ready(target)

    @classmethod
    def from_native(cls, target: FrozenTarget, folder: Path, depths: int = 4) -> "MTPDrafter":
        """The MTP modules that the target's own checkpoint in `folder` brings, attached to the target.

        `depths`: how many are trained where there is one module; more modules serve a depth each. Raises SpecdraftError
        if there is none, or one that is not a dense layer of the Llama and Qwen kind.
        """
        native = read_native(Checkpoint(folder), target)
        modules, unroll = ("one", depths) if native.modules == 1 else ("each", native.modules)
        shape: dict[str, Any] = {"qkv_bias": native.qkv_bias, "qk_norm": native.qk_norm, "family": native.family}
        shape["taps"] = _taps(target, native.family)
        drafter = _class_for(modules)(MTPConfig.like(target, unroll=unroll, modules=modules, **shape))
        check_tensors(native.tensors, drafter.state_dict(), str(folder))
        drafter.load_state_dict(native.tensors)
        return drafter._ready(target)

    @classmethod
    def from_pretrained(cls, folder: Any) -> "MTPDrafter":  # type: ignore[override]
        """See TrainableDrafter; the class is the one for the number of modules."""
        written = read_servable(Path(folder))
        return super(MTPDrafter, _class_for(cls.config_from_servable(written).modules)).from_pretrained(folder)

    def _ready(self, target: FrozenTarget) -> Self:
        self.attach(target)
        nn.Module.to(self, target.device)
        return self

    @torch.no_grad()
    def _start_from(self, target: FrozenTarget) -> None:
        """Every module: the target's last layer over its last hidden state alone, then its final norm."""
        width = target.hidden_size
        for module in self.stack:
            module.input_proj.weight.zero_()[:, :width] = torch.eye(width)
            copy_layer(module, target)
            module.final_layernorm.weight.copy_(target.gain(target.final_norm))

    @property
    def stack(self) -> Sequence[MTPModule]:
        """The modules, depth by depth."""
        return cast(Sequence[MTPModule], self.model["mtp_layers"])

    def embed_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        return embedded if self.custom.reads_first else embedded.masked_fill((positions == 0)[..., None], 0)

    def enter(self, seen: Observation) -> Tensor:
        return (seen.taps if self.taps else seen.hidden).to(self.dtype)

    def project(self, embedded: Tensor, feature: Tensor) -> Slots:
        return self.stack[0].project(embedded, feature)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self.hand_on(self.stack[0], residual, attended)

    def read_out(self, feature: Tensor) -> Tensor:
        return self.before_head(self.stack[0], feature)

    def hand_on(self, module: MTPModule, residual: Tensor, attended: Tensor) -> Tensor:
        """What the module gives to the next depth."""
        hidden = module.finish(residual, attended)
        return module.final_layernorm(hidden) if self.custom.hands_on_normed else hidden

    def before_head(self, module: MTPModule, feature: Tensor) -> Tensor:
        """What it has given to the next depth, as the head reads it."""
        return feature if self.custom.hands_on_normed else module.final_layernorm(feature)

    def servable_config(self) -> dict[str, Any]:
        """config.json of the modules alone, in the words of the checkpoint that they are stitched into."""
        config = self.config
        return {
            "architectures": ["MiMoMTPModel"],
            **config.servable(),
            "num_nextn_predict_layers": config.module_count,
            "attention_bias": config.qkv_bias,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            "specdraft": {
                "drafter": "mtp",
                "target_hidden_size": config.target_hidden_size,
                "unroll": config.unroll,
                "modules": config.modules,
                "qk_norm": config.qk_norm,
                "taps": config.taps,
                "family": config.family,
                "trained_length": config.trained_length,
            },
        }

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> MTPConfig:
        own = {name: value for name, value in written["specdraft"].items() if name != "drafter"}
        return MTPConfig.from_servable(written, qkv_bias=written["attention_bias"], **own)


@dataclass(frozen=True)
class StackMemory:
    cache: RowCache
    """A layer a module. Column c holds the slot that reads the token at c + 1: in module k that is slot c + 1 - k, and
    the first k - 1 columns hold none."""
    outputs: Tensor
    """[batch, modules, H]: what each module hands on at the column that reads the root."""


class MTPStackDrafter(MTPDrafter):
    """Each depth its own module, with causal attention over its own slots.

    When a token becomes known, drafted or committed, every module reads it in a slot of its own, beside what the module
    before it made of the token before. So module k has slots that read drafted tokens behind its committed ones, and
    below a token at depth d only the modules behind the d-th go on.
    """

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        feature, head = self.enter(seen), self.head()
        predictions: list[Prediction] = []
        for depth, module in enumerate(self.stack, 1):
            ahead = torch.cat([tokens[:, depth:], torch.zeros_like(tokens[:, :depth])], 1)
            positions = seen.positions + depth - 1
            residual, query, key, value = module.project(self.embed_at(ahead, positions), feature)
            query, key = self.rotary(query, positions), self.rotary(key, positions)
            grouped = key.shape[1] < query.shape[1]
            attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            feature = self.hand_on(module, residual, attended)
            predictions.append(Prediction(depth, depth, self.before_head(module, feature), head, None))
        return predictions

    @torch.no_grad()
    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> StackMemory:  # type: ignore[override]
        blank = torch.zeros(len(roots), len(self.stack), self.config.hidden_size, dtype=self.dtype, device=roots.device)
        return self._advance(StackMemory(RowCache(len(roots), roots.device), blank), seen, roots)

    @torch.no_grad()
    def remember(self, memory: StackMemory, verdict: Verdict, seen: Observation) -> StackMemory:  # type: ignore[override]
        return self._advance(memory, seen, verdict.token)

    def keep(self, memory: StackMemory, rows: Sequence[int]) -> StackMemory:  # type: ignore[override]
        memory.cache.keep(rows)
        return StackMemory(memory.cache, memory.outputs[list(rows)])

    @torch.no_grad()
    def propose(self, memory: StackMemory, *, warp: Warp, dice: Dice) -> DraftTree:  # type: ignore[override]
        """Raises SpecdraftError for a shape deeper than there are modules."""
        cache, deepest = memory.cache, _depth(self.shape)
        if deepest > len(self.stack):
            raise SpecdraftError(
                f"{deepest} tokens below each other were asked of a drafter with {len(self.stack)} MTP modules, one a "
                f"depth: draft at most {len(self.stack)}, or train with modules: one"
            )
        rows = torch.arange(len(memory.outputs), device=memory.outputs.device)[:, None]
        outputs = {index: memory.outputs[:, index, None] for index in range(deepest)}
        places = torch.empty_like(cache.lengths[:, None])[:, :0]

        def grow(frontier: Frontier) -> Tensor:
            nonlocal outputs, places
            positions = cache.lengths[:, None] + torch.full_like(frontier.tokens, frontier.depth - 1)
            places = torch.cat([places, positions], 1)
            embedded = self.embed_at(frontier.tokens, positions)
            outputs = {
                index: self._read_column(
                    cache, index, embedded, outputs[index - 1][rows, frontier.parents], places, frontier.attends
                )
                for index in range(frontier.depth, deepest)
            }
            return self._score(frontier.depth, outputs[frontier.depth])

        words = Words(self.target.vocab_size, self.kept_ids())
        tree = propose(self.shape, self._score(0, memory.outputs[:, 0]), grow, words, warp, dice)
        cache.discard()
        return tree

    def _score(self, index: int, feature: Tensor) -> Tensor:
        return self.target.head(self.before_head(self.stack[index], feature))[..., : self.config.vocab_size]

    def _advance(self, memory: StackMemory, seen: Observation, roots: Tensor) -> StackMemory:
        """Every module reads the newly committed tokens; the last of each row is its root."""
        cache = memory.cache
        rows, last = torch.arange(len(roots), device=roots.device), seen.mask.sum(1) - 1
        ahead = torch.cat([seen.tokens[:, 1:], seen.tokens[:, :1]], 1)
        ahead[rows, last] = roots
        steps = torch.arange(ahead.shape[1], device=roots.device)
        attends = (steps[:, None] >= steps).expand(len(roots), -1, -1)
        places = cache.lengths[:, None] + steps
        embedded, feature = self.embed_at(ahead, places), self.enter(seen)
        outputs = []
        for index in range(len(self.stack)):
            output = self._read_column(cache, index, embedded, feature, places, attends)
            outputs.append(output[rows, last])
            feature = torch.cat([memory.outputs[:, index, None], output[:, :-1]], 1)
        cache.commit(steps.expand_as(ahead), last + 1)
        return StackMemory(cache, torch.stack(outputs, 1))

    def _read_column(
        self, cache: RowCache, index: int, embedded: Tensor, feature: Tensor, places: Tensor, attends: Tensor
    ) -> Tensor:
        """What module `index` (from 0) hands on at new columns: embedded and feature [batch, new, H].

        `places` int64 [batch, scratch]: the columns that are not committed, of which the new ones are the last;
        `attends` bool [batch, new, scratch].
        """
        positions, module = places[:, -embedded.shape[1] :], self.stack[index]
        residual, query, key, value = module.project(embedded, feature)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        slots = attends & (places >= index)[:, None]
        # a column without a slot is read by nobody; that it sees something keeps it finite
        mask = cache.mask(positions, torch.where(slots.any(-1, keepdim=True), slots, attends), query.dtype)
        mask[..., : min(index, cache.width)] = torch.finfo(mask.dtype).min
        keys, values = cache.update(key, value, index)
        attended = scaled_dot_product_attention(query, keys, values, mask, enable_gqa=keys.shape[1] < query.shape[1])
        return self.hand_on(module, residual, attended)


def _taps(target: FrozenTarget, family: str) -> list[int]:
    return [] if CUSTOMS[family].reads_normed else [target.num_layers]


def _class_for(modules: str) -> type[MTPDrafter]:
    return MTPStackDrafter if modules == "each" else MTPDrafter


def _depth(shape: Shape) -> int:
    return shape.gamma if isinstance(shape, Chain) else shape.depth


def checkpoint_folder(name: str) -> Path:
    """Where a target's checkpoint lies: its own folder, or the Hub's cache once the target has been loaded.

    Raises SpecdraftError if it is in neither.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"], local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        raise SpecdraftError(f"the checkpoint of {name} is not on this machine: {error}") from error

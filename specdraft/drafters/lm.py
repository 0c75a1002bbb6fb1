"""Two-model speculative sampling (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Any small causal LM with the target's tokenizer drafts, a chain or a tree; trained on the target's laws (DistillSpec,
Zhou et al. 2023, arXiv 2310.08461) it drafts better. It may be a model of its own or be cut from the target's layers.
It reads committed tokens once; what it drafts is scratch in its own keys and values. What is saved is a plain Hugging
Face folder, which every engine loads as the draft model.

On its own text (GKD, Agarwal et al. 2023, arXiv 2306.13649): `specdraft respond` with the drafter's folder as
`target.name` writes answers by the drafter; `specdraft train` with these as `data.answers` has the target score them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed

from specdraft import lowbit
from specdraft.causal import CausalLM, Observation, Session
from specdraft.config import Recipe, SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.base import DrafterConfig, DrafterRecipe, TrainableDrafter, check_tensors, read_servable
from specdraft.drafters.lowbit_lm import read_lowbit_lm
from specdraft.drafters.proposals import Frontier, Words, propose
from specdraft.drafters.vocabulary import check_tokenizers
from specdraft.objectives import Prediction
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

ADAPTER = "adapter"
"""Folder of the low-rank updates alone, in peft's layout, inside a drafter's."""


class LoraRecipe(Recipe):
    """Low-rank updates of frozen weights (Hu et al. 2021, arXiv 2106.09685); they are merged where it is saved."""

    rank: int = Field(default=16, ge=1)
    """Rank of each update."""
    alpha: int = Field(default=32, ge=1)
    """An update is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before each update, while training."""
    modules: tuple[str, ...] | None = None
    """Linear layers that get one, by the ends of their names (q_proj, v_proj, ...). Unset: all but the head."""


class LMRecipe(DrafterRecipe):
    kind: Literal["lm"] = "lm"
    """The drafting method."""
    model: str | None = None
    """Hub id or folder of a causal LM with the target's tokenizer. Unset: some of the target's own layers, between its
    embedding and its head, all copied."""
    layers: int | None = Field(default=None, ge=1)
    """How many of the target's layers it is cut from. Unset: half."""
    spread: Literal["first", "even"] | None = None
    """Which of them: the first ones, or evenly spread, the first and the last among them. Unset: even."""
    lora: LoraRecipe | None = None
    """Train low-rank updates only. Unset: every weight."""

    @model_validator(mode="after")
    def _no_idle_setting(self) -> "LMRecipe":
        if self.model is not None and (self.layers is not None or self.spread is not None):
            raise ValueError("layers and spread say how to cut the target, and mean nothing beside model")
        own = [name for name in ("model", "layers", "spread", "lora") if getattr(self, name) is not None]
        if self.checkpoint is not None and own:
            raise ValueError(
                f"{', '.join(own)} mean nothing beside checkpoint, which goes on with its own weights; "
                "to adapt a trained drafter with lora, give its folder as model"
            )
        return self


class LMConfig(DrafterConfig):
    """What is known beside the LM's own config."""

    model_type = "specdraft_lm"

    shared: int = 0
    """Ids below it are drafted; those above are one side's alone, or padding."""


@dataclass(frozen=True)
class LMMemory:
    session: Session
    hidden: Tensor
    """[batch, H]: the drafter's own last hidden state at each row's root."""


class LMDrafter(TrainableDrafter):
    """Drafts with `lm`, a transformers causal LM that `reader` reads, decoding and training on the same weights."""

    recipe_class = LMRecipe
    config_class = LMConfig
    config: LMConfig

    def __init__(self, config: LMConfig, reader: CausalLM) -> None:
        super().__init__(config)
        self.reader, self.lm = reader, reader.model
        self.adapter: Any = None  # peft's LoraConfig, if low-rank updates are what trains
        self.post_init()

    def init_weights(self) -> None:
        """Nothing: the LM comes with its weights."""

    @classmethod
    def of(cls, reader: CausalLM, target: FrozenTarget) -> Self:
        """Draft for `target` with an LM as it is. Raises SpecdraftError if the vocabularies do not match."""
        drafter = cls(LMConfig(vocab_size=target.vocab_size, shared=check_tokenizers(reader, target)), reader)
        drafter._target = [target]
        return drafter

    @classmethod
    def for_target(cls, target: FrozenTarget, recipe: LMRecipe, counts: Tensor) -> Self:
        """In float32, which is what an optimiser steps on. `counts` are not read: an LM keeps its vocabulary."""
        if recipe.model is None:
            reader = cut(target, recipe.layers, recipe.spread or "even")
        else:
            reader = read_lm(recipe.model, torch.float32)
        nn.Module.to(reader.model, target.device)
        reader.model.generation_config = GenerationConfig(
            bos_token_id=target.config.bos_token_id,
            eos_token_id=list(target.end_ids) or None,
            pad_token_id=target.config.pad_token_id,
        )
        drafter = cls.of(reader, target)
        if recipe.lora is not None:
            drafter._adapt(recipe.lora, recipe.model)
        return drafter

    def _adapt(self, recipe: LoraRecipe, base: str | None) -> None:
        """Freeze the LM and put low-rank updates beside its linear layers. Raises SpecdraftError if there is none."""
        from peft import LoraConfig, inject_adapter_in_model

        modules = "all-linear" if recipe.modules is None else list(recipe.modules)
        self.adapter = LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            lora_dropout=recipe.dropout,
            target_modules=modules,
            base_model_name_or_path=base,
            task_type="CAUSAL_LM",
        )
        try:
            inject_adapter_in_model(self.adapter, self.lm)
        except ValueError as error:
            raise SpecdraftError(
                f"drafter.lora.modules {modules} fit nothing in {self.reader.name}: {error}"
            ) from error

    def attach(self, target: FrozenTarget) -> None:
        """Raises SpecdraftError for a target that gives an id to another token, or has fewer ids."""
        if self.reader.tokenizer is not None and target.tokenizer is not None:
            self.config.shared = check_tokenizers(self.reader, target)
        elif target.vocab_size < self.config.vocab_size:
            raise SpecdraftError(
                f"the drafter was made for a target with {self.config.vocab_size} ids; {target.name} has "
                f"{target.vocab_size}"
            )
        self._hold(target)

    def kept_ids(self) -> Tensor | None:
        if self.config.shared == self.target.vocab_size:
            return None
        return torch.arange(self.config.shared, device=self.target.device)

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        """One prediction for every depth: the law of the next token, whatever was drafted before it."""
        hidden = self.reader.body(input_ids=self._known(tokens), use_cache=False).last_hidden_state
        head = self.lm.get_output_embeddings()
        probe = torch.ones(1)
        if self.config.shared < self.reader.vocab_size or not torch.equal(self.reader.finish(probe), probe):
            head = _SharedColumns(head, self.reader.finish, self.config.shared)
        return [Prediction(1, 0, hidden, head, self.kept_ids())]

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> LMMemory:
        session = self.reader.session((), len(roots))
        lengths = seen.mask.sum(1, keepdim=True)
        tokens = torch.cat([seen.tokens, roots[:, None]], 1).scatter_(1, lengths, roots[:, None])
        return self._read(session, tokens, torch.arange(tokens.shape[1], device=roots.device) <= lengths)

    def remember(self, memory: LMMemory, verdict: Verdict, seen: Observation) -> LMMemory:
        """The old root has been read already: what is new are the accepted tokens and the new root behind them."""
        tokens = torch.cat([seen.tokens[:, 1:], verdict.token[:, None]], 1)
        tokens.scatter_(1, verdict.accepted[:, None], verdict.token[:, None])
        return self._read(memory.session, tokens, seen.mask)

    def keep(self, memory: LMMemory, rows: Sequence[int]) -> LMMemory:
        memory.session.keep(rows)
        return LMMemory(memory.session, memory.hidden[list(rows)])

    def propose(self, memory: LMMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        session = memory.session

        def grow(frontier: Frontier) -> Tensor:
            depths = torch.full_like(frontier.tokens, frontier.depth - 1)
            return self._logits(session.grow(frontier.tokens, depths, frontier.attends).hidden)

        words = Words(self.target.vocab_size)
        tree = propose(self.shape, self._logits(memory.hidden), grow, words, warp, dice)
        session.discard()
        return tree

    def _read(self, session: Session, tokens: Tensor, mask: Tensor) -> LMMemory:
        hidden = session.read(self._known(tokens), mask).hidden
        return LMMemory(session, hidden[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1])

    def _known(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(max=self.reader.vocab_size - 1)  # an id that the LM lacks is read as its last

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.reader.head(hidden)[..., : self.config.shared]

    def servable_config(self) -> dict[str, Any]:
        """The LM's own config.json, with rotary positions where engines of every age look for them."""
        written = json.loads(self.lm.config.to_json_string())
        rope = written.get("rope_parameters") or {}
        if "rope_theta" in rope:
            written["rope_theta"] = rope["rope_theta"]
            if rope.get("rope_type", "default") != "default":
                written["rope_scaling"] = rope
        known = {name: getattr(self.config, name) for name in ("vocab_size", "shared", "trained_length")}
        return {**written, "architectures": [type(self.lm).__name__], "specdraft": {"drafter": "lm", **known}}

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> LMConfig:
        return LMConfig(**{name: value for name, value in written["specdraft"].items() if name != "drafter"})

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
    ) -> None:
        """Write the folder of the LM itself, updates merged, with its tokenizer; under `adapter`, the updates alone.

        Raises SpecdraftError, and writes nothing, if a tensor is empty or not of the shape that the config asks for.
        """
        if not is_main_process:
            return
        held = {name.removeprefix("lm."): t.detach() for name, t in (state_dict or self.state_dict()).items()}
        tensors = self._merged(held)
        written = self.servable_config() | lowbit.config_of(self.lm)
        with torch.device("meta"):
            empty = type(self.lm)(self.lm.config)
        lowbit.install(empty, written, str(save_directory))
        wanted = empty.state_dict()
        for name, source in self.lm.all_tied_weights_keys.items():  # held once, under the name that it is tied to
            spare = tensors.pop(name, None)
            if spare is not None:
                tensors.setdefault(source, spare)
            del wanted[name]
        check_tensors(tensors, wanted, str(save_directory))
        dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
        folder = Path(save_directory)
        self.lm.save_pretrained(folder, state_dict=tensors)
        config = {**written, **dict.fromkeys(("dtype", "torch_dtype"), str(dtype).split(".")[1])}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if self.reader.tokenizer is not None:
            self.reader.tokenizer.save_pretrained(folder)
        if self.adapter is not None:
            self.adapter.save_pretrained(folder / ADAPTER)
            own = {name: tensor.contiguous() for name, tensor in _updates(held).items()}
            save_file(own, folder / ADAPTER / "adapter_model.safetensors", metadata={"format": "pt"})

    def _merged(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The LM's tensors under its own names: W + alpha / rank * B A for each weight with an update."""
        tensors = {name.replace(".base_layer.", "."): t for name, t in held.items() if ".lora_" not in name}
        for name, down in held.items():
            if (module := name.removesuffix(".lora_A.default.weight")) != name:
                layer: Any = self.lm.get_submodule(module)
                up, weight = held[f"{module}.lora_B.default.weight"], tensors[f"{module}.weight"]
                update = up.float() @ down.float() * layer.scaling["default"]
                update = update.T if layer.fan_in_fan_out else update
                tensors[f"{module}.weight"] = (weight + update).to(weight.dtype)
        return tensors

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str]) -> Self:  # type: ignore[override]
        """Read what `save_pretrained` wrote, in eval mode, in the dtype that it was written in.

        Raises SpecdraftError on a missing, extra or misshapen tensor; nothing is ever initialised afresh.
        """
        written = read_servable(Path(folder))
        ours = written.get(lowbit.KEY, {}).get("quant_method") == lowbit.METHOD
        reader = read_lowbit_lm(Path(folder), written) if ours else read_lm(str(folder))
        return cls(cls.config_from_servable(written), reader).eval()

    def load_weights(self, folder: Path) -> None:
        """With updates, theirs alone: the weights below them are what they were."""
        if self.adapter is None:
            self.lm.load_state_dict(read_lm(str(folder)).model.state_dict())
            return
        path = folder / ADAPTER / "adapter_model.safetensors"
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise SpecdraftError(f"{path} cannot be read: {error}") from error
        mine = _updates(self.lm.state_dict())
        check_tensors(tensors, mine, str(path))
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])


class _SharedColumns(nn.Module):
    """The LM's head, its scaling and soft-capping included, without the columns of ids that are not drafted."""

    def __init__(self, linear: nn.Module, finish: Callable[[Tensor], Tensor], shared: int) -> None:
        super().__init__()
        self.linear, self.finish, self.shared = linear, finish, shared

    def forward(self, hidden: Tensor) -> Tensor:
        return self.finish(self.linear(hidden)[..., : self.shared])


def _updates(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The low-rank updates among an LM's tensors, under the names that peft writes."""
    return {f"base_model.model.{n.replace('.default.', '.')}": t for n, t in held.items() if ".lora_" in n}


def cut(target: FrozenTarget, layers: int | None, spread: Literal["first", "even"]) -> CausalLM:
    """An LM of some of the target's layers, copied in float32 with its embedding, final norm and head.

    Raises SpecdraftError if the target has fewer layers, or if layers of its kind do not fit other places.
    """
    most = target.num_layers
    count = max(1, most // 2) if layers is None else layers
    if count > most:
        raise SpecdraftError(f"drafter.layers is {count}: {target.name} has {most} layers to be cut from")
    kept = [step * (most - 1) // (count - 1) for step in range(count)] if spread == "even" and count > 1 else []
    kept = kept or list(range(count))
    config = deepcopy(target.model.config)
    shape = config.get_text_config()
    for name, value in shape.to_dict().items():
        if "layer" in name and isinstance(value, list) and len(value) == most:
            setattr(shape, name, [value[place] for place in kept])
    shape.num_hidden_layers = count
    with no_init_weights():
        model = type(target.model)(config)
    model.tie_weights()
    stack = next(name for name, module in target.model.named_modules() if module is target.layers) + "."
    places = {f"{stack}{old}.": f"{stack}{new}." for new, old in enumerate(kept)}
    tensors: dict[str, Tensor] = {}
    for name, tensor in target.model.state_dict().items():
        place = name[: name.index(".", len(stack)) + 1] if name.startswith(stack) else ""
        if not place or place in places:
            tensors[places.get(place, place) + name.removeprefix(place)] = tensor
    name = f"{count} layers of {target.name}"
    check_tensors(tensors, model.state_dict(), f"{name} (layers {', '.join(str(place + 1) for place in kept)})")
    model.load_state_dict(tensors)
    return CausalLM(model.float().eval(), target.tokenizer, name)


def read_lm(name: str, dtype: torch.dtype | Literal["auto"] = "auto") -> CausalLM:
    """A plain Hugging Face LM with its tokenizer, by Hub id or folder, in eval mode.

    Raises SpecdraftError if there is none, or on a missing, extra or misshapen tensor.
    """
    try:
        with _unsharded():
            loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
        model, found = loaded
        bare = Path(name).is_dir() and not (Path(name) / "tokenizer_config.json").exists()
        tokenizer = None if bare else AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SpecdraftError(f"the draft LM {name} cannot be read: {error}") from error
    faults = [f"{key} is missing" for key in sorted(found["missing_keys"])]
    faults += [f"{key} is not expected" for key in sorted(found["unexpected_keys"])]
    faults += [f"{key} has another shape" for key in sorted(map(str, found["mismatched_keys"]))]
    if faults:
        raise SpecdraftError(f"{name}: the weights do not fit the config: {'; '.join(faults)}")
    return CausalLM(model.eval(), tokenizer, name)


@contextmanager
def _unsharded() -> Iterator[None]:
    """Under ZeRO-3 transformers would load empty shards; whole weights are read, and the engine shards them later."""
    held = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = held

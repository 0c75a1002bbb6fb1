"""What every drafter is: something that proposes a tree, and, if it learns, something that predicts laws."""

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from pydantic import Field, field_validator, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from specdraft import lowbit
from specdraft.causal import Observation, Session
from specdraft.config import Recipe, SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.shapes import Chain, Shape
from specdraft.objectives import TERMS, Mixture, Prediction
from specdraft.reduction import CHUNK, Teacher, reduce
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

logger = logging.getLogger(__name__)

Memory = Any
"""What a drafter knows of the committed tokens of a batch; opaque to everyone but the drafter that made it."""


class Drafter(Protocol):
    """A drafter at decode time. Rows of a batch are independent: what a row gets does not depend on its neighbours.

    A drafter's memory holds committed tokens only; whatever it computes while drafting is scratch.
    """

    taps: tuple[int, ...]
    """The target layers that `seen.taps` must hold; empty if the drafter reads none."""
    shape: Shape
    """What it drafts below a root; set it before decoding begins."""

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> Memory:
        """Read the whole prompt. `roots` int64 [batch]: the first token that the target emitted. `session`: the
        target's own reading of these rows, for a drafter that drafts on its keys and values."""
        ...

    def propose(self, memory: Memory, *, warp: Warp, dice: Dice) -> DraftTree:
        """Draft below each row's root. What is drawn is drawn by `dice` from the warped q that the tree hands on."""
        ...

    def remember(self, memory: Memory, verdict: Verdict, seen: Observation) -> Memory:
        """Read what was committed (`seen`: the root and its accepted nodes); `verdict.token` is the new root."""
        ...

    def keep(self, memory: Memory, rows: Sequence[int]) -> Memory:
        """The memory of `rows` alone, in that order: the other rows have ended."""
        ...


class ObjectiveRecipe(Recipe):
    """What training minimises: sum over depths d of depth_decay^(d - 1) * (weighted sum of the terms) / tokens."""

    terms: dict[str, float] = Field(default={"forward_kl": 1.0})
    """Terms and their weights; see `specdraft.objectives` for names and formulas."""
    top_k: int | None = Field(default=None, ge=1)
    """Tokens that `topk_cross_entropy` keeps of the target's law. Unset: 10."""
    temperature: float = Field(default=1.0, gt=0)
    """Warps the target's law and the drafter's alike, as decoding at this temperature does. Other than 1, and with
    `topk_cross_entropy`, the target's full head is computed even where a store and a reduced vocabulary spare it."""
    depth_decay: float = Field(default=0.8, gt=0, le=1)
    """How much less each depth counts than the one before."""
    chunk: int = Field(default=CHUNK, ge=1)
    """Positions whose logits are held at once: memory is chunk * vocabulary * 4 bytes, about 6 + depths times."""
    fused: bool = False
    """Compile the passes over the vocabulary into one or two (torch.compile: needs a C++ compiler on a CPU, Triton on
    CUDA, and some seconds at the first step). Worth it where the draft vocabulary is large."""

    @property
    def mixture(self) -> Mixture:
        return Mixture({name: w for name, w in self.terms.items() if w}, self.top_k or 10, self.temperature, self.fused)

    @field_validator("terms")
    @classmethod
    def _known(cls, terms: dict[str, float]) -> dict[str, float]:
        for name in terms:
            if name not in TERMS:
                nearest = difflib.get_close_matches(name, TERMS, n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else ""
                raise ValueError(f"no objective is called {name!r}, there are {', '.join(TERMS)}{hint}")
        if not any(weight > 0 for weight in terms.values()):
            raise ValueError("an objective needs a term with a weight above 0")
        return terms

    @model_validator(mode="after")
    def _used(self) -> Self:
        if self.top_k is not None and "topk_cross_entropy" not in self.terms:
            raise ValueError("top_k has no effect without the term topk_cross_entropy: add the term, or unset top_k")
        return self


@dataclass(frozen=True)
class Evidence:
    """What the target says about a batch of training tokens.

    A plain dataclass, so that no engine casts or moves what is in it: the target's features keep their precision.
    """

    observation: Observation
    target: FrozenTarget
    log_partition: Tensor | None = None
    """float32 [batch, time]: log-sum-exp of the target's full logits, if a store has it."""


@dataclass
class DrafterOutput(ModelOutput):
    """loss: scalar. The others are detached sums over supervised positions, float or int64 [depths]."""

    loss: Tensor = None  # type: ignore[assignment]
    losses: Tensor = None  # type: ignore[assignment]
    """The objective at each depth, unweighted."""
    overlaps: Tensor = None  # type: ignore[assignment]
    """sum_x min(p, q) at each depth: `overlaps / counts` is overlap_d."""
    counts: Tensor = None  # type: ignore[assignment]


class DrafterRecipe(Recipe):
    """What every method's recipe has; each adds its own, and a `kind` that is its name in DRAFTERS."""

    kind: str
    """The drafting method."""
    checkpoint: str | None = None
    """Go on from this trained drafter, with its shape and its draft vocabulary."""


class DrafterConfig(PreTrainedConfig):
    """What every method's config has."""

    vocab_size: int = 0
    """The target's."""
    target_hidden_size: int = 0
    trained_length: int | None = None
    """Longest sample that it was trained on."""


class TrainableDrafter(PreTrainedModel):
    """A drafter with weights. A method says what it predicts; the loss, for every method, is written here.

    Its decode-time side is the `Drafter` protocol. What it saves is what engines load: the layout of `servable_config`
    and of the module's own tensor names, never transformers' own.
    """

    recipe_class: ClassVar[type[DrafterRecipe]]
    predicts_features: ClassVar[bool] = False
    """Whether the hidden states that it predicts are the target's own, after the final norm: `feature_regression`."""
    config: DrafterConfig
    taps: tuple[int, ...] = ()
    base_model_prefix = ""
    accepts_loss_kwargs = True
    """transformers' Trainer then counts the tokens of the whole step, over micro-batches and ranks."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.shape: Shape = Chain()
        self.loss_type = None  # type: ignore[assignment]
        self.objective = ObjectiveRecipe()
        self._target: list[FrozenTarget] = []

    @classmethod
    def for_target(cls, target: FrozenTarget, recipe: Any, counts: Tensor) -> Self:
        """A fresh drafter for `target`, attached to it and on its device.

        `recipe` is of the class's own `recipe_class`. `counts` int64 [V]: how often each id is supervised in the
        training answers, for a reduced draft vocabulary.
        """
        raise NotImplementedError

    def attach(self, target: FrozenTarget) -> None:
        """Borrow what belongs to the target, its embedding and head: never trained, saved or sharded with the drafter.

        Raises SpecdraftError for a target of another width or a smaller vocabulary. Ids that the target has gained
        since training are never drafted, with a warning.
        """
        config = self.config
        if target.hidden_size != config.target_hidden_size or target.vocab_size < config.vocab_size:
            raise SpecdraftError(
                f"the drafter was made for a target of width {config.target_hidden_size} with {config.vocab_size} ids; "
                f"{target.name} has {target.hidden_size} and {target.vocab_size}"
            )
        self._hold(target)

    def _hold(self, target: FrozenTarget) -> None:
        """The end of every `attach`, once the target is found to fit."""
        if (gained := target.vocab_size - self.config.vocab_size) > 0:
            logger.warning("%s has %d ids more than the drafter, which never drafts them", target.name, gained)
        self._target = [target]

    @property
    def target(self) -> FrozenTarget:
        """The target that the drafter is attached to; SpecdraftError if there is none."""
        if not self._target:
            raise SpecdraftError(f"{type(self).__name__} has no target yet: call attach(target) before it is used")
        return self._target[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] to the target's embeddings [..., H], on the drafter's device and in its dtype."""
        embedding = self.target.embedding
        with torch.no_grad():
            return embedding(tokens.to(embedding.weight.device)).to(self.device, self.dtype)

    def kept_ids(self) -> Tensor | None:
        """int64 [kept], ascending: the target's id of each column of the drafter's logits; None: the first ids."""
        return None

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        """The drafter's predictions at every position of int64 [batch, time] tokens, teacher-forced, one a depth."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        evidence: Evidence,
        num_items_in_batch: Tensor | int | None = None,
    ) -> DrafterOutput:
        """The objective over a batch.

        input_ids: int64 [batch, time]. labels: the ids where supervised, -100 elsewhere, not shifted.
        num_items_in_batch: the supervised tokens of the whole step, by which every depth divides; None: the batch's.
        Raises SpecdraftError for an objective that does not suit the drafter.
        """
        objective = self.objective
        mixture = objective.mixture
        if mixture.regression and not self.predicts_features:
            raise SpecdraftError(
                f"objective.terms has feature_regression, but {type(self).__name__} does not predict the target's "
                "features: leave the term out, or train eagle1, which does"
            )
        predictions = self.predict(input_ids, evidence.observation)
        reduction = reduce(
            predictions,
            Teacher(evidence.target, evidence.observation.hidden, evidence.log_partition),
            labels,
            mixture=mixture,
            weights=[objective.depth_decay ** (prediction.depth - 1) for prediction in predictions],
            num_items=num_items_in_batch,
            chunk=objective.chunk,
        )
        return DrafterOutput(**reduction._asdict())

    def borrowed(self) -> dict[str, Tensor]:
        """What the layout wants in the checkpoint that is not the drafter's but its target's: written at a save,
        checked at a load, held by nobody. Without a target: on the meta device, for the shapes."""
        return {}

    def servable_config(self) -> dict[str, Any]:
        """config.json in the serving engines' words; `torch_dtype` is that of the weights."""
        raise NotImplementedError

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> DrafterConfig:
        """The config that `servable_config` described."""
        raise NotImplementedError

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
    ) -> None:
        """Write config.json and model.safetensors. `state_dict`: the whole weights, where the module holds only shards.

        Raises SpecdraftError, and writes nothing, if a tensor is empty or not of the shape that the config asks for, or
        if there is no target and the layout wants something of it.
        """
        if not is_main_process:
            return
        held = state_dict or self.state_dict()
        if shards := [name for name, value in held.items() if isinstance(value, DTensor)]:
            raise SpecdraftError(f"{save_directory}: {', '.join(shards)} lie here in shards; give the whole state_dict")
        tensors = {name: value.detach().contiguous() for name, value in held.items()}
        config = self.servable_config() | lowbit.config_of(self)
        check_tensors(tensors, self.unloaded(config, str(save_directory)).state_dict(), str(save_directory))
        dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
        config["torch_dtype"] = str(dtype).split(".")[1]
        borrowed = {name: tensor.to(dtype) for name, tensor in self.borrowed().items()}
        if any(tensor.is_meta for tensor in borrowed.values()):
            raise SpecdraftError(
                f"{', '.join(borrowed)} is the target's: call attach(target) before the drafter is saved"
            )
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({**tensors, **borrowed}, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str]) -> Self:  # type: ignore[override]
        """Read what `save_pretrained` wrote, in eval mode, in the dtype that it was written in.

        Raises SpecdraftError on a missing, extra or misshapen tensor; nothing is ever initialised afresh.
        """
        drafter = cls.unloaded(read_servable(Path(folder)), str(folder))
        tensors = _read_tensors(Path(folder), drafter)
        nn.Module.to(drafter, next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()))
        drafter.load_state_dict(tensors)
        lowbit.check(drafter, str(folder))
        return drafter.eval()

    @classmethod
    def unloaded(cls, written: dict[str, Any], where: str) -> Self:
        """The drafter that a config.json describes, quantised layers included, before its weights are read."""
        drafter = cls(cls.config_from_servable(written))
        lowbit.install(drafter, written, where)
        return drafter

    def load_weights(self, folder: Path) -> None:
        """Take over, in place, what `save_pretrained` wrote of a drafter like this one: training goes on from it.

        Raises SpecdraftError on a missing, extra or misshapen tensor.
        """
        self.load_state_dict(_read_tensors(folder, self))


def _read_tensors(folder: Path, drafter: TrainableDrafter) -> dict[str, Tensor]:
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise SpecdraftError(f"{folder}/model.safetensors cannot be read: {error}") from error
    wanted = drafter.state_dict()
    check_tensors(tensors, {**wanted, **drafter.borrowed()}, str(folder))
    return {name: tensors[name] for name in wanted}


def read_servable(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; SpecdraftError if there is none or it is not JSON."""
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SpecdraftError(f"{folder} is not a drafter's checkpoint: {error}") from error


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    """Raise SpecdraftError unless `found` has exactly the names and shapes of `wanted`, and integers where it has."""
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"{name} is not expected" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        if found[name].shape != wanted[name].shape:
            faults.append(f"{name} has the shape {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}")
        one, other = found[name].dtype, wanted[name].dtype
        if one != other and not (one.is_floating_point and other.is_floating_point):
            faults.append(f"{name} is {str(one).split('.')[1]} instead of {str(other).split('.')[1]}")
    if faults:
        raise SpecdraftError(f"{where}: the weights do not fit the config: {'; '.join(faults)}")

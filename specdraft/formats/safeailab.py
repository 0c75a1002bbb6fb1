"""EAGLE-3 in the names of its authors' repository: what vLLM, SGLang, TensorRT-LLM and llama.cpp all load, and ours.

One written elsewhere says less, and what it leaves out is an engine's convention. Tapped layers: the key at the top
counts from the embedding (vLLM, speculators, llama.cpp), the one inside `eagle_config` from the first layer's output
(SGLang) or from the embedding (vLLM): where only that one is given, it is taken if one reading is every engine's
default, and refused if it may be either. Without any, the default layers.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from specdraft.config import SpecdraftError
from specdraft.drafters.eagle import default_taps
from specdraft.drafters.vocabulary import from_tables, to_tables
from specdraft.formats.contents import Contents, Folder, Naming, without_embedding
from specdraft.formats.llama import shape_of
from specdraft.target import FrozenTarget

log = logging.getLogger(__name__)

TAPS = "eagle_aux_hidden_state_layer_ids"


def recognise(folder: Folder) -> bool:
    names = {name.removeprefix("model.") for name in folder.files}
    own = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
    marked = "speculators_model_type" in folder.config or "use_last_layernorm" in (
        folder.config.get("eagle_config") or {}
    )
    return not marked and "fc.weight" in names and bool(names & own)


def to_theirs(ours: Contents, naming: Naming) -> Contents:
    """The same; only that engines sort the tapped layers, so that they must be sorted."""
    taps = ours.config[TAPS]
    if taps != sorted(set(taps)):
        raise SpecdraftError(f"the tapped layers are {taps}; engines read them ascending, each once: train with those")
    return ours


def to_ours(theirs: Contents, target: FrozenTarget) -> Contents:
    config, tensors = theirs.config, dict(theirs.tensors)
    inner = config.get("eagle_config") or {}
    _refuse_switches({**inner, **config}, target)
    shape = shape_of(config, "the EAGLE-3 head")
    tensors = {_our_name(name): tensor for name, tensor in tensors.items()}
    without_embedding(tensors, target, log.warning)
    size, drafted = _vocabulary(config, tensors, shape["vocab_size"])
    if "lm_head.weight" not in tensors and drafted == {}:
        log.info("no lm_head.weight: the target's output rows, as engines share them")
        rows = target.head_rows(torch.arange(size, device=target.device)).cpu()
        tensors["lm_head.weight"] = rows.to(tensors["fc.weight"].dtype) if "fc.weight" in tensors else rows
    taps = _taps(config.get(TAPS), inner.get(TAPS), target.num_layers)
    own = config.get("specdraft", {})
    return Contents(
        {
            **shape,
            "draft_vocab_size": size,
            "norm_before_residual": bool(config.get("norm_before_residual", inner.get("norm_before_residual", False))),
            TAPS: taps,
            "specdraft": {
                "drafter": "eagle3",
                "target_hidden_size": own.get("target_hidden_size", target.hidden_size),
                "unroll": own.get("unroll", 4),
                "trained_length": own.get("trained_length"),
            },
        },
        {**tensors, **drafted},
    )


def under_layers(name: str) -> str:
    """The name of a tensor where others count the one layer among layers."""
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _our_name(name: str) -> str:
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _refuse_switches(settings: dict[str, Any], target: FrozenTarget) -> None:
    faults = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if settings.get(name)]
    if settings.get("use_aux_hidden_state", True) is False:
        faults.append("use_aux_hidden_state false")
    if settings.get("target_hidden_size") not in (None, target.hidden_size):
        faults.append(f"target_hidden_size {settings['target_hidden_size']} (this target: {target.hidden_size})")
    if faults:
        raise SpecdraftError(f"the EAGLE-3 head has {', '.join(faults)}, which specdraft's has not")


def _vocabulary(config: dict[str, Any], tensors: dict[str, Tensor], vocab: int) -> tuple[int, dict[str, Tensor]]:
    """How many ids are drafted, and the tables, taken out of `tensors`; none for the whole vocabulary.

    Raises SpecdraftError for tables that do not say which, or that say it as ids in the place of offsets.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    head = tensors.get("lm_head.weight")
    size = config.get("draft_vocab_size") or (vocab if head is None else len(head))
    if d2t is None and t2d is not None:
        raise SpecdraftError("t2d without d2t: the checkpoint is incomplete")
    if t2d is None and d2t is not None and len(d2t) > 1 and bool((d2t.long().diff() > 0).all()):
        raise SpecdraftError(
            f"d2t rises from each row to the next ({d2t[:4].tolist()}...), as ids do; offsets rise only where an id is "
            "left out. Write d2t[i] = id - i, or a t2d table that confirms these"
        )
    kept = from_tables(d2t, size, vocab, t2d)
    if size == vocab:
        return size, {}
    offsets, mask = to_tables(kept, vocab)
    return size, {"d2t": offsets, "t2d": mask}


def _taps(top: list[int] | None, inner: list[int] | None, layers: int) -> list[int]:
    default = list(default_taps(layers))
    if top is not None:
        if inner is not None and [tap + 1 for tap in inner] != list(top):
            log.warning(
                "SGLang would read other layers (%s in eagle_config, counted from 0) than vLLM (%s)", inner, top
            )
        return sorted(set(top))
    if inner is None or inner == default or [tap + 1 for tap in inner] == default:
        return default
    raise SpecdraftError(
        f"only eagle_config names the tapped layers, {inner}: vLLM reads them as they are, SGLang as "
        f"{[tap + 1 for tap in inner]}, and a mistake costs acceptance without an error. Say with what it was trained: "
        f"taps: {inner}, or taps: {[tap + 1 for tap in inner]} if it was SGLang's way"
    )

"""EAGLE-3 as NVIDIA's Model Optimizer writes it, which TensorRT-LLM and vLLM load.

Tensors are those of `safeailab` under `layers.0.`, without a t2d table; the output layer is always there. The tapped
layers stand in `eagle_config` alone, counted from the first layer's output: 0 is the state after the first layer. What
it also knows of the Medusa kind, parallel heads on an EAGLE layer, is refused; it has no layout of plain Medusa heads.
"""

from typing import Any

from specdraft.config import SpecdraftError
from specdraft.drafters.vocabulary import from_tables, to_tables
from specdraft.formats import safeailab
from specdraft.formats.contents import Contents, Folder, Naming
from specdraft.formats.safeailab import TAPS
from specdraft.target import FrozenTarget

_SWITCHES: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Its `eagle_config`, as far as it says what an EAGLE-3 head is."""


def recognise(folder: Folder) -> bool:
    """By `eagle_config`, in which nobody else writes the norms down."""
    return "use_last_layernorm" in (folder.config.get("eagle_config") or {})


def to_theirs(ours: Contents, naming: Naming) -> Contents:
    """With the taps at the top as well, for vLLM, which would read those of `eagle_config` one layer too early."""
    config, tensors = safeailab.to_theirs(ours, naming)
    if config["norm_before_residual"]:
        raise SpecdraftError("the head has norm_before_residual, which TensorRT-LLM does not know: train without it")
    described = {**_SWITCHES, TAPS: [tap - 1 for tap in config[TAPS]]}
    return Contents(
        {**config, "attention_bias": False, "mlp_bias": False, "eagle_config": described},
        {safeailab.under_layers(name): tensor for name, tensor in tensors.items() if name != "t2d"},
    )


def to_ours(theirs: Contents, target: FrozenTarget) -> Contents:
    inner = theirs.config["eagle_config"]
    unlike = {name: inner[name] for name, value in _SWITCHES.items() if inner.get(name) not in (None, value)}
    if unlike:
        told = ", ".join(f"{name} {value}" for name, value in unlike.items())
        raise SpecdraftError(f"eagle_config says {told}: such a head is not specdraft's EAGLE-3")
    taps = theirs.config.get(TAPS) or [layer + 1 for layer in inner.get(TAPS) or ()] or None
    config = {name: value for name, value in theirs.config.items() if name not in ("eagle_config", TAPS)}
    tensors = dict(theirs.tensors)
    if (offsets := tensors.get("d2t")) is not None:  # never ids, so that the table that would say so need not be there
        vocab = config.get("vocab_size") or target.vocab_size
        tensors["d2t"], tensors["t2d"] = to_tables(from_tables(offsets, len(offsets), vocab, tensors.get("t2d")), vocab)
    return safeailab.to_ours(Contents({**config, **({TAPS: taps} if taps else {})}, tensors), target)

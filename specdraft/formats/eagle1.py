"""EAGLE-1 for vLLM, which is ours, and for SGLang: the same weights under two config.json and one tensor of zeros.

vLLM knows the class as EagleLlamaForCausalLM and ignores a bias behind the fusion without a word; SGLang knows it as
LlamaForCausalLMEagle and fills a bias that is absent with random numbers.
"""

import logging

from specdraft.config import SpecdraftError
from specdraft.formats.contents import Contents, Folder, Naming, without_embedding
from specdraft.formats.llama import shape_of
from specdraft.target import FrozenTarget

log = logging.getLogger(__name__)

SGLANG = "LlamaForCausalLMEagle"


def recognise_vllm(folder: Folder) -> bool:
    return _is_eagle1(folder) and folder.config.get("architectures") != [SGLANG]


def recognise_sglang(folder: Folder) -> bool:
    return _is_eagle1(folder) and folder.config.get("architectures") == [SGLANG]


def to_vllm(ours: Contents, naming: Naming) -> Contents:
    if "fc.bias" in ours.tensors:
        raise SpecdraftError("fc.bias is not zero, and vLLM ignores it: acceptance would fall. Export eagle1-sglang")
    return ours


def to_sglang(ours: Contents, naming: Naming) -> Contents:
    weight = ours.tensors["fc.weight"]
    bias = {"fc.bias": weight.new_zeros(len(weight))}
    return Contents({**ours.config, "architectures": [SGLANG]}, {**bias, **ours.tensors})


def to_ours(theirs: Contents, target: FrozenTarget) -> Contents:
    """A bias of zeros behind the fusion is none; another one is kept."""
    config, tensors = theirs.config, dict(theirs.tensors)
    without_embedding(tensors, target, log.warning)
    if "fc.bias" in tensors and not tensors["fc.bias"].any():
        del tensors["fc.bias"]
    own = config.get("specdraft", {})
    described = {
        "drafter": "eagle1",
        "target_hidden_size": own.get("target_hidden_size", target.hidden_size),
        "fc_bias": "fc.bias" in tensors,
        "unroll": own.get("unroll", 4),
        "trained_length": own.get("trained_length"),
    }
    return Contents({**shape_of(config, "the EAGLE-1 head"), "specdraft": described}, tensors)


def _is_eagle1(folder: Folder) -> bool:
    names = {name.removeprefix("model.") for name in folder.files}
    mine = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and "layers.0.hidden_norm.weight" not in names
    return mine and "speculators_model_type" not in folder.config

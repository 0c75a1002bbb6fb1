"""A draft LM with integer weights, read without the packages that transformers would want for it."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights

from specdraft import lowbit
from specdraft.causal import CausalLM
from specdraft.config import SpecdraftError
from specdraft.drafters.base import check_tensors


def read_lowbit_lm(folder: Path, written: dict[str, Any]) -> CausalLM:
    """The LM of a Hugging Face folder whose config.json, `written`, has a `quantization_config` of `lowbit`'s.

    In eval mode. Raises SpecdraftError on a missing, extra or misshapen tensor, or a scheme that is not handled.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        del config.quantization_config
        with no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(config)
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        bare = not (folder / "tokenizer_config.json").exists()
        tokenizer = None if bare else AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise SpecdraftError(f"the draft LM {folder} cannot be read: {error}") from error
    lowbit.install(model, written, str(folder))
    model.tie_weights()
    wanted = model.state_dict()
    for name in model.all_tied_weights_keys:  # held once, under the name that it is tied to
        del wanted[name]
    check_tensors(tensors, wanted, str(folder))
    nn.Module.to(model, getattr(torch, written["torch_dtype"]))
    model.load_state_dict(tensors, strict=False)
    lowbit.check(model, str(folder))
    return CausalLM(model.eval(), tokenizer, str(folder))

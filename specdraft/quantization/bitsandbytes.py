"""Draft LMs in bitsandbytes' INT8 and NF4, written and loaded through transformers."""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from specdraft.config import SpecdraftError
from specdraft.drafters.base import read_servable

KINDS = ("bnb-int8", "bnb-nf4")


def write_bitsandbytes(folder: Path, kind: str, dtype: str, output: Path) -> list[str]:
    """Quantise the draft LM of a folder; the names of the quantised layers, in the drafter.

    Raises SpecdraftError, before anything is written, where bitsandbytes is not installed or cannot do it here.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SpecdraftError(
            f"{kind} needs the package bitsandbytes: pip install 'specdraft[quant]'; w8a8, int8 and int4 need nothing"
        )
    written = read_servable(folder)
    wide = getattr(torch, written["torch_dtype"] if dtype == "auto" else dtype)
    if kind == "bnb-int8":
        settings = BitsAndBytesConfig(load_in_8bit=True)
    else:
        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=wide)
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line at each call
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=wide)
        model.save_pretrained(output)
    except (ImportError, RuntimeError, ValueError) as error:
        raise SpecdraftError(f"bitsandbytes cannot quantise {folder} on this machine: {error}") from error
    if (folder / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(folder).save_pretrained(output)
    config = read_servable(output)
    kept = {name: value for name, value in written.items() if name not in ("dtype", "torch_dtype")}
    dtypes = dict.fromkeys(("dtype", "torch_dtype"), str(wide).removeprefix("torch."))
    (output / "config.json").write_text(json.dumps({**config, **kept, **dtypes}, indent=2) + "\n")
    return [f"lm.{name}" for name in _quantized(output)]


def _quantized(folder: Path) -> list[str]:
    """The layers whose weights are integers in the files."""
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stream:
            integers = [name for name in stream.keys() if stream.get_slice(name).get_dtype() in ("I8", "U8")]  # noqa: SIM118
        found += [name.removesuffix(".weight") for name in integers if name.endswith(".weight")]
    return found

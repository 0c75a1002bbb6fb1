"""Every checkpoint layout: who loads it, how it is written and read, and how it is told from the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specdraft.config import SpecdraftError
from specdraft.drafters.base import TrainableDrafter
from specdraft.drafters.mtp import MTPDrafter, checkpoint_folder
from specdraft.formats import eagle1, huggingface, medusa, modelopt, mtp, safeailab, speculators
from specdraft.formats.contents import Folder, Layout, Naming
from specdraft.target import FrozenTarget


@dataclass(frozen=True)
class Format:
    drafters: tuple[str, ...]
    """The kinds, by their names in DRAFTERS, that can be written so."""
    engines: str
    """Who loads it."""
    write: Callable[[TrainableDrafter, Naming, Path], None]
    """Write a drafter that is attached to its target into a folder that is not there yet."""
    read: Callable[[Folder, FrozenTarget], TrainableDrafter]
    """The drafter in a folder, whoever trained it, in eval mode."""
    recognise: Callable[[Folder], bool]
    methods: Mapping[str, str] = field(default_factory=dict)
    """What the engines to which a served drafter is given by name call its method."""
    names_target: bool = False
    """Whether its config.json says where the target is."""
    exact: bool = True
    """Whether what is read back computes bit for bit what was written; else products of other shapes may round."""


def _read_mtp(folder: Folder, target: FrozenTarget) -> TrainableDrafter:
    return MTPDrafter.from_native(target, folder.path).eval()


def _write_mtp(drafter: TrainableDrafter, naming: Naming, out: Path) -> None:
    mtp.write(drafter, checkpoint_folder(naming.target.name), out)


_SAFEAILAB = Layout(safeailab.to_theirs, safeailab.to_ours, integers=True)
_MODELOPT = Layout(modelopt.to_theirs, modelopt.to_ours)
_SPECULATORS = Layout(speculators.to_theirs, speculators.to_ours, integers=True)
_EAGLE1_VLLM = Layout(eagle1.to_vllm, eagle1.to_ours, integers=True)
_EAGLE1_SGLANG = Layout(eagle1.to_sglang, eagle1.to_ours)
_MEDUSA_VLLM = Layout(medusa.to_vllm, medusa.from_vllm)
_FASTERDECODING = Layout(medusa.to_fasterdecoding, medusa.from_fasterdecoding)

FORMATS: dict[str, Format] = {
    "safeailab": Format(
        ("eagle3",),
        "vLLM, SGLang, TensorRT-LLM, llama.cpp",
        _SAFEAILAB.write,
        _SAFEAILAB.read,
        safeailab.recognise,
        {"vLLM": "eagle3", "SGLang": "EAGLE3", "TensorRT-LLM": "Eagle3"},
    ),
    "modelopt": Format(
        ("eagle3",),
        "TensorRT-LLM, vLLM",
        _MODELOPT.write,
        _MODELOPT.read,
        modelopt.recognise,
        {"vLLM": "eagle3", "TensorRT-LLM": "Eagle3"},
    ),
    "speculators": Format(
        ("eagle3",),
        "vLLM by the folder alone, llama.cpp",
        _SPECULATORS.write,
        _SPECULATORS.read,
        speculators.recognise,
        {"vLLM": "eagle3"},
        names_target=True,
    ),
    "eagle1-vllm": Format(
        ("eagle1",), "vLLM", _EAGLE1_VLLM.write, _EAGLE1_VLLM.read, eagle1.recognise_vllm, {"vLLM": "eagle"}
    ),
    "eagle1-sglang": Format(
        ("eagle1",), "SGLang", _EAGLE1_SGLANG.write, _EAGLE1_SGLANG.read, eagle1.recognise_sglang, {"SGLang": "EAGLE"}
    ),
    "medusa-vllm": Format(
        ("medusa",), "vLLM", _MEDUSA_VLLM.write, _MEDUSA_VLLM.read, medusa.recognise_vllm, {"vLLM": "medusa"}
    ),
    "fasterdecoding": Format(
        ("medusa",),
        "FasterDecoding's Medusa, vLLM",
        _FASTERDECODING.write,
        _FASTERDECODING.read,
        medusa.recognise_fasterdecoding,
        {"vLLM": "medusa"},
        names_target=True,
    ),
    "mtp": Format(
        ("mtp",),
        "vLLM, SGLang; a copy of the target with them",
        _write_mtp,
        _read_mtp,
        mtp.recognise,
        {"vLLM": "mtp", "SGLang": "NEXTN"},
    ),
    "huggingface": Format(
        ("lm",),
        "every engine, as the draft model",
        huggingface.write,
        huggingface.read,
        lambda folder: huggingface.recognise(folder) and not mtp.recognise(folder),
        {"vLLM": "draft_model", "SGLang": "STANDALONE", "TensorRT-LLM": "DraftTarget"},
        exact=False,
    ),
}
"""Layouts by the name that recipes (`format`) give them."""


def recognise(folder: Folder) -> str:
    """The name of the layout in a folder. Raises SpecdraftError if it is none of them."""
    found = [name for name, layout in FORMATS.items() if layout.recognise(folder)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(folder.files)[:4])
    raise SpecdraftError(
        f"{folder.path} looks like {' and '.join(found) or 'no layout that is known'} (architectures "
        f"{folder.config.get('architectures')}, tensors {names}, ...); name it: format is one of {', '.join(FORMATS)}"
    )


__all__ = ["FORMATS", "Folder", "Format", "Naming", "recognise"]

"""Which layout a folder is in, told by what lies in it alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from drafting import eagle3
from foreign import put, shaken, write
from models import tiny_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from specdraft.config import SpecdraftError
from specdraft.drafters import DRAFTERS
from specdraft.drafters.base import TrainableDrafter
from specdraft.drafters.eagle import Eagle1Drafter, Eagle1Recipe
from specdraft.drafters.hydra import HydraDrafter
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.medusa import MedusaDrafter
from specdraft.drafters.mtp import MTPDrafter
from specdraft.export import FormatName, compare, gather
from specdraft.formats import FORMATS, Folder, Naming, recognise
from specdraft.target import FrozenTarget

COUNTS = torch.ones(96, dtype=torch.int64)
MAKERS: dict[str, Callable[[FrozenTarget], TrainableDrafter]] = {
    "eagle3": eagle3,
    "eagle1": lambda target: Eagle1Drafter.for_target(target, Eagle1Recipe(), COUNTS),
    "medusa": lambda target: MedusaDrafter.for_target(target, MedusaDrafter.recipe_class(kind="medusa"), COUNTS),
    "mtp": lambda target: MTPDrafter.for_target(target, MTPDrafter.recipe_class(kind="mtp"), COUNTS),
    "lm": lambda target: LMDrafter.for_target(target, LMDrafter.recipe_class(kind="lm"), COUNTS),
}


@pytest.fixture
def target(tmp_path: Path) -> FrozenTarget:
    tiny_model().save_pretrained(tmp_path / "target")
    return FrozenTarget(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), name=str(tmp_path / "target"))


def test_recipes_name_every_layout_and_every_kind_has_its_own() -> None:
    assert get_args(FormatName) == tuple(FORMATS)
    assert {kind for layout in FORMATS.values() for kind in layout.drafters} == MAKERS.keys() <= DRAFTERS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_x10_what_is_written_is_recognised_and_only_as_itself(name: str, target: FrozenTarget, tmp_path: Path) -> None:
    (kind,) = FORMATS[name].drafters
    FORMATS[name].write(MAKERS[kind](target), Naming(target, "t"), tmp_path / "out")
    folder = Folder(tmp_path / "out")
    assert recognise(folder) == name
    folder.config.pop("specdraft", None)
    assert recognise(folder) == name, "a stranger's says nothing of ours"


def test_x05_mtp_modules_that_were_stitched_pass_the_gate(target: FrozenTarget, tmp_path: Path) -> None:
    drafter = shaken(MAKERS["mtp"](target))
    FORMATS["mtp"].write(drafter, Naming(target, "t"), tmp_path / "out")
    found = FORMATS["mtp"].read(Folder(tmp_path / "out"), target)
    one, other = (gather(target, each, [[5, 6, 7]], 8) for each in (drafter, found))
    assert compare(one, other, 0)["logits"] == 0


def test_other_names_that_strangers_give(target: FrozenTarget, tmp_path: Path) -> None:
    config, tensors = write("eagle1-vllm", MAKERS["eagle1"](target), tmp_path / "eagle1")
    config["architectures"] = ["LlamaForCausalLM"]
    assert recognise(put((config, tensors), tmp_path / "a")) == "eagle1-vllm"
    config, tensors = write("speculators", eagle3(target), tmp_path / "eagle3")
    plain = {"architectures": ["Eagle3LlamaForCausalLM"]}
    assert recognise(put((plain, {f"model.{n}": t for n, t in tensors.items()}), tmp_path / "b")) == "safeailab"
    config, tensors = write("fasterdecoding", MAKERS["medusa"](target), tmp_path / "medusa")
    assert (
        recognise(put(({}, {f"medusa_heads.{n}": t for n, t in tensors.items()}), tmp_path / "c")) == "fasterdecoding"
    )


def test_x13_what_is_no_drafter_is_refused_and_pickles_are_not_opened(target: FrozenTarget, tmp_path: Path) -> None:
    folder = put(({"architectures": ["Thing"]}, {"a.weight": torch.zeros(2)}), tmp_path / "thing")
    with pytest.raises(SpecdraftError, match=r"no layout that is known.*Thing.*a\.weight"):
        recognise(folder)
    HydraDrafter.for_target(target, HydraDrafter.recipe_class(kind="hydra"), COUNTS).save_pretrained(tmp_path / "hydra")
    with pytest.raises(SpecdraftError, match="no layout that is known"):
        recognise(Folder(tmp_path / "hydra"))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(SpecdraftError, match="may run code"):
        Folder(tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(SpecdraftError, match="cannot be read"):
        Folder(tmp_path / "pickled")


def test_x05_an_index_that_names_what_its_file_has_not_is_refused(target: FrozenTarget, tmp_path: Path) -> None:
    _, tensors = write("safeailab", eagle3(target), tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    shards = {"one.safetensors": ["fc.weight"], "two.safetensors": [name for name in tensors if name != "fc.weight"]}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / "out" / file)
    places = {name: file for file, names in shards.items() for name in names}
    index = tmp_path / "out" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert Folder(tmp_path / "out").contents().tensors.keys() == tensors.keys()
    index.write_text(json.dumps({"weight_map": {**places, "norm.weight": "one.safetensors"}}))
    with pytest.raises(SpecdraftError, match=r"places norm\.weight in one\.safetensors, where it is not"):
        Folder(tmp_path / "out")

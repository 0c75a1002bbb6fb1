"""SHIP's parity gate: `specdraft export --verify-engine vllm`, against a vLLM that is played."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.fake_vllm import fake_vllm
from foreign import shaken
from tiny_chat import write_target

from specdraft.config import SpecdraftError
from specdraft.drafters import load_drafter
from specdraft.drafters.eagle import Eagle3Drafter, Eagle3Recipe
from specdraft.evaluation.served import Ask, decode_both
from specdraft.evaluation.served_counts import Counts
from specdraft.export import ExportRecipe, export
from specdraft.target import FrozenTarget, TargetRecipe

V, GAMMA, CAP = 410, 3, 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, and head/: an EAGLE-3 head."""
    folder = tmp_path_factory.mktemp("place")
    write_target(folder / "target", vocab_size=V)
    target = FrozenTarget.load(TargetRecipe(name=str(folder / "target")))
    head = Eagle3Drafter.for_target(target, Eagle3Recipe(vocabulary=128, unroll=GAMMA), torch.ones(V).long())
    shaken(head).save_pretrained(folder / "head")
    return folder


def job(place: Path, out: Path, python: Path, **changes: Any) -> ExportRecipe:
    given = {"drafter": place / "head", "target": {"name": str(place / "target"), "dtype": "float32"}}
    settings = {"format": "safeailab", "max_new_tokens": CAP, "verify": False}
    engine = {"kind": "vllm", "python": python}
    return ExportRecipe.model_validate({**given, **settings, "output": out, "verify_engine": engine, **changes})


def played(place: Path, folder: Path, dtype: torch.dtype, more: int = 0) -> Path:
    """A vLLM that decodes with the head in `dtype`, computing in float32, and counts `more` drafts than it makes."""
    target = FrozenTarget.load(TargetRecipe(name=str(place / "target"), dtype="float32"))
    head = load_drafter(place / "head").to(dtype=dtype).float()  # type: ignore[call-arg]
    head.attach(target)
    prompts = torch.randint(V, (4, 8), generator=torch.Generator().manual_seed(1)).tolist()
    plain, chain = decode_both(target, head, Ask(prompts, CAP, GAMMA))  # type: ignore[arg-type]
    counts = [Counts.of_rounds(generation.rounds, GAMMA) + Counts(drafts=more) for generation in chain]
    folder.mkdir(exist_ok=True)
    return fake_vllm(folder, plain, counts)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_x10_x11_what_was_written_is_what_the_engine_loads(place: Path, tmp_path: Path, dtype: str) -> None:
    python = played(place, tmp_path / "vllm", torch.float32 if dtype == "auto" else torch.bfloat16)
    done = export(job(place, tmp_path / "out", python, dtype=dtype))
    assert done["served"]["ours"] == done["served"]["theirs"]
    assert done["served"]["answers"] == "identical"
    assert json.loads(json.dumps(done)) == done
    asked = json.loads((tmp_path / "vllm" / "job.json").read_text())
    assert asked["llm"]["speculative_config"]["model"] == str(tmp_path / "out")
    loaded = (tmp_path / "vllm" / "drafter" / "model.safetensors").read_bytes()
    assert loaded == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_x13_an_engine_that_counts_otherwise_leaves_no_folder(place: Path, tmp_path: Path) -> None:
    python = played(place, tmp_path / "vllm", torch.float32, more=1)
    with pytest.raises(SpecdraftError, match=r"does not do as the drafter here.*differ in 4 of 4 batches"):
        export(job(place, tmp_path / "out", python))
    assert not (tmp_path / "out").exists()


def test_an_engine_that_is_not_there_or_reads_another_layout_is_said_first(place: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecdraftError, match="is not there"):
        export(job(place, tmp_path / "out", tmp_path / "none"))
    with pytest.raises(ValueError, match="vLLM does not load the layout eagle1-sglang"):
        job(place, tmp_path / "out", tmp_path / "none", format="eagle1-sglang")
    assert job(place, tmp_path / "out", tmp_path / "none", prompts=["x"]).prompts == ("x",)

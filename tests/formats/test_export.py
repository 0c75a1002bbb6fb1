"""`specdraft export` and `specdraft import`, from folders to folders, and the gate between them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import shaken
from safetensors.torch import load_file, save_file
from tiny_chat import write_target

from specdraft import export as module
from specdraft.config import SpecdraftError
from specdraft.drafters import kind_of, load_drafter
from specdraft.drafters.base import TrainableDrafter
from specdraft.drafters.eagle import Eagle3Drafter, Eagle3Recipe
from specdraft.drafters.medusa import MedusaDrafter, MedusaRecipe
from specdraft.export import Evidence, ExportRecipe, ImportRecipe, compare, export, gather, import_drafter
from specdraft.provenance import Provenance
from specdraft.target import FrozenTarget, TargetRecipe

V = 410


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, and head/: a trained EAGLE-3 head with a reduced vocabulary and its provenance."""
    folder = tmp_path_factory.mktemp("place")
    write_target(folder / "target", vocab_size=V, num_hidden_layers=4)
    target = FrozenTarget.load(TargetRecipe(name=str(folder / "target")))
    head = shaken(Eagle3Drafter.for_target(target, Eagle3Recipe(vocabulary=128, unroll=3), torch.ones(V).long()))
    head.config.trained_length = 40
    head.save_pretrained(folder / "head")
    Provenance.of(Eagle3Recipe(), seed=7, target="t", fingerprint="f", data=[]).write(folder / "head")
    return folder


def job(place: Path, out: Path, **changes: Any) -> ExportRecipe:
    given = {"drafter": place / "head", "target": {"name": str(place / "target")}, "format": "speculators"}
    return ExportRecipe.model_validate({**given, "output": out, "max_new_tokens": 8, **changes})


def test_x05_x10_what_is_exported_is_verified_by_a_fresh_process_and_comes_back_by_import(
    place: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is the capital of France?"}\n')
    done = export(job(place, tmp_path / "out", prompts=[str(tmp_path / "prompts.jsonl")]))
    assert done["verified"]["logits"] == 0
    assert done["verified"]["tau"] >= 1
    assert json.loads(json.dumps(done)) == done
    made = Provenance.read(tmp_path / "out")
    assert made.recipe["format"] == "speculators"
    assert made.recipe["drafter_made"]["seed"] == 7
    assert str(place / "head" / "model.safetensors") in made.data
    back = ImportRecipe.model_validate(
        {"folder": tmp_path / "out", "target": {"name": str(place / "target")}, "output": tmp_path / "back"}
    )
    assert import_drafter(back) | {"output": ""} == {
        "output": "",
        "format": "speculators",
        "kind": "eagle3",
        "taps": [1, 2],
    }
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (place / "head" / name).read_bytes()
    assert Provenance.read(tmp_path / "back").recipe["drafter_made"]["recipe"]["format"] == "speculators"


def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side of the gate without the seconds that a process takes to start."""
    monkeypatch.setattr(module, "_in_fresh_process", lambda scratch: module.answer(scratch))


def test_x11_the_dtype_is_that_of_every_tensor(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    assert export(job(place, tmp_path / "out", dtype="bfloat16", format="safeailab"))["verified"]["logits"] == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_x01_x13_what_is_written_wrong_is_found_and_leaves_no_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def spoilt(scratch: Path) -> None:
        path = tmp_path / "out" / "model.safetensors"
        tensors = load_file(path)
        tensors["norm.weight"] *= 1.001
        save_file(tensors, path)
        module.answer(scratch)

    monkeypatch.setattr(module, "_in_fresh_process", spoilt)
    with pytest.raises(SpecdraftError, match="computes other logits"):
        export(job(place, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_x13_a_process_that_fails_is_an_error_and_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nSpecdraftError: fc.weight is missing")
    monkeypatch.setattr(subprocess, "run", lambda _command, **_settings: failed)
    with pytest.raises(SpecdraftError, match=r"fresh process: (.|\n)*fc\.weight is missing"):
        module._in_fresh_process(tmp_path)


def test_x01_a_writer_that_loses_changes_or_makes_up_a_tensor_writes_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdraft.formats import safeailab

    right = safeailab.under_layers
    for wrong, said in (("norm.weight", "norm.weight is missing"), ("fc.weight", "fc.weight is missing")):
        monkeypatch.setattr(safeailab, "under_layers", lambda name, wrong=wrong: right(name) + "x" * (name == wrong))
        with pytest.raises(SpecdraftError, match=said):
            export(job(place, tmp_path / "out", verify=False))
        assert not (tmp_path / "out").exists()


def test_a_drafter_of_another_kind_a_folder_that_is_there_and_idle_settings_are_refused(
    place: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecdraftError, match="of the kind eagle3; its layouts are: safeailab, modelopt, speculators"):
        export(job(place, tmp_path / "out", format="medusa-vllm"))
    with pytest.raises(SpecdraftError, match="is there already"):
        export(job(place, place / "head"))
    with pytest.raises(ValueError, match="does not name the target"):
        job(place, tmp_path / "out", format="safeailab", target_name="x")
    with pytest.raises(ValueError, match="without verify"):
        job(place, tmp_path / "out", verify=False, prompts=["x"])
    given = {"folder": place / "target", "target": {"name": str(place / "target")}, "output": tmp_path / "out"}
    with pytest.raises(SpecdraftError, match="taps have no effect"):
        import_drafter(ImportRecipe.model_validate({**given, "taps": [1, 2]}))


def test_t11_taps_of_an_import_win_over_the_config(place: Path, tmp_path: Path) -> None:
    given = {"folder": place / "head", "target": {"name": str(place / "target")}, "output": tmp_path / "out"}
    assert import_drafter(ImportRecipe.model_validate({**given, "taps": [2, 3]}))["taps"] == [2, 3]
    assert load_drafter(tmp_path / "out").taps == (2, 3)


def evidence(drafter: TrainableDrafter) -> Evidence:
    return gather(drafter.target, drafter, [[5, 6, 7]], 8)


def test_the_gate_compares_bit_for_bit_or_as_far_as_rounding_goes(place: Path) -> None:
    target = FrozenTarget.load(TargetRecipe(name=str(place / "target")))
    medusa = shaken(MedusaDrafter.for_target(target, MedusaRecipe(heads=2), torch.zeros(V)))
    assert kind_of(medusa) == "medusa"
    meant = evidence(medusa)
    assert compare(meant, evidence(medusa), 0)["logits"] == 0
    near = Evidence([logits * (1 + 1e-6) for logits in meant.logits], meant.metrics)
    assert 0 < compare(meant, near, 1e-5)["logits"] < 1e-5
    with pytest.raises(SpecdraftError, match="other logits"):
        compare(meant, near, 0)
    with pytest.raises(SpecdraftError, match="other logits"):
        compare(meant, Evidence([logits * float("nan") for logits in meant.logits], meant.metrics), 1e-5)
    with pytest.raises(SpecdraftError, match=r"accepted otherwise.*tau"):
        compare(meant, Evidence(meant.logits, {**meant.metrics, "tau": meant.metrics["tau"] + 0.01}), 0)
    with pytest.raises(SpecdraftError, match="logits of the shape"):
        compare(meant, Evidence([logits[..., 1:] for logits in meant.logits], meant.metrics), 0)

"""From files to files: the `train` verb, EAGLE-3 on a tiny target that lies in a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat import write_target

from specdraft.config import SpecdraftError
from specdraft.data.store import CaptureRecipe, capture
from specdraft.drafters import load_drafter
from specdraft.provenance import Provenance
from specdraft.training import TrainRecipe, train


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_target(folder / "target")
    words = "one two three four five six seven".split()
    with (folder / "answers.jsonl").open("w") as file:
        for cut in range(1, 7):
            asked, said = " ".join(words[:cut]), " ".join(words[cut:] * 2)
            chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": chat}) + "\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "one two"}\n{"prompt": "five"}\n')
    return folder


def recipe(files: Path, folder: Path, **training: Any) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {
            "target": {"name": str(files / "target"), "dtype": "float32"},
            "data": {"answers": [str(files / "answers.jsonl")], "max_length": 64, "cache_dir": str(files / "cache")},
            "drafter": {"kind": "eagle3", "taps": [1, 2, 3], "vocabulary": 40, "unroll": 2},
            "training": {
                "output_dir": folder, "max_steps": 4, "batch_size": 3, "save_every": 2, "log_every": 1,
                "evaluate_every": 3, **training,
            },
            "evaluation": {
                "prompts": [str(files / "prompts.jsonl")], "systems": [{"kind": "chain", "gamma": 2}],
                "max_new_tokens": 12, "bootstrap_samples": 100, "compare_with_plain": False,
            },
        }
    )  # fmt: skip


def with_store(made: TrainRecipe, store: Path) -> TrainRecipe:
    return made.model_copy(update={"data": made.data.model_copy(update={"store": str(store)})})


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [line["loss"] for line in history if "loss" in line]


def test_train_writes_checkpoints_curves_and_where_they_come_from(files: Path, tmp_path: Path) -> None:
    found = train(recipe(files, tmp_path))
    assert json.loads(json.dumps(found)) == found
    assert found["steps"] == 4
    assert found["positions"] > 0
    for name in ("best", "final"):
        drafter = load_drafter(found[name])
        assert all(tensor.isfinite().all() for tensor in drafter.state_dict().values() if tensor.is_floating_point())
        assert Provenance.read(Path(found[name])).recipe["drafter"]["vocabulary"] == 40
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in history if "eval_tau" in line] == [3, 4]
    assert found["tau"] == max(line["eval_tau"] for line in history if "eval_tau" in line)


def test_a_store_gives_the_losses_of_the_target_itself(files: Path, tmp_path: Path) -> None:
    made = recipe(files, tmp_path / "online")
    train(made)
    store = {
        "target": made.target,
        "data": made.data,
        "taps": (1, 2, 3),
        "output": str(tmp_path / "store"),
        "dtype": "float32",
    }
    capture(CaptureRecipe.model_validate(store))
    train(with_store(recipe(files, tmp_path / "stored"), tmp_path / "store"))
    assert losses(tmp_path / "stored") == pytest.approx(losses(tmp_path / "online"), rel=1e-4)


def test_a_run_goes_on_but_not_as_another(files: Path, tmp_path: Path) -> None:
    train(recipe(files, tmp_path, max_steps=2))
    assert train(recipe(files, tmp_path))["steps"] == 4
    with pytest.raises(SpecdraftError, match=r"another recipe, with other training\.learning_rate"):
        train(recipe(files, tmp_path, learning_rate=0.5))
    with pytest.raises(SpecdraftError, match=r"training\.resume is off"):
        train(recipe(files, tmp_path, resume=False))


def test_v01_going_on_from_a_checkpoint_keeps_its_vocabulary(files: Path, tmp_path: Path) -> None:
    first = train(recipe(files, tmp_path / "first"))
    made = recipe(files, tmp_path / "second")
    drafter = made.drafter.model_copy(update={"checkpoint": first["final"], "vocabulary": None})
    second = train(made.model_copy(update={"drafter": drafter}))
    tables = [load_drafter(found["final"]).state_dict()["d2t"] for found in (first, second)]
    assert torch.equal(*tables)

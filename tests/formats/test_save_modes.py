"""Whatever a training is asked to save is there, whole, when it ends; and a save of nothing is a failure."""

from pathlib import Path

import pytest
import torch
from drafting import tiny_target
from safetensors.torch import load_file
from test_training import trainer_of

from specdraft.config import SpecdraftError
from specdraft.target import FrozenTarget


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


@pytest.mark.parametrize("every", [None, 1, 2])
def test_x04_every_way_of_saving_leaves_whole_weights(every: int | None, target: FrozenTarget, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path, settings={"save_every": every, "max_steps": 2})
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    steps = [] if every is None else [f"checkpoint-{step}" for step in range(every, 3, every)]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == set(steps)
    held = trainer.drafter.state_dict()
    for name in [*steps, "final"]:
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert tensors.keys() == held.keys()
        assert all(tensor.numel() and tensor.shape == held[key].shape for key, tensor in tensors.items())
    final = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(tensor, held[name]) for name, tensor in final.items())


def test_x04_a_save_of_nothing_fails_and_leaves_no_config_behind(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path, settings={"max_steps": 1})
    empty = {name: value[:0] for name, value in trainer.drafter.state_dict().items()}
    with pytest.raises(SpecdraftError, match="has the shape"):
        trainer._save(str(tmp_path / "final"), empty)
    assert not (tmp_path / "final").exists()

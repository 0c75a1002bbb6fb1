"""The trainer in one process: what it counts, skips, keeps and refuses."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import HeadsDrafter, heads_drafter, tiny_target, token_rows

from specdraft.config import SpecdraftError
from specdraft.data.batches import collate
from specdraft.drafters.base import ObjectiveRecipe
from specdraft.target import FrozenTarget
from specdraft.trainer import BEST, DrafterTrainer, TrainingSettings, observe


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


def trainer_of(
    target: FrozenTarget, folder: Path, lengths: tuple[int, ...] = (20, 12, 9, 15), **more: Any
) -> DrafterTrainer:
    drafter = heads_drafter(target)
    settings = {"batch_size": 2, "max_steps": 4, "save_every": None, "log_every": 1, "learning_rate": 1e-2}
    settings = TrainingSettings(output_dir=folder, **{**settings, **more.pop("settings", {})})
    arguments = settings.arguments(target.device, evaluating="measure" in more)
    rows = token_rows(lengths, silent=more.pop("silent", ()))
    look = more.pop("look", partial(observe, target, drafter.taps))
    return DrafterTrainer(drafter, rows, arguments, look=look, bad_steps=settings.bad_steps, **more)


def test_t15_only_the_drafter_learns_and_only_it_is_held(target: FrozenTarget, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    trainer = trainer_of(target, tmp_path)
    start = {name: value.clone() for name, value in trainer.drafter.state_dict().items()}
    trainer.train()
    assert not target.model.training
    assert all(torch.equal(before[name], value) for name, value in target.model.state_dict().items())
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in trainer.drafter.parameters()}
    assert all(not torch.equal(start[name], value) for name, value in trainer.drafter.state_dict().items())


def test_every_log_line_has_loss_and_overlap_of_every_depth(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 4
    for line in lines:
        assert {"loss_1", "overlap_1", "loss_2", "overlap_2"} <= line.keys()
        assert 0 < line["overlap_2"] <= 1


def test_a_line_s_overlap_is_the_mean_over_supervised_positions(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path, settings={"batch_size": 4, "max_steps": 1})
    batch = collate([trainer.rows[row] for row in range(4)])
    with torch.no_grad():
        output = heads_drafter(target)(batch["input_ids"], batch["labels"], trainer.look(batch))
    trainer.train()
    (line,) = [line for line in trainer.state.log_history if "loss" in line]
    assert line["overlap_1"] == pytest.approx(float(output.overlaps[0] / output.counts[0]), rel=1e-6)
    assert line["loss"] == pytest.approx(float(output.loss), rel=1e-6)
    assert output.counts.tolist() == [sum(n - 4 for n in (20, 12, 9, 15)), sum(n - 5 for n in (20, 12, 9, 15))]


def test_d19_rows_without_supervision_do_not_count(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path, silent=(0, 1, 2, 3), settings={"max_steps": 1})
    trainer.train()
    assert trainer.tally.positions == 0
    assert trainer.finite.skipped == 0
    assert all(p.isfinite().all() for p in trainer.drafter.parameters())


def poison(target: FrozenTarget, taps: tuple[int, ...], row: int, batch: Any) -> Any:
    evidence = observe(target, taps, batch)
    if row in batch["row"]:
        evidence.observation.taps.fill_(float("nan"))
    return evidence


def test_t06_a_step_that_is_not_finite_is_skipped_and_counted(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path, look=partial(poison, target, (1,), 1))
    trainer.train()
    assert trainer.finite.skipped == 2  # row 1 comes once in each of two epochs
    assert all(p.isfinite().all() for p in trainer.drafter.parameters())
    assert trainer.state.log_history[-2]["skipped_steps"] == 2


def test_t06_several_in_a_row_stop_the_run_and_name_the_rows(target: FrozenTarget, tmp_path: Path) -> None:
    look = partial(poison, target, (1,), 1)
    trainer = trainer_of(target, tmp_path, lengths=(20, 12), look=look, settings={"bad_steps": 3})
    with pytest.raises(SpecdraftError, match=r"3 steps in a row .* on rows \[(0, 1|1, 0)\]"):
        trainer.train()


def test_t31_best_is_the_highest_tau_not_the_last_or_the_lowest_loss(target: FrozenTarget, tmp_path: Path) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    taus = iter([1.2, 1.9, 1.5, 1.4])

    def measure(drafter: HeadsDrafter) -> dict[str, float]:
        seen.append({name: value.clone() for name, value in drafter.state_dict().items()})
        return {"tau": next(taus), "alpha": 0.5}

    trainer = trainer_of(target, tmp_path, measure=measure, settings={"evaluate_every": 1})
    trainer.train()
    assert trainer.state.best_metric == 1.9
    best = HeadsDrafter.from_pretrained(tmp_path / BEST).state_dict()
    assert all(torch.equal(best[name], seen[1][name]) for name in best)
    assert [line["eval_tau"] for line in trainer.state.log_history if "eval_tau" in line] == [1.2, 1.9, 1.5, 1.4]


def test_bfloat16_autocast_over_float32_masters(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path, settings={"precision": "bfloat16"})
    trainer.train()
    assert {p.dtype for p in trainer.drafter.parameters()} == {torch.float32}
    assert trainer.look(collate([trainer.rows[0]])).observation.taps.dtype == torch.float32
    assert trainer.state.log_history[-1]["train_loss"] > 0


@pytest.mark.parametrize("able", [True, False])
def test_auto_precision_is_what_the_device_computes_in(
    able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdraft.trainer.computes_in_bfloat16", lambda device: able)
    settings = TrainingSettings(output_dir=tmp_path, precision="auto")
    assert settings.arguments(torch.device("cpu"), evaluating=False).bf16 is able


def test_t32_a_batch_is_overfitted(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = trainer_of(
        target, tmp_path, lengths=(12, 12), settings={"max_steps": 150, "log_every": 150, "learning_rate": 3e-2}
    )
    trainer.drafter.objective = ObjectiveRecipe(terms={"forward_kl": 1.0}, depth_decay=1.0)
    trainer.train()
    batch = collate([trainer.rows[0], trainer.rows[1]])
    with torch.no_grad():
        output = trainer.drafter(batch["input_ids"], batch["labels"], trainer.look(batch))
    assert (output.overlaps / output.counts > 0.97).all()


def test_no_pickle_is_written_with_the_weights(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path)
    trainer.save_model(str(tmp_path / "final"))
    assert {path.name for path in (tmp_path / "final").iterdir()} == {"config.json", "model.safetensors"}


def test_an_unknown_objective_is_named_with_its_nearest() -> None:
    with pytest.raises(ValueError, match=r"'forward_lk'.*did you mean forward_kl\?"):
        ObjectiveRecipe(terms={"forward_lk": 1.0})

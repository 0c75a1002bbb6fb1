"""Faults that people met in training, each by its id, against the real trainer and tiny drafters."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import eagle3, heads_drafter, tiny_target, token_rows
from models import tiny_model
from torch import Tensor
from torch.nn import functional as F

from specdraft.config import SpecdraftError
from specdraft.data.batches import collate
from specdraft.drafters.base import Evidence, ObjectiveRecipe, TrainableDrafter
from specdraft.drafters.eagle import Eagle1Drafter, Eagle1Recipe
from specdraft.objectives import Mixture
from specdraft.reduction import Teacher, law_positions
from specdraft.target import FrozenTarget
from specdraft.trainer import Batch, DrafterTrainer, Look, TrainingSettings, observe

STEADY = {"schedule": "constant", "warmup": 0.0, "max_grad_norm": 0.0, "learning_rate": 1.0}
"""With plain SGD: one step subtracts the gradient from the weights."""


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


def trainer_of(
    drafter: TrainableDrafter, folder: Path, lengths: Sequence[int], look: Look | None = None, **settings: Any
) -> DrafterTrainer:
    sgd = settings.pop("sgd", False)
    made = TrainingSettings(output_dir=folder, **{"save_every": None, "log_every": 1, "max_steps": 1, **settings})
    arguments = made.arguments(drafter.target.device, evaluating=False)
    if sgd:
        arguments.optim = "sgd"
    look = look or partial(observe, drafter.target, drafter.taps)
    return DrafterTrainer(drafter, token_rows(lengths), arguments, look=look)


def lines(trainer: DrafterTrainer) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "loss" in line]


def loss_of(drafter: TrainableDrafter, batch: Batch, num_items: int | None = None) -> Tensor:
    evidence = observe(drafter.target, drafter.taps, batch)
    return drafter(batch["input_ids"], batch["labels"], evidence, num_items).loss


def weights(drafter: TrainableDrafter) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in drafter.named_parameters()}


@pytest.mark.parametrize("padded", [64, 128])
def test_t01_the_loss_is_the_sum_over_ten_answer_tokens_whatever_the_padding(target: FrozenTarget, padded: int) -> None:
    drafter = heads_drafter(target)
    rows = token_rows((5, 11))  # answers of 2 and 8 tokens
    apart = sum(loss_of(drafter, collate([rows[row]]), num_items=1) for row in range(2))
    batch = collate([rows[0], rows[1]])
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    wide = {name: F.pad(batch[name], (0, padded - 11), value=value) for name, value in fill.items()}
    loss = loss_of(drafter, wide)
    torch.testing.assert_close(loss, apart / 10)
    expected = torch.autograd.grad(apart / 10, list(drafter.parameters()))
    torch.testing.assert_close(torch.autograd.grad(loss, list(drafter.parameters())), expected)


def test_t02_unequal_micro_batches_are_one_batch_and_no_mean_of_means(target: FrozenTarget, tmp_path: Path) -> None:
    """Answers of 11 and 101 tokens, at once and accumulated."""
    steps, logged = [], []
    for rows, micro in ((2, 1), (1, 2)):
        drafter = heads_drafter(target)
        start = weights(drafter)
        trainer = trainer_of(
            drafter, tmp_path / str(rows), (14, 104), sgd=True, batch_size=rows, accumulate=micro, **STEADY
        )
        trainer.train()
        steps.append({name: start[name] - weight for name, weight in weights(drafter).items()})
        logged.append(lines(trainer)[0]["loss"])
    drafter = heads_drafter(target)
    with torch.no_grad():
        short, long = (loss_of(drafter, collate([trainer.rows[row]]), num_items=1).item() for row in range(2))
    assert logged == pytest.approx([(short + long) / 112] * 2, rel=1e-5)
    assert abs((short / 11 + long / 101) / 2 - logged[0]) > 1e-2
    torch.testing.assert_close(steps[0], steps[1], rtol=0, atol=1e-6)


def test_t05_four_heads_all_learn_and_all_are_logged(target: FrozenTarget, tmp_path: Path) -> None:
    drafter = heads_drafter(target, shifts=(1, 2, 3, 4))
    start = weights(drafter)
    trainer = trainer_of(drafter, tmp_path, (20, 15), sgd=True, **STEADY)
    trainer.train()
    for head in range(4):
        assert not torch.equal(start[f"blocks.{head}.weight"], drafter.blocks[head].weight)
        assert lines(trainer)[0][f"loss_{head + 1}"] > 0


class HalfLogits:
    """The target with float16 logits, of which some are too large for it."""

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target

    def head(self, hidden: Tensor) -> Tensor:
        logits = self.target.head(hidden).half()
        logits[:, 5] = 7e4
        return logits


def test_t06_a_float16_logit_of_7e4_costs_its_step_and_nothing_else(target: FrozenTarget, tmp_path: Path) -> None:
    def look(batch: Batch) -> Evidence:
        evidence = observe(target, (1,), batch)
        return replace(evidence, target=HalfLogits(target)) if 1 in batch["row"] else evidence

    drafter = heads_drafter(target)
    trainer = trainer_of(drafter, tmp_path, (20, 12), look, batch_size=1, max_steps=2)
    trainer.train()
    assert trainer.finite.skipped == 1
    assert all(weight.isfinite().all() for weight in drafter.parameters())


def test_t06_a_loss_of_exactly_zero_over_some_tokens_is_warned_of(
    target: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No label is among the draft ids: label cross-entropy has nothing to say."""
    drafter = heads_drafter(target, kept=[0, 1, 2])
    drafter.objective = ObjectiveRecipe(terms={"label_cross_entropy": 1.0})
    with caplog.at_level(logging.WARNING):
        trainer_of(drafter, tmp_path, (20, 12)).train()
    assert "the loss is exactly 0 over 24 positions" in caplog.text  # 16 and 8: the first of an answer is the root


@pytest.mark.parametrize("kept", [None, torch.arange(1, 96, 5)])
def test_t13_training_learns_the_law_of_the_models_own_logits(kept: Tensor | None) -> None:
    """The final norm, of weight 3, is applied once; with a stored log-partition as without."""
    model = tiny_model()
    target = FrozenTarget(model)
    torch.nn.init.constant_(target.final_norm.weight, 3.0)
    batch = collate([token_rows((9,))[0]])
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits[0]
    hidden = observe(target, (), batch).observation.hidden
    where, ids = torch.arange(9), slice(None) if kept is None else kept
    for partition in (None, logits.logsumexp(-1)[None]):
        law = Teacher(target, hidden, partition).law(where, where, kept, Mixture({"forward_kl": 1.0}))
        torch.testing.assert_close(law.log_p, logits.log_softmax(-1)[:, ids], rtol=1e-5, atol=1e-5)


def test_t14_a_tap_a_thousand_times_as_large_trains_in_bfloat16(target: FrozenTarget, tmp_path: Path) -> None:
    drafter = eagle3(target, taps=(1, 2, 3), unroll=2)
    start = weights(drafter)

    def look(batch: Batch) -> Evidence:
        evidence = observe(target, drafter.taps, batch)
        evidence.observation.taps[..., : target.hidden_size] *= 1e3
        return evidence

    trainer = trainer_of(drafter, tmp_path, (20, 12), look, precision="bfloat16", max_steps=2)
    trainer.train()
    assert trainer.finite.skipped == 0
    assert all(torch.tensor(list(line.values())).isfinite().all() for line in lines(trainer))
    assert all(weight.isfinite().all() for weight in drafter.parameters())
    assert not torch.equal(start["fc.weight"], drafter.fc.weight)


def eagle1(target: FrozenTarget) -> Eagle1Drafter:
    """With random weights: at its own start, half of them wait for the others to move."""
    recipe = Eagle1Recipe(unroll=2, start="random")
    return Eagle1Drafter.for_target(target, recipe, torch.zeros(target.vocab_size, dtype=torch.long))


def test_feature_regression_holds_eagle_1_to_the_targets_normed_states(target: FrozenTarget, tmp_path: Path) -> None:
    drafter = eagle1(target)
    drafter.objective = ObjectiveRecipe(terms={"feature_regression": 1.0}, depth_decay=0.5)
    rows = token_rows((12, 9))
    batch = collate([rows[0], rows[1]])
    seen = observe(target, drafter.taps, batch).observation
    with torch.no_grad():
        expected = torch.zeros(())
        for weight, prediction in zip((1.0, 0.5), drafter.predict(batch["input_ids"], seen), strict=True):
            row, at = law_positions(batch["labels"], prediction.shift).nonzero().unbind(1)
            mine, wanted = prediction.hidden[row, at - prediction.shift], seen.hidden[row, at]
            expected += weight * F.smooth_l1_loss(mine, wanted, reduction="none").mean(-1).sum() / 15
        torch.testing.assert_close(loss_of(drafter, batch), expected)
    drafter.objective = ObjectiveRecipe(terms={"feature_regression": 1.0, "label_cross_entropy": 0.1})
    start = weights(drafter)
    trainer_of(drafter, tmp_path, (12, 9), sgd=True, **STEADY).train()
    assert all(not torch.equal(start[name], weight) for name, weight in drafter.named_parameters())


def test_feature_regression_is_refused_for_a_drafter_without_features(target: FrozenTarget, tmp_path: Path) -> None:
    drafter = eagle3(target, taps=(1,), unroll=1)
    drafter.objective = ObjectiveRecipe(terms={"forward_kl": 1.0, "feature_regression": 1.0})
    with pytest.raises(SpecdraftError, match=r"feature_regression, but Eagle3Drafter does not predict.*eagle1"):
        trainer_of(drafter, tmp_path, (12, 9)).train()


def test_top_k_without_its_term_is_an_error_and_ten_is_what_it_is_unless_said() -> None:
    with pytest.raises(ValueError, match="top_k has no effect without the term topk_cross_entropy"):
        ObjectiveRecipe(top_k=5)
    recipe = ObjectiveRecipe(terms={"topk_cross_entropy": 1.0})
    assert recipe.mixture.top_k == 10
    assert ObjectiveRecipe.model_validate(recipe.model_dump()) == recipe
    assert ObjectiveRecipe(terms={"topk_cross_entropy": 1.0}, top_k=3, temperature=0.5).mixture == Mixture(
        {"topk_cross_entropy": 1.0}, 3, 0.5
    )

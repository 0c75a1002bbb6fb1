"""A short distillation with rounded weights, where rounding alone costs too much acceptance: mostly at 4 bits."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specdraft.config import Recipe
from specdraft.data.batches import DataRecipe, build_rows, collate
from specdraft.data.chat import ChatFormat
from specdraft.drafters.base import ObjectiveRecipe, TrainableDrafter
from specdraft.lowbit import Scheme
from specdraft.quantization.rounding import to_nearest
from specdraft.target import FrozenTarget
from specdraft.trainer import DrafterTrainer, TrainingSettings, observe


class RecoveryRecipe(Recipe):
    answers: tuple[str, ...] = Field(min_length=1)
    """The target's own answers, as training has them."""
    steps: int = Field(default=100, ge=1)
    """Optimiser steps."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    batch_size: int = Field(default=8, ge=1)
    """Rows of a step."""
    max_length: int = Field(default=512, ge=2)
    """Rows are cut to this many tokens."""
    objective: ObjectiveRecipe = ObjectiveRecipe()
    """What is minimised."""
    seed: int = 0
    """Of the order of the data."""


class _Rounded(nn.Module):
    """A weight as its integers stand for it; the gradient passes as if it had not been rounded (straight-through)."""

    def __init__(self, scale: Tensor, scheme: Scheme) -> None:
        super().__init__()
        self.scale, self.scheme = scale, scheme

    def forward(self, weight: Tensor) -> Tensor:
        held = to_nearest(weight.detach(), self.scale, self.scheme).float()
        wide = self.scale.float().repeat_interleave(weight.shape[1] // self.scale.shape[1], 1)
        return weight + ((held * wide).to(weight.dtype) - weight).detach()


def recover(
    drafter: TrainableDrafter,
    target: FrozenTarget,
    scales: Mapping[str, Tensor],
    scheme: Scheme,
    recipe: RecoveryRecipe,
) -> None:
    """Train the drafter, in place, with the layers of `scales` rounded to their scales in every forward pass.

    What is left in those layers are weights that round, by the same scales, to those it was trained with. All other
    weights learn as well.
    """
    data = DataRecipe.model_validate({"answers": recipe.answers, "max_length": recipe.max_length})
    rows = build_rows(data, ChatFormat(target.tokenizer, {}, target.end_ids))
    layers = {name: drafter.get_submodule(name) for name in scales}
    for name, layer in layers.items():
        parametrize.register_parametrization(layer, "weight", _Rounded(scales[name], scheme))
    drafter.objective = recipe.objective
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingSettings(
            output_dir=Path(scratch),
            max_steps=recipe.steps,
            learning_rate=recipe.learning_rate,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            save_every=None,
        )
        trainer = DrafterTrainer(
            drafter.train(),
            rows,
            settings.arguments(target.device, evaluating=False),
            look=partial(observe, target, drafter.taps),
            collate=collate,
            measure=None,
            bad_steps=settings.bad_steps,
        )
        trainer.train()
    for layer in layers.values():
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    drafter.eval()
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.grad = None

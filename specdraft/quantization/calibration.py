"""What a drafter's layers really read: its inputs on the target's answers, as sums that calibrated rounding needs."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.batches import DataRecipe, build_rows
from specdraft.data.chat import ChatFormat
from specdraft.drafters.base import TrainableDrafter
from specdraft.target import FrozenTarget


class CalibrationRecipe(Recipe):
    answers: tuple[str, ...] = Field(min_length=1)
    """The target's own answers, as `respond` writes them, to what training was on: never what is evaluated on."""
    rows: int = Field(default=128, ge=1)
    """How many of them are read."""
    max_length: int = Field(default=512, ge=2)
    """Tokens of each that are read."""


@torch.no_grad()
def hessians(
    drafter: TrainableDrafter,
    target: FrozenTarget,
    layers: Mapping[str, nn.Linear],
    recipe: CalibrationRecipe,
    progress: Callable[[int], None],
) -> dict[str, Tensor]:
    """Of each layer by name, the mean of x x^T over its inputs x: float64 [in, in].

    The drafter reads the answers as it does in training, a row at a time and unrolled to all its depths: so its layers
    see what they see when it drafts. Raises SpecdraftError if there is no usable answer, or a layer has read nothing.
    """
    settings = {"answers": recipe.answers, "limit": recipe.rows, "max_length": recipe.max_length}
    data = DataRecipe.model_validate(settings)
    rows = build_rows(data, ChatFormat(target.tokenizer, {}, target.end_ids))
    sums = {name: torch.zeros(1, dtype=torch.float64) for name in layers}
    counts = dict.fromkeys(layers, 0)

    def add(name: str, _layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        read = args[0].flatten(0, -2).double()
        sums[name] = sums[name].to(read.device) + read.T @ read
        counts[name] += len(read)

    hooks = [layer.register_forward_pre_hook(partial(add, name)) for name, layer in layers.items()]
    mine = {id(layer) for layer in layers.values()}
    try:
        for row in range(len(rows)):
            tokens = rows[row]["input_ids"][None].to(target.device)
            seen = target.observe(tokens, torch.ones_like(tokens, dtype=torch.bool), drafter.taps)
            for prediction in drafter.predict(tokens, seen):
                if any(id(module) in mine for module in prediction.head.modules()):
                    prediction.logits(prediction.hidden)  # `predict` leaves the head to whoever wants logits
            progress(1)
    finally:
        for hook in hooks:
            hook.remove()
    if unread := [name for name, count in counts.items() if not count]:
        raise SpecdraftError(f"nothing came through {', '.join(unread)} in {len(rows)} answers: no calibration")
    return {name: total / counts[name] for name, total in sums.items()}

"""Tiny drafters far from their start, and the same in integers."""

from pathlib import Path
from typing import Any

import torch

from specdraft.drafters import DRAFTERS
from specdraft.drafters.base import TrainableDrafter
from specdraft.quantization.stage import QuantizeRecipe, layers_to_quantize, quantize_layers, scheme_for
from specdraft.target import FrozenTarget

SCHEMES: dict[str, dict[str, int]] = {"w8a8": {}, "int8": {}, "int4": {"group_size": 16}}


def trained(kind: str, target: FrozenTarget) -> TrainableDrafter:
    """A drafter far from its start, so that every part matters."""
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    torch.manual_seed(0)
    drafter = DRAFTERS[kind].for_target(target, DRAFTERS[kind].recipe_class(kind=kind), counts)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.requires_grad:
                weight += torch.randn_like(weight) * 0.1
    return drafter.eval()


def in_integers(drafter: TrainableDrafter, scheme: str, **changes: Any) -> TrainableDrafter:
    """The drafter itself, quantised in place."""
    given = {"target": {"name": "t"}, "drafter": Path("d"), "output": Path("o"), "scheme": scheme}
    recipe = QuantizeRecipe.model_validate({**given, **SCHEMES[scheme], **changes})
    layers = layers_to_quantize(drafter, head=recipe.head, fusion=recipe.fusion)
    quiet = lambda _what, _total: lambda _done: None  # noqa: E731
    quantize_layers(recipe, drafter, drafter.target, layers, scheme_for(recipe, layers), quiet)
    return drafter

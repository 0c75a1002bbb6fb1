"""What calibration sums up is what the layers read, unrolled as in training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from tiny_chat import chat_tokenizer
from torch import Tensor

from specdraft import lowbit
from specdraft.config import SpecdraftError
from specdraft.data.batches import DataRecipe, build_rows
from specdraft.data.chat import ChatFormat
from specdraft.drafters import DRAFTERS
from specdraft.drafters.base import TrainableDrafter
from specdraft.quantization.calibration import CalibrationRecipe, hessians
from specdraft.target import FrozenTarget

quiet: Callable[[int], None] = lambda _done: None  # noqa: E731


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    tokenizer = chat_tokenizer()
    return FrozenTarget(tiny_model(vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture
def answers(tmp_path: Path) -> CalibrationRecipe:
    with (tmp_path / "answers.jsonl").open("w") as file:
        for asked, said in [("one two", "three four five"), ("what is two", "two is two and two"), ("five", "six")]:
            chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": chat}) + "\n")
    return CalibrationRecipe(answers=(str(tmp_path / "answers.jsonl"),), rows=3)


def drafter(kind: str, target: FrozenTarget, **settings: Any) -> TrainableDrafter:
    recipe = DRAFTERS[kind].recipe_class(kind=kind, **settings)
    return DRAFTERS[kind].for_target(target, recipe, torch.ones(target.vocab_size).long()).eval()


def hidden(target: FrozenTarget, recipe: CalibrationRecipe) -> Tensor:
    """The target's last hidden states of all answers, float64 [tokens, H]."""
    data = DataRecipe.model_validate({"answers": recipe.answers, "max_length": recipe.max_length})
    rows = build_rows(data, ChatFormat(target.tokenizer, {}, target.end_ids))
    tokens = [rows[row]["input_ids"][None] for row in range(len(rows))]
    seen = [target.observe(each, torch.ones_like(each).bool(), ()) for each in tokens]
    return torch.cat([each.hidden[0] for each in seen]).double()


def test_the_sum_is_the_mean_of_x_x_transposed_over_every_token(
    target: FrozenTarget, answers: CalibrationRecipe
) -> None:
    medusa = drafter("medusa", target)
    layers = {name: layer for name, layer in lowbit.plain_linears(medusa).items() if name.startswith("blocks.0")}
    (found,) = hessians(medusa, target, layers, answers, quiet).values()
    want = hidden(target, answers)
    torch.testing.assert_close(found, want.T @ want / len(want), rtol=1e-5, atol=1e-7)
    assert not medusa.blocks[0].layers[0]._forward_pre_hooks, "nothing is left behind"  # type: ignore[union-attr, index]


def test_every_step_of_the_unroll_counts_and_the_head_reads_its_predictions(
    target: FrozenTarget, answers: CalibrationRecipe
) -> None:
    tokens, counted = len(hidden(target, answers)), {}
    eagle = drafter("eagle3", target, unroll=3)
    layers = lowbit.plain_linears(eagle)

    def count(name: str) -> Callable[..., None]:
        def hook(_layer: object, args: tuple[Tensor, ...]) -> None:
            counted[name] = counted.get(name, 0) + args[0].flatten(0, -2).shape[0]

        return hook

    for name, layer in layers.items():
        layer.register_forward_pre_hook(count(name))
    sums = hessians(eagle, target, layers, answers, quiet)
    assert counted["fc"] == tokens
    assert counted["midlayer.mlp.up_proj"] == counted["midlayer.self_attn.k_proj"] == counted["lm_head"] == 3 * tokens
    assert {name: tuple(total.shape) for name, total in sums.items()} == {
        name: (layer.in_features, layer.in_features) for name, layer in layers.items()
    }


def test_a_layer_that_reads_nothing_cannot_be_calibrated(target: FrozenTarget, answers: CalibrationRecipe) -> None:
    with pytest.raises(SpecdraftError, match="nothing came through stray"):
        hessians(drafter("medusa", target), target, {"stray": torch.nn.Linear(2, 2)}, answers, quiet)

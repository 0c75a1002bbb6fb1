"""Medusa for vLLM and in FasterDecoding's names: there and back bit for bit, and whose output layer it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import assert_same, put, read, shaken, write
from models import tiny_model
from torch import Tensor
from torch.nn.functional import silu

from specdraft.config import SpecdraftError
from specdraft.drafters.medusa import MedusaDrafter, MedusaRecipe
from specdraft.target import FrozenTarget

H, V = 32, 96


def medusa(head: str = "target", dtype: torch.dtype = torch.float32) -> MedusaDrafter:
    recipe = MedusaRecipe.model_validate({"heads": 3, "layers": 2, "head": head})
    target = FrozenTarget(tiny_model())
    return shaken(MedusaDrafter.for_target(target, recipe, torch.zeros(V))).to(dtype=dtype)


@pytest.mark.parametrize("head", ["target", "own"])
def test_x02_x10_fasterdecodings_names_shapes_and_config(head: str, tmp_path: Path) -> None:
    drafter = medusa(head)
    config, tensors = write("fasterdecoding", drafter, tmp_path / "out")
    blocks = {f"{i}.{layer}.linear.weight": (H, H) for i in range(3) for layer in range(2)}
    heads = {f"{i}.2.weight": (V, H) for i in range(3)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == blocks | heads
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": "org/target",
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "medusa_fc_bias": False,
        "hidden_size": H,
        "vocab_size": V,
        "torch_dtype": "float32",
        "specdraft": {"drafter": "medusa", "trained_length": None, "head": head},
    }
    rows = drafter.target.head_rows(torch.arange(V))
    assert torch.equal(tensors["2.2.weight"], rows) == (head == "target")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["target", "own"])
@pytest.mark.parametrize("name", ["medusa-vllm", "fasterdecoding"])
def test_x01_x02_there_and_back_is_bit_exact(name: str, head: str, dtype: torch.dtype, tmp_path: Path) -> None:
    drafter = medusa(head, dtype)
    drafter.config.trained_length = 48
    folder = put(write(name, drafter, tmp_path / "out"), tmp_path / "again")
    assert_same(read(name, folder, drafter.target), drafter)


def test_own_output_layers_that_still_equal_the_targets_stay_their_own(tmp_path: Path) -> None:
    target = FrozenTarget(tiny_model())
    fresh = MedusaDrafter.for_target(target, MedusaRecipe(heads=2, head="own"), torch.zeros(V))
    for name in ("medusa-vllm", "fasterdecoding"):
        assert_same(read(name, put(write(name, fresh, tmp_path / name), tmp_path / f"{name}2"), target), fresh)


@torch.no_grad()
def test_x02_a_strangers_heads_with_biases_and_a_prefix_compute_what_they_say(tmp_path: Path) -> None:
    """Written out: x + SiLU(W x + b), then the head's own output layer."""
    target = FrozenTarget(tiny_model())
    tensors: dict[str, Tensor] = {}
    for head in range(2):
        tensors[f"medusa_heads.{head}.0.linear.weight"] = torch.randn(H, H)
        tensors[f"medusa_heads.{head}.0.linear.bias"] = torch.randn(H)
        tensors[f"medusa_heads.{head}.1.weight"] = torch.randn(V, H)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x/y"}
    found = read("fasterdecoding", put((config, tensors), tmp_path / "theirs"), target)
    assert isinstance(found, MedusaDrafter)
    assert (found.config.head, found.config.bias, found.config.vocab_size) == ("own", True, V)
    tokens = torch.randint(0, V, (1, 6))
    seen = target.observe(tokens, torch.ones_like(tokens).bool(), ())
    for head, prediction in enumerate(found.predict(tokens, seen)):
        weight, bias, rows = (
            tensors[f"medusa_heads.{head}.{name}"] for name in ("0.linear.weight", "0.linear.bias", "1.weight")
        )
        wanted = (seen.hidden + silu(seen.hidden @ weight.T + bias)) @ rows.T
        torch.testing.assert_close(prediction.head(prediction.hidden), wanted)
    found.save_pretrained(tmp_path / "ours")
    assert_same(MedusaDrafter.from_pretrained(tmp_path / "ours"), found)
    written, _ = write("medusa-vllm", found, tmp_path / "vllm")
    assert written["medusa_fc_bias"] is True


def test_one_output_layer_that_is_not_the_targets_becomes_each_heads_own(tmp_path: Path) -> None:
    drafter = medusa()
    config, tensors = write("medusa-vllm", drafter, tmp_path / "out")
    assert config["original_lm_head"] is True
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    found = read("medusa-vllm", put((config, tensors), tmp_path / "theirs"), drafter.target)
    assert isinstance(found, MedusaDrafter)
    assert found.config.head == "own"
    assert all(torch.equal(weight, tensors["lm_head.weight"]) for weight in found.lm_heads.parameters())


Damage = Callable[[dict[str, Any], dict[str, Tensor]], object]
DAMAGES: list[tuple[str, Damage]] = [
    ("blocks.1.layers.0.weight is missing", lambda config, tensors: tensors.pop("1.0.linear.weight")),
    ("0.0.conv.weight is not expected", lambda config, tensors: tensors.update({"0.0.conv.weight": torch.zeros(1)})),
    (r"has the shape \(31, 32\)", lambda config, tensors: tensors.update({"0.0.linear.weight": torch.zeros(31, H)})),
    ("lm_heads.1.weight is missing", lambda config, tensors: tensors.pop("1.2.weight")),
    ("how many heads", lambda config, tensors: config.pop("medusa_num_heads")),
    ("token_map", lambda config, tensors: tensors.update(token_map=torch.arange(9))),
    ("truncated", lambda config, tensors: config.update(truncated_vocab_size=9)),
    ("it is not", lambda config, tensors: config["specdraft"].update(head="target")),
]


@pytest.mark.parametrize(("said", "damage"), DAMAGES, ids=[said for said, _ in DAMAGES])
def test_x01_x02_damaged_heads_are_refused_with_the_reason(said: str, damage: Damage, tmp_path: Path) -> None:
    drafter = medusa("own")
    config, tensors = write("fasterdecoding", drafter, tmp_path / "out")
    damage(config, tensors)
    with pytest.raises(SpecdraftError, match=said):
        read("fasterdecoding", put((config, tensors), tmp_path / "theirs"), drafter.target)

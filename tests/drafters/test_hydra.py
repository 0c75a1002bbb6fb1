"""Hydra: each node's head reads the path to it, in training as in decoding, in chains and trees."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import ForcedDice
from models import tiny_model
from safetensors.torch import load_file

from specdraft.drafters import load_drafter
from specdraft.drafters.base import Evidence
from specdraft.drafters.hydra import HydraDrafter, HydraRecipe
from specdraft.drafters.shapes import Chain, DynamicTree, Shape, StaticTree
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

H, V = 32, 96
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 1), (0, 0, 0), (1, 0, 1), (1, 0, 1, 0)))


def hydra(target: FrozenTarget, shaken: bool = True, **recipe: Any) -> HydraDrafter:
    """`shaken`: far from the start, so that every part of it matters."""
    drafter = HydraDrafter.for_target(target, HydraRecipe(**recipe), torch.zeros(target.vocab_size)).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += shaken * 0.3 * torch.randn_like(weight)
    return drafter


@torch.no_grad()
def test_fresh_heads_say_what_the_target_says_of_the_next_token() -> None:
    target = FrozenTarget(tiny_model())
    tokens = torch.randint(0, V, (1, 6))
    seen = target.observe(tokens, torch.ones_like(tokens).bool(), ())
    for prediction in hydra(target, shaken=False, layers=2).predict(tokens, seen):
        assert torch.equal(prediction.hidden, seen.hidden)
        torch.testing.assert_close(prediction.head(prediction.hidden), target.head(seen.hidden), rtol=0, atol=1e-4)


@torch.no_grad()
def test_head_d_reads_the_d_tokens_after_its_position_and_no_others() -> None:
    target = FrozenTarget(tiny_model())
    drafter, tokens = hydra(target), torch.randint(0, V, (1, 12))
    seen = target.observe(tokens, torch.ones_like(tokens).bool(), ())
    other = tokens.clone()
    other[0, 8] = (tokens[0, 8] + 1) % V
    pairs = zip(drafter.predict(tokens, seen), drafter.predict(other, seen), strict=True)
    for depth, (one, two) in enumerate(pairs, 1):
        assert (one.depth, one.shift) == (depth, depth)
        changed = [t for t in range(12) if not torch.equal(one.hidden[:, t], two.hidden[:, t])]
        assert changed == list(range(8 - depth, 8))


@pytest.mark.parametrize("shape", [STATIC, DynamicTree(4, 3, 11)], ids=["static", "dynamic"])
@torch.no_grad()
def test_t07_below_every_node_of_a_tree_stands_what_training_says_below_its_path(shape: Shape) -> None:
    """The children of a node are the likeliest under the law that `predict` gives for the text that ends in it."""
    target = FrozenTarget(tiny_model())
    drafter = hydra(target, layers=2)
    drafter.shape = shape
    tokens, lengths = torch.randint(0, V, (2, 7)), torch.tensor([6, 3])
    roots = tokens[torch.arange(2), lengths]
    seen = target.observe(tokens[:, :6], torch.arange(6) < lengths[:, None], ())
    tree = drafter.propose(drafter.begin(seen, roots), warp=Warp(1.0), dice=ForcedDice(tokens))
    assert tree.depth == 4 if shape is STATIC else tree.depth >= 2
    for row, length in enumerate(lengths.tolist()):
        paths: list[list[int]] = []
        children: dict[int, list[int]] = {}
        for node, (token, parent) in enumerate(zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True)):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
            children.setdefault(parent, []).append(node)
        for parent, nodes in children.items():
            above = paths[parent] if parent >= 0 else []
            text = torch.tensor([[*tokens[row, : length + 1].tolist(), *above]])
            whole = target.observe(text, torch.ones_like(text).bool(), ())
            prediction = drafter.predict(text, whole)[len(above)]
            ranked = prediction.head(prediction.hidden[0, length - 1]).argsort(descending=True).tolist()
            got = [paths[node][-1] for node in nodes]
            if shape is STATIC:
                ranks = [
                    path[-1] for path in STATIC.paths if path[:-1] == (STATIC.paths[parent] if parent >= 0 else ())
                ]
                assert got == [ranked[rank] for rank in ranks]
            else:
                assert set(got) == set(ranked[: len(got)])


def test_t05_every_head_has_a_gradient_and_changes_from_the_first_step_on() -> None:
    target = FrozenTarget(tiny_model())
    drafter = hydra(target, shaken=False).train()
    tokens = torch.randint(3, V, (2, 12))
    output = drafter(tokens, tokens, Evidence(target.observe(tokens, torch.ones_like(tokens).bool(), ()), target))
    output.loss.backward()
    before = [weight.clone() for weight in drafter.parameters()]
    assert len(before) == 8
    torch.optim.AdamW(drafter.parameters(), 1e-2).step()
    for weight, old in zip(drafter.parameters(), before, strict=True):
        assert weight.grad is not None
        assert weight.grad.norm() > 0
        assert not torch.equal(weight, old)


@torch.no_grad()
def test_what_was_drafted_matters_to_the_next_law_as_it_does_not_in_medusa() -> None:
    target = FrozenTarget(tiny_model())
    drafter = hydra(target)
    drafter.shape = Chain(2)
    tokens = torch.tensor([[5, 9, 3]])
    memory = drafter.begin(target.observe(tokens, torch.ones_like(tokens).bool(), ()), torch.tensor([7]))
    laws = [
        drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(torch.tensor([[first, 1]]))).laws for first in (4, 5)
    ]
    assert laws[0] is not None
    assert laws[1] is not None
    assert torch.equal(laws[0][:, 0], laws[1][:, 0])
    assert not torch.allclose(laws[0][:, 1], laws[1][:, 1], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x01_x10_its_checkpoint_has_these_names_and_comes_back_bitwise(dtype: torch.dtype, tmp_path: Path) -> None:
    drafter = hydra(FrozenTarget(tiny_model()), heads=3, layers=2).to(dtype=dtype)
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    golden = {f"heads.{i}.fc.weight": (H, (2 + i) * H) for i in range(3)}
    golden |= {f"heads.{i}.block.layers.{j}.weight": (H, H) for i in range(3) for j in range(2)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == golden
    loaded = load_drafter(tmp_path)
    assert isinstance(loaded, HydraDrafter)
    assert loaded.servable_config() == drafter.servable_config()
    mine, theirs = drafter.state_dict(), loaded.state_dict()
    assert all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in golden)

"""The unrolled attention equals dense attention under the mask that it never builds, gradients included."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from specdraft import attention
from specdraft.attention import unrolled_attention

SHAPES = {"plain": (2, 2), "grouped": (4, 2), "one key head": (4, 1)}


def inputs(heads: int, kv_heads: int, steps: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps)
    shapes = [(heads, 6), (kv_heads, 6), (kv_heads, 6), (kv_heads, 6, steps), (kv_heads, 6, steps)]
    return [torch.randn(2, *shape, 8, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def visible(length: int, steps: int) -> Tensor:
    """bool [T, (1 + j) T]: step-0 keys causally, each later step's on the diagonal."""
    own = torch.eye(length, dtype=torch.bool)
    return torch.cat([torch.ones_like(own).tril(), *[own] * steps], 1)


def dense(query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    keys, values = (
        torch.cat([first, *later.unbind(3)], 2).repeat_interleave(groups, 1)
        for first, later in ((key, own_key), (value, own_value))
    )
    scores = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    seen = visible(query.shape[2], own_key.shape[3]).to(query.device)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values


def test_t07_the_mask_is_causal_over_step_0_and_the_diagonal_of_each_later_step() -> None:
    """Seen through the function: the value of one key alone tells which queries look at it."""
    for steps in (0, 1, 2):
        query, key, value, own_key, own_value = (x.double() for x in inputs(2, 2, steps, torch.float64))
        table = torch.zeros(6, 6 * (1 + steps), dtype=torch.bool)
        for column in range(table.shape[1]):
            value.zero_(), own_value.zero_()
            step, slot = divmod(column, 6)
            (value[:, :, slot] if step == 0 else own_value[:, :, slot, step - 1]).fill_(1)
            table[:, column] = (unrolled_attention(query, key, value, own_key, own_value) != 0)[0, 0, :, 0]
        assert torch.equal(table, visible(6, steps))


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_equal_dense_attention(shape: str, steps: int) -> None:
    leaves = [x.requires_grad_() for x in inputs(*SHAPES[shape], steps, torch.float64)]
    out, want = unrolled_attention(*leaves), dense(*leaves)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    pull = torch.randn(out.shape, dtype=torch.float64)
    used = leaves if steps else leaves[:3]
    got, due = torch.autograd.grad(out, used, pull), torch.autograd.grad(want, used, pull)
    for mine, theirs in zip(got, due, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_gradcheck_of_the_cpu_merge() -> None:
    leaves = [x[:1, :, :3].clone().requires_grad_() for x in inputs(2, 1, 2, torch.float64)]
    assert torch.autograd.gradcheck(unrolled_attention, leaves, atol=1e-8, rtol=1e-6)


def test_saturated_scores_stay_finite() -> None:
    leaves = [x.requires_grad_() for x in inputs(2, 2, 2, torch.float32)]
    scaled = [leaves[0] * 1e3, *leaves[1:]]
    out = unrolled_attention(*scaled)
    out.sum().backward()
    torch.testing.assert_close(out, dense(*scaled), rtol=1e-4, atol=1e-4)
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in leaves)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_within_its_own_rounding(shape: str) -> None:
    exact = [x.requires_grad_() for x in inputs(*SHAPES[shape], 3, torch.float64)]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    out, want = unrolled_attention(*rounded), dense(*exact)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=0, atol=0.03)
    got, due = torch.autograd.grad(out.sum(), rounded), torch.autograd.grad(want.sum(), exact)
    for mine, theirs in zip(got, due, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0.03, atol=0.06)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_flex_path_forward_run_eagerly_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    query, key, value, own_key, own_value = inputs(4, 2, 2, torch.float32)
    got = attention._by_flex(query, key, value, own_key.repeat_interleave(2, 1), own_value.repeat_interleave(2, 1))
    want = unrolled_attention(query, key, value, own_key, own_value)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [6, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_equals_dense_attention_with_gradients(shape: str, length: int) -> None:
    heads, kv_heads = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, length), (kv_heads, length), (kv_heads, length), (kv_heads, length, 2), (kv_heads, length, 2)]
    exact = [torch.randn(2, *shape, 32, generator=generator, dtype=torch.float64) for shape in shapes]
    leaves = [x.to("cuda", torch.float32).requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    out, want = unrolled_attention(*leaves), dense(*exact)
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=5e-3)  # products in TF32
    got, due = torch.autograd.grad(out.square().sum(), leaves), torch.autograd.grad(want.square().sum(), exact)
    for mine, theirs in zip(got, due, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=2e-2, atol=3e-2)

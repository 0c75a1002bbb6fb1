"""Rounding against closed forms and brute force on matrices small enough for it."""

from itertools import product

import pytest
import torch
from torch import Tensor

from specdraft.config import SpecdraftError
from specdraft.lowbit import Scheme
from specdraft.quantization.rounding import clipped_scale, gptq, nearest_scale, to_nearest

INT4, INT8 = Scheme(4, 8), Scheme(8)


def stands_for(integers: Tensor, scale: Tensor) -> Tensor:
    return integers.double() * scale.double().repeat_interleave(integers.shape[1] // scale.shape[1], 1)


def loss(weight: Tensor, held: Tensor, hessian: Tensor) -> float:
    """The mean squared change of the outputs, summed over them: tr (dW) H (dW)^T."""
    off = held - weight.double()
    return float(((off @ hessian) * off).sum())


def correlated(width: int, samples: int = 400) -> Tensor:
    """The mean of x x^T over inputs that lie near a few directions."""
    inputs = torch.randn(samples, max(width // 4, 1), dtype=torch.float64) @ torch.randn(
        max(width // 4, 1), width, dtype=torch.float64
    )
    inputs += 0.1 * torch.randn_like(inputs)
    return inputs.T @ inputs / samples


@pytest.mark.parametrize("scheme", [INT4, INT8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_nearest_is_off_by_half_a_scale_at_most_by_the_scale_that_is_stored(
    scheme: Scheme, dtype: torch.dtype
) -> None:
    weight = torch.randn(6, 32)
    scale = nearest_scale(weight, scheme, dtype)
    assert scale.dtype == dtype
    integers = to_nearest(weight, scale, scheme)
    assert integers.dtype == torch.int8
    assert -scheme.largest - 1 <= int(integers.min()) <= int(integers.max()) <= scheme.largest
    wide = scale.double().repeat_interleave(32 // scale.shape[1], 1)
    cut = 2**-8 * (scheme.largest + 1) if dtype == torch.bfloat16 else 0.0  # the range's end moves with the scale
    assert ((stands_for(integers, scale) - weight).abs() <= (0.5001 + cut) * wide).all()


def test_each_group_has_a_scale_of_its_own_and_zeros_have_one_too() -> None:
    weight = torch.cat([torch.full((2, 8), 15.0), torch.full((2, 8), 0.15), torch.zeros(2, 8)], 1)
    scale = nearest_scale(weight, INT4, torch.float32)
    torch.testing.assert_close(scale, torch.tensor([[2.0, 0.02, 1.0]]).expand(2, -1))
    assert not to_nearest(weight, scale, INT4)[:, 16:].any()


def test_gptq_with_independent_inputs_is_rounding_to_the_nearest() -> None:
    weight = torch.randn(5, 16)
    scale = nearest_scale(weight, INT4, torch.float32)
    diagonal = torch.diag(torch.rand(16, dtype=torch.float64) + 0.1)
    assert torch.equal(gptq(weight, scale, INT4, diagonal), to_nearest(weight, scale, INT4))


def test_gptq_of_two_inputs_rounds_the_second_to_make_up_for_the_first() -> None:
    """x2 = x1: w1 + w2 is what matters. 0.4 + 0.4 rounds to 0 + 0, but the better answer is 0 + 1."""
    scheme, scale = Scheme(4), torch.ones(1, 1)
    weight = torch.tensor([[0.4, 0.4]])
    same = torch.ones(2, 2, dtype=torch.float64)
    assert to_nearest(weight, scale, scheme).tolist() == [[0, 0]]
    assert sorted(gptq(weight, scale, scheme, same)[0].tolist()) == [0, 1]


def test_gptq_is_between_brute_force_and_rounding_and_near_to_brute_force() -> None:
    scheme, width = Scheme(4), 6
    choices = torch.tensor(list(product((0, 1), repeat=width)), dtype=torch.float64)
    sums = {"best": 0.0, "gptq": 0.0, "nearest": 0.0}
    for _ in range(30):
        weight, hessian = torch.randn(1, width), correlated(width)
        scale = nearest_scale(weight, scheme, torch.float32)
        floor = (weight.double() / scale.double()).floor()
        options = (floor + choices).clamp(-8, 7) * scale.double()
        sums["best"] += min(loss(weight, option[None], hessian) for option in options)
        for name, integers in (
            ("gptq", gptq(weight, scale, scheme, hessian)),
            ("nearest", to_nearest(weight, scale, scheme)),
        ):
            sums[name] += loss(weight, stands_for(integers, scale), hessian)
    assert sums["best"] <= sums["gptq"] < 0.6 * sums["nearest"]


@pytest.mark.parametrize("width", [64, 320])  # one block of columns, and three
def test_gptq_beats_rounding_on_correlated_inputs_also_across_blocks(width: int) -> None:
    weight, hessian = torch.randn(24, width), correlated(width)
    scale = nearest_scale(weight, INT4, torch.bfloat16)
    calibrated = loss(weight, stands_for(gptq(weight, scale, INT4, hessian), scale), hessian)
    assert calibrated < 0.5 * loss(weight, stands_for(to_nearest(weight, scale, INT4), scale), hessian)


def test_gptq_blocks_are_one_walk_over_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = torch.randn(8, 96), correlated(96)
    scale = nearest_scale(weight, INT4, torch.float32)
    whole = gptq(weight, scale, INT4, hessian)
    monkeypatch.setattr("specdraft.quantization.rounding._BLOCK", 7)
    assert torch.equal(gptq(weight, scale, INT4, hessian), whole)


def test_gptq_lives_with_inputs_that_never_come_and_refuses_what_is_no_number() -> None:
    weight, hessian = torch.randn(4, 16), correlated(16)
    hessian[3], hessian[:, 3] = 0, 0
    scale = nearest_scale(weight, INT4, torch.float32)
    integers = gptq(weight, scale, INT4, hessian)
    assert torch.equal(integers[:, 3], to_nearest(weight, scale, INT4)[:, 3])
    assert gptq(weight, scale, INT4, torch.zeros(16, 16, dtype=torch.float64)).shape == weight.shape
    with pytest.raises(SpecdraftError, match="not finite"):
        gptq(weight, scale, INT4, hessian * torch.nan)


def test_clipping_gives_up_an_outlier_that_no_input_asks_for() -> None:
    weight = torch.full((1, 8), 0.9)
    weight[0, 0] = 10.0
    power = torch.ones(8)
    power[0] = 1e-6
    scale, full = (
        clipped_scale(weight, INT4, torch.float32, power),
        nearest_scale(weight, INT4, torch.float32),
    )
    assert scale < 0.9 * full
    errors = [((stands_for(to_nearest(weight, s, INT4), s) - weight).square() * power).sum() for s in (scale, full)]
    assert errors[0] < errors[1]

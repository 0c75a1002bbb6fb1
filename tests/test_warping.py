"""One warp for p and q, in transformers' order."""

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from specdraft.warping import Warp

P, Q = torch.tensor([0.5, 0.3, 0.1, 0.1]).log(), torch.tensor([0.4, 0.4, 0.1, 0.1]).log()


def overlap(p: torch.Tensor, q: torch.Tensor) -> float:
    return torch.minimum(p, q).sum().item()


def test_e06_both_sides_are_warped_alike() -> None:
    raw, warp = Warp(1.0), Warp(1.0, top_k=2)
    assert warp(P).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert warp(Q).tolist() == pytest.approx([0.5, 0.5, 0, 0])
    assert overlap(raw(P), raw(Q)) == pytest.approx(0.9)
    assert overlap(warp(P), warp(Q)) == pytest.approx(0.875)
    assert overlap(warp(P), raw(Q)) == pytest.approx(0.775)
    assert overlap(raw(P), warp(Q)) == pytest.approx(0.8)


def test_e06_half_temperature_squares_and_renormalises() -> None:
    for logits in (P, Q):
        squared = logits.exp() ** 2
        assert Warp(0.5)(logits).tolist() == pytest.approx((squared / squared.sum()).tolist())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.7, 5, None), (1.3, None, 0.8), (0.6, 9, 0.7), (2.0, 99, 1.0)],
)
def test_the_law_is_that_of_transformers_generate(temperature: float, top_k: int | None, top_p: float | None) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_layer=1, n_head=1, n_embd=8, bos_token_id=0, eos_token_id=0))
    settings = GenerationConfig(do_sample=True, temperature=temperature, top_k=top_k or 0, top_p=top_p or 1.0)
    logits = 3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    model.generation_config = settings
    processors = model._get_logits_processor(settings, input_ids_seq_length=1)
    want = processors(torch.zeros(6, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    assert torch.allclose(Warp(temperature, top_k, top_p)(logits), want, atol=1e-7)


def test_greedy_is_one_hot_at_the_lowest_of_equal_ids() -> None:
    law = Warp(0.0, top_k=3, top_p=0.5)(torch.tensor([[1.0, 5.0, 5.0], [2.0, 0.0, 1.0]]))
    assert law.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert Warp().greedy
    assert not Warp(0.1).greedy


@pytest.mark.parametrize("warp", [Warp(), Warp(0.7), Warp(1.0, 3), Warp(1.0, 3, 0.9)])
def test_any_leading_shape_and_at_least_single_precision(warp: Warp) -> None:
    logits = torch.randn(2, 3, 10)
    law = warp(logits)
    assert law.shape == logits.shape
    assert torch.allclose(law.sum(-1), torch.ones(2, 3))
    assert torch.equal(law[1, 2], warp(logits[1, 2]))
    assert warp(logits.bfloat16()).dtype == torch.float32
    assert warp(logits.double()).dtype == torch.float64


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_settings_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Warp(**wrong)

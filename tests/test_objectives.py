"""The divergences against their definitions, their gradients against autograd of those definitions."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdraft.objectives import OBJECTIVES, TargetLaw, divergence


def dense(name: str, logits: Tensor, log_p: Tensor) -> Tensor:
    """Each divergence as its docstring says, over the kept ids, for autograd to differentiate."""
    p, q, log_q = log_p.exp(), logits.softmax(-1), logits.log_softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    mass = p.sum(-1, keepdim=True)
    kl = (p * (log_p - mass.log() - log_q)).sum(-1)
    m = (p + q) / 2
    share = torch.exp(-3 * overlap.detach())
    return {
        "forward_kl": kl,
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "jensen_shannon": (
            (p * (log_p - m.log())).sum(-1) + (q * (log_q - m.log())).sum(-1) + (1 - p.sum(-1)) * math.log(2)
        )
        / 2,
        "total_variation": 1 - overlap,
        "negative_log_acceptance": -overlap.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - overlap),
    }[name]


def laws(n: int, vocab: int, kept: int, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    log_p = (torch.randn(n, vocab, dtype=torch.float64) * scale).log_softmax(-1)[:, :kept]
    return torch.randn(n, kept, dtype=torch.float64) * scale, log_p


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kept", [9, 5])
def test_value_and_gradient_are_the_definition_s(name: str, kept: int) -> None:
    logits, log_p = laws(7, 9, kept)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, overlap = divergence(ours, TargetLaw(log_p), {name: 1.0})
    expected = dense(name, theirs, log_p)
    weight = torch.linspace(-1, 2, 7, dtype=torch.float64)
    (loss * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(overlap, torch.minimum(log_p.exp(), logits.softmax(-1)).sum(-1))


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"reverse_kl"}))
def test_bounded_divergences_stay_in_bounds_over_a_reduced_vocabulary(name: str) -> None:
    logits, log_p = laws(50, 12, 4)
    loss, _ = divergence(logits, TargetLaw(log_p), {name: 1.0})
    upper = {"jensen_shannon": math.log(2), "total_variation": 1.0}.get(name, math.inf)
    assert (loss >= 0).all()
    assert (loss <= upper).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_zero_at_q_equal_p_with_no_gradient(name: str) -> None:
    _, log_p = laws(5, 8, 8)
    logits = (log_p + 1.5).requires_grad_()
    loss, overlap = divergence(logits, TargetLaw(log_p), {name: 1.0})
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-12)
    torch.testing.assert_close(overlap, torch.ones_like(loss))
    if name not in ("total_variation", "negative_log_acceptance", "lk_hybrid"):  # these have a kink there
        torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-12)


def test_v06_mass_outside_the_kept_ids_is_never_renormalised() -> None:
    log_p = torch.tensor([[0.1, 0.1]], dtype=torch.float64).log()  # of [.1, .1, .7, .1]
    loss, overlap = divergence(torch.zeros(1, 2, dtype=torch.float64), TargetLaw(log_p), {"total_variation": 1.0})
    assert overlap.item() == pytest.approx(0.2)  # the bound on alpha there: p(0) + p(1)
    assert loss.item() == pytest.approx(0.8)
    logits = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    divergence(logits, TargetLaw(log_p), {"forward_kl": 1.0})[0].sum().backward()
    q = logits.detach().softmax(-1)
    torch.testing.assert_close(logits.grad, 0.2 * q - log_p.exp())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_t06_saturated_logits_stay_finite_in_float32(name: str) -> None:
    torch.manual_seed(0)
    log_p = (torch.randn(6, 11) * 1e3).log_softmax(-1).clamp(min=-1e4)
    logits = (torch.randn(6, 11) * 1e3).requires_grad_()
    loss, _ = divergence(logits, TargetLaw(log_p), {name: 1.0})
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad.isfinite().all()


def test_acceptance_still_pulls_where_the_overlap_underflows() -> None:
    """At a one-hot p and a q that gives it e^-500, the gradient is cross-entropy's, q - p."""
    log_p = torch.tensor([[0.0, -1e4, -1e4]])
    logits = torch.tensor([[-500.0, 0.0, 0.0]], requires_grad=True)
    loss, overlap = divergence(logits, TargetLaw(log_p), {"negative_log_acceptance": 1.0})
    loss.sum().backward()
    assert overlap.item() == 0
    assert loss.item() == pytest.approx(500 + math.log(2))
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 0.5, 0.5]]))


def test_a_mixture_is_the_weighted_sum() -> None:
    logits, log_p = laws(4, 8, 6)
    logits.requires_grad_()
    terms = {"forward_kl": 0.7, "total_variation": 2.0, "lk_hybrid": 1.0}
    loss, _ = divergence(logits, TargetLaw(log_p), terms)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    parts = [divergence(logits, TargetLaw(log_p), {name: 1.0})[0] * weight for name, weight in terms.items()]
    (expected,) = torch.autograd.grad(sum(part.sum() for part in parts), logits)
    torch.testing.assert_close(loss, sum(parts))
    torch.testing.assert_close(grad, expected)


def test_no_term_is_an_error() -> None:
    logits, log_p = laws(1, 4, 4)
    with pytest.raises(ValueError, match="at least one term of forward_kl"):
        divergence(logits, TargetLaw(log_p), {})


def test_forward_kl_at_a_one_hot_target_is_cross_entropy() -> None:
    logits, _ = laws(3, 5, 5)
    label = torch.tensor([0, 3, 4])
    log_p = torch.full((3, 5), -1e4, dtype=torch.float64).scatter(1, label[:, None], 0.0)
    for name in ("forward_kl", "negative_log_acceptance"):
        loss, _ = divergence(logits, TargetLaw(log_p), {name: 1.0})
        torch.testing.assert_close(loss, F.cross_entropy(logits, label, reduction="none"))

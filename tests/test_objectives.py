"""The divergences against their definitions, their gradients against autograd of those definitions."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdraft.objectives import (
    OBJECTIVES,
    TERMS,
    Mixture,
    TargetLaw,
    divergence,
    feature_regression,
    loss_and_gradient,
    sparse_law,
    truncated,
)

CROSS_ENTROPIES = {"topk_cross_entropy", "label_cross_entropy"}
TOP_K = 3


def dense(name: str, logits: Tensor, whole: Tensor, labels: Tensor) -> Tensor:
    """Each divergence as its docstring says, over the kept ids, for autograd to differentiate.

    whole: log p [n, V], of which the first columns are kept; labels: int64 [n].
    """
    kept = logits.shape[1]
    log_p = whole[:, :kept]
    p, q, log_q = log_p.exp(), logits.softmax(-1), logits.log_softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    mass = p.sum(-1, keepdim=True)
    kl = (p * (log_p - mass.log() - log_q)).sum(-1)
    m = (p + q) / 2
    share = torch.exp(-3 * overlap.detach())
    label = torch.where(labels < kept, -log_q.gather(1, labels.clamp(max=kept - 1)[:, None])[:, 0], 0.0)
    least = whole.sort(descending=True).values[:, TOP_K - 1 : TOP_K]
    top = torch.where(whole >= least, whole.exp(), 0.0)
    return {
        "topk_cross_entropy": -((top / top.sum(-1, keepdim=True))[:, :kept] * log_q).sum(-1),
        "label_cross_entropy": label,
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


def laws(n: int, vocab: int, kept: int, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, kept], the whole log p [n, vocab] and labels [n], all random."""
    torch.manual_seed(seed)
    whole = (torch.randn(n, vocab, dtype=torch.float64) * scale).log_softmax(-1)
    return torch.randn(n, kept, dtype=torch.float64) * scale, whole, torch.randint(0, vocab, (n,))


def target_law(whole: Tensor, labels: Tensor, kept: int) -> TargetLaw:
    kept_ids = torch.arange(kept)
    label = sparse_law(labels[:, None], whole.new_ones(len(labels), 1), kept_ids)
    return TargetLaw(whole[:, :kept], label, truncated(whole, TOP_K, kept_ids))


def one(name: str) -> Mixture:
    return Mixture({name: 1.0}, top_k=TOP_K)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kept", [9, 5])
def test_value_and_gradient_are_the_definition_s(name: str, kept: int) -> None:
    logits, whole, labels = laws(7, 9, kept)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, overlap = divergence(ours, target_law(whole, labels, kept), one(name))
    expected = dense(name, theirs, whole, labels)
    weight = torch.linspace(-1, 2, 7, dtype=torch.float64)
    (loss * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(overlap, torch.minimum(whole[:, :kept].exp(), logits.softmax(-1)).sum(-1))


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"reverse_kl"}))
def test_bounded_divergences_stay_in_bounds_over_a_reduced_vocabulary(name: str) -> None:
    logits, whole, labels = laws(50, 12, 4)
    loss, _ = divergence(logits, target_law(whole, labels, 4), one(name))
    upper = {"jensen_shannon": math.log(2), "total_variation": 1.0}.get(name, math.inf)
    assert (loss >= 0).all()
    assert (loss <= upper).all()


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - CROSS_ENTROPIES))
def test_zero_at_q_equal_p_with_no_gradient(name: str) -> None:
    _, log_p, _ = laws(5, 8, 8)
    logits = (log_p + 1.5).requires_grad_()
    loss, overlap = divergence(logits, TargetLaw(log_p), one(name))
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-12)
    torch.testing.assert_close(overlap, torch.ones_like(loss))
    if name not in ("total_variation", "negative_log_acceptance", "lk_hybrid"):  # these have a kink there
        torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-12)


def test_v06_mass_outside_the_kept_ids_is_never_renormalised() -> None:
    log_p = torch.tensor([[0.1, 0.1]], dtype=torch.float64).log()  # of [.1, .1, .7, .1]
    loss, overlap = divergence(torch.zeros(1, 2, dtype=torch.float64), TargetLaw(log_p), one("total_variation"))
    assert overlap.item() == pytest.approx(0.2)  # the bound on alpha there: p(0) + p(1)
    assert loss.item() == pytest.approx(0.8)
    logits = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    divergence(logits, TargetLaw(log_p), one("forward_kl"))[0].sum().backward()
    q = logits.detach().softmax(-1)
    torch.testing.assert_close(logits.grad, 0.2 * q - log_p.exp())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_t06_saturated_logits_stay_finite_in_float32(name: str) -> None:
    torch.manual_seed(0)
    log_p = (torch.randn(6, 11) * 1e3).log_softmax(-1).clamp(min=-1e4)
    logits = (torch.randn(6, 11) * 1e3).requires_grad_()
    loss, _ = divergence(logits, target_law(log_p, torch.arange(6), 11), one(name))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad.isfinite().all()


def test_acceptance_still_pulls_where_the_overlap_underflows() -> None:
    """At a one-hot p and a q that gives it e^-500, the gradient is cross-entropy's, q - p."""
    log_p = torch.tensor([[0.0, -1e4, -1e4]])
    logits = torch.tensor([[-500.0, 0.0, 0.0]], requires_grad=True)
    loss, overlap = divergence(logits, TargetLaw(log_p), one("negative_log_acceptance"))
    loss.sum().backward()
    assert overlap.item() == 0
    assert loss.item() == pytest.approx(500 + math.log(2))
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 0.5, 0.5]]))


def test_a_mixture_is_the_weighted_sum() -> None:
    logits, whole, labels = laws(4, 8, 6)
    logits.requires_grad_()
    terms = {name: 0.3 + index for index, name in enumerate(OBJECTIVES)}
    law = target_law(whole, labels, 6)
    loss, _ = divergence(logits, law, Mixture(terms, top_k=TOP_K))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    parts = [dense(name, logits, whole, labels) * weight for name, weight in terms.items()]
    (expected,) = torch.autograd.grad(sum(part.sum() for part in parts), logits)
    torch.testing.assert_close(loss, sum(parts))
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("terms", [{}, {"forward_lk": 1.0}])
def test_no_term_or_an_unknown_one_is_an_error(terms: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least one term of forward_kl"):
        Mixture(terms)


def test_a_term_without_its_law_is_an_error() -> None:
    logits, log_p, _ = laws(1, 4, 4)
    with pytest.raises(ValueError, match="was not given"):
        divergence(logits, TargetLaw(log_p), one("label_cross_entropy"))


def test_forward_kl_at_a_one_hot_target_is_cross_entropy() -> None:
    logits, _, _ = laws(3, 5, 5)
    label = torch.tensor([0, 3, 4])
    log_p = torch.full((3, 5), -1e4, dtype=torch.float64).scatter(1, label[:, None], 0.0)
    for name in ("forward_kl", "negative_log_acceptance", "topk_cross_entropy", "label_cross_entropy"):
        loss, _ = divergence(logits, target_law(log_p, label, 5), one(name))
        torch.testing.assert_close(loss, F.cross_entropy(logits, label, reduction="none"))


def test_v06_a_truncated_law_is_cut_over_the_whole_vocabulary_and_never_renormalised_over_the_kept_ids() -> None:
    """p = [.4, .1, .3, .2], kept are 1 and 2, k = 2: p_k = [4/7, 0, 3/7, 0], of which 3/7 can be drafted."""
    log_p = torch.tensor([[0.4, 0.1, 0.3, 0.2]], dtype=torch.float64).log()
    law = truncated(log_p, 2, torch.tensor([1, 2]))
    dense_law = torch.zeros(1, 2, dtype=torch.float64).scatter_add_(1, law.columns, law.shares)
    torch.testing.assert_close(dense_law, torch.tensor([[0.0, 3 / 7]], dtype=torch.float64))
    assert truncated(log_p, 9, None).shares.sum().item() == pytest.approx(1)  # k beyond the vocabulary: p itself


def test_sparse_laws_find_the_columns_of_unsorted_kept_ids() -> None:
    law = sparse_law(torch.tensor([[7], [2], [5], [-100]]), torch.ones(4, 1), torch.tensor([5, 9, 2]))
    assert law.shares[:, 0].tolist() == [0, 1, 1, 0]
    assert law.columns[1:3, 0].tolist() == [2, 0]
    assert sparse_law(torch.tensor([[-100]]), torch.ones(1, 1), None) == (torch.tensor([[0]]), torch.tensor([[0.0]]))


def test_feature_regression_is_smooth_l1_over_the_width() -> None:
    hidden = torch.tensor([[0.5, -3.0], [0.0, 1.0]], requires_grad=True)
    loss = feature_regression(hidden, torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16))
    assert loss.tolist() == [(0.5**2 / 2 + 3 - 0.5) / 2, 0.0]
    loss.sum().backward()
    assert hidden.grad.tolist() == [[0.25, -0.5], [0.0, 0.0]]
    assert "feature_regression" in TERMS


@pytest.mark.parametrize("kept", [9, 5])
def test_the_fused_passes_give_the_same_loss_overlap_and_gradient(kept: int) -> None:
    """Every term at once, at another temperature, for chunks of two sizes, in float32 and from bfloat16 logits."""
    mixture = Mixture({name: 0.3 + index for index, name in enumerate(OBJECTIVES)}, top_k=TOP_K, temperature=0.7)
    stream = torch.Generator().manual_seed(6)
    for count, dtype in ((7, torch.float32), (3, torch.float32), (4, torch.bfloat16)):
        whole = torch.randn(count, 9, generator=stream).log_softmax(-1)
        law = target_law(whole, torch.arange(count), kept)
        logits = torch.randn(count, kept, generator=stream).to(dtype)
        want = loss_and_gradient(logits, law, mixture)
        got = replace(mixture, fused=True).evaluate(logits, law)
        assert [part.dtype for part in got] == [part.dtype for part in want]
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)

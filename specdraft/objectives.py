"""What a drafter learns from: divergences between its law q and the target's law p.

A divergence is given by its value and by its pull, u_x = q_x * d(loss)/d(q_x). Whatever the divergence, its gradient
with respect to the logits of q is then u_x - q_x * sum_y u_y, so that a mixture of several costs one projection.
`reduction` sums them over a batch. Whatever the term, the loss is a function of q alone: p is a constant.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import smooth_l1_loss

LK_ETA = 3.0
"""How fast `lk_hybrid` passes from distillation to acceptance as the overlap grows: the paper's best."""


LOG_ZERO = -1e4
"""Floor of log p: its exponential is exactly 0, and 0 * log p is 0 instead of NaN."""


class Prediction(NamedTuple):
    """What a drafter predicts at one depth: head(hidden[:, t]) is to match p[:, t + shift].

    hidden: [batch, time, width]; head: width -> logits of the kept ids, called as a module so that ZeRO-3 and FSDP
    gather it; kept_ids: int64 [kept], the reduced draft vocabulary's target ids, or None for the full vocabulary.
    Predictions that share a head or kept ids hand over the same object: their work is then shared as well.
    """

    depth: int
    shift: int
    hidden: Tensor
    head: nn.Module
    kept_ids: Tensor | None

    def logits(self, hidden: Tensor) -> Tensor:
        """The head over some of `hidden`, [..., width] to [..., kept], in the head's own dtype: that of the target
        where it is the target's."""
        return self.head(hidden.to(next(w.dtype for w in self.head.parameters() if w.is_floating_point())))


class SparseLaw(NamedTuple):
    """A law on k ids a row: int64 [n, k] columns of the kept ids, their shares [n, k]; 0 for an id that is not kept."""

    columns: Tensor
    shares: Tensor


def sparse_law(ids: Tensor, shares: Tensor, kept_ids: Tensor | None) -> SparseLaw:
    """ids int64 [n, k] of the whole vocabulary, below 0 for none, with their shares [n, k]; never renormalised."""
    if kept_ids is None:
        return SparseLaw(ids.clamp(min=0), shares * (ids >= 0))
    order = kept_ids.argsort()
    columns = order[torch.searchsorted(kept_ids, ids, sorter=order).clamp(max=len(kept_ids) - 1)]
    return SparseLaw(columns, shares * (kept_ids[columns] == ids))


def truncated(logits: Tensor, top_k: int, kept_ids: Tensor | None) -> SparseLaw:
    """p of the whole vocabulary, from its logits [n, V] or log p, cut to its `top_k` likeliest ids, renormalised there,
    then restricted."""
    top = logits.topk(min(top_k, logits.shape[-1]))
    return sparse_law(top.indices, at_least_float(top.values).softmax(-1), kept_ids)


class TargetLaw:
    """p over the kept ids, from log p [n, kept]; the rows sum to `mass` <= 1. Shared by every depth of a chunk.

    `label` is the data's own token and `top` p cut to its likeliest ids, where a term asks for them.
    """

    def __init__(self, log_p: Tensor, label: SparseLaw | None = None, top: SparseLaw | None = None) -> None:
        self.log_p, self.label, self.top = log_p, label, top
        self.p = log_p.exp()
        self.mass = self.p.sum(-1)
        self.negentropy = torch.linalg.vecdot(self.p, log_p)


def target_law(
    logits: Tensor, log_partition: Tensor | None = None, label: SparseLaw | None = None, top: SparseLaw | None = None
) -> TargetLaw:
    """The law of logits [n, kept] of any dtype, in at least float32. log_partition [n]: the log-sum-exp of the full
    logits, where these are the kept ids' alone."""
    wide = at_least_float(logits)
    log_p = wide.log_softmax(-1) if log_partition is None else wide - log_partition[:, None]
    return TargetLaw(log_p.clamp(min=LOG_ZERO), label, top)


class Laws:
    """p and q at n positions: what a divergence is a function of. q is the softmax of `logits` [n, kept]."""

    def __init__(self, target: TargetLaw, logits: Tensor) -> None:
        self.target, self.p, self.log_p = target, target.p, target.log_p
        self.log_q = logits.log_softmax(-1)
        self.q = self.log_q.exp()
        self.overlap = torch.minimum(self.p, self.q).sum(-1)
        """sum_x min(p, q): the chance that a token drawn from q is accepted. [n]."""


Pull = tuple[Tensor, Tensor]
"""A divergence's loss [n] and its pull u [n, kept]."""


def forward_kl(laws: Laws) -> Pull:
    """mass * KL(p / mass | q) = sum_x p log(p / q) - mass log(mass): distillation (Hinton et al., arXiv 1503.02531).

    p is not renormalised: the gradient is mass * q - p, so a position with little mass on the kept ids pulls little.
    The last term is a constant that keeps the value at or above 0; over the full vocabulary it vanishes.
    """
    mass = laws.target.mass
    return laws.target.negentropy - torch.linalg.vecdot(laws.p, laws.log_q) - torch.xlogy(mass, mass), -laws.p


def reverse_kl(laws: Laws) -> Pull:
    """sum_x q log(q / p): seeks modes (MiniLLM, Gu et al. 2023, arXiv 2306.08543)."""
    ratio = laws.log_q - laws.log_p
    pull = laws.q * ratio
    loss = pull.sum(-1)
    return loss, pull.add_(laws.q)


def jensen_shannon(laws: Laws) -> Pull:
    """(KL(p | m) + KL(q | m)) / 2 with m = (p + q) / 2: GKD's symmetric case (Agarwal et al. 2023, arXiv 2306.13649).

    The mass of p outside the kept ids, where q is 0, counts with its exact value log(2) / 2 each.
    """
    log_m = ((laws.p + laws.q) / 2).clamp_(min=torch.finfo(laws.q.dtype).tiny).log_()
    pull = (laws.log_q - log_m).mul_(laws.q).div_(2)
    toward_p = (laws.target.negentropy - torch.linalg.vecdot(laws.p, log_m)) / 2
    return toward_p + pull.sum(-1) + (1 - laws.target.mass) * (log(2) / 2), pull


def total_variation(laws: Laws) -> Pull:
    """1 - sum_x min(p, q): the chance of a rejection (DistillSpec, Zhou et al. 2023, arXiv 2310.08461).

    Its gradient fades where p and q do not overlap; mix it, or start from another.
    """
    return 1 - laws.overlap, (laws.q < laws.p).to(laws.q.dtype).mul_(laws.q).neg_()


def negative_log_acceptance(laws: Laws) -> Pull:
    """-log sum_x min(p, q): the likelihood of acceptance (LK-alpha, Samarin et al. 2026, arXiv 2602.23881).

    Computed in logarithms: at saturated logits, where the overlap underflows, the gradient is that of cross-entropy.
    """
    low = torch.minimum(laws.log_p, laws.log_q)
    share = low.softmax(-1)
    log_overlap = low.amax(-1) - share.amax(-1).log()
    return -log_overlap, (laws.log_q < laws.log_p).to(share.dtype).mul_(share).neg_()


def lk_hybrid(laws: Laws) -> Pull:
    """lambda * KL(p | q) + (1 - lambda) * TV, lambda = exp(-3 * overlap) held constant (LK-lambda, arXiv 2602.23881).

    Distillation while p and q hardly meet, acceptance itself once they do.
    """
    kl, kl_pull = forward_kl(laws)
    tv, tv_pull = total_variation(laws)
    share = torch.exp(-LK_ETA * laws.overlap)
    return share * kl + (1 - share) * tv, tv_pull.lerp_(kl_pull, share[:, None])


def topk_cross_entropy(laws: Laws) -> Pull:
    """-sum_x p_k(x) log q(x), p_k being p cut to its k likeliest tokens and renormalised there.

    After HASS (Zhang et al. 2024, arXiv 2408.15766).

    The cut is made over the whole vocabulary; what falls outside the kept ids is then dropped, not spread over the
    others, so that a position whose likely tokens cannot be drafted pulls little, as with the other divergences.
    """
    return _cross_entropy(laws, laws.target.top)


def label_cross_entropy(laws: Laws) -> Pull:
    """-log q(label): the data's own token, as in Medusa (Cai et al. 2024, arXiv 2401.10774).

    A label outside the kept ids contributes 0, and its position is counted all the same.
    """
    return _cross_entropy(laws, laws.target.label)


def _cross_entropy(laws: Laws, law: SparseLaw | None) -> Pull:
    if law is None:
        raise ValueError("this term needs a law that TargetLaw was not given")
    pull = torch.zeros_like(laws.log_q).scatter_add_(-1, law.columns, -law.shares)
    return -torch.linalg.vecdot(law.shares, laws.log_q.gather(-1, law.columns)), pull


def feature_regression(hidden: Tensor, features: Tensor) -> Tensor:
    """Smooth L1 between the drafter's hidden states [n, H] and the target's after its final norm [n, H], mean over H.

    EAGLE-1's regression (Li et al. 2024, arXiv 2401.15077, which mixes 1.0 of it with 0.1 of cross-entropy): x^2 / 2
    where the difference |x| < 1, |x| - 1/2 elsewhere. Returns [n], at least float32. Autograd differentiates it.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return smooth_l1_loss(hidden.to(wide), features.to(hidden.device, wide), reduction="none").mean(-1)


OBJECTIVES: dict[str, Callable[[Laws], Pull]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
    "topk_cross_entropy": topk_cross_entropy,
    "label_cross_entropy": label_cross_entropy,
}
FEATURE_REGRESSION = "feature_regression"
"""The one term that is no function of q: see `feature_regression`."""
TERMS = (*OBJECTIVES, FEATURE_REGRESSION)


@dataclass(frozen=True)
class Mixture:
    """The weighted sum of `terms` {name in TERMS: weight}. Raises ValueError without a term, or for an unknown one.

    temperature: p and q are both warped, p = softmax(z / T) and q = softmax(l / T), as decoding at T warps both. The
    terms and the overlap are then those of the laws that meet in decoding at T, and the drafter's best logits l are z
    at every T; an unwarped q would learn z / T, and be warped a second time in decoding. No factor T^2 is added.
    """

    terms: Mapping[str, float]
    top_k: int = 10
    temperature: float = 1.0
    fused: bool = False
    """Compile the passes over the vocabulary into one or two."""

    def __post_init__(self) -> None:
        if not self.terms or not set(self.terms) <= set(TERMS):
            raise ValueError(f"an objective needs at least one term of {', '.join(TERMS)}, and no other")

    @property
    def labelled(self) -> bool:
        return "label_cross_entropy" in self.terms

    @property
    def truncated(self) -> bool:
        return "topk_cross_entropy" in self.terms

    @property
    def regression(self) -> float:
        """The weight of `feature_regression`."""
        return self.terms.get(FEATURE_REGRESSION, 0.0)

    @property
    def needs_whole_law(self) -> bool:
        """Whether log p at the kept ids is not enough: a truncation, or a normaliser at another temperature than 1."""
        return self.truncated or self.temperature != 1

    def warped(self, logits: Tensor) -> Tensor:
        return logits if self.temperature == 1 else logits / self.temperature

    def law(
        self, logits: Tensor, log_partition: Tensor | None, label: SparseLaw | None, top: SparseLaw | None
    ) -> TargetLaw:
        """`target_law`, in one or two passes if fused."""
        return (_fused(target_law) if self.fused else target_law)(logits, log_partition, label, top)

    def evaluate(self, logits: Tensor, target: TargetLaw) -> tuple[Tensor, Tensor, Tensor]:
        """`loss_and_gradient`, in one or two passes if fused."""
        return (_fused(loss_and_gradient) if self.fused else loss_and_gradient)(logits, target, self)

    def descend(self, logits: Tensor, target: TargetLaw) -> tuple[Tensor, Tensor]:
        """The same loss and overlap; the gradient takes the place of `logits`."""
        return (_fused(_loss_and_gradient_) if self.fused else _loss_and_gradient_)(logits, target, self)


def mix(laws: Laws, mixture: Mixture) -> Pull:
    """The mixture's divergences; `feature_regression`, which is none, adds nothing here."""
    loss, pull = torch.zeros_like(laws.overlap), None
    for name, weight in mixture.terms.items():
        if name != FEATURE_REGRESSION:
            term_loss, term_pull = OBJECTIVES[name](laws)
            loss = loss.add_(term_loss, alpha=weight)
            term_pull = term_pull if weight == 1 else term_pull.mul_(weight)
            pull = term_pull if pull is None else pull.add_(term_pull)
    return loss, torch.zeros_like(laws.q) if pull is None else pull


def loss_and_gradient(logits: Tensor, target: TargetLaw, mixture: Mixture) -> tuple[Tensor, Tensor, Tensor]:
    """The mixture's divergences at n positions, from the drafter's logits [n, kept], not yet warped, of any dtype.

    Returns the loss [n], the overlap [n], and the gradient of each position's loss with respect to its logits, in their
    dtype. Tensor algebra alone, so that torch.compile makes one or two passes over the vocabulary of it.
    """
    laws = Laws(target, mixture.warped(at_least_float(logits)))
    loss, pull = mix(laws, mixture)
    gradient = torch.addcmul(pull, laws.q, pull.sum(-1, keepdim=True), value=-1)
    return loss, laws.overlap, mixture.warped(gradient).to(logits.dtype)


def _loss_and_gradient_(logits: Tensor, target: TargetLaw, mixture: Mixture) -> tuple[Tensor, Tensor]:
    loss, overlap, gradient = loss_and_gradient(logits, target, mixture)
    logits.copy_(gradient)
    return loss, overlap


@cache
def _fused(work: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(work)  # made when it is first wanted: the compiler is slow to import


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: TargetLaw, mixture: Mixture) -> tuple[Tensor, Tensor]:
        loss, overlap, gradient = mixture.evaluate(logits, target)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(overlap)
        return loss, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        [gradient] = ctx.saved_tensors
        return (gradient * grad_loss[:, None]).to(gradient.dtype), None, None


def divergence(logits: Tensor, target: TargetLaw, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """The loss [n], differentiable in `logits`, and the overlap [n]: see `loss_and_gradient`."""
    loss, overlap = _Divergence.apply(logits, target, mixture)
    return loss, overlap


def at_least_float(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()

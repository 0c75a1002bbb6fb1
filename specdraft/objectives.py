"""What a drafter learns from: divergences between its law q and the target's law p.

A divergence is given by its value and by its pull, u_x = q_x * d(loss)/d(q_x). Whatever the divergence, its gradient
with respect to the logits of q is then u_x - q_x * sum_y u_y, so that a mixture of several costs one projection.
`reduction` sums them over a batch.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LK_ETA = 3.0
"""How fast `lk_hybrid` passes from distillation to acceptance as the overlap grows: the paper's best."""


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


class TargetLaw:
    """p over the kept ids, from log p [n, kept]; the rows sum to `mass` <= 1. Shared by every depth of a chunk."""

    def __init__(self, log_p: Tensor) -> None:
        self.log_p = log_p

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def mass(self) -> Tensor:
        return self.p.sum(-1)

    @cached_property
    def negentropy(self) -> Tensor:
        return torch.linalg.vecdot(self.p, self.log_p)


class Laws:
    """p and q at n positions: what a divergence is a function of. q is the softmax of `logits` [n, kept]."""

    def __init__(self, target: TargetLaw, logits: Tensor) -> None:
        self.target, self.p, self.log_p = target, target.p, target.log_p
        self.log_q = logits.log_softmax(-1)

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def overlap(self) -> Tensor:
        """sum_x min(p, q): the chance that a token drawn from q is accepted. [n]."""
        return torch.minimum(self.p, self.q).sum(-1)


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


OBJECTIVES: dict[str, Callable[[Laws], Pull]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}


def mix(laws: Laws, terms: Mapping[str, float]) -> Pull:
    """The weighted sum of `terms` {name in OBJECTIVES: weight}. Raises ValueError without a term."""
    loss, pull = torch.zeros_like(laws.overlap), None
    for name, weight in terms.items():
        term_loss, term_pull = OBJECTIVES[name](laws)
        loss = loss.add_(term_loss, alpha=weight)
        term_pull = term_pull if weight == 1 else term_pull.mul_(weight)
        pull = term_pull if pull is None else pull.add_(term_pull)
    if pull is None:
        raise ValueError(f"an objective needs at least one term of {', '.join(OBJECTIVES)}")
    return loss, pull


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: TargetLaw, terms: Mapping[str, float]) -> tuple[Tensor, Tensor]:
        laws = Laws(target, logits)
        loss, pull = mix(laws, terms)
        ctx.save_for_backward(pull.addcmul_(laws.q, pull.sum(-1, keepdim=True), value=-1))
        ctx.mark_non_differentiable(laws.overlap)
        return loss, laws.overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * grad_loss[:, None], None, None


def divergence(logits: Tensor, target: TargetLaw, terms: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """The mixture `terms` {name in OBJECTIVES: weight} at n positions.

    logits: float32 or float64 [n, kept], the drafter's over the kept ids. Returns the loss [n], differentiable in
    `logits`, and the overlap [n].
    """
    loss, overlap = _Divergence.apply(logits, target, terms)
    return loss, overlap

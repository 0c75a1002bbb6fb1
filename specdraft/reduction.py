"""The sum of a divergence over a batch, which never builds a [tokens, V] tensor.

Everything is written in terms of the law index i: p[:, i] is the target's law of token i + 1. A prediction of shift s
made at position t aims at the law i = t + s, so that one chunk of laws serves every depth and its p is computed once.
Only supervised positions are gathered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from specdraft.objectives import Laws, Prediction, TargetLaw, divergence, mix

IGNORED = -100
"""The label of a token that is not supervised."""

LOG_ZERO = -1e4
"""Floor of log p: its exponential is exactly 0, and 0 * log p is 0 instead of NaN."""


class TargetHead(Protocol):
    def head(self, hidden: Tensor) -> Tensor:
        """[n, H] to logits [n, V]."""
        ...

    def restricted_head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[n, H] to the logits of `ids` alone, [n, len(ids)]."""
        ...


@dataclass(frozen=True)
class Teacher:
    """The target's laws over a batch, computed only where they are asked for.

    hidden: [batch, time, H], after the final norm. log_partition: float32 [batch, time], the log-sum-exp of the full
    logits, if it is known: a reduced vocabulary then costs its own columns only.
    """

    target: TargetHead
    hidden: Tensor
    log_partition: Tensor | None = None

    @torch.no_grad()
    def log_p(self, positions: Tensor, kept_ids: Tensor | None) -> Tensor:
        """log p at int64 [n] flat positions: float [n, kept], normalised over the full vocabulary, never the kept ids.

        float32, or float64 where the target's logits are.
        """
        hidden = self.hidden.flatten(0, 1)[positions]
        with torch.autocast(hidden.device.type, enabled=False):  # the target keeps its own precision
            if kept_ids is not None and self.log_partition is not None:
                logits = _at_least_float(self.target.restricted_head(hidden, kept_ids))
                return (logits - self.log_partition.flatten()[positions, None]).clamp_(min=LOG_ZERO)
            log_p = _at_least_float(self.target.head(hidden)).log_softmax(-1)
            return (log_p if kept_ids is None else log_p[:, kept_ids]).clamp_(min=LOG_ZERO)


def _at_least_float(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class Reduction(NamedTuple):
    """loss: scalar, differentiable. The others: detached [depths], sums over the supervised positions of each depth."""

    loss: Tensor
    losses: Tensor
    overlaps: Tensor
    counts: Tensor


@dataclass(frozen=True)
class _Plan:
    """Which hidden states meet which laws; columns of a [depths, n] tensor belong to `positions`."""

    predictions: Sequence[Prediction]
    teacher: Teacher
    terms: Mapping[str, float]
    chunk: int
    positions: Tensor  # int64 [n]: flat law indices
    supervised: Tensor  # bool [depths, n]
    weights: Tensor  # float [depths, n]: the depth's weight over the number of items; 0 where not supervised

    @cached_property
    def groups(self) -> list[list[int]]:
        """Indices of the predictions that share a head, and so one matrix product."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, prediction in enumerate(self.predictions):
            groups.setdefault((id(prediction.head), id(prediction.kept_ids)), []).append(index)
        return list(groups.values())

    def rows(self) -> list[Tensor]:
        """Each depth's hidden states [n, width]; zeros where it is not supervised, lest a NaN there spread."""
        rows = []
        for prediction, supervised in zip(self.predictions, self.supervised, strict=True):
            at = (self.positions - prediction.shift).clamp(min=0)
            rows.append(prediction.hidden.flatten(0, 1)[at].masked_fill(~supervised[:, None], 0.0))
        return rows

    def chunks(self) -> list[slice]:
        return [slice(at, at + self.chunk) for at in range(0, len(self.positions), self.chunk)]

    def laws(self, part: slice) -> Callable[[int], TargetLaw]:
        """The target's law over a chunk for any prediction, computed once for all that share their kept ids."""
        known: dict[int, TargetLaw] = {}

        def law(index: int) -> TargetLaw:
            kept_ids = self.predictions[index].kept_ids
            if id(kept_ids) not in known:
                known[id(kept_ids)] = TargetLaw(self.teacher.log_p(self.positions[part], kept_ids))
            return known[id(kept_ids)]

        return law

    def account(self, index: int, part: slice, loss: Tensor, overlap: Tensor) -> Tensor:
        """[3]: the chunk's weighted loss, and the sums of loss and overlap over the supervised positions."""
        supervised = self.supervised[index, part]
        sums = [(loss * self.weights[index, part]).sum(), (loss * supervised).sum(), (overlap * supervised).sum()]
        return torch.stack(sums)


class _WholeHeads(torch.autograd.Function):
    """The loss through plain linear heads, its gradients computed on the way forward, chunk by chunk, and kept.

    No logits outlive their chunk and none are recomputed; a weight is cast to the compute dtype once.
    Returns [depths, 3], see `_Plan.account`; only the first column has a gradient.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, learning: bool, *tensors: Tensor) -> Tensor:
        depths = len(plan.predictions)
        rows, weights = tensors[:depths], tensors[depths:]
        device = rows[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        cast = [weight.to(autocast or weight.dtype) for weight in weights]
        row_grads = [torch.empty_like(row) for row in rows] if learning else []
        weight_grads = [torch.zeros_like(w) if learning and w.requires_grad else None for w in weights]
        account = rows[0].new_zeros(depths, 3, dtype=plan.weights.dtype)
        with torch.autocast(device, enabled=False):
            for part in plan.chunks():
                law = plan.laws(part)
                for group, weight, weight_grad in zip(plan.groups, cast, weight_grads, strict=True):
                    hidden = torch.cat([rows[index][part] for index in group]).to(weight.dtype)
                    scores = _at_least_float(hidden @ weight.T)
                    for index, logits in zip(group, scores.chunk(len(group)), strict=True):
                        laws = Laws(law(index), logits)
                        loss, pull = mix(laws, plan.terms)
                        account[index] += plan.account(index, part, loss, laws.overlap)
                        if learning:
                            torch.addcmul(pull, laws.q, pull.sum(-1, keepdim=True), value=-1, out=logits)
                    if learning:
                        scale = torch.cat([plan.weights[index, part] for index in group])[:, None].to(weight.dtype)
                        score_grads = scores.to(weight.dtype)
                        for index, grad in zip(group, ((score_grads @ weight) * scale).chunk(len(group)), strict=True):
                            row_grads[index][part] = grad
                        if weight_grad is not None:
                            _add_product(weight_grad, score_grads.T, hidden * scale)
        ctx.grads = (*row_grads, *weight_grads)
        return account

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of this loss were handed out already: backward runs once")
        grads, ctx.grads = ctx.grads, None
        return None, None, *(None if g is None else g.mul_(grad[0, 0].to(g.dtype)) for g in grads)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _through_modules(plan: _Plan, rows: Sequence[Tensor]) -> Tensor:
    """The same account through the head modules, each chunk under activation checkpointing."""

    def account(part: slice, *hidden: Tensor) -> Tensor:
        law = plan.laws(part)
        sums: dict[int, Tensor] = {}
        for group in plan.groups:
            head = plan.predictions[group[0]].head
            scores = _at_least_float(head(torch.cat([hidden[index] for index in group])))
            for index, logits in zip(group, scores.chunk(len(group)), strict=True):
                sums[index] = plan.account(index, part, *divergence(logits, law(index), plan.terms))
        return torch.stack([sums[index] for index in range(len(hidden))])

    total = rows[0].new_zeros(len(rows), 3, dtype=plan.weights.dtype)
    for part in plan.chunks():
        total = total + checkpoint(account, part, *(row[part] for row in rows), use_reentrant=False)
    return total


def _whole(head: nn.Module) -> bool:
    """Whether the head is a plain linear layer without a bias, whose weight lies here as a whole."""
    if type(head) is not nn.Linear or [name for name, _ in head.named_parameters()] != ["weight"]:
        return False
    return not isinstance(head.weight, DTensor) and head.weight.shape == (head.out_features, head.in_features)


def _sharded(head: nn.Module) -> bool:
    """Whether a call of the head is a collective: a DTensor, FSDP's wrapper, or ZeRO-3's empty parameter."""
    return isinstance(head, FSDPModule | FullyShardedDataParallel) or any(
        isinstance(parameter, DTensor) or parameter.numel() == 0 for parameter in head.parameters()
    )


def law_positions(labels: Tensor, shift: int) -> Tensor:
    """Which laws a prediction of this shift is held to: bool [batch, time], indexed by the law, i = t + shift.

    labels: int64 [batch, time], the ids where supervised, IGNORED elsewhere; not shifted. Position t counts iff the
    tokens t + 1 ... t + shift + 1 are all supervised: a drafter is asked only after the target has emitted its root,
    token t + 1, so the first token of an answer is a label at shift 0 alone.
    """
    supervised = labels != IGNORED
    held = supervised.roll(-1, dims=1)
    held[:, -1:] = False
    held[:, :shift] = False
    for back in range(shift):
        held[:, back:] &= supervised[:, : supervised.shape[1] - back]
    return held


def _padded(positions: Tensor, chunk: int, sharded: bool) -> Tensor:
    """Positions with at least one chunk, and under sharding as many as the rank with the most has.

    What is added is supervised nowhere: it costs a call and gives every parameter a gradient of 0.
    """
    count = torch.tensor(max(1, -(-len(positions) // chunk)), device=positions.device)
    if sharded and torch.distributed.is_initialized():
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
    missing = max(0, (int(count) - 1) * chunk + 1 - len(positions))
    return torch.cat([positions, positions.new_zeros(missing)])


def reduce(
    predictions: Sequence[Prediction],
    teacher: Teacher,
    labels: Tensor,
    *,
    terms: Mapping[str, float],
    weights: Sequence[float],
    num_items: Tensor | float | None = None,
    chunk: int = 128,
) -> Reduction:
    """Sum the mixture `terms` over every depth and supervised position: sum_d weights[d] * sum_t loss / num_items.

    labels: int64 [batch, time], see `law_positions`. num_items: the supervised tokens of the whole step, over its
    micro-batches and ranks; None: those of `labels`. chunk: law positions that are worked on at once.
    Heads that are plain, whole linear layers get their gradients inside the forward pass. Any other is called as a
    module and recomputed; sharded ones equally often on every rank, a rank without a supervised token included.
    """
    labels = labels.to(teacher.hidden.device)
    held = torch.stack([law_positions(labels, prediction.shift).flatten() for prediction in predictions])
    positions = held.any(0).nonzero().squeeze(-1)
    real = len(positions)
    whole = all(_whole(prediction.head) for prediction in predictions)
    if not whole:
        positions = _padded(positions, chunk, any(_sharded(prediction.head) for prediction in predictions))
    supervised = held[:, positions]
    supervised[:, real:] = False
    if num_items is None:
        num_items = (labels != IGNORED).sum()
    dtype = torch.float64 if teacher.hidden.dtype == torch.float64 else torch.float32
    items = torch.as_tensor(num_items, dtype=dtype, device=labels.device).clamp(min=1)
    scale = torch.tensor(weights, dtype=dtype, device=labels.device)[:, None] / items
    plan = _Plan(predictions, teacher, terms, chunk, positions, supervised, supervised * scale)
    rows = plan.rows()
    if whole:
        heads = [predictions[group[0]].head.weight for group in plan.groups]
        account = _WholeHeads.apply(plan, torch.is_grad_enabled(), *rows, *heads)
    else:
        account = _through_modules(plan, rows)
    sums = account.detach()
    return Reduction(account[:, 0].sum(), sums[:, 1], sums[:, 2], supervised.sum(-1))

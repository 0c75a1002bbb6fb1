"""The sum of a divergence over a batch, which never builds a [tokens, V] tensor.

Everything is written in terms of the law index i: p[:, i] is the target's law of token i + 1. A prediction of shift s
made at position t aims at the law i = t + s, so that one chunk of laws serves every depth and its p is computed once.
Only supervised positions are gathered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from specdraft.objectives import (
    Mixture,
    Prediction,
    TargetLaw,
    at_least_float,
    divergence,
    feature_regression,
    sparse_law,
    truncated,
)

IGNORED = -100
"""The label of a token that is not supervised."""

CHUNK = 64
"""Law positions worked on at once, unless told: 4 depths of 151,936 ids then take 0.4 GB."""

_BLOCK = 2048
"""Rows of a weight's gradient that are converted at once."""


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
    logits, if it is known: a reduced vocabulary then costs its own columns only. Where a mixture needs more than that
    (a truncation, another temperature than 1) the full head is computed all the same: a store changes no loss.
    """

    target: TargetHead
    hidden: Tensor
    log_partition: Tensor | None = None

    @torch.no_grad()
    def law(self, positions: Tensor, labels: Tensor, kept_ids: Tensor | None, mixture: Mixture) -> TargetLaw:
        """p at int64 [n] flat positions over the kept ids, normalised over the full vocabulary, never the kept ids.

        labels: int64 [n], the ids that follow. float32, or float64 where the target's logits are.
        """
        hidden = self.hidden.flatten(0, 1)[positions]
        log_partition: Tensor | None = None
        top = None
        with torch.autocast(hidden.device.type, enabled=False):  # the target keeps its own precision
            if kept_ids is not None and self.log_partition is not None and not mixture.needs_whole_law:
                logits = self.target.restricted_head(hidden, kept_ids)
                log_partition = self.log_partition.flatten()[positions]
            else:
                logits = self.target.head(hidden)
                if mixture.temperature != 1 or kept_ids is not None:
                    logits = mixture.warped(at_least_float(logits))
                top = truncated(logits, mixture.top_k, kept_ids) if mixture.truncated else None
                if kept_ids is not None:
                    logits, log_partition = logits[:, kept_ids], logits.logsumexp(-1)
        ones = torch.ones(len(labels), 1, dtype=at_least_float(logits).dtype, device=logits.device)
        label = sparse_law(labels[:, None], ones, kept_ids) if mixture.labelled else None
        return mixture.law(logits, log_partition, label, top)


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
    mixture: Mixture
    chunk: int
    positions: Tensor  # int64 [n]: flat law indices
    labels: Tensor  # int64 [n]: the tokens that these are the laws of
    supervised: Tensor  # bool [depths, n]
    weights: Tensor  # float [depths, n]: the depth's weight over the number of items; 0 where not supervised

    @cached_property
    def groups(self) -> list[list[int]]:
        """Indices of the predictions that share a head, and so one matrix product."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, prediction in enumerate(self.predictions):
            groups.setdefault((id(prediction.head), id(prediction.kept_ids)), []).append(index)
        return list(groups.values())

    def places(self, index: int, part: slice) -> Tensor:
        """Where in the depth's flat hidden states the chunk's laws are predicted; 0 where nowhere."""
        return (self.positions[part] - self.predictions[index].shift).clamp(min=0)

    def rows(self, index: int, part: slice) -> Tensor:
        """The depth's hidden states [n, width]; zeros where it is not supervised, lest a NaN there spread."""
        rows = self.predictions[index].hidden.flatten(0, 1)[self.places(index, part)]
        return rows.masked_fill(~self.supervised[index, part, None], 0.0)

    def chunks(self) -> list[slice]:
        return [slice(at, at + self.chunk) for at in range(0, len(self.positions), self.chunk)]

    def laws(self, part: slice) -> Callable[[int], TargetLaw]:
        """The target's law over a chunk for any prediction, computed once for all that share their kept ids."""
        known: dict[int, TargetLaw] = {}

        def law(index: int) -> TargetLaw:
            kept_ids = self.predictions[index].kept_ids
            if id(kept_ids) not in known:
                where, labels = self.positions[part], self.labels[part]
                known[id(kept_ids)] = self.teacher.law(where, labels, kept_ids, self.mixture)
            return known[id(kept_ids)]

        return law

    def account(self, index: int, part: slice, loss: Tensor, overlap: Tensor) -> Tensor:
        """[3]: the chunk's weighted loss, and the sums of loss and overlap over the supervised positions."""
        supervised = self.supervised[index, part]
        sums = [(loss * self.weights[index, part]).sum(), (loss * supervised).sum(), (overlap * supervised).sum()]
        return torch.stack(sums)

    def blank(self) -> Tensor:
        """An account [depths, 3] of nothing."""
        return self.weights.new_zeros(len(self.predictions), 3)


class _WholeHeads(torch.autograd.Function):
    """The loss through plain linear heads, its gradients computed on the way forward, chunk by chunk, and kept.

    No logits outlive their chunk and none are recomputed; a weight is cast to the compute dtype once. `tensors`: the
    hidden states of each depth, then the weight of each group. Returns the account; only its first column has a
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, learning: bool, *tensors: Tensor) -> Tensor:
        device = tensors[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        grads = [_zeros(tensor) if learning and tensor.requires_grad else None for tensor in tensors]
        depths = len(plan.predictions)
        cast = [weight.to(autocast or weight.dtype) for weight in tensors[depths:]]
        rows = min(plan.chunk, len(plan.positions))
        scores = [  # one room for the logits of every chunk: to ask for it anew each time is slow
            weight.new_empty(rows * len(group), len(weight)) for group, weight in zip(plan.groups, cast, strict=True)
        ]
        account = plan.blank()
        with torch.autocast(device, enabled=False):
            for part in plan.chunks():
                law = plan.laws(part)
                for group, weight, weight_grad, room in zip(plan.groups, cast, grads[depths:], scores, strict=True):
                    hidden_grads = [grads[index] for index in group]
                    account[group] += _through_weight(plan, part, law, group, weight, hidden_grads, weight_grad, room)
        ctx.grads = grads
        return account

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of this loss were handed out already: backward runs once")
        grads, ctx.grads = ctx.grads, None
        return None, None, *(None if g is None else g.mul_(grad[0, 0].to(g.dtype)) for g in grads)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)  # so that it can be written to flat


def _through_weight(
    plan: _Plan,
    part: slice,
    law: Callable[[int], TargetLaw],
    group: Sequence[int],
    weight: Tensor,
    hidden_grads: Sequence[Tensor | None],
    weight_grad: Tensor | None,
    room: Tensor,
) -> Tensor:
    """A chunk through the head that a group shares: its account [group, 3]; the gradients are added to where asked.
    Its logits are written to `room`, [at least as many rows, kept]."""
    hidden = torch.cat([plan.rows(index, part) for index in group]).to(weight.dtype)
    scores = torch.mm(hidden, weight.T, out=room[: len(hidden)])
    learning = weight_grad is not None or any(grad is not None for grad in hidden_grads)
    sums = [
        _through_law(plan, part, law(index), index, logits, learning)
        for index, logits in zip(group, scores.chunk(len(group)), strict=True)
    ]
    scale = torch.cat([plan.weights[index, part] for index in group])[:, None]
    if weight_grad is not None:
        _add_product(weight_grad, scores.T, (hidden * scale).to(weight.dtype))
    if any(grad is not None for grad in hidden_grads):
        moved = (scores @ weight) * scale
        for index, grad, change in zip(group, hidden_grads, moved.chunk(len(group)), strict=True):
            if grad is not None:  # rows that are supervised nowhere may meet at one place, with a weight of 0
                grad.flatten(0, 1).index_add_(0, plan.places(index, part), change.to(grad.dtype))
    return torch.stack(sums)


def _through_law(plan: _Plan, part: slice, law: TargetLaw, index: int, logits: Tensor, learning: bool) -> Tensor:
    """A depth's account of a chunk, [3]; if `learning`, its unweighted gradient takes the place of `logits`.

    What it holds, a few times [chunk, kept] in float32, is gone when it returns: that is the peak of the loss.
    """
    if learning:
        loss, overlap = plan.mixture.descend(logits, law)
    else:
        loss, overlap, _ = plan.mixture.evaluate(logits, law)
    return plan.account(index, part, loss, overlap)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in blocks where that takes a conversion."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    for rows, factors in zip(total.split(_BLOCK), left.split(_BLOCK), strict=True):
        rows.add_(factors @ right)


def _through_modules(plan: _Plan) -> Tensor:
    """The same account through the head modules, each chunk under activation checkpointing."""

    def account(part: slice) -> Tensor:
        law = plan.laws(part)
        sums: dict[int, Tensor] = {}
        for group in plan.groups:
            head = plan.predictions[group[0]].head
            scores = head(torch.cat([plan.rows(index, part) for index in group]))
            for index, logits in zip(group, scores.chunk(len(group)), strict=True):
                loss, overlap = divergence(logits, law(index), plan.mixture)
                sums[index] = plan.account(index, part, loss, overlap)
        return torch.stack([sums[index] for index in range(len(plan.predictions))])

    return _checkpointed(plan, account)


def _through_features(plan: _Plan) -> Tensor:
    """The account of `feature_regression`, which no head takes part in."""

    def account(part: slice) -> Tensor:
        features = plan.teacher.hidden.flatten(0, 1)[plan.positions[part]]
        sums = []
        for index in range(len(plan.predictions)):
            loss = feature_regression(plan.rows(index, part), features).to(plan.weights.dtype)
            sums.append(plan.account(index, part, plan.mixture.regression * loss, torch.zeros_like(loss)))
        return torch.stack(sums)

    return _checkpointed(plan, account)


def _checkpointed(plan: _Plan, account: Callable[[slice], Tensor]) -> Tensor:
    total = plan.blank()
    for part in plan.chunks():
        total = total + checkpoint(account, part, use_reentrant=False)
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
    for back in range(min(shift, supervised.shape[1])):
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
    mixture: Mixture,
    weights: Sequence[float],
    num_items: Tensor | float | None = None,
    chunk: int = CHUNK,
) -> Reduction:
    """Sum the mixture over every depth and supervised position: sum_d weights[d] * sum_t loss / num_items.

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
    following = labels.roll(-1, dims=1).flatten()[positions]
    plan = _Plan(predictions, teacher, mixture, chunk, positions, following, supervised, supervised * scale)
    if whole:
        hidden = [prediction.hidden for prediction in predictions]
        heads = [predictions[group[0]].head.weight for group in plan.groups]
        account = _WholeHeads.apply(plan, torch.is_grad_enabled(), *hidden, *heads)
    else:
        account = _through_modules(plan)
    if mixture.regression:
        account = account + _through_features(plan)
    sums = account.detach()
    return Reduction(account[:, 0].sum(), sums[:, 1], sums[:, 2], supervised.sum(-1))

"""The chunked sum against a dense one: loss, gradients, which positions count, and what is never built."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdraft.objectives import Prediction, TargetLaw, divergence
from specdraft.reduction import IGNORED, Reduction, Teacher, law_positions, reduce

TERMS = {"forward_kl": 1.0, "total_variation": 0.5}


class Head:
    """A target of which only the output layer matters."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.calls: list[tuple[int, int]] = []

    def head(self, hidden: Tensor) -> Tensor:
        self.calls.append((len(hidden), len(self.weight)))
        return hidden @ self.weight.T

    def restricted_head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self.calls.append((len(hidden), len(ids)))
        return hidden @ self.weight[ids].T


class Wrapped(nn.Module):
    """A head that is no plain linear layer: it takes the way through the module."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)


class Case:
    """Two rows of 14 tokens, answers of unequal length, and one prediction for each shift."""

    def __init__(
        self,
        shifts: Sequence[int] = (1, 2, 3),
        kept: int | None = None,
        scale: float = 1.0,
        vocab: int = 23,
        dtype: torch.dtype = torch.float64,
        shared: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.target = Head(torch.randn(vocab, 6, dtype=dtype) * scale)
        self.hidden = torch.randn(2, 14, 6, dtype=dtype)
        self.labels = torch.randint(0, vocab, (2, 14))
        self.labels[0, :5] = IGNORED
        self.labels[1, :3] = self.labels[1, 6:8] = self.labels[1, 12:] = IGNORED
        self.kept_ids = None if kept is None else torch.randperm(vocab)[:kept].sort().values
        width = kept or vocab
        self.heads = [nn.Linear(4, width, bias=False, dtype=dtype) for _ in (shifts[:1] if shared else shifts)]
        for head in self.heads:
            head.weight.data.mul_(scale)
        self.states = [torch.randn(2, 14, 4, dtype=dtype, requires_grad=True) for _ in shifts]
        self.shifts = shifts
        self.log_partition = (self.hidden @ self.target.weight.T).logsumexp(-1)

    def predictions(self, wrapped: bool = False) -> list[Prediction]:
        heads: list[nn.Module] = [Wrapped(head) if wrapped else head for head in self.heads]
        heads = heads * len(self.shifts) if len(heads) == 1 else heads
        return [
            Prediction(depth, shift, state, head, self.kept_ids)
            for depth, (shift, state, head) in enumerate(zip(self.shifts, self.states, heads, strict=True), 1)
        ]

    def weights(self) -> list[float]:
        return [0.8**depth for depth in range(len(self.shifts))]

    def reduce(self, wrapped: bool = False, partition: bool = False, chunk: int = 4) -> Reduction:
        teacher = Teacher(self.target, self.hidden, self.log_partition if partition else None)
        return reduce(self.predictions(wrapped), teacher, self.labels, terms=TERMS, weights=self.weights(), chunk=chunk)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Written again without a chunk, a gather or an index of laws: for each row, position and depth in turn."""
        log_p = (self.hidden @ self.target.weight.T).log_softmax(-1)
        items = (self.labels != IGNORED).sum()
        total, overlaps, counts = torch.zeros((), dtype=self.hidden.dtype), [], []
        for prediction, weight in zip(self.predictions(), self.weights(), strict=True):
            shift, losses, met = prediction.shift, [], []
            for row in range(2):
                for t in range(14 - shift - 1):
                    if (self.labels[row, t + 1 : t + shift + 2] == IGNORED).any():
                        continue
                    law = log_p[row, t + shift]
                    law = law if self.kept_ids is None else law[self.kept_ids]
                    logits = F.linear(prediction.hidden[row, t], prediction.head.weight)
                    loss, overlap = divergence(logits[None], TargetLaw(law[None]), TERMS)
                    losses.append(loss)
                    met.append(overlap)
            total = total + weight * torch.cat(losses).sum() / items
            overlaps.append(torch.cat(met).sum())
            counts.append(len(losses))
        return total, torch.stack(overlaps), torch.tensor(counts)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        leaves = [*self.states, *(head.weight for head in self.heads)]
        return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("kept", "partition"), [(None, False), (7, False), (7, True)])
@pytest.mark.parametrize("shifts", [(0,), (1, 2, 3), (0, 2)])
def test_t25_chunked_equals_dense(
    wrapped: bool, shared: bool, kept: int | None, partition: bool, shifts: tuple[int, ...]
) -> None:
    case = Case(shifts, kept, shared=shared)
    result = case.reduce(wrapped, partition)
    loss, overlaps, counts = case.dense()
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.overlaps, overlaps, rtol=1e-12, atol=1e-12)
    assert result.counts.tolist() == counts.tolist()
    for ours, theirs in zip(case.gradients(3 * result.loss), case.gradients(3 * loss), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wrapped", [False, True])
def test_chunked_equals_dense_at_saturated_logits(wrapped: bool) -> None:
    case = Case(scale=100.0)
    result, (loss, _, _) = case.reduce(wrapped), case.dense()
    torch.testing.assert_close(result.loss, loss, rtol=1e-10, atol=0)
    for ours, theirs in zip(case.gradients(result.loss), case.gradients(loss), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_vocabulary_of_151936(wrapped: bool) -> None:
    case = Case(vocab=151_936, dtype=torch.float32)
    result, (loss, _, _) = case.reduce(wrapped), case.dense()
    torch.testing.assert_close(result.loss, loss, rtol=1e-5, atol=0)
    for ours, theirs in zip(case.gradients(result.loss), case.gradients(loss), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("wrapped", [False, True])
def test_bfloat16_autocast_keeps_float32_masters_and_sums(wrapped: bool) -> None:
    case = Case(dtype=torch.float32)
    loss, _, _ = case.dense()
    with torch.autocast("cpu", torch.bfloat16):
        result = case.reduce(wrapped)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss, loss, rtol=2e-2, atol=0)
    for ours, theirs in zip(case.gradients(result.loss), case.gradients(loss), strict=True):
        assert ours.dtype == torch.float32
        assert F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.999


def test_weights_held_in_bfloat16() -> None:
    case = Case(dtype=torch.float32)
    loss, _, _ = case.dense()
    case.heads[0].bfloat16()
    case.states = [state.detach().bfloat16().requires_grad_() for state in case.states]
    result = case.reduce()
    torch.testing.assert_close(result.loss, loss, rtol=2e-2, atol=0)
    assert [grad.dtype for grad in case.gradients(result.loss)] == [torch.bfloat16] * 4


def test_only_supervised_positions_reach_a_head_and_the_target_s_serves_every_depth() -> None:
    case = Case((1, 2, 3), 7)
    case.reduce(chunk=4)
    held = int(law_positions(case.labels, 1).sum())
    assert sum(rows for rows, _ in case.target.calls) == held
    assert max(rows for rows, _ in case.target.calls) == 4
    case.target.calls.clear()
    case.reduce(partition=True)
    assert {columns for _, columns in case.target.calls} == {7}


def test_d01_d02_which_positions_count() -> None:
    """x0..x9 with x4..x7 supervised; the law that shift s is held to at t is the law of token t + s + 1."""
    labels = torch.full((1, 10), IGNORED)
    labels[0, 4:8] = torch.arange(4, 8)

    def positions(shift: int) -> list[int]:
        return (law_positions(labels, shift)[0].nonzero().squeeze(-1) - shift).tolist()

    assert positions(0) == [3, 4, 5, 6]  # labels x4..x7: the prompt's last position predicts the answer's first token
    assert positions(1) == [3, 4, 5]  # labels x5..x7: position 3 reads the embedding of x4
    assert positions(2) == [3, 4]
    assert positions(3) == [3]  # x4 is the root there, x5 and x6 are the drafter's own
    assert positions(4) == []


def test_d02_plain_and_medusa_labels_at_an_answer_of_three() -> None:
    labels = torch.tensor([[IGNORED, IGNORED, IGNORED, 11, 12]])  # P1 P2 P3 R1 R2
    assert law_positions(labels, 0).nonzero().tolist() == [[0, 2], [0, 3]]
    assert law_positions(labels, 1).nonzero().tolist() == [[0, 3]]


def test_law_positions_at_the_edges_of_a_fully_supervised_row() -> None:
    labels = torch.zeros(2, 4, dtype=torch.long)
    assert law_positions(labels, 0).tolist() == [[True, True, True, False]] * 2
    assert law_positions(labels, 2).tolist() == [[False, False, True, False]] * 2
    assert not law_positions(labels, 5).any()


def test_a_gap_between_two_answers_ends_the_run() -> None:
    labels = torch.tensor([[IGNORED, 1, 2, IGNORED, 4, 5, 6]])
    assert (law_positions(labels, 2)[0].nonzero().squeeze(-1) - 2).tolist() == [3]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("padding", [0, 50])
def test_t01_padding_changes_nothing(wrapped: bool, padding: int) -> None:
    case = Case((1, 2))
    expected = case.reduce(wrapped)
    grads = case.gradients(expected.loss)
    case.hidden = F.pad(case.hidden, (0, 0, 0, padding), value=float("nan"))
    case.labels = F.pad(case.labels, (0, padding), value=IGNORED)
    leaves = case.states
    case.states = [F.pad(state, (0, 0, 0, padding), value=float("nan")) for state in leaves]
    result = case.reduce(wrapped)
    case.states = leaves
    torch.testing.assert_close(result.loss, expected.loss)
    for ours, theirs in zip(case.gradients(result.loss), grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("wrapped", [False, True])
def test_t03_masked_positions_get_no_gradient_at_any_depth(wrapped: bool) -> None:
    case = Case((1, 2, 3))
    *states, _ = case.gradients(case.reduce(wrapped).loss)
    for shift, grad in zip(case.shifts, states, strict=True):
        held = law_positions(case.labels, shift).roll(-shift, dims=1)
        assert (grad[held].abs().sum(-1) > 0).all()
        assert (grad[~held] == 0).all()


def test_t05_every_head_has_a_gradient_of_its_own() -> None:
    case = Case((1, 2, 3, 4), shared=False)
    result = case.reduce()
    assert len(result.losses) == 4
    *_, a, b, c, d = case.gradients(result.loss)
    assert all(grad.norm() > 0 for grad in (a, b, c, d))


@pytest.mark.parametrize("wrapped", [False, True])
def test_d19_t06_a_batch_without_a_supervised_token_gives_zero_and_zero_gradients(wrapped: bool) -> None:
    case = Case((1, 2))
    case.labels[:] = IGNORED
    result = case.reduce(wrapped)
    assert result.loss.item() == 0
    assert result.counts.tolist() == [0, 0]
    assert all((grad == 0).all() for grad in case.gradients(result.loss))  # and none is missing: DDP waits for each


def test_no_gradients_are_computed_when_none_is_wanted() -> None:
    case = Case()
    with torch.no_grad():
        quiet = case.reduce()
    assert not quiet.loss.requires_grad
    torch.testing.assert_close(quiet.loss, case.reduce().loss)


def test_backward_runs_once() -> None:
    loss = Case().reduce().loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        loss.backward()


def test_a_frozen_head_gets_no_gradient() -> None:
    case = Case()
    case.heads[0].requires_grad_(False)
    case.reduce().loss.backward()
    assert case.heads[0].weight.grad is None
    assert all(state.grad is not None for state in case.states)

"""The chunked sum against a dense one: loss, gradients, which positions count, and what is never built."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdraft.objectives import TERMS, Mixture, Prediction
from specdraft.reduction import IGNORED, Reduction, Teacher, law_positions, reduce

MIXTURE = Mixture({"forward_kl": 1.0, "total_variation": 0.5})
MIXTURES = {
    **{name: Mixture({name: 1.0}, top_k=3) for name in TERMS},
    "all": Mixture({name: 0.3 + index for index, name in enumerate(TERMS)}, top_k=2),
    "all at 0.6": Mixture({name: 0.3 + index for index, name in enumerate(TERMS)}, top_k=4, temperature=0.6),
    "acceptance at 2": Mixture({"negative_log_acceptance": 1.0}, temperature=2.0),
}


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


def definitions(
    whole: Tensor, kept: Tensor, log_q: Tensor, label: Tensor, top_k: int
) -> dict[str, Callable[[], Tensor]]:
    """Every divergence as its docstring says, of log p over the whole vocabulary and log q over the kept ids."""
    log_p = whole[:, kept]
    p, q = log_p.exp(), log_q.exp()
    overlap, mass, m = torch.minimum(p, q).sum(-1), p.sum(-1), (p + q) / 2
    lean = torch.exp(-3 * overlap.detach())

    def kl() -> Tensor:
        return (p * (log_p - log_q)).sum(-1) - mass * mass.log()

    def truncated() -> Tensor:
        top = whole.exp() * (whole >= whole.sort(descending=True).values[:, top_k - 1, None])
        return -((top / top.sum(-1, keepdim=True))[:, kept] * log_q).sum(-1)

    return {
        "forward_kl": kl,
        "reverse_kl": lambda: (q * (log_q - log_p)).sum(-1),
        "jensen_shannon": lambda: ((p * (p / m).log() + q * (q / m).log()).sum(-1) + (1 - mass) * math.log(2)) / 2,
        "total_variation": lambda: 1 - overlap,
        "negative_log_acceptance": lambda: -overlap.log(),
        "lk_hybrid": lambda: lean * kl() + (1 - lean) * (1 - overlap),
        "topk_cross_entropy": truncated,
        "label_cross_entropy": lambda: -(label * log_q).sum(-1),
    }


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
        width: int = 4,
    ) -> None:
        torch.manual_seed(0)
        self.target = Head(torch.randn(vocab, 6, dtype=dtype) * scale)
        self.hidden = torch.randn(2, 14, 6, dtype=dtype)
        self.labels = torch.randint(0, vocab, (2, 14))
        self.labels[0, :5] = IGNORED
        self.labels[1, :3] = self.labels[1, 6:8] = self.labels[1, 12:] = IGNORED
        self.kept_ids = None if kept is None else torch.randperm(vocab)[:kept].sort().values
        columns = kept or vocab
        self.heads = [nn.Linear(width, columns, bias=False, dtype=dtype) for _ in (shifts[:1] if shared else shifts)]
        for head in self.heads:
            head.weight.data.mul_(scale)
        self.states = [torch.randn(2, 14, width, dtype=dtype, requires_grad=True) for _ in shifts]
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

    def reduce(
        self,
        wrapped: bool = False,
        partition: bool = False,
        chunk: int = 4,
        mixture: Mixture = MIXTURE,
        num_items: float | None = None,
    ) -> Reduction:
        teacher = Teacher(self.target, self.hidden, self.log_partition if partition else None)
        predictions, weights = self.predictions(wrapped), self.weights()
        return reduce(
            predictions, teacher, self.labels, mixture=mixture, weights=weights, num_items=num_items, chunk=chunk
        )

    def dense(self, mixture: Mixture = MIXTURE) -> tuple[Tensor, Tensor, Tensor]:
        """Written again without a chunk or an index of laws, every term as it is defined: loss, overlaps, counts."""
        log_target = (self.hidden @ self.target.weight.T / mixture.temperature).log_softmax(-1)
        kept = torch.arange(log_target.shape[-1]) if self.kept_ids is None else self.kept_ids
        total, overlaps, counts = torch.zeros((), dtype=self.hidden.dtype), [], []
        for prediction, weight in zip(self.predictions(), self.weights(), strict=True):
            shift = prediction.shift
            held = [
                (row, t)
                for row, t in product(range(2), range(14 - shift - 1))
                if (self.labels[row, t + 1 : t + shift + 2] != IGNORED).all()
            ]
            rows, times = torch.tensor(held).unbind(1)
            state, whole = prediction.hidden[rows, times], log_target[rows, times + shift]
            logits = F.linear(state, prediction.head.weight) / mixture.temperature
            label = self.labels[rows, times + shift + 1, None] == kept
            losses = definitions(whole, kept, logits.log_softmax(-1), label, mixture.top_k)
            wanted = self.hidden[rows, times + shift]
            losses["feature_regression"] = lambda s=state, w=wanted: F.smooth_l1_loss(s, w, reduction="none").mean(-1)
            total = total + weight * sum(share * losses[name]().sum() for name, share in mixture.terms.items())
            overlaps.append((1 - losses["total_variation"]()).sum())
            counts.append(len(held))
        return total / (self.labels != IGNORED).sum(), torch.stack(overlaps), torch.tensor(counts)

    def gradients(self, loss: Tensor, unused: bool = False) -> list[Tensor]:
        """`unused`: zeros for what the loss does not depend on, which is otherwise an error."""
        leaves = [*self.states, *(head.weight for head in self.heads)]
        return list(torch.autograd.grad(loss, leaves, materialize_grads=unused))


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("kept", "partition"), [(None, False), (7, False), (7, True)])
def test_every_term_and_mixture_has_the_naive_loss_and_gradients(
    name: str, wrapped: bool, kept: int | None, partition: bool
) -> None:
    """With a stored log_partition too: a truncation or a temperature then has the full head computed."""
    case, mixture = Case(kept=kept, width=6), MIXTURES[name]
    ours, theirs = case.reduce(wrapped, partition, mixture=mixture), case.dense(mixture)[0]
    torch.testing.assert_close(ours.loss, theirs, rtol=1e-11, atol=1e-12)
    for mine, other in zip(case.gradients(2 * ours.loss), case.gradients(2 * theirs, unused=True), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    whole_law = mixture.temperature != 1 or "topk_cross_entropy" in mixture.terms
    assert case.target.calls[0][1] == (23 if whole_law or not partition else 7)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_the_chunk_changes_nothing(wrapped: bool, chunk: int) -> None:
    case, mixture = Case(kept=7, width=6), MIXTURES["all at 0.6"]
    ours, theirs = (case.reduce(wrapped, chunk=size, mixture=mixture) for size in (chunk, 4))
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(case.gradients(ours.loss), case.gradients(theirs.loss), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("wrapped", [False, True])
def test_num_items_divides_every_depth_and_its_weight_decays_it(wrapped: bool) -> None:
    case, mixture = Case((1, 2, 3), width=6), MIXTURES["all"]
    result = case.reduce(wrapped, mixture=mixture, num_items=40.0)
    expected = sum(weight * float(loss) for weight, loss in zip((1, 0.8, 0.64), result.losses, strict=True)) / 40
    assert result.loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_label_that_is_not_kept_adds_nothing_and_is_counted(wrapped: bool) -> None:
    case, mixture = Case((1,), kept=7), MIXTURES["label_cross_entropy"]
    held = law_positions(case.labels, 1).roll(1, 1)  # by the label, no longer by the law before it
    dropped = next(v for v in range(23) if v not in case.kept_ids.tolist())
    case.labels[held] = dropped
    result = case.reduce(wrapped, mixture=mixture)
    assert result.loss.item() == 0
    assert all((grad == 0).all() for grad in case.gradients(result.loss))
    assert result.counts.tolist() == [int(held.sum())]
    row, time = held.nonzero()[0].tolist()
    case.labels[row, time] = case.kept_ids[3]
    log_q = F.linear(case.states[0][row, time - 2], case.heads[0].weight).log_softmax(-1)
    expected = -log_q[3] / (case.labels != IGNORED).sum()
    torch.testing.assert_close(case.reduce(wrapped, mixture=mixture).loss, expected)


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation gave back, in elements."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return found


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kept", [None, 90])
def test_t25_no_tensor_of_all_tokens_and_ids_is_ever_built(wrapped: bool, shared: bool, kept: int | None) -> None:
    case, mixture = Case((1, 2), kept, vocab=97, shared=shared, width=6), MIXTURES["all at 0.6"]
    tokens = int(law_positions(case.labels, 1).sum())
    with Allocations() as seen:
        case.reduce(wrapped, chunk=2, mixture=mixture).loss.backward()
    assert 2 * (kept or 97) <= seen.largest <= 6 * 97 < tokens * (kept or 97)  # a chunk's logits; a head's weight
    with Allocations() as dense:
        case.dense(mixture)
    assert dense.largest >= tokens * (kept or 97)


def test_hidden_states_of_any_layout_get_their_gradient() -> None:
    case = Case()
    case.states = [
        state.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for state in case.states
    ]
    for ours, theirs in zip(case.gradients(case.reduce().loss), case.gradients(case.dense()[0]), strict=True):
        torch.testing.assert_close(ours, theirs)


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
    case = Case((1, 2), vocab=151_936, dtype=torch.float32)
    case.labels[:, 9:] = IGNORED
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

"""Greedy decoding's rounds without decoding: what a drafter would have been accepted, read off the target's answers.

A greedy target gives the same answer whatever is drafted. So one pass of a drafter over the answers, at all depths and
teacher-forced, says at which rank its law at each depth has the answer's token, given that what was drafted above it
was right; and that is all that the rounds of a chain or of a static tree depend on. They are then walked, not decoded,
for as many shapes as one likes, and come out as decoding's own, to the count (in half precision: but for rounding
where two guesses all but tie). A dynamic tree is shaped by the scores of wrong guesses too, and a sampled draft is
drawn: these are decoded. What one pass gives for sampling is `overlap_d`, which is not alpha.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdraft.causal import Observation
from specdraft.config import SpecdraftError
from specdraft.decoding import Round, pad
from specdraft.dice import SeededDice
from specdraft.drafters.base import TrainableDrafter
from specdraft.drafters.recurrence import RecurrentDrafter
from specdraft.drafters.shapes import Chain, Choice, DynamicTree, Shape
from specdraft.evaluation.costs import depth_of
from specdraft.evaluation.report import Estimate
from specdraft.evaluation.statistics import Array, Bootstrap
from specdraft.objectives import Prediction
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import verify
from specdraft.warping import Warp

NEVER = np.iinfo(np.int32).max
"""Rank of a token that the drafter cannot draft."""
_ROWS = 8  # answers read at once
_CHUNK = 512  # positions whose logits are held at once
Progress = Callable[[int], None]
"""Called with the number of prompts done since the last call."""


@dataclass(frozen=True)
class Trace:
    """What the target answers by itself; a list a prompt each."""

    prompts: list[list[int]]
    answers: list[list[int]]
    after: list[list[int]]
    """What it would have gone on to say, ends ignored: the last round's drafts are verified against it."""

    def batches(self) -> Iterator[list[int]]:
        """Indices of the prompts, a few rows of similar length at a time."""
        lengths = [len(p) + len(a) for p, a in zip(self.prompts, self.answers, strict=True)]
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        yield from (order[start : start + _ROWS] for start in range(0, len(order), _ROWS))

    def row(self, index: int) -> list[int]:
        return [*self.prompts[index], *self.answers[index], *self.after[index]]


@torch.no_grad()
def greedy_trace(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    depth: int,
    progress: Progress | None = None,
) -> Trace:
    """The target's own greedy answers as a trace from which shapes up to `depth` deep are replayed.

    The target says `depth` - 1 tokens more behind each answer. Raises SpecdraftError for an empty prompt or answer.
    """
    if empty := [i for i, (p, a) in enumerate(zip(prompts, answers, strict=True)) if not p or not a]:
        raise SpecdraftError(f"prompt {empty[0]} or its answer has no token; every one needs at least one to be traced")
    after: list[list[int]] = [[] for _ in prompts]
    trace = Trace([*map(list, prompts)], [*map(list, answers)], after)
    for batch in trace.batches():
        if depth > 1:
            said = _said(target, [trace.row(index) for index in batch], depth - 1)
            for index, tokens in zip(batch, said, strict=True):
                after[index] += tokens
        if progress is not None:
            progress(len(batch))
    return trace


def _said(target: FrozenTarget, rows: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The `count` tokens that the target says next, whatever ends it has."""
    tokens, mask = pad(rows, target.device)
    session, none = target.session((), len(rows)), DraftTree.empty(len(rows), target.device)
    seen = session.read(tokens, mask)
    last = seen.hidden[torch.arange(len(rows), device=mask.device), mask.sum(1) - 1]
    said = [target.head(last).argmax(-1)]
    while len(said) < count:
        ids = target.head(session.extend(said[-1], none).hidden).argmax(-1)
        session.commit(verify(none, ids, SeededDice(range(len(rows)))))
        said.append(ids[:, 0])
    return torch.stack(said, 1).tolist()


@dataclass(frozen=True)
class Ranks:
    """At which rank a drafter's laws have the tokens of a trace's answers."""

    depth: int
    """How deep it drafts, of what was asked for."""
    by_prompt: list[Array]
    """int32 [answer - 1, depth] a prompt: below the answer's token s as root, the rank (0: the likeliest) of token
    s + d under the law at depth d, the tokens between being the answer's; NEVER for one that cannot be drafted."""
    agreement: float
    """Share of the answers' tokens that are the target's likeliest in this pass: 1, but for rounding, or they are not
    its greedy answers."""

    def rounds(self, shape: Shape) -> list[list[Round]]:
        """The rounds that greedy decoding makes of each prompt with a chain or a static tree.

        Raises SpecdraftError for a dynamic tree, and for a shape that is deeper than was read.
        """
        if isinstance(shape, DynamicTree):
            raise SpecdraftError("a dynamic tree cannot be replayed: its shape hangs on the scores of wrong guesses")
        if isinstance(shape, Choice) or (isinstance(shape, Chain) and shape.stop_below > 0):
            raise SpecdraftError("a draft that adapts cannot be replayed: the trace has no confidences and no rounds")
        if depth_of(shape) > self.depth:
            raise SpecdraftError(
                f"a shape {depth_of(shape)} tokens deep was asked of a replay that is {self.depth} deep: ask for less, "
                "or for a drafter that drafts deeper"
            )
        chain = isinstance(shape, Chain)
        paths = {(0,) * depth for depth in range(1, shape.gamma + 1)} if chain else set(shape.paths)  # type: ignore[union-attr]
        inner = {path[:-1] for path in paths}
        return [_walk(ranks.tolist(), paths, inner) for ranks in self.by_prompt]


Path = tuple[int, ...]


def _walk(ranks: list[list[int]], paths: set[Path], inner: set[Path]) -> list[Round]:
    """One answer's rounds, from ranks [answer - 1][depth]; a chain is the static tree of the likeliest tokens."""
    rounds: list[Round] = []
    start = 0
    while start < len(ranks):
        path: Path = ()
        for rank in ranks[start]:
            if (*path, rank) not in paths:
                break
            path = (*path, rank)
        refused = path in inner  # something stood below the accepted path, in vain
        emitted = min(len(path) + 1, len(ranks) - start)
        chances = (1.0,) * len(path) + (0.0,) * refused
        rounds.append(Round(len(chances), len(path), emitted, len(paths), chances))
        start += emitted
    return rounds


@torch.no_grad()
def read_ranks(
    drafter: TrainableDrafter, target: FrozenTarget, trace: Trace, depth: int, progress: Progress | None = None
) -> Ranks:
    """One pass of the drafter, attached to `target`, over a greedy trace, up to `depth` deep.

    A recurrent drafter is unrolled that deep, whatever it was trained for, as it is in decoding; one with a head or a
    module a depth is as deep as it has them; the one law of an LM or an early exit serves every depth.
    """
    found: list[Array] = [np.empty(0)] * len(trace.prompts)
    deepest, agreed, said = depth, 0, 0
    for batch in trace.batches():
        seen, predictions = _read(drafter, target, [trace.row(index) for index in batch], depth)
        columns = {}
        for prediction in predictions:
            spans = [_Span.of(trace, index, prediction, depth) for index in batch]
            columns[prediction.depth] = _columns(prediction, seen.tokens, spans)
        shared = predictions[0].shift == 0
        deepest = depth if shared else len(predictions)
        for place, index in enumerate(batch):
            count = len(trace.answers[index]) - 1
            rows = [
                columns[1][place][d : d + count] if shared else columns[d + 1][place][:count] for d in range(deepest)
            ]
            found[index] = np.stack(rows, 1)
        own = Prediction(1, 0, seen.hidden, target.output_head(), None)
        spans = [_Span(len(trace.prompts[index]) - 1, len(trace.answers[index]), 1) for index in batch]
        for ranks in _columns(own, seen.tokens, spans):
            agreed, said = agreed + int((ranks == 0).sum()), said + len(ranks)
        if progress is not None:
            progress(len(batch))
    return Ranks(deepest, found, agreed / max(said, 1))


class _Span(NamedTuple):
    """Places of one row at which a prediction is read: from `start`, so many of them, each for the token `ahead`."""

    start: int
    places: int
    ahead: int

    @classmethod
    def of(cls, trace: Trace, index: int, prediction: Prediction, depth: int) -> "_Span":
        """The laws at the prediction's depth below every root of an answer; of an only one, those at all depths."""
        roots = len(trace.answers[index]) - 1
        start = len(trace.prompts[index]) + prediction.depth - 1 - prediction.shift
        return cls(start, roots + (depth - 1 if prediction.shift == 0 and roots else 0), prediction.shift + 1)


def _columns(prediction: Prediction, tokens: Tensor, spans: Sequence[_Span]) -> list[Array]:
    """The ranks of the tokens that really came, int32 [count] a row, in the order of the spans' places."""
    width, device = tokens.shape[1], tokens.device
    index = torch.cat([row * width + torch.arange(s.start, s.start + s.places) for row, s in enumerate(spans)])
    ahead = torch.repeat_interleave(torch.tensor([s.ahead for s in spans]), torch.tensor([s.places for s in spans]))
    wanted, hidden = tokens.flatten()[(index + ahead).to(device)], prediction.hidden.flatten(0, 1)
    ranks = [
        _rank(prediction.logits(hidden[part]), wanted[part_wanted], prediction.kept_ids)
        for part, part_wanted in zip(
            index.to(device).split(_CHUNK), torch.arange(len(wanted), device=device).split(_CHUNK), strict=True
        )
    ]
    whole = torch.cat(ranks).cpu().numpy().astype(np.int32) if ranks else np.empty(0, np.int32)
    return np.split(whole, np.cumsum([s.places for s in spans])[:-1])


def _rank(logits: Tensor, wanted: Tensor, kept_ids: Tensor | None) -> Tensor:
    """The rank of ids [n] under logits [n, kept]; of equal logits the first column's is likelier, as argmax has it."""
    kept = logits.shape[-1]
    column = wanted if kept_ids is None else torch.searchsorted(kept_ids, wanted)
    known = column < kept
    column = column.clamp(max=kept - 1)
    if kept_ids is not None:
        known &= kept_ids[column] == wanted
    own, columns = logits.gather(-1, column[:, None]), torch.arange(kept, device=logits.device)
    above = (logits > own) | ((logits == own) & (columns < column[:, None]))
    return above.sum(-1).masked_fill(~known, NEVER)


def _read(
    drafter: TrainableDrafter, target: FrozenTarget, rows: Sequence[Sequence[int]], depth: int
) -> tuple[Observation, list[Prediction]]:
    """What the target sees in some rows, and what the drafter predicts of them, up to `depth` deep."""
    tokens, mask = pad(rows, target.device)
    seen = target.observe(tokens, mask, drafter.taps)
    with unrolled(drafter, depth):
        return seen, [prediction for prediction in drafter.predict(tokens, seen) if prediction.depth <= depth]


@contextmanager
def unrolled(drafter: TrainableDrafter, depth: int) -> Iterator[None]:
    """A recurrent drafter predicts `depth` deep, which its weights do at any depth, and not as deep as it trained."""
    if not isinstance(drafter, RecurrentDrafter):
        yield
        return
    held, drafter.config.unroll = drafter.config.unroll, depth
    try:
        yield
    finally:
        drafter.config.unroll = held


@dataclass(frozen=True)
class Overlaps:
    """sum_x min(p, q) below every root in the answers, teacher-forced: `overlap_d`, of the positions that training
    supervises. Not alpha, which counts only where decoding comes by, below accepted parents."""

    sums: Array
    """float [prompts, depth]"""
    counts: Array
    """float [prompts, depth]"""

    @property
    def depth(self) -> int:
        return self.sums.shape[1]

    def by_depth(self, bootstrap: Bootstrap) -> list[Estimate]:
        return [bootstrap.ratio(self.sums[:, d], self.counts[:, d]) for d in range(self.depth)]


@torch.no_grad()
def read_overlaps(
    drafter: TrainableDrafter,
    target: FrozenTarget,
    trace: Trace,
    warp: Warp,
    depth: int,
    progress: Progress | None = None,
) -> Overlaps:
    """One pass of the drafter over answers that were sampled by `warp`, which warps p and q alike. A drafter with one
    law for every depth has one overlap."""
    sums, counts = (np.zeros((len(trace.prompts), depth)) for _ in range(2))
    deepest = 0
    for batch in trace.batches():
        seen, predictions = _read(drafter, target, [trace.row(index) for index in batch], depth)
        deepest = max(prediction.depth for prediction in predictions)
        for place, index in enumerate(batch):
            first, count = len(trace.prompts[index]) - 1, len(trace.answers[index])
            for part in torch.arange(first, first + count, device=seen.tokens.device).split(_CHUNK):
                p = warp(target.head(seen.hidden[place, part]))
                for prediction in predictions:
                    kept = part >= first + prediction.shift  # the root is a token of the answer
                    q = warp(prediction.logits(prediction.hidden[place, part[kept] - prediction.shift]))
                    ids = slice(q.shape[-1]) if prediction.kept_ids is None else prediction.kept_ids
                    sums[index, prediction.depth - 1] += float(torch.minimum(p[kept][:, ids], q).sum())
                    counts[index, prediction.depth - 1] += int(kept.sum())
        if progress is not None:
            progress(len(batch))
    return Overlaps(sums[:, :deepest], counts[:, :deepest])

"""Rounds to figures: counts by prompt and depth, ratios of their sums, bootstrap intervals over prompts.

Every figure is a ratio of two sums over prompts, so one set of resampled prompt weights serves them all.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specdraft.decoding import Round
from specdraft.evaluation.report import Acceptance, DepthFigures, Estimate, Slice

Array = NDArray[np.float64]

POSITION_EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048)
LENGTH_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Bootstrap:
    """Resamples of `count` prompts (or batches): weights float [samples, count], fixed by the seed."""

    def __init__(self, count: int, samples: int, seed: int, level: float = 0.95) -> None:
        generator = np.random.default_rng(seed)
        self._weights: Array = generator.multinomial(count, np.full(count, 1 / count), size=samples).astype(np.float64)
        self._tails = (50 * (1 - level), 50 * (1 + level))

    def ratio(self, top: Array, bottom: Array) -> Estimate:
        """sum(top) / sum(bottom), both float [count], with its percentile interval."""
        return self.quotient((top, bottom))

    def quotient(self, over: tuple[Array, Array], under: tuple[Array, Array] | None = None) -> Estimate:
        """The ratio `over`, or the ratio of ratios `over` / `under` (paired: both see the same resamples).

        Resamples in which a denominator is 0 are left out.
        """
        parts = list(over) if under is None else [over[0], over[1], under[1], under[0]]  # a/b, or (a/b) / (c/d)
        tops, bottoms = parts[::2], parts[1::2]
        whole = [part.sum() for part in parts]
        if any(total == 0 for total in whole[1::2]):
            return Estimate(value=None)
        value = float(np.prod(whole[::2]) / np.prod(whole[1::2]))
        if np.count_nonzero(np.all([bottom != 0 for bottom in bottoms], axis=0)) < 2:
            return Estimate(value=value)
        numerator = np.prod([self._weights @ top for top in tops], axis=0)
        denominator = np.prod([self._weights @ bottom for bottom in bottoms], axis=0)
        resampled = numerator[denominator != 0] / denominator[denominator != 0]
        low, high = np.percentile(resampled, self._tails)
        return Estimate(value=value, low=float(low), high=float(high))


@dataclass(frozen=True)
class Counts:
    """Sums over the rounds of each prompt: float [prompts], or float [prompts, depth] (column d - 1 is depth d)."""

    rounds: Array
    proposed: Array
    accepted: Array
    emitted: Array
    reached: Array
    """[prompts, depth]: rounds that accepted depth d - 1."""
    offers: Array
    """[prompts, depth]: of these, rounds that were offered a candidate at depth d."""
    survived: Array
    """[prompts, depth]: of these, rounds that accepted depth d."""
    chances: Array
    """[prompts, depth]: sum of the analytic acceptance over the offers."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[Round]]) -> "Counts":
        depth = max((r.offered for row in rows for r in row), default=0)
        by_prompt = np.zeros((4, len(rows)))
        by_depth = np.zeros((4, len(rows), depth))
        for row, rounds in enumerate(rows):
            for r in rounds:
                by_prompt[:, row] += 1, r.proposed, r.accepted, r.emitted
                by_depth[0, row, : r.accepted + 1] += 1
                by_depth[1, row, : r.offered] += 1
                by_depth[2, row, : r.accepted] += 1
                by_depth[3, row, : r.offered] += r.chances
        return cls(*by_prompt, *by_depth)

    def tau(self, bootstrap: Bootstrap) -> Estimate:
        return bootstrap.ratio(self.accepted + self.rounds, self.rounds)

    def alpha(self, bootstrap: Bootstrap) -> Estimate:
        return bootstrap.ratio(self.survived.sum(1), self.offers.sum(1))

    def analytic_alpha(self, bootstrap: Bootstrap) -> Estimate:
        return bootstrap.ratio(self.chances.sum(1), self.offers.sum(1))

    def depths(self, bootstrap: Bootstrap) -> list[DepthFigures]:
        return [
            DepthFigures(
                depth=d + 1,
                offers=int(self.offers[:, d].sum()),
                offer=bootstrap.ratio(self.offers[:, d], self.reached[:, d]),
                alpha=bootstrap.ratio(self.survived[:, d], self.offers[:, d]),
                analytic_alpha=bootstrap.ratio(self.chances[:, d], self.offers[:, d]),
                reach=bootstrap.ratio(self.survived[:, d], self.rounds),
            )
            for d in range(self.offers.shape[1])
        ]


def acceptance(
    rows: Sequence[Sequence[Round]],
    prompt_lengths: Sequence[int],
    categories: Sequence[str | None],
    bootstrap: Bootstrap,
    trained_length: int | None = None,
) -> Acceptance:
    """All acceptance figures of one system; `rows` holds each prompt's rounds in order."""
    counts = Counts.of(rows)
    histogram = np.bincount([r.emitted for row in rows for r in row], minlength=1)
    return Acceptance(
        rounds=int(counts.rounds.sum()),
        proposed=int(counts.proposed.sum()),
        accepted=int(counts.accepted.sum()),
        tau=counts.tau(bootstrap),
        emitted_per_pass=bootstrap.ratio(counts.emitted, counts.rounds),
        alpha=counts.alpha(bootstrap),
        analytic_alpha=counts.analytic_alpha(bootstrap),
        acceptance_ratio=bootstrap.ratio(counts.accepted, counts.proposed),
        depths=counts.depths(bootstrap),
        slices=[
            *_by_category(rows, categories, bootstrap),
            *_by_position(rows, bootstrap),
            *_by_prompt_length(rows, prompt_lengths, trained_length, bootstrap),
        ],
        emitted_histogram=[int(count) for count in histogram],
    )


def _slice(
    kind: Literal["category", "output position", "prompt length"],
    name: str,
    rows: Sequence[Sequence[Round]],
    bootstrap: Bootstrap,
) -> Slice | None:
    counts = Counts.of(rows)
    if not counts.rounds.sum():
        return None
    return Slice(
        kind=kind,
        name=name,
        prompts=int(np.count_nonzero(counts.rounds)),
        rounds=int(counts.rounds.sum()),
        tau=counts.tau(bootstrap),
        alpha=counts.alpha(bootstrap),
        analytic_alpha=counts.analytic_alpha(bootstrap),
    )


def _by_category(
    rows: Sequence[Sequence[Round]], categories: Sequence[str | None], bootstrap: Bootstrap
) -> list[Slice]:
    parts = (
        (name, [row if category == name else [] for row, category in zip(rows, categories, strict=True)])
        for name in sorted({name for name in categories if name is not None})
    )
    return _present(_slice("category", name, part, bootstrap) for name, part in parts)


def _by_position(rows: Sequence[Sequence[Round]], bootstrap: Bootstrap) -> list[Slice]:
    """Rounds by the place in the answer of the first token that they emit (0: the token that belongs to no round)."""
    starts = [np.cumsum([1, *(r.emitted for r in row)])[:-1] for row in rows]
    parts = (
        (
            name,
            [
                [r for r, start in zip(row, at, strict=True) if inside(start)]
                for row, at in zip(rows, starts, strict=True)
            ],
        )
        for name, inside in _spans(POSITION_EDGES)
    )
    return _present(_slice("output position", name, part, bootstrap) for name, part in parts)


def _by_prompt_length(
    rows: Sequence[Sequence[Round]], lengths: Sequence[int], trained_length: int | None, bootstrap: Bootstrap
) -> list[Slice]:
    """Prompts by their number of tokens; the drafter's trained length is an edge of its own (X-07)."""
    edges = sorted({*LENGTH_EDGES, *([] if trained_length is None else [trained_length + 1])})
    parts = (
        (name, [row if inside(length) else [] for row, length in zip(rows, lengths, strict=True)])
        for name, inside in _spans(edges)
    )
    return _present(_slice("prompt length", name, part, bootstrap) for name, part in parts)


def _spans(edges: Sequence[int]) -> Iterator[tuple[str, Callable[[float], bool]]]:
    for low, high in pairwise((*edges, math.inf)):
        name = f"{low} and on" if high == math.inf else f"{low} to {high - 1}"
        yield name, lambda value, low=low, high=high: low <= value < high  # type: ignore[misc]


def _present(slices: Iterable[Slice | None]) -> list[Slice]:
    return [found for found in slices if found is not None]

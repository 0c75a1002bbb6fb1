"""Rounds to figures: counts by prompt and depth, ratios of their sums, bootstrap intervals over prompts.

Every figure is a ratio of two sums over prompts, so one set of resampled prompt weights serves them all.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdraft.decoding import Round
from specdraft.evaluation.report import Acceptance, Bin, Calibration, DepthFigures, Estimate, Slice, SliceKind
from specdraft.reliability import ACCEPTED, BINS, CONFIDENCE, NODES, TARGET

Array = NDArray[Any]

POSITION_EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048)
LENGTH_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Bootstrap:
    """Resamples of prompts (or batches): weights float [samples, count], fixed by the seed.

    `units`: how many there are; or, of each, its conversation: conversations are drawn, and all turns of one with it.
    """

    def __init__(self, units: int | Sequence[int], samples: int, seed: int, level: float = 0.95) -> None:
        owners = np.arange(units) if isinstance(units, int) else np.unique(units, return_inverse=True)[1]
        count = int(owners.max()) + 1
        drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=samples)
        self._owners: Array = owners
        self._weights: Array = drawn.astype(float)[:, owners]
        self._tails = (50 * (1 - level), 50 * (1 + level))

    def _few(self, contribute: Array) -> bool:
        """Whether those that `contribute`, bool [count], are turns of fewer than two conversations."""
        return len(np.unique(self._owners[contribute])) < 2

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
        if self._few(np.all([bottom != 0 for bottom in bottoms], axis=0)):
            return Estimate(value=value)
        numerator = np.prod([self._weights @ top for top in tops], axis=0)
        denominator = np.prod([self._weights @ bottom for bottom in bottoms], axis=0)
        resampled = numerator[denominator != 0] / denominator[denominator != 0]
        low, high = np.percentile(resampled, self._tails)
        return Estimate(value=value, low=float(low), high=float(high))

    def difference(self, one: tuple[Array, Array], other: tuple[Array, Array]) -> Estimate:
        """The ratio `one` minus the ratio `other`, each of sums of float [count]; paired, as `quotient` is."""
        sums = [part.sum() for part in (*one, *other)]
        if sums[1] == 0 or sums[3] == 0:
            return Estimate(value=None)
        value = float(sums[0] / sums[1] - sums[2] / sums[3])
        a, b, c, d = (self._weights @ part for part in (*one, *other))
        whole = (b != 0) & (d != 0)
        if self._few((one[1] != 0) & (other[1] != 0)) or not whole.any():
            return Estimate(value=value)
        low, high = np.percentile(a[whole] / b[whole] - c[whole] / d[whole], self._tails)
        return Estimate(value=value, low=float(low), high=float(high))

    def of(self, parts: Array, statistic: Callable[[Array], Array]) -> Estimate:
        """A statistic of sums: parts float [count, ...] are summed over resamples to [samples, ...], which `statistic`
        takes to [samples]. Resamples for which it is NaN are left out."""
        value = float(statistic(parts.sum(0)[None])[0])
        if math.isnan(value):
            return Estimate(value=None)
        resampled = statistic(np.tensordot(self._weights, parts, 1))
        if self._few(np.ones(len(parts), dtype=bool)) or np.isnan(resampled).all():
            return Estimate(value=value)
        low, high = np.nanpercentile(resampled, self._tails)
        return Estimate(value=value, low=float(low), high=float(high))


@dataclass(frozen=True)
class RoundTable:
    """All rounds of all prompts, one after another; every array is [rounds]."""

    prompts: int
    prompt: Array
    """Index of the round's prompt."""
    start: Array
    """Place in the answer of the first token that the round emits (0 is the token that belongs to no round)."""
    offered: Array
    accepted: Array
    emitted: Array
    proposed: Array
    chances: Array
    """[rounds, depth]: 0 where nothing was offered."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[Round]]) -> "RoundTable":
        rounds = [r for row in rows for r in row]
        depth = max((r.offered for r in rounds), default=0)
        figures = np.array([(r.offered, r.accepted, r.emitted, r.proposed) for r in rounds], dtype=int).reshape(-1, 4)
        starts = [start for row in rows if row for start in accumulate((r.emitted for r in row[:-1]), initial=1)]
        return cls(
            prompts=len(rows),
            prompt=np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
            start=np.array(starts, dtype=int),
            offered=figures[:, 0],
            accepted=figures[:, 1],
            emitted=figures[:, 2],
            proposed=figures[:, 3],
            chances=np.array([[*r.chances, *[0.0] * (depth - r.offered)] for r in rounds]).reshape(len(rounds), depth),
        )

    def where(self, kept: Array) -> "RoundTable":
        """The rounds that `kept`, bool [rounds], says; the prompts stay as many."""
        parts = {name: value[kept] for name, value in vars(self).items() if name != "prompts"}
        return RoundTable(self.prompts, **parts)

    def by_prompt(self, values: Array) -> Array:
        """Sums of values [rounds] over each prompt, float [prompts]."""
        return np.bincount(self.prompt, values, self.prompts)


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
    def of(cls, table: RoundTable) -> "Counts":
        depths = range(1, table.chances.shape[1] + 1)

        def by_depth(values: Callable[[int], Array]) -> Array:
            return np.array([table.by_prompt(values(d)) for d in depths]).reshape(-1, table.prompts).T

        return cls(
            rounds=table.by_prompt(np.ones_like(table.prompt)),
            proposed=table.by_prompt(table.proposed),
            accepted=table.by_prompt(table.accepted),
            emitted=table.by_prompt(table.emitted),
            reached=by_depth(lambda d: table.accepted >= d - 1),
            offers=by_depth(lambda d: table.offered >= d),
            survived=by_depth(lambda d: table.accepted >= d),
            chances=by_depth(lambda d: table.chances[:, d - 1]),
        )

    def tau(self, bootstrap: Bootstrap) -> Estimate:
        return bootstrap.ratio(self.accepted + self.rounds, self.rounds)

    def alpha(self, bootstrap: Bootstrap) -> Estimate:
        return bootstrap.ratio(self.survived.sum(1), self.offers.sum(1))

    def analytic_alpha(self, bootstrap: Bootstrap) -> Estimate:
        return bootstrap.ratio(self.chances.sum(1), self.offers.sum(1))

    def iid(self, bootstrap: Bootstrap, relative: bool) -> Estimate:
        """tau with the one alpha of all depths at each, offers as they were; `relative`: tau over it, less 1."""
        parts = np.stack(
            [self.reached, self.offers, self.survived, np.zeros_like(self.offers)], 1
        )  # [prompts, 4, depth]
        parts[:, 3, :1] = self.rounds[:, None]

        def statistic(sums: Array) -> Array:
            reached, offers, survived, rounds = sums.transpose(1, 0, 2)
            alpha = _over(survived.sum(1), offers.sum(1))[:, None]
            tau = 1 + np.cumprod(alpha * np.nan_to_num(_over(offers, reached)), 1).sum(1)
            return _over(rounds[:, 0] + survived.sum(1), rounds[:, 0]) / tau - 1 if relative else tau

        return bootstrap.of(parts, statistic) if self.offers.size else Estimate(value=None)

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
    table = RoundTable.of(rows)
    counts = Counts.of(table)
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
        slices=list(_slices(table, np.array(prompt_lengths), categories, trained_length, bootstrap)),
        emitted_histogram=np.bincount(table.emitted, minlength=1).tolist(),
        iid_tau=counts.iid(bootstrap, relative=False),
        iid_departure=counts.iid(bootstrap, relative=True),
    )


def calibration(sums: Sequence[Tensor | None], bootstrap: Bootstrap) -> Calibration | None:
    """Whether a drafter is as often right as it says, from each prompt's `reliability` (None: it had no round).

    None where no prompt has any, or no node was counted.
    """
    if all(each is None for each in sums):
        return None
    parts = np.stack([np.zeros((BINS, 4)) if each is None else each.numpy() for each in sums])
    if not (nodes := int(parts[..., NODES].sum())):
        return None

    def error(sums: Array) -> Array:
        apart = np.abs(sums[..., CONFIDENCE] - sums[..., TARGET]).sum(-1)
        return _over(apart, sums[..., NODES].sum(-1))

    return Calibration(
        nodes=nodes,
        error=bootstrap.of(parts, error),
        bins=[
            Bin(
                low=place / BINS,
                high=(place + 1) / BINS,
                nodes=int(found[:, NODES].sum()),
                confidence=float(found[:, CONFIDENCE].sum() / found[:, NODES].sum()),
                accepted=bootstrap.ratio(found[:, ACCEPTED], found[:, NODES]),
                target=bootstrap.ratio(found[:, TARGET], found[:, NODES]),
            )
            for place, found in enumerate(parts.transpose(1, 0, 2))
            if found[:, NODES].any()
        ],
    )


def _over(top: Array, bottom: Array) -> Array:
    """top / bottom; NaN where there is nothing to divide by."""
    return np.divide(top, bottom, out=np.full(np.broadcast(top, bottom).shape, np.nan), where=bottom != 0)


def _slices(
    table: RoundTable,
    prompt_lengths: Array,
    categories: Sequence[str | None],
    trained_length: int | None,
    bootstrap: Bootstrap,
) -> Iterator[Slice]:
    """The parts that hold some rounds. The drafter's trained length is an edge of its own (X-07)."""
    parts: list[tuple[SliceKind, str, Array]] = []
    for category in sorted({name for name in categories if name is not None}):
        parts.append(("category", category, np.array([name == category for name in categories])[table.prompt]))
    parts += [("output position", name, kept) for name, kept in _spans(POSITION_EDGES, table.start)]
    edges = sorted({*LENGTH_EDGES, *([] if trained_length is None else [trained_length + 1])})
    parts += [("prompt length", name, kept) for name, kept in _spans(edges, prompt_lengths[table.prompt])]
    for kind, name, kept in parts:
        if kept.any():
            counts = Counts.of(table.where(kept))
            yield Slice(
                kind=kind,
                name=name,
                prompts=int(np.count_nonzero(counts.rounds)),
                rounds=int(counts.rounds.sum()),
                tau=counts.tau(bootstrap),
                alpha=counts.alpha(bootstrap),
                analytic_alpha=counts.analytic_alpha(bootstrap),
            )


def _spans(edges: Sequence[int], values: Array) -> Iterator[tuple[str, Array]]:
    """Name and members of each half-open span between edges, the last one without end."""
    for low, high in pairwise((*edges, math.inf)):
        name = f"{low} and on" if high == math.inf else f"{low} to {high - 1}"
        yield name, (low <= values) & (values < high)

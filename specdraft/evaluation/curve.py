"""Speed-up over batch size: measured by decoding again at each size, and predicted without it.

What a row accepts does not hang on the rows beside it. So the rounds of one run say how many rows are still alive in
each round of any batch, and with the seconds of a round at so many rows (`costs.time_parts`), what every batch takes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specdraft.decoding import Generation
from specdraft.drafters.base import Drafter
from specdraft.drafters.shapes import Shape
from specdraft.evaluation.costs import SIZES, Parts, time_parts
from specdraft.evaluation.report import BatchSpeed, Estimate
from specdraft.evaluation.statistics import Array
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

_FEWEST = 2  # batches, or no interval could be given
_SAMPLES = 500  # resamples of the prompts behind the interval of a prediction


@dataclass(frozen=True)
class Rows:
    """One way of decoding all prompts, as it is seen row by row: each int64 [prompts]."""

    rounds: Array
    """Target passes of the row."""
    tokens: Array
    """New tokens behind the first, which comes of the prompt's own pass."""

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> "Rows":
        return cls(
            rounds=np.array([len(generation.rounds) for generation in generations]),
            tokens=np.array([len(generation.tokens) - 1 for generation in generations]),
        )


@dataclass(frozen=True)
class Clock:
    """Seconds of a batch's decoding by the number of rows that are alive in a round."""

    rows: Array
    """Batch sizes that were timed, rising."""
    rounds: Array
    """float [plain and systems, sizes]: a round of so many rows."""
    begins: Array
    """float [sizes]: the drafter's reading of the prompts; nothing in plain decoding."""
    parts: Parts
    """At the batch size of the report."""

    @classmethod
    def of(cls, sizes: Sequence[int], timed: Sequence[Parts], parts: Parts) -> "Clock":
        rounds = [
            [each.passes[1] + each.plain_rest, *map(sum, zip(each.drafts, each.targets, each.rests, strict=True))]
            for each in timed
        ]
        return cls(np.array(sizes), np.array(rounds).T, np.array([each.begin for each in timed]), parts)

    def seconds(self, system: int, rounds: Array) -> Array:
        """Of batches [..., batch] whose rows take so many rounds each, [...]; `system` 0 is plain decoding."""
        batch = rounds.shape[-1]
        each = np.interp(np.arange(1, batch + 1), self.rows, self.rounds[system])
        falling = -np.sort(-rounds, axis=-1)
        ends = np.concatenate([falling[..., 1:], np.zeros_like(falling[..., :1])], -1)
        begin = np.interp(batch, self.rows, self.begins) if system else 0.0
        return (falling - ends) @ each + begin


def contexts(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], rows: int) -> list[list[int]]:
    """`rows` prompts with half of their answers, spread evenly over all lengths: what a batch meets midway."""
    texts = [[*prompt, *answer[: len(answer) // 2]] for prompt, answer in zip(prompts, answers, strict=True)]
    texts.sort(key=len)
    return [texts[(2 * row + 1) * len(texts) // (2 * rows)] for row in range(rows)]


def filled(prompts: int, size: int) -> Array:
    """Indices of prompts, int64 [batches, size]: every one at least once, in full batches, two of them or more."""
    batches = max(math.ceil(prompts / size), _FEWEST)
    return (np.arange(batches * size) % prompts).reshape(batches, size)


def wind(
    target: FrozenTarget,
    drafter: Drafter,
    shapes: Sequence[Shape],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    warp: Warp,
    sizes: Sequence[int],
) -> Clock:
    """Time the parts of rounds of 1, 2, 4, ... rows and of each of `sizes`, the first of which is the report's own."""
    powers = (2**power for power in range(max(sizes).bit_length()))
    ladder = sorted({*powers, *sizes})
    timed = {
        rows: time_parts(
            target, drafter, shapes, contexts(prompts, answers, rows), warp, SIZES if rows == sizes[0] else ()
        )
        for rows in ladder
    }
    return Clock.of(ladder, [*timed.values()], timed[sizes[0]])


def predicted(clock: Clock, system: int, plain: Rows, rows: Rows, size: int, seed: int) -> Estimate:
    """The decode speed-up of a system in batches of `size`; the interval is that of what is accepted, over prompts."""
    prompts = len(plain.rounds)

    def speedup(places: Array) -> Array:
        """places int64 [..., batches, size] to [...]."""
        return np.prod(
            [
                one.tokens[places].sum((-1, -2)) ** sign * clock.seconds(which, one.rounds[places]).sum(-1) ** -sign
                for which, one, sign in ((system, rows, 1.0), (0, plain, -1.0))
            ],
            axis=0,
        )

    if not rows.tokens.any():
        return Estimate(value=None)
    places = filled(prompts, size)
    value = float(speedup(places))
    drawn = np.random.default_rng(seed).integers(prompts, size=(_SAMPLES, prompts))
    low, high = np.percentile(speedup(drawn[:, places]), (2.5, 97.5))
    return Estimate(value=value, low=float(low), high=float(high)) if prompts > 1 else Estimate(value=value)


def by_batch(
    sizes: Sequence[int],
    decode: Callable[[int, Array], Sequence[tuple[Estimate, Estimate]]],
    clock: Clock,
    plain: Rows,
    systems: Sequence[Rows],
    seed: int,
) -> list[list[BatchSpeed]]:
    """Each system's speeds at rising batch sizes.

    `decode` decodes the prompts of these places, int64 [batches, size], again, in batches of a size, and gives each
    system's speed-up end to end and without prompts.
    """
    found: list[list[BatchSpeed]] = [[] for _ in systems]
    for size in sizes:
        places = filled(len(plain.rounds), size)
        for index, (speedup, decode_speedup) in enumerate(decode(size, places)):
            found[index].append(
                BatchSpeed(
                    batch_size=size,
                    batches=len(places),
                    speedup=speedup,
                    decode_speedup=decode_speedup,
                    predicted=predicted(clock, index + 1, plain, systems[index], size, seed),
                )
            )
    return found


def stops_paying(sizes: Sequence[int], speeds: Sequence[float]) -> float | None:
    """The batch size from which drafting is no faster than plain decoding, given its speed at rising `sizes`: the first
    size, if it never pays; None, if it pays at the last, or no size is given."""
    if not sizes:
        return None
    paying = [place for place, speed in enumerate(speeds) if speed > 1]
    if not paying:
        return float(sizes[0])
    if paying[-1] == len(sizes) - 1:
        return None
    (a, fast), (b, slow) = list(pairwise(zip(sizes, speeds, strict=True)))[paying[-1]]
    share = (fast - 1) / (fast - slow)
    return math.exp((1 - share) * math.log(a) + share * math.log(b))

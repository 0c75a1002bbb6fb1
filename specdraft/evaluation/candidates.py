"""Drafters with shapes: their rounds, replayed or decoded, what these promise at each batch size, which is better."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specdraft.config import SpecdraftError
from specdraft.decoding import Round, generate
from specdraft.drafters.base import Drafter, TrainableDrafter
from specdraft.drafters.shapes import DynamicTree
from specdraft.evaluation.costs import costs, depth_of, time_parts
from specdraft.evaluation.curve import stops_paying
from specdraft.evaluation.prompts import Prompt
from specdraft.evaluation.replay import Overlaps, Ranks, Trace, greedy_trace, read_overlaps, read_ranks
from specdraft.evaluation.report import Estimate
from specdraft.evaluation.stage import Source, training_of
from specdraft.evaluation.statistics import Array, Bootstrap, Counts, RoundTable, acceptance
from specdraft.evaluation.systems import ChainSystem, StaticTreeSystem, System
from specdraft.evaluation.tune_report import BatchPoint, Candidate, Comparison, Speed, Tuned, verdict
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

_OWN = 0.98  # of an answer's tokens must be the target's likeliest, or it is not its greedy answer


@dataclass(frozen=True)
class Work:
    """What all drafters share."""

    target: FrozenTarget
    systems: tuple[System, ...]
    """The shapes that are tried."""
    prompts: list[Prompt]
    answers: list[list[int]]
    """The target's own, one a prompt."""
    cap: int
    """Of each answer."""
    template_args: Mapping[str, bool | int | str]
    """Of the chat template, for the answers that a static tree is calibrated on."""
    temperature: float
    batch_sizes: tuple[int, ...]
    seed: int
    bootstrap_samples: int
    step: Callable[[str, int], Callable[[int], None]]
    """(what, how many) to a progress bar's advance."""
    warnings: list[str] = field(default_factory=list)

    @property
    def warp(self) -> Warp:
        return Warp(self.temperature)

    @property
    def bootstrap(self) -> Bootstrap:
        return Bootstrap(len(self.prompts), self.bootstrap_samples, self.seed)


@dataclass(frozen=True)
class _Try:
    """One drafter with one shape, and the rounds of every prompt."""

    system: System
    how: Literal["replayed", "decoded"]
    rounds: list[list[Round]]


@dataclass(frozen=True)
class Tried:
    """A drafter with all the shapes that it can draft."""

    source: Source
    drafter: Drafter
    tuned: Tuned
    counts: dict[str, Counts]
    """By the shape's name."""
    systems: dict[str, System]


def tried(work: Work, drafters: Sequence[tuple[Source, Drafter]]) -> list[Tried]:
    """Every drafter with every shape that it can draft."""
    systems = [_settled(work, source, drafter) for source, drafter in drafters]
    replayed = [s.shape() for each in systems for s in each if not isinstance(s.shape(), DynamicTree)]
    depth = max(map(depth_of, replayed), default=1)
    ids = [prompt.ids for prompt in work.prompts]
    trace = Trace(ids, work.answers, [[] for _ in ids])
    if work.warp.greedy and any(isinstance(drafter, TrainableDrafter) for _, drafter in drafters):
        progress = work.step("what comes behind the answers", len(ids))
        trace = greedy_trace(work.target, ids, work.answers, depth, progress)
    return [
        _one(work, source, drafter, each, _reading(work, source, drafter, trace, depth))
        for (source, drafter), each in zip(drafters, systems, strict=True)
    ]


def _settled(work: Work, source: Source, drafter: Drafter) -> list[System]:
    """The shapes that this drafter is tried with, static trees calibrated."""
    _, answers = training_of(source)
    found: list[System] = []
    for system in work.systems:
        try:
            if isinstance(system, StaticTreeSystem):
                system = system.settled(work.target, drafter, answers, work.template_args)
            found.append(system)
        except SpecdraftError as error:
            work.warnings.append(f"{source.name}, {system.name}: left out: {error}")
    return found


def _reading(work: Work, source: Source, drafter: Drafter, trace: Trace, depth: int) -> Ranks | Overlaps | None:
    """The pass over the answers. None: a drafter without one. Raises SpecdraftError for answers of somebody else."""
    if not isinstance(drafter, TrainableDrafter):
        return None
    progress = work.step(f"{source.name}: reading", len(trace.prompts))
    if not work.warp.greedy:
        return read_overlaps(drafter, work.target, trace, work.warp, depth, progress)
    ranks = read_ranks(drafter, work.target, trace, depth, progress)
    if ranks.agreement < _OWN:
        raise SpecdraftError(
            f"only {100 * ranks.agreement:.1f} % of the answers' tokens are what {work.target.name} itself would say "
            f"next: these are not its greedy answers, and a replay of them would be wrong; give prompts instead"
        )
    if ranks.agreement < 1:
        warning = f"{100 * (1 - ranks.agreement):.3f} % of the answers' tokens part from the target's likeliest"
        work.warnings.append(f"{source.name}: {warning}, by rounding: replayed figures are that inexact.")
    return ranks


def _one(
    work: Work, source: Source, drafter: Drafter, systems: Sequence[System], reading: Ranks | Overlaps | None
) -> Tried:
    """Rounds, figures and predicted speeds of one drafter's shapes. Raises SpecdraftError if none is left."""
    tries: list[_Try] = []
    for system in systems:
        try:
            tries.append(_tried(work, source, drafter, system, reading))
        except SpecdraftError as error:
            work.warnings.append(f"{source.name}, {system.name}: left out: {error}")
    if not tries:
        raise SpecdraftError(f"{source.name} can draft nothing of what was asked for: {' '.join(work.warnings)}")
    candidates = _priced(work, source, drafter, tries)
    sizes = work.batch_sizes
    points = [_point(place, size, tries, candidates) for place, size in enumerate(sizes)]
    tuned = Tuned(
        drafter=source.name,
        candidates=candidates,
        by_batch=points,
        stops_paying=stops_paying([*sizes], [point.predicted.value or 0.0 for point in points]),
        overlaps=reading.by_depth(work.bootstrap) if isinstance(reading, Overlaps) else [],
    )
    counts = {each.system.name: Counts.of(RoundTable.of(each.rounds)) for each in tries}
    return Tried(source, drafter, tuned, counts, {each.system.name: each.system for each in tries})


def _tried(work: Work, source: Source, drafter: Drafter, system: System, reading: Ranks | Overlaps | None) -> _Try:
    """Replayed where that is exact, else decoded. Raises SpecdraftError for a shape that the drafter cannot draft."""
    shape = system.shape()
    if isinstance(reading, Ranks) and not isinstance(shape, DynamicTree):
        return _Try(system, "replayed", reading.rounds(shape))
    drafter.shape = shape
    ids = [prompt.ids for prompt in work.prompts]
    progress = work.step(f"{source.name}: {system.name}", len(ids))
    settings: dict[str, Any] = {"warp": work.warp, "max_new_tokens": work.cap, "seed": work.seed}
    decoding = generate(work.target, drafter, ids, batch_size=work.batch_sizes[0], progress=progress, **settings)
    rounds = [generation.rounds for generation in decoding.generations]
    if not any(r.proposed for row in rounds for r in row):
        raise SpecdraftError(f"it proposed nothing in {sum(map(len, rounds))} rounds")
    return _Try(system, "decoded", rounds)


def _priced(work: Work, source: Source, drafter: Drafter, tries: Sequence[_Try]) -> list[Candidate]:
    """The figures of each shape, and what they promise at the costs that each batch size has, half an answer in."""
    lengths, categories = [len(p.ids) for p in work.prompts], [p.category for p in work.prompts]
    figures = [acceptance(each.rounds, lengths, categories, work.bootstrap) for each in tries]
    speeds: list[list[Speed]] = [[] for _ in tries]
    middling = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    context = [*work.prompts[middling].ids, *work.answers[middling][: len(work.answers[middling]) // 2]]
    shapes, sizes = [each.system.shape() for each in tries], work.batch_sizes
    timed = work.step(f"{source.name}: costs", len(sizes))
    for size in sizes:
        parts = time_parts(work.target, drafter, shapes, [context] * size, work.warp)
        for place, (shape, found) in enumerate(zip(shapes, figures, strict=True)):
            cost = costs(parts, place, shape, found)
            speeds[place].append(
                Speed(
                    batch_size=size,
                    c=cost.c,
                    v=cost.v,
                    nodes=cost.nodes,
                    round_cost=cost.round_cost,
                    predicted=_scaled(found.emitted_per_pass, cost.round_cost),
                    break_even_alpha=cost.break_even_alpha,
                )
            )
        timed(1)
    return [
        Candidate(
            system=each.system.name,
            shape=each.system.model_dump(mode="json"),
            how=each.how,
            acceptance=found,
            speeds=own,
        )
        for each, found, own in zip(tries, figures, speeds, strict=True)
    ]


def _scaled(estimate: Estimate, cost: float) -> Estimate:
    if estimate.value is None:  # every answer is one token long: no round, and nothing to gain
        return estimate
    low, high = (None if bound is None else bound / cost for bound in (estimate.low, estimate.high))
    return Estimate(value=estimate.value / cost, low=low, high=high)


def _point(place: int, size: int, tries: Sequence[_Try], candidates: Sequence[Candidate]) -> BatchPoint:
    """The best at the batch size in this place."""

    def speed(candidate: Candidate) -> float:
        return candidate.speeds[place].predicted.value or 0.0

    best = max(candidates, key=speed)
    chains = [
        (speed(candidate), each.system.gamma)
        for each, candidate in zip(tries, candidates, strict=True)
        if isinstance(each.system, ChainSystem)
    ]
    fastest, gamma = max(chains, key=lambda chain: chain[0], default=(0.0, None))
    return BatchPoint(
        batch_size=size,
        system=best.system,
        predicted=best.speeds[place].predicted,
        best_gamma=gamma if gamma is None or fastest > 1 else 0,
    )


def compared(work: Work, one: Tried, other: Tried) -> Comparison:
    """tau with the same shape, the best one of the faster drafter that both draft; speed with each one's best."""
    faster = max((one, other), key=lambda found: found.tuned.by_batch[0].predicted.value or 0.0)
    shared = [c for c in faster.tuned.candidates if one.tuned.named(c.system) and other.tuned.named(c.system)]
    common = max(shared, key=lambda c: c.speeds[0].predicted.value or 0.0, default=None)
    names = one.source.name, other.source.name
    verdicts, tau = [], None
    if common is not None:
        each = [found.counts[common.system] for found in (one, other)]
        sums = [(counts.accepted + counts.rounds, counts.rounds) for counts in each]
        tau = work.bootstrap.difference(*sums)
        verdicts.append(f"{verdict(*names, tau, 'tau')}, with the {common.system}")
    speed = work.bootstrap.difference(_speed_sums(one), _speed_sums(other))
    size = work.batch_sizes[0]
    verdicts.append(f"{verdict(*names, speed, 'predicted speed')}, each with its best shape, at batch {size}")
    system = None if common is None else common.system
    return Comparison(one=names[0], other=names[1], system=system, tau=tau, speed=speed, verdicts=verdicts)


def _speed_sums(found: Tried) -> tuple[Array, Array]:
    """Tokens and time, in steps of plain decoding, of each prompt with the drafter's best shape."""
    system = found.tuned.by_batch[0].system
    candidate = found.tuned.named(system)
    assert candidate is not None, "a point names a candidate"
    speed, counts = candidate.speeds[0], found.counts[system]
    return counts.emitted, counts.rounds * speed.round_cost

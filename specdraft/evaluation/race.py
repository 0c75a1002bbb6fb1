"""Plain decoding and every system, on the same prompts, side by side: their answers, and their speeds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdraft.decoding import Generation, generate
from specdraft.drafters.base import Drafter
from specdraft.drafters.shapes import Shape
from specdraft.evaluation.costs import costs
from specdraft.evaluation.curve import Rows, by_batch, predicted, stops_paying, wind
from specdraft.evaluation.prompts import Prompt
from specdraft.evaluation.recipe import EvalRecipe
from specdraft.evaluation.report import Estimate, RunTime, SystemReport
from specdraft.evaluation.statistics import Array, Bootstrap
from specdraft.target import FrozenTarget


@dataclass
class Run:
    """One way of decoding all prompts, batch by batch."""

    name: str
    drafter: Drafter | None = None
    """None: plain decoding."""
    shape: Shape | None = None
    """What it drafts."""
    generations: list[Generation] = field(default_factory=list)
    batches: list[RunTime] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Of each batch."""
    groups: list[int] = field(default_factory=list)
    """Of each batch: the batches of the same conversations have one number."""

    def per_batch(self, figure: Callable[[RunTime], float]) -> np.ndarray:
        return np.array([figure(batch) for batch in self.batches], dtype=np.float64)

    def time(self) -> RunTime:
        whole = {name: sum(getattr(batch, name) for batch in self.batches) for name in RunTime.model_fields}
        return RunTime(**whole)


def decode_all(
    target: FrozenTarget,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    runs: Sequence[Run],
    progress: Callable[[int, int], None] | None,
) -> tuple[list[Prompt], list[int]]:
    """Every run takes each batch in turn, and another goes first each time: a machine that slows down slows all.

    Then the users of the batch ask on. What they say next follows the answers of the first run, for every run alike:
    so all answer the same prompts, and figures are paired, whatever was drawn. Returns what was asked, in the order of
    each run's generations, and of which of `prompts` each is a turn.
    """
    size = recipe.batch_size
    for run in runs:
        few = [prompt.ids for prompt in prompts[:size]]
        _batch(target, recipe, run, few, range(len(few)), min(recipe.max_new_tokens, 8))  # warm up
    asked: list[Prompt] = []
    owners: list[int] = []
    batches, done, total = 0, 0, len(runs) * len(prompts)
    for start in range(0, len(prompts), size):
        batch, turn = [*enumerate(prompts)][start : start + size], 0
        while batch:
            ids, streams = [prompt.ids for _, prompt in batch], [owner + (turn << 32) for owner, _ in batch]
            for place in range(len(runs)):
                run = runs[(batches + place) % len(runs)]
                generations, taken = _batch(target, recipe, run, ids, streams, recipe.max_new_tokens)
                run.generations += generations
                run.batches.append(taken)
                run.rows.append(len(batch))
                run.groups.append(start)
                done += len(batch)
                if progress is not None:
                    progress(done, total)
            asked += [prompt for _, prompt in batch]
            owners += [owner for owner, _ in batch]
            batches, turn = batches + 1, turn + 1
            answers = [generation.tokens for generation in runs[0].generations[-len(batch) :]]
            batch = _asked_on(batch, answers) if turn != recipe.turns else []
            total += len(runs) * len(batch)
    return asked, owners


def _asked_on(batch: Sequence[tuple[int, Prompt]], answers: Sequence[Sequence[int]]) -> list[tuple[int, Prompt]]:
    """The next turn of those conversations that have one."""
    after = [(owner, prompt.after(answer)) for (owner, prompt), answer in zip(batch, answers, strict=True)]
    return [(owner, prompt) for owner, prompt in after if prompt is not None]


def _batch(
    target: FrozenTarget,
    recipe: EvalRecipe,
    run: Run,
    batch: Sequence[Sequence[int]],
    streams: Sequence[int],
    cap: int,
) -> tuple[list[Generation], RunTime]:
    if run.drafter is not None and run.shape is not None:
        run.drafter.shape = run.shape
    clock = time.perf_counter()
    decoding = generate(
        target,
        run.drafter,
        batch,
        warp=recipe.warp,
        max_new_tokens=cap,
        processors=recipe.controls.processors(target.end_ids),
        stop=recipe.controls.stop,
        batch_size=len(batch),
        seed=recipe.seed,
        streams=streams,
        lossy=None if run.drafter is None else recipe.lossy,
        witness=run.drafter is not None and not recipe.warp.greedy,
        calibrate=True,
    )
    taken = RunTime(
        new_tokens=decoding.new_tokens,
        passes=decoding.passes,
        seconds=time.perf_counter() - clock - decoding.witness_seconds,
        prefill_seconds=decoding.prefill_seconds,
        target_seconds=decoding.target_seconds,
        drafter_seconds=decoding.drafter_seconds,
    )
    return decoding.generations, taken


def speedups(recipe: EvalRecipe, plain: Run, run: Run) -> tuple[Estimate, Estimate]:
    """End to end, and without reading prompts (of whose pass the first token of each row comes)."""
    bootstrap, rows = Bootstrap(run.groups, recipe.bootstrap_samples, recipe.seed), np.array(run.rows, dtype=np.float64)

    def rate(one: Run, decode: bool) -> tuple[np.ndarray, np.ndarray]:
        tokens, seconds = one.per_batch(lambda t: t.new_tokens), one.per_batch(lambda t: t.seconds)
        return (tokens - rows, seconds - one.per_batch(lambda t: t.prefill_seconds)) if decode else (tokens, seconds)

    whole, decode = (bootstrap.quotient(rate(run, kind), rate(plain, kind)) for kind in (False, True))
    return whole, decode


def priced(
    target: FrozenTarget,
    drafter: Drafter,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    plain: Run,
    runs: Sequence[Run],
    systems: Sequence[SystemReport],
    progress: Callable[[int, int], None] | None,
) -> list[SystemReport]:
    """The systems with their speeds, measured and predicted, at every batch size."""
    own, rows = Rows.of(plain.generations), [Rows.of(run.generations) for run in runs]
    ids, answers = [prompt.ids for prompt in prompts], [generation.tokens for generation in plain.generations]
    shapes = [system.shape() for system in recipe.systems]
    size = min(recipe.batch_size, len(prompts))
    clock = wind(target, drafter, shapes, ids, answers, recipe.warp, (size, *recipe.batch_sizes))

    def again(size: int, places: Array) -> list[tuple[Estimate, Estimate]]:
        other = recipe.model_copy(update={"batch_size": size})
        fresh = [Run(run.name, run.drafter, run.shape) for run in (plain, *runs)]
        once = [prompts[place]._replace(then=None) for place in places.flat]
        decode_all(target, other, once, fresh, progress)
        return [speedups(other, fresh[0], run) for run in fresh[1:]]

    curves = by_batch(recipe.batch_sizes, again, clock, own, rows, recipe.seed)
    priced = []
    for place, (system, run, curve) in enumerate(zip(systems, runs, curves, strict=True)):
        speedup, decode_speedup = speedups(recipe, plain, run)
        speeds = {
            "speedup": speedup,
            "decode_speedup": decode_speedup,
            "costs": costs(clock.parts, place, shapes[place], system.acceptance),
            "predicted": predicted(clock, place + 1, own, rows[place], size, recipe.seed),
            "by_batch": curve,
            "stops_paying": stops_paying(recipe.batch_sizes, [point.decode_speedup.value or 0.0 for point in curve]),
        }
        priced.append(system.model_copy(update=speeds))
    return priced

"""Two forms of one drafter on the same prompts, pair by pair: what quantising cost, and what it brought."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.conversations import Faults
from specdraft.decoding import Decoding, Generation, generate
from specdraft.drafters.base import Drafter, Shape
from specdraft.evaluation.costs import depth_of, time_parts
from specdraft.evaluation.lossless import check_sampled, compare_greedy
from specdraft.evaluation.prompts import Prompt, read_prompts
from specdraft.evaluation.statistics import Bootstrap, Counts, RoundTable, acceptance
from specdraft.evaluation.systems import ChainSystem, StaticTreeSystem, System, TreeSystem
from specdraft.quantization.report import Pair, Side
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

_TIMINGS = 3  # of each form, in turn


class ComparisonRecipe(Recipe):
    prompts: tuple[str, ...] = Field(min_length=1)
    """Held-out prompts: JSONL files or datasets, as for `eval`."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many prompts."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """Variables of the chat template, as serving sets them."""
    systems: tuple[System, ...] = (ChainSystem(), TreeSystem())
    """What is drafted, each compared in turn. A static tree is calibrated once, for both."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy decoding."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Cap on each answer."""
    batch_size: int = Field(default=1, ge=1)
    """Prompts decoded together."""
    seed: int = 0
    """Of sampling and of the bootstrap."""
    bootstrap_samples: int = Field(default=2000, ge=100)
    """Resamples behind each interval."""
    max_loss: float | None = Field(default=None, ge=0, lt=1)
    """Share of tau that may be lost without an alarm. Unset: 0.005 for 8 bits, 0.03 for 4."""
    strict: bool = False
    """Fail on an alarm, once everything is written."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len({system.name for system in self.systems}) < max(len(self.systems), 1):
            raise ValueError("systems must name one or more, each once")
        return self

    @property
    def warp(self) -> Warp:
        return Warp(self.temperature)


@dataclass
class _Run:
    """One way of decoding all prompts."""

    drafter: Drafter | None
    shape: Shape | None
    generations: list[Generation] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Of each batch, as the seconds."""
    seconds: list[float] = field(default_factory=list)

    def decode(
        self, target: FrozenTarget, recipe: ComparisonRecipe, batch: Sequence[Prompt], start: int, cap: int
    ) -> Decoding:
        if self.drafter is not None and self.shape is not None:
            self.drafter.shape = self.shape
        return generate(
            target,
            self.drafter,
            [prompt.ids for prompt in batch],
            warp=recipe.warp,
            max_new_tokens=cap,
            batch_size=len(batch),
            seed=recipe.seed,
            streams=range(start, start + len(batch)),
            witness=self.drafter is not None and not recipe.warp.greedy,
        )

    def add(self, decoding: Decoding) -> None:
        self.generations += decoding.generations
        self.tokens.append(decoding.new_tokens)
        self.seconds.append(decoding.seconds)


def compare(
    target: FrozenTarget,
    before: Drafter,
    after: Drafter,
    recipe: ComparisonRecipe,
    answers: tuple[str, ...],
    max_loss: float,
    progress: Callable[[int, int], None],
) -> list[Pair]:
    """Decode the prompts plainly and, with each system, by the drafter before and after; a pair a system.

    `answers`: what to calibrate static trees on where the recipe does not say. `max_loss`: share of tau beyond which a
    pair raises the alarm. Raises SpecdraftError if there is no usable prompt, or for a system that it cannot draft.
    """
    prompts = read_prompts(target, recipe.prompts, recipe.limit, recipe.chat_template_kwargs, Faults())
    systems = [
        system.settled(target, before, answers, recipe.chat_template_kwargs)
        if isinstance(system, StaticTreeSystem)
        else system
        for system in recipe.systems
    ]
    plain = _Run(None, None)
    pairs = [tuple(_Run(drafter, system.shape()) for drafter in (before, after)) for system in systems]
    _decode(target, recipe, prompts, [plain, *(run for pair in pairs for run in pair)], progress)
    steps = [_step_seconds(target, drafter, systems, recipe, prompts) for drafter in (before, after) * _TIMINGS]
    found = []
    for place, (system, runs) in enumerate(zip(systems, pairs, strict=True)):
        taken = [float(np.median([step[place] for step in steps[form::2]])) for form in (0, 1)]
        sides = [_side(target, recipe, prompts, plain, run, seconds) for run, seconds in zip(runs, taken, strict=True)]
        bootstrap = Bootstrap(len(prompts), recipe.bootstrap_samples, recipe.seed)
        first, second = (Counts.of(RoundTable.of([g.rounds for g in run.generations])) for run in runs)
        sums = [(counts.accepted + counts.rounds, counts.rounds) for counts in (second, first)]
        ratio = bootstrap.quotient(*sums)
        found.append(
            Pair(
                system=system.name,
                shape=system.model_dump(mode="json"),
                before=sides[0],
                after=sides[1],
                tau_ratio=ratio,
                tau_difference=bootstrap.difference(*sums),
                alarm=ratio.value is not None and 1 - ratio.value > max_loss,
            )
        )
    return found


def _decode(
    target: FrozenTarget,
    recipe: ComparisonRecipe,
    prompts: Sequence[Prompt],
    runs: Sequence[_Run],
    progress: Callable[[int, int], None],
) -> None:
    """Every run takes each batch in turn, and another goes first each time: a machine that slows down slows all."""
    size = recipe.batch_size
    for run in runs:
        run.decode(target, recipe, prompts[:size], 0, min(recipe.max_new_tokens, 8))  # warm up
    done, total = 0, len(runs) * len(prompts)
    for turn, start in enumerate(range(0, len(prompts), size)):
        batch = prompts[start : start + size]
        for place in range(len(runs)):
            run = runs[(turn + place) % len(runs)]
            run.add(run.decode(target, recipe, batch, start, recipe.max_new_tokens))
            done += len(batch)
            progress(done, total)


def _step_seconds(
    target: FrozenTarget,
    drafter: Drafter,
    systems: Sequence[System],
    recipe: ComparisonRecipe,
    prompts: Sequence[Prompt],
) -> list[float]:
    """Seconds of one depth of drafting, for each system, below a middling prompt."""
    middling = sorted((prompt.ids for prompt in prompts), key=len)[len(prompts) // 2]
    shapes = [system.shape() for system in systems]
    batch = [middling] * min(recipe.batch_size, len(prompts))
    drafts = time_parts(target, drafter, shapes, batch, recipe.warp, sizes=()).drafts
    return [seconds / max(depth_of(shape), 1) for seconds, shape in zip(drafts, shapes, strict=True)]


def _side(
    target: FrozenTarget,
    recipe: ComparisonRecipe,
    prompts: Sequence[Prompt],
    plain: _Run,
    run: _Run,
    draft_step_seconds: float,
) -> Side:
    bootstrap = Bootstrap(len(prompts), recipe.bootstrap_samples, recipe.seed)
    rounds = [generation.rounds for generation in run.generations]
    figures = acceptance(rounds, [len(p.ids) for p in prompts], [p.category for p in prompts], bootstrap)
    if figures.rounds and not figures.proposed:
        raise SpecdraftError(f"the drafter proposed nothing in {figures.rounds} rounds; not a comparison")
    rates = [(np.array(one.tokens, dtype=float), np.array(one.seconds)) for one in (run, plain)]
    if recipe.warp.greedy:
        lossless = compare_greedy(target, [prompt.ids for prompt in prompts], plain.generations, run.generations)
    else:
        lossless = check_sampled(run.generations)
    return Side(
        acceptance=figures,
        draft_step_seconds=draft_step_seconds,
        tokens_per_second=sum(run.tokens) / max(sum(run.seconds), 1e-9),
        speedup=Bootstrap(len(run.tokens), recipe.bootstrap_samples, recipe.seed).quotient(*rates),
        losslessness=lossless,
    )

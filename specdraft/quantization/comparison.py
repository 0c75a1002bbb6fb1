"""Two forms of one drafter on the same prompts, pair by pair: what quantising cost, and what it brought."""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.conversations import Faults
from specdraft.drafters.base import Drafter
from specdraft.evaluation.costs import depth_of, time_parts
from specdraft.evaluation.measure import losslessness, racing, settled
from specdraft.evaluation.prompts import Prompt, read_prompts
from specdraft.evaluation.race import Run, decode_all, speedups
from specdraft.evaluation.recipe import EvalRecipe
from specdraft.evaluation.statistics import Bootstrap, Counts, RoundTable, acceptance
from specdraft.evaluation.systems import ChainSystem, System, TreeSystem
from specdraft.quantization.report import Pair, Side
from specdraft.target import FrozenTarget

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
    asked = EvalRecipe(
        systems=recipe.systems,
        turns=1,
        chat_template_kwargs=recipe.chat_template_kwargs,
        temperature=recipe.temperature,
        max_new_tokens=recipe.max_new_tokens,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        bootstrap_samples=recipe.bootstrap_samples,
        training_prompts=answers,
    )
    asked = settled(target, before, asked, prompts)
    forms, systems = [racing(drafter, asked) for drafter in (before, after)], asked.systems
    plain = Run("plain")
    pairs = [tuple(Run(system.name, drafter, system.shape()) for drafter in forms) for system in systems]
    decode_all(target, asked, prompts, [plain, *(run for pair in pairs for run in pair)], progress)
    steps = [_step_seconds(target, drafter, asked, prompts) for drafter in forms * _TIMINGS]
    found = []
    for place, (system, runs) in enumerate(zip(systems, pairs, strict=True)):
        taken = [float(np.median([step[place] for step in steps[form::2]])) for form in (0, 1)]
        sides = [_side(target, asked, prompts, plain, run, seconds) for run, seconds in zip(runs, taken, strict=True)]
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


def _step_seconds(target: FrozenTarget, drafter: Drafter, recipe: EvalRecipe, prompts: Sequence[Prompt]) -> list[float]:
    """Seconds of one depth of drafting, for each system, below a middling prompt."""
    middling = sorted((prompt.ids for prompt in prompts), key=len)[len(prompts) // 2]
    shapes = [system.shape() for system in recipe.systems]
    batch = [middling] * min(recipe.batch_size, len(prompts))
    drafts = time_parts(target, drafter, shapes, batch, recipe.warp, sizes=()).drafts
    return [seconds / max(depth_of(shape), 1) for seconds, shape in zip(drafts, shapes, strict=True)]


def _side(
    target: FrozenTarget,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    plain: Run,
    run: Run,
    draft_step_seconds: float,
) -> Side:
    bootstrap = Bootstrap(len(prompts), recipe.bootstrap_samples, recipe.seed)
    rounds = [generation.rounds for generation in run.generations]
    figures = acceptance(rounds, [len(p.ids) for p in prompts], [p.category for p in prompts], bootstrap)
    if figures.rounds and not figures.proposed:
        raise SpecdraftError(f"the drafter proposed nothing in {figures.rounds} rounds; not a comparison")
    return Side(
        acceptance=figures,
        draft_step_seconds=draft_step_seconds,
        tokens_per_second=run.time().tokens_per_second,
        speedup=speedups(recipe, plain, run)[0],
        losslessness=losslessness(target, recipe, prompts, plain, run),
    )

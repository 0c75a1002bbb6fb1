"""The evaluation itself: plain and speculative decoding of the same prompts, side by side, and what came of it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import JsonValue

from specdraft.config import SpecdraftError
from specdraft.controls import Controls
from specdraft.data.conversations import Faults
from specdraft.drafters.adaptive import AdaptiveDrafter
from specdraft.drafters.base import Drafter
from specdraft.drafters.shapes import Chain
from specdraft.evaluation import exhibits
from specdraft.evaluation.lossless import check_sampled, compare_greedy, lossy_by_choice
from specdraft.evaluation.prompts import Prompt, read_prompts, seen_in_training
from specdraft.evaluation.race import Run, decode_all, priced
from specdraft.evaluation.recipe import EvalRecipe
from specdraft.evaluation.report import Losslessness, Report, Setting, SystemReport
from specdraft.evaluation.served import Ask, Engine, confront
from specdraft.evaluation.served_counts import Served
from specdraft.evaluation.statistics import Bootstrap, acceptance, calibration
from specdraft.evaluation.systems import AdaptiveSystem, StaticTreeSystem, System
from specdraft.provenance import Provenance
from specdraft.target import FrozenTarget

FEW = 20


def evaluate(
    target: FrozenTarget,
    drafter: Drafter,
    recipe: EvalRecipe,
    *,
    drafter_name: str = "drafter",
    drafter_weights: str | None = None,
    trained_length: int | None = None,
    prompts: Sequence[Prompt] | None = None,
    progress: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
) -> Report:
    """Decode the recipe's prompts (or `prompts`, ready made) plainly and with each system, and report.

    `drafter_weights` says which weights are measured, see `Setting`; `trained_length` is the longest sequence that the
    drafter was trained on, if known; `progress` is called with the prompts decoded so far, over all runs, and their
    total. `engine` decodes the prompts too, to be compared with plain decoding and the recipe's one chain, greedily.
    Sets `drafter.shape`. Raises SpecdraftError if there is no usable prompt, no system or two of one name, or a system
    that never drafted anything.
    """
    if len({system.name for system in recipe.systems}) < max(len(recipe.systems), 1):
        raise SpecdraftError(f"evaluation.systems must name one system or more, each once, got {list(recipe.systems)}")
    if engine is not None:
        if recipe.controls != Controls():
            raise SpecdraftError("an engine is asked without controls: leave them out where one is compared")
        engine.ready(drafter)
    faults = Faults()
    if prompts is None:
        prompts = read_prompts(target, recipe.prompts, recipe.limit, recipe.chat_template_kwargs, faults)
    asked, recipe = recipe, settled(target, drafter, recipe, prompts)
    racer = racing(drafter, recipe)
    runs = [Run(system.name, racer, system.shape()) for system in recipe.systems]
    plain = Run("plain") if recipe.compare_with_plain else None
    everything = runs if plain is None else [plain, *runs]
    turns, owners = decode_all(target, recipe, prompts, everything, progress)
    overlap = seen_in_training(prompts, recipe.training_prompts) if recipe.training_prompts else None
    systems = _judge(target, recipe, turns, owners, plain, runs, trained_length)
    if plain is not None:
        systems = priced(target, racer, recipe, turns, plain, runs, systems, progress)
    return Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        setting=_setting(target, recipe, prompts, len(turns), drafter_name, drafter_weights, trained_length, overlap),
        plain=None if plain is None else plain.time(),
        systems=systems,
        samples=exhibits.samples(target.tokenizer, turns, {r.name: r.generations for r in runs}, recipe.shown),
        training=[] if recipe.training_log is None else exhibits.training_curves(recipe.training_log),
        served=None if engine is None else _served(engine, target, drafter, recipe, turns, plain, runs),
        warnings=[
            *_warnings(recipe, prompts, turns, trained_length, overlap, faults),
            *(f"{system.name}: {said}." for system in systems for said in system.acceptance.disagreements()),
        ],
        provenance=_provenance(target, asked),
    )


def racing(drafter: Drafter, recipe: EvalRecipe) -> Drafter:
    """The drafter as it drafts every system of the recipe."""
    adapts = any(isinstance(system, AdaptiveSystem) for system in recipe.systems)
    return AdaptiveDrafter(drafter) if adapts else drafter


def settled(target: FrozenTarget, drafter: Drafter, recipe: EvalRecipe, prompts: Sequence[Prompt]) -> EvalRecipe:
    """The recipe with the paths of its static trees and the costs of what adapts, on a middling prompt."""
    answers, template_args = recipe.training_prompts, recipe.chat_template_kwargs
    middling = sorted((prompt.ids for prompt in prompts), key=len)[len(prompts) // 2]
    systems: list[System] = []
    for system in recipe.systems:
        if isinstance(system, StaticTreeSystem):
            system = system.settled(target, drafter, answers, template_args)
        elif isinstance(system, AdaptiveSystem):
            system = system.settled(target, drafter, [middling] * min(recipe.batch_size, len(prompts)), recipe.warp)
        systems.append(system)
    return recipe.model_copy(update={"systems": tuple(systems)})


def _served(
    engine: Engine,
    target: FrozenTarget,
    drafter: Drafter,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    plain: Run | None,
    runs: Sequence[Run],
) -> Served:
    assert plain is not None, "an engine is compared with plain decoding too"
    ((gamma, chain),) = ((run.shape.gamma, run.generations) for run in runs if isinstance(run.shape, Chain))
    ask = Ask([prompt.ids for prompt in prompts], recipe.max_new_tokens, gamma, recipe.batch_size)
    return confront(engine, target, drafter, ask, plain.generations, chain, tie_factor=recipe.tie_factor)


def _judge(
    target: FrozenTarget,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    owners: Sequence[int],
    plain: Run | None,
    runs: Sequence[Run],
    trained_length: int | None,
) -> list[SystemReport]:
    bootstrap = Bootstrap(owners, recipe.bootstrap_samples, recipe.seed)
    lengths = [len(prompt.ids) for prompt in prompts]
    categories = [prompt.category for prompt in prompts]
    found = []
    for system, run in zip(recipe.systems, runs, strict=True):
        rounds = [generation.rounds for generation in run.generations]
        figures = acceptance(rounds, lengths, categories, bootstrap, trained_length)
        sure = calibration([generation.reliability for generation in run.generations], bootstrap)
        if figures.rounds and not figures.proposed:
            raise SpecdraftError(
                f"{system.name}: the drafter proposed nothing in {figures.rounds} rounds; not a report"
            )
        found.append(
            SystemReport(
                name=system.name,
                shape=system.model_dump(mode="json"),
                acceptance=figures.model_copy(update={"calibration": sure}),
                time=run.time(),
                speedup=None,
                decode_speedup=None,
                costs=None,
                losslessness=losslessness(target, recipe, prompts, plain, run),
            )
        )
    return found


def losslessness(
    target: FrozenTarget, recipe: EvalRecipe, prompts: Sequence[Prompt], plain: Run | None, run: Run
) -> Losslessness:
    """The verdict on one run; `plain`, what greedy answers are compared with."""
    if recipe.lossy is not None:
        return lossy_by_choice(run.generations, recipe.lossy)
    if not recipe.warp.greedy:
        return check_sampled(run.generations)
    if plain is None:
        return Losslessness(verdict="not certified", reason="plain decoding was not run")
    ids, processors = [prompt.ids for prompt in prompts], recipe.controls.processors(target.end_ids)
    return compare_greedy(target, ids, plain.generations, run.generations, recipe.tie_factor, processors)


def _setting(
    target: FrozenTarget,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    answers: int,
    drafter_name: str,
    drafter_weights: str | None,
    trained_length: int | None,
    overlap: int | None,
) -> Setting:
    return Setting(
        target=target.name,
        target_fingerprint=target.fingerprint,
        drafter=drafter_name,
        drafter_weights=drafter_weights,
        device=str(target.device),
        hardware=exhibits.hardware(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        batch_size=recipe.batch_size,
        temperature=recipe.temperature,
        top_k=recipe.top_k,
        top_p=recipe.top_p,
        max_new_tokens=recipe.max_new_tokens,
        acceptance=_rule(recipe),
        controls=recipe.controls.description,
        seed=recipe.seed,
        prompts=len(prompts),
        answers=answers,
        categories=dict(Counter(prompt.category for prompt in prompts if prompt.category is not None)),
        training_overlap=overlap,
        trained_length=trained_length,
    )


def _rule(recipe: EvalRecipe) -> str:
    rule = recipe.lossy
    return "exact" if rule is None else f"typical (epsilon {rule.epsilon:g}, delta {rule.delta:g}), lossy by choice"


def _warnings(
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    turns: Sequence[Prompt],
    trained_length: int | None,
    overlap: int | None,
    faults: Faults,
) -> list[str]:
    found = []
    if trained_length is not None:
        beyond = sum(len(prompt.ids) > trained_length for prompt in turns)
        within = sum(len(p.ids) <= trained_length < len(p.ids) + recipe.max_new_tokens for p in turns)
        if beyond:
            found.append(
                f"{beyond} prompts are longer than the {trained_length} tokens that the drafter was trained on."
            )
        if within:
            found.append(f"{within} answers may grow past the {trained_length} tokens that the drafter was trained on.")
    if overlap:
        found.append(
            f"{overlap} of {len(prompts)} prompts also stand among the training prompts: acceptance is too good."
        )
    if len(prompts) < FEW:
        found.append(f"Only {len(prompts)} prompts: the intervals are rough.")
    if recipe.compare_with_plain and recipe.controls.processors((0,)) is not None:
        found.append("Predicted speeds leave out the time that processing takes of every law (evaluation.controls).")
    if faults.counts:
        found.append(str(faults))
    return found


def _provenance(target: FrozenTarget, recipe: EvalRecipe) -> dict[str, JsonValue]:
    files = [Path(source) for source in recipe.prompts if Path(source).is_file()]
    made = Provenance.of(recipe, seed=recipe.seed, target=target.name, fingerprint=target.fingerprint, data=files)
    return asdict(made)

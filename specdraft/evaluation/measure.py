"""The evaluation itself: plain and speculative decoding of the same prompts, side by side, and what came of it."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import numpy as np
import torch
from pydantic import Field, JsonValue, model_validator

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.conversations import Faults
from specdraft.decoding import Generation, generate
from specdraft.drafters.base import Drafter, Shape
from specdraft.evaluation import exhibits
from specdraft.evaluation.costs import costs, time_parts
from specdraft.evaluation.lossless import TIE_FACTOR, check_sampled, compare_greedy, lossy_by_choice
from specdraft.evaluation.prompts import Prompt, read_prompts, seen_in_training
from specdraft.evaluation.report import Estimate, Losslessness, Report, RunTime, Setting, SystemReport
from specdraft.evaluation.statistics import Bootstrap, acceptance
from specdraft.evaluation.systems import (
    Acceptance,
    ChainSystem,
    ExactAcceptance,
    StaticTreeSystem,
    System,
    TreeSystem,
    TypicalAcceptance,
)
from specdraft.provenance import Provenance
from specdraft.target import FrozenTarget
from specdraft.verify import Thresholds
from specdraft.warping import Warp

FEW = 20


class EvalRecipe(Recipe):
    prompts: tuple[str, ...] = ()
    """JSONL files (turns, messages or prompt, with an optional category) or datasets to evaluate on."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many prompts."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """Variables of the chat template, as serving sets them."""
    systems: tuple[System, ...] = (ChainSystem(), TreeSystem())
    """What the drafter drafts, each evaluated in turn on the same prompts."""
    acceptance: Acceptance = ExactAcceptance()
    """The rule by which drafted tokens are accepted."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy decoding."""
    top_k: int | None = Field(default=None, ge=1)
    """Keep the likeliest so many tokens, for target and drafter alike."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the likeliest tokens of this total probability, for target and drafter alike."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Cap on each answer."""
    batch_size: int = Field(default=1, ge=1)
    """Prompts decoded together."""
    seed: int = 0
    """Of sampling and of the bootstrap."""
    compare_with_plain: bool = True
    """Also decode without a drafter: needed for the speed-up, and for the verdict on greedy answers."""
    bootstrap_samples: int = Field(default=2000, ge=100)
    """Resamples behind each interval."""
    tie_factor: float = Field(default=TIE_FACTOR, ge=0)
    """Half precision: a greedy answer may part from plain decoding where both tokens lie within so many times what the
    dtype itself does to the target's logits there (its plain pass against float32) of the best logit."""
    shown: int = Field(default=8, ge=0)
    """Answers shown in the report for each system."""
    training_prompts: tuple[str, ...] = ()
    """What the drafter was trained on, to count the evaluation prompts that it has seen."""
    training_log: Path | None = None
    """A `trainer_state.json`, whose curves the report shows."""

    @property
    def warp(self) -> Warp:
        return Warp(self.temperature, self.top_k, self.top_p)

    @property
    def lossy(self) -> Thresholds | None:
        rule = self.acceptance
        return Thresholds(rule.epsilon, rule.delta) if isinstance(rule, TypicalAcceptance) else None

    @model_validator(mode="after")
    def _lossy_when_sampled(self) -> Self:
        if self.lossy is not None and self.warp.greedy:
            raise ValueError("acceptance typical has no effect at temperature 0: set a temperature, or leave it exact")
        return self


@dataclass
class _Run:
    """One way of decoding all prompts, batch by batch."""

    name: str
    shape: Shape | None
    """None: plain decoding."""
    generations: list[Generation] = field(default_factory=list)
    batches: list[RunTime] = field(default_factory=list)

    def per_batch(self, figure: Callable[[RunTime], float]) -> np.ndarray:
        return np.array([figure(batch) for batch in self.batches], dtype=np.float64)

    def time(self) -> RunTime:
        whole = {name: sum(getattr(batch, name) for batch in self.batches) for name in RunTime.model_fields}
        return RunTime(**whole)


def evaluate(
    target: FrozenTarget,
    drafter: Drafter,
    recipe: EvalRecipe,
    *,
    drafter_name: str = "drafter",
    trained_length: int | None = None,
    prompts: Sequence[Prompt] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Decode the recipe's prompts (or `prompts`, ready made) plainly and with each system, and report.

    `trained_length` is the longest sequence that the drafter was trained on, if known; `progress` is called with the
    prompts decoded so far, over all runs, and their total. Sets `drafter.shape`. Raises SpecdraftError if there is no
    usable prompt, no system or two of one name, or a system that never drafted anything.
    """
    if len({system.name for system in recipe.systems}) < max(len(recipe.systems), 1):
        raise SpecdraftError(f"evaluation.systems must name one system or more, each once, got {list(recipe.systems)}")
    faults = Faults()
    if prompts is None:
        prompts = read_prompts(target, recipe.prompts, recipe.limit, recipe.chat_template_kwargs, faults)
    asked, recipe = recipe, _settled(target, drafter, recipe)
    runs = [_Run(system.name, system.shape()) for system in recipe.systems]
    plain = _Run("plain", None) if recipe.compare_with_plain else None
    everything = runs if plain is None else [plain, *runs]
    _decode(target, drafter, recipe, prompts, everything, progress)
    overlap = seen_in_training(prompts, recipe.training_prompts) if recipe.training_prompts else None
    return Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        setting=_setting(target, recipe, prompts, drafter_name, trained_length, overlap),
        plain=None if plain is None else plain.time(),
        systems=_judge(target, drafter, recipe, prompts, plain, runs, trained_length),
        samples=exhibits.samples(target.tokenizer, prompts, {r.name: r.generations for r in runs}, recipe.shown),
        training=[] if recipe.training_log is None else exhibits.training_curves(recipe.training_log),
        warnings=_warnings(recipe, prompts, trained_length, overlap, faults),
        provenance=_provenance(target, asked),
    )


def _settled(target: FrozenTarget, drafter: Drafter, recipe: EvalRecipe) -> EvalRecipe:
    """The recipe with the paths of its static trees."""
    answers, template_args = recipe.training_prompts, recipe.chat_template_kwargs
    systems = tuple(
        system.settled(target, drafter, answers, template_args) if isinstance(system, StaticTreeSystem) else system
        for system in recipe.systems
    )
    return recipe.model_copy(update={"systems": systems})


def _decode(
    target: FrozenTarget,
    drafter: Drafter,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    runs: Sequence[_Run],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Every run takes each batch in turn, and another goes first each time: a machine that slows down slows all."""
    ids = [prompt.ids for prompt in prompts]
    for run in runs:
        _batch(target, drafter, recipe, run, ids[: recipe.batch_size], 0, min(recipe.max_new_tokens, 8))  # warm up
    done, total = 0, len(runs) * len(prompts)
    for turn, start in enumerate(range(0, len(prompts), recipe.batch_size)):
        batch = ids[start : start + recipe.batch_size]
        for place in range(len(runs)):
            run = runs[(turn + place) % len(runs)]
            generations, taken = _batch(target, drafter, recipe, run, batch, start, recipe.max_new_tokens)
            run.generations += generations
            run.batches.append(taken)
            done += len(batch)
            if progress is not None:
                progress(done, total)


def _batch(
    target: FrozenTarget,
    drafter: Drafter,
    recipe: EvalRecipe,
    run: _Run,
    batch: Sequence[Sequence[int]],
    start: int,
    cap: int,
) -> tuple[list[Generation], RunTime]:
    if run.shape is not None:
        drafter.shape = run.shape
    clock = time.perf_counter()
    decoding = generate(
        target,
        None if run.shape is None else drafter,
        batch,
        warp=recipe.warp,
        max_new_tokens=cap,
        batch_size=len(batch),
        seed=recipe.seed,
        first_index=start,
        lossy=None if run.shape is None else recipe.lossy,
    )
    taken = RunTime(
        new_tokens=decoding.new_tokens,
        passes=decoding.passes,
        seconds=time.perf_counter() - clock,
        prefill_seconds=decoding.prefill_seconds,
        target_seconds=decoding.target_seconds,
        drafter_seconds=decoding.drafter_seconds,
    )
    return decoding.generations, taken


def _judge(
    target: FrozenTarget,
    drafter: Drafter,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    plain: _Run | None,
    runs: Sequence[_Run],
    trained_length: int | None,
) -> list[SystemReport]:
    bootstrap = Bootstrap(len(prompts), recipe.bootstrap_samples, recipe.seed)
    lengths = [len(prompt.ids) for prompt in prompts]
    categories = [prompt.category for prompt in prompts]
    passes: dict[int, float] = {}
    drafts: list[float] = []
    if plain is not None:
        middling = sorted((prompt.ids for prompt in prompts), key=len)[len(prompts) // 2]
        shapes = [run.shape for run in runs if run.shape is not None]
        batch = [middling] * min(recipe.batch_size, len(prompts))
        passes, drafts = time_parts(target, drafter, shapes, batch, recipe.warp)
    found = []
    for place, (system, run) in enumerate(zip(recipe.systems, runs, strict=True)):
        rounds = [generation.rounds for generation in run.generations]
        figures = acceptance(rounds, lengths, categories, bootstrap, trained_length)
        if figures.rounds and not figures.proposed:
            raise SpecdraftError(
                f"{system.name}: the drafter proposed nothing in {figures.rounds} rounds; not a report"
            )
        speedup, decode_speedup = (None, None) if plain is None else _speedups(recipe, plain, run)
        found.append(
            SystemReport(
                name=system.name,
                shape=system.model_dump(mode="json"),
                acceptance=figures,
                time=run.time(),
                speedup=speedup,
                decode_speedup=decode_speedup,
                costs=None if plain is None else costs(passes, drafts[place], system.shape(), figures),
                losslessness=_losslessness(target, recipe, prompts, plain, run),
            )
        )
    return found


def _speedups(recipe: EvalRecipe, plain: _Run, run: _Run) -> tuple[Estimate, Estimate]:
    """End to end, and without reading prompts (of whose pass the first token of each row comes)."""
    bootstrap = Bootstrap(len(run.batches), recipe.bootstrap_samples, recipe.seed)
    rows = np.bincount([index // recipe.batch_size for index in range(len(run.generations))]).astype(np.float64)

    def rate(one: _Run, decode: bool) -> tuple[np.ndarray, np.ndarray]:
        tokens, seconds = one.per_batch(lambda t: t.new_tokens), one.per_batch(lambda t: t.seconds)
        return (tokens - rows, seconds - one.per_batch(lambda t: t.prefill_seconds)) if decode else (tokens, seconds)

    whole, decode = (bootstrap.quotient(rate(run, kind), rate(plain, kind)) for kind in (False, True))
    return whole, decode


def _losslessness(
    target: FrozenTarget, recipe: EvalRecipe, prompts: Sequence[Prompt], plain: _Run | None, run: _Run
) -> Losslessness:
    if recipe.lossy is not None:
        return lossy_by_choice(run.generations, recipe.lossy)
    if not recipe.warp.greedy:
        return check_sampled(run.generations)
    if plain is None:
        return Losslessness(verdict="not certified", reason="plain decoding was not run")
    ids = [prompt.ids for prompt in prompts]
    return compare_greedy(target, ids, plain.generations, run.generations, recipe.tie_factor)


def _setting(
    target: FrozenTarget,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    drafter_name: str,
    trained_length: int | None,
    overlap: int | None,
) -> Setting:
    return Setting(
        target=target.name,
        target_fingerprint=target.fingerprint,
        drafter=drafter_name,
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
        seed=recipe.seed,
        prompts=len(prompts),
        categories=dict(Counter(prompt.category for prompt in prompts if prompt.category is not None)),
        training_overlap=overlap,
        trained_length=trained_length,
    )


def _rule(recipe: EvalRecipe) -> str:
    rule = recipe.lossy
    return "exact" if rule is None else f"typical (epsilon {rule.epsilon:g}, delta {rule.delta:g}), lossy by choice"


def _warnings(
    recipe: EvalRecipe, prompts: Sequence[Prompt], trained_length: int | None, overlap: int | None, faults: Faults
) -> list[str]:
    found = []
    if trained_length is not None:
        beyond = sum(len(prompt.ids) > trained_length for prompt in prompts)
        within = sum(len(p.ids) <= trained_length < len(p.ids) + recipe.max_new_tokens for p in prompts)
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
    if faults.counts:
        found.append(str(faults))
    return found


def _provenance(target: FrozenTarget, recipe: EvalRecipe) -> dict[str, JsonValue]:
    files = [Path(source) for source in recipe.prompts if Path(source).is_file()]
    made = Provenance.of(recipe, seed=recipe.seed, target=target.name, fingerprint=target.fingerprint, data=files)
    return asdict(made)

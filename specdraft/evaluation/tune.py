"""`specdraft tune`: what to draft, with which drafter, up to which batch size; from one recorded trace where that is
exact, and confirmed by decoding."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from rich.console import Console

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.chat import tokenizer_fingerprint
from specdraft.data.conversations import Faults, RowError, read_conversations
from specdraft.decoding import generate
from specdraft.evaluation import exhibits
from specdraft.evaluation.candidates import Tried, Work, compared, tried
from specdraft.evaluation.measure import FEW, evaluate
from specdraft.evaluation.prompts import Prompt, read_prompts
from specdraft.evaluation.recipe import EvalRecipe
from specdraft.evaluation.report import Estimate, speed_sentence
from specdraft.evaluation.stage import Source, training_of
from specdraft.evaluation.systems import ChainSystem, StaticTreeSystem, System, TreeSystem
from specdraft.evaluation.tune_report import Candidate, Comparison, Confirmation, Tuning, table
from specdraft.progress import progress_bar
from specdraft.provenance import Provenance
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.warping import Warp

Step = Callable[[str, int], Callable[[int], None]]


class TuneRecipe(Recipe):
    """The fast mode, for thousands of prompts: `answers` that `respond` wrote, chains and static trees, `confirm: 0`:
    then nothing is decoded but a few tokens behind each answer."""

    target: TargetRecipe
    """The model whose answers are to stay the same."""
    drafters: tuple[Annotated[Source, Field(discriminator="kind")], ...] = Field(min_length=1)
    """What is tuned; several are compared on the same prompts, pair by pair."""
    prompts: tuple[str, ...] = ()
    """JSONL files or datasets of prompts; the target answers them once. Or give answers."""
    answers: tuple[str, ...] = ()
    """JSONL files that `respond` wrote with this target at this temperature: recorded traces, used as they are."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many prompts."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """Variables of the chat template, as serving sets them; recorded answers keep their prompts."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Cap on each answer; recorded ones are cut to it."""
    gammas: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2, 3, 4, 5, 6)
    """Lengths of the chains that are tried. Greedy chains cost nothing: they are replayed."""
    trees: tuple[Annotated[TreeSystem | StaticTreeSystem, Field(discriminator="kind")], ...] = ()
    """Trees that are tried. Static ones are replayed where decoding is greedy; others are decoded."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """Rising batch sizes at which costs are measured and speeds predicted; the first is the one that is confirmed."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy decoding. Above 0 every shape is decoded, and a pass over the answers gives overlap_d, not alpha."""
    confirm: int = Field(default=2, ge=0)
    """How many of the best are decoded again beside plain decoding: the winner and the runner-up."""
    confirm_prompts: int | None = Field(default=None, ge=1)
    """On how many of the prompts. Unset: on all."""
    seed: int = 0
    """Of sampling and of the bootstrap."""
    bootstrap_samples: int = Field(default=2000, ge=100)
    """Resamples behind each interval."""
    output: Path
    """Folder for tune.json and tune.md."""

    @property
    def systems(self) -> tuple[System, ...]:
        return (*(ChainSystem(gamma=gamma) for gamma in self.gammas), *self.trees)

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if bool(self.prompts) == bool(self.answers):
            raise ValueError("give either prompts, which the target answers, or answers that it has given: one of them")
        if self.answers and self.chat_template_kwargs:
            raise ValueError(
                "chat_template_kwargs has no effect on answers, which keep the prompts they were given for"
            )
        if not self.batch_sizes or [*self.batch_sizes] != sorted(set(self.batch_sizes)):
            raise ValueError(f"batch_sizes must rise, got {list(self.batch_sizes)}")
        if not self.confirm and self.confirm_prompts:
            raise ValueError("confirm_prompts has no effect where confirm is 0: set confirm, or leave it out")
        for what, names in (
            ("drafters", [drafter.name for drafter in self.drafters]),
            ("gammas and trees", [system.name for system in self.systems]),
        ):
            if len(set(names)) < max(len(names), 1):
                raise ValueError(f"{what} must name one or more, each once, got {', '.join(names) or 'none'}")
        return self


def tune(recipe: TuneRecipe) -> dict[str, Any]:
    """Tune, write tune.json and tune.md, print the table on stderr, and return the summary.

    Raises SpecdraftError for answers that are not the target's own at this temperature, for a drafter that cannot be
    loaded, and for one that can draft nothing of what was asked for.
    """
    console = Console(stderr=True)
    target = FrozenTarget.load(recipe.target)
    drafters = [(source, source.load(target)) for source in recipe.drafters]
    with progress_bar(console) as bar:

        def step(what: str, total: int) -> Callable[[int], None]:
            task = bar.add_task(what, total=total)
            return lambda done: bar.advance(task, done)

        faults = Faults()
        prompts, answers, cap = _answers(target, recipe, faults, step)
        work = Work(
            target=target,
            systems=recipe.systems,
            prompts=prompts,
            answers=answers,
            cap=cap,
            template_args=recipe.chat_template_kwargs,
            temperature=recipe.temperature,
            batch_sizes=recipe.batch_sizes,
            seed=recipe.seed,
            bootstrap_samples=recipe.bootstrap_samples,
            step=step,
        )
        if faults.counts:
            work.warnings.append(str(faults))
        if len(prompts) < FEW:
            work.warnings.append(f"Only {len(prompts)} prompts: the intervals are rough.")
        found = tried(work, drafters)
        comparisons = [compared(work, one, other) for one, other in combinations(found, 2)]
        confirmations = _confirmed(recipe, work, found)
    tuning = _assembled(recipe, work, found, comparisons, confirmations)
    tuning.write(recipe.output)
    console.print(table(tuning))
    return summary(tuning, recipe.output)


def summary(tuning: Tuning, folder: Path) -> dict[str, Any]:
    """What the last line of stdout says."""
    drafters = {
        tuned.drafter: {
            "tau": {found.system: found.acceptance.tau.value for found in tuned.candidates},
            "best": {str(point.batch_size): point.system for point in tuned.by_batch},
            "predicted": {str(point.batch_size): point.predicted.value for point in tuned.by_batch},
            "best_gamma": {str(point.batch_size): point.best_gamma for point in tuned.by_batch},
            "stops_paying": tuned.stops_paying,
        }
        for tuned in tuning.drafters
    }
    confirmed = [
        {"drafter": c.drafter, "system": c.system, "decode_speedup": c.decode_speedup.value, "lossless": c.lossless}
        for c in tuning.confirmations
    ]
    verdicts = [text for comparison in tuning.comparisons for text in comparison.verdicts]
    report = str(folder / "tune.md")
    return {
        "report": report,
        "headline": tuning.headline,
        "drafters": drafters,
        "confirmed": confirmed,
        "verdicts": verdicts,
    }


def _answers(
    target: FrozenTarget, recipe: TuneRecipe, faults: Faults, step: Step
) -> tuple[list[Prompt], list[list[int]], int]:
    """The prompts, the target's own answers, and the cap that these have."""
    if recipe.answers:
        return _recorded(target, recipe, faults)
    prompts = read_prompts(target, recipe.prompts, recipe.limit, recipe.chat_template_kwargs, faults)
    decoding = generate(
        target,
        None,
        [prompt.ids for prompt in prompts],
        warp=Warp(recipe.temperature),
        max_new_tokens=recipe.max_new_tokens,
        batch_size=recipe.batch_sizes[0],
        seed=recipe.seed,
        progress=step("the target's own answers", len(prompts)),
    )
    return prompts, [generation.tokens for generation in decoding.generations], recipe.max_new_tokens


def _recorded(target: FrozenTarget, recipe: TuneRecipe, faults: Faults) -> tuple[list[Prompt], list[list[int]], int]:
    """Answers as `respond` wrote them. Raises SpecdraftError for those of another target, tokenizer or temperature."""
    prompts: list[Prompt] = []
    answers: list[list[int]] = []
    cap, own = recipe.max_new_tokens, tokenizer_fingerprint(target.tokenizer)
    wanted = {"fingerprint": target.fingerprint, "tokenizer": own, "temperature": recipe.temperature}
    for conversation in read_conversations(recipe.answers, faults):
        if recipe.limit is not None and len(prompts) >= recipe.limit:
            break
        if not conversation.answers or conversation.written_by is None:
            faults.note(conversation.where, RowError("no recorded answer", "let the target answer it (`respond`)"))
            continue
        by = conversation.written_by
        if differ := [f"{name} {by.get(name)}, not {due}" for name, due in wanted.items() if by.get(name) != due]:
            raise SpecdraftError(
                f"{conversation.where}: these are not {target.name}'s answers at temperature {recipe.temperature:g}: "
                f"{'; '.join(differ)}; write them with `specdraft respond`, or give prompts"
            )
        cap = min(cap, int(by["max_new_tokens"]))
        for answer in conversation.answers:
            if answer.answer_ids:
                text = conversation.messages[answer.message - 1]["content"]
                prompts.append(Prompt(answer.prompt_ids, text, conversation.category))
                answers.append(answer.answer_ids)
    if not prompts:
        raise SpecdraftError(f"no recorded answer in {', '.join(recipe.answers)}; {faults}")
    return prompts[: recipe.limit], [answer[:cap] for answer in answers[: recipe.limit]], cap


def _confirmed(recipe: TuneRecipe, work: Work, found: Sequence[Tried]) -> list[Confirmation]:
    """The best shapes of all drafters, decoded beside plain decoding; each drafter's own in one run."""
    pairs = [(each, candidate) for each in found for candidate in each.tuned.candidates]
    pairs.sort(key=lambda pair: pair[1].speeds[0].predicted.value or 0.0, reverse=True)
    confirmations = []
    for each in found:
        if chosen := [candidate for owner, candidate in pairs[: recipe.confirm] if owner is each]:
            confirmations += _confirmation(recipe, work, each, chosen)
    return confirmations


def _confirmation(recipe: TuneRecipe, work: Work, each: Tried, chosen: Sequence[Candidate]) -> list[Confirmation]:
    prompts = work.prompts[: recipe.confirm_prompts]
    trained_length, answers = training_of(each.source)
    settings = EvalRecipe(
        systems=tuple(each.systems[candidate.system] for candidate in chosen),
        temperature=recipe.temperature,
        max_new_tokens=work.cap,
        batch_size=recipe.batch_sizes[0],
        seed=recipe.seed,
        bootstrap_samples=recipe.bootstrap_samples,
        shown=0,
        training_prompts=answers,
    )
    advance, before = work.step(f"{each.source.name}: confirming", (1 + len(chosen)) * len(prompts)), 0

    def progress(done: int, total: int) -> None:
        nonlocal before
        advance(done - before)
        before = done

    report = evaluate(
        work.target,
        each.drafter,
        settings,
        drafter_name=each.source.name,
        trained_length=trained_length,
        prompts=prompts,
        progress=progress,
    )
    work.warnings.extend(warning for warning in report.warnings if warning not in work.warnings)
    return [
        Confirmation(
            drafter=each.source.name,
            system=system.name,
            batch_size=recipe.batch_sizes[0],
            prompts=len(prompts),
            predicted=candidate.speeds[0].predicted,
            decode_speedup=system.decode_speedup or Estimate(value=None),
            speedup=system.speedup or Estimate(value=None),
            tau=system.acceptance.tau,
            lossless=system.losslessness.verdict,
            sentence=speed_sentence(system),
        )
        for candidate, system in zip(chosen, report.systems, strict=True)
    ]


def _assembled(
    recipe: TuneRecipe,
    work: Work,
    found: Sequence[Tried],
    comparisons: list[Comparison],
    confirmations: list[Confirmation],
) -> Tuning:
    target = work.target
    files = [Path(source) for source in (*recipe.prompts, *recipe.answers) if Path(source).is_file()]
    made = Provenance.of(recipe, seed=recipe.seed, target=target.name, fingerprint=target.fingerprint, data=files)
    return Tuning(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        target=target.name,
        target_fingerprint=target.fingerprint,
        hardware=exhibits.hardware(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        temperature=recipe.temperature,
        max_new_tokens=work.cap,
        prompts=len(work.prompts),
        drafters=[each.tuned for each in found],
        comparisons=comparisons,
        confirmations=confirmations,
        warnings=work.warnings,
        provenance=asdict(made),
    )

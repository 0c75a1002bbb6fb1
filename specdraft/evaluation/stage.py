"""`specdraft eval`: a target, a drafter and prompts in, a folder with the report out."""

import logging
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator
from rich.console import Console
from torch import nn

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.batches import DataRecipe, load_rows
from specdraft.drafters import checkpoint_of, load_drafter
from specdraft.drafters.base import Drafter
from specdraft.drafters.early_exit import LayersDrafter, SearchRecipe, search
from specdraft.drafters.ensemble import EnsembleDrafter
from specdraft.drafters.hybrid import HybridDrafter
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.lookahead import LookaheadDrafter
from specdraft.drafters.lookup import LookupDrafter, Occurrence
from specdraft.evaluation import page
from specdraft.evaluation.measure import evaluate
from specdraft.evaluation.recipe import EvalRecipe
from specdraft.evaluation.report import Report
from specdraft.evaluation.served import VllmEngine
from specdraft.evaluation.served_server import ServerEngine
from specdraft.evaluation.systems import ChainSystem
from specdraft.lowbit import engine_dtype
from specdraft.packing import pack_linears
from specdraft.progress import progress_bar
from specdraft.provenance import FILE_NAME, Provenance, hash_weights
from specdraft.target import FrozenTarget, TargetRecipe

log = logging.getLogger(__name__)


class TrainedSource(Recipe):
    kind: Literal["trained"] = "trained"
    """A drafter that was trained here."""
    folder: Path
    """What `train` wrote, or the name of a Hub repository to which `publish` brought it."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    subfolder: str | None = None
    """Folder inside, where a repository holds several variants."""

    @property
    def name(self) -> str:
        return "/".join(filter(None, (str(self.folder), self.subfolder))) + f"@{self.revision}" * bool(self.revision)

    @property
    def checkpoint(self) -> Path:
        """Where its files lie on this machine; SpecdraftError if they cannot be had."""
        return checkpoint_of(self.folder, self.revision, self.subfolder)

    def load(self, target: FrozenTarget) -> Drafter:
        """In the dtype in which engines would draft."""
        drafter = load_drafter(self.checkpoint)
        drafter.attach(target)
        nn.Module.to(drafter, target.device, engine_dtype(drafter, target.dtype))
        pack_linears(drafter)
        return cast(Drafter, drafter)


class LMSource(Recipe):
    kind: Literal["lm"]
    """A small causal language model with the target's tokenizer; drafts chains."""
    model: TargetRecipe
    """Where it is, as for a target."""

    @property
    def name(self) -> str:
        return self.model.name

    def load(self, target: FrozenTarget) -> Drafter:
        return cast(Drafter, LMDrafter.of(FrozenTarget.load(self.model), target))


class LookupSource(Recipe):
    kind: Literal["lookup"]
    """Prompt lookup: what followed the last tokens before. Nothing to load; drafts chains."""
    shortest: int = 1
    """Shortest suffix that is looked up."""
    longest: int = 3
    """Longest suffix that is looked up; tried first."""
    occurrence: Occurrence = "latest"
    """Which of several occurrences is continued: the latest, which is the likeliest to go on alike, or the earliest, as
    in vLLM."""

    @property
    def name(self) -> str:
        which = ", earliest" if self.occurrence == "earliest" else ""
        return f"prompt lookup ({self.shortest} to {self.longest} tokens{which})"

    def load(self, target: FrozenTarget) -> Drafter:
        return LookupDrafter(self.shortest, self.longest, self.occurrence)


class EarlyExitSource(Recipe):
    """The simplest: `{kind: early_exit, exit: 10}`. The best, minutes later: `{kind: early_exit, search: {answers:
    [answers.jsonl]}}`, which logs the layers that it found, to be given as `skip` from then on."""

    kind: Literal["early_exit"]
    """The target's own layers, some of them, on its keys and values: nothing to train. One of exit, skip, search."""
    exit: int | None = Field(default=None, ge=1)
    """Draft with so many of the first layers."""
    skip: tuple[int, ...] | None = None
    """Draft with all layers but these, counted from 1."""
    search: SearchRecipe | None = None
    """Find the layers to draft with."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (given := [self.exit, self.skip, self.search].count(None)) != 2:
            raise ValueError(f"one of exit, skip and search says which layers draft; {3 - given} of them are given")
        return self

    @property
    def name(self) -> str:
        if self.exit is not None:
            return f"the target's first {self.exit} layers"
        if self.skip is not None:
            return f"the target without its layers {', '.join(map(str, sorted(self.skip))) or '(none)'}"
        return "the target's own layers, found by search"

    def load(self, target: FrozenTarget) -> Drafter:
        if self.exit is not None:
            return LayersDrafter(target, range(1, self.exit + 1))
        if self.skip is not None:
            return LayersDrafter.without(target, self.skip)
        assert self.search is not None, "by _one"
        wanted = self.search
        settings = {"answers": wanted.answers, "max_length": wanted.max_length, "limit": wanted.rows}
        rows = load_rows(DataRecipe.model_validate(settings), target.tokenizer, target.end_ids)
        with progress_bar(Console(stderr=True)) as bar:
            task = bar.add_task("searching layers", total=None)
            found = search(target, rows, wanted, lambda done, total: bar.update(task, completed=done, total=total))
        skip = sorted(set(range(1, target.num_layers + 1)) - set(found.layers))
        told = "%d of %d layers draft, %.1f %% as the target would, promising %.2f times its speed; next time: skip: %s"
        log.info(told, len(found.layers), target.num_layers, 100 * found.agreement, found.speed, skip)
        return LayersDrafter(target, found.layers)


class LookaheadSource(Recipe):
    kind: Literal["lookahead"]
    """The target's own Jacobi iteration: nothing to load. Every pass scores window * (ngram - 1) guesses more."""
    window: int = Field(default=7, ge=1)
    """Positions that are guessed at once."""
    ngram: int = Field(default=5, ge=2)
    """Tokens of the n-grams that are collected; one of them is the root, the rest is drafted."""
    guesses: int = Field(default=7, ge=1)
    """Most n-grams that are kept of each first token, and tried at once where a tree is drafted."""

    @property
    def name(self) -> str:
        return f"lookahead (window {self.window}, {self.ngram}-grams)"

    def load(self, target: FrozenTarget) -> Drafter:
        return LookaheadDrafter(self.window, self.ngram, self.guesses)


One = Annotated[
    TrainedSource | LMSource | LookupSource | EarlyExitSource | LookaheadSource, Field(discriminator="kind")
]


class HybridSource(Recipe):
    kind: Literal["hybrid"]
    """Prompt lookup where it has something to offer, another drafter everywhere else."""
    first: LookupSource = LookupSource(kind="lookup")
    """Tried first: prompt lookup, which alone of all has now and then nothing to offer. Drafts chains."""
    second: One
    """Drafts in the rows in which the first has nothing."""
    least: int = Field(default=1, ge=1)
    """How many tokens the first must offer to be used."""

    @property
    def name(self) -> str:
        return f"{self.first.name}, else {self.second.name}"

    def load(self, target: FrozenTarget) -> Drafter:
        return HybridDrafter(self.first.load(target), self.second.load(target), self.least)


class EnsembleSource(Recipe):
    kind: Literal["ensemble"]
    """Several drafters at once, their drafts merged into one tree."""
    drafters: tuple[One, ...] = Field(min_length=2)
    """Which, the best one first. All of them must know the shape that an evaluation asks for."""

    @property
    def name(self) -> str:
        return " + ".join(drafter.name for drafter in self.drafters)

    def load(self, target: FrozenTarget) -> Drafter:
        return EnsembleDrafter([drafter.load(target) for drafter in self.drafters])


Source = TrainedSource | LMSource | LookupSource | EarlyExitSource | LookaheadSource | HybridSource | EnsembleSource


class EvaluateRecipe(Recipe):
    target: TargetRecipe
    """The model whose answers are to stay the same."""
    drafter: Annotated[Source, Field(discriminator="kind")]
    """The drafter that is measured."""
    evaluation: EvalRecipe
    """On what, and how."""
    output: Path
    """Folder for report.json, report.md and report.html."""
    check_lossless: bool = False
    """Fail, once the report is written, where some system's verdict is not lossless."""
    engine: Annotated[VllmEngine | ServerEngine, Field(discriminator="kind")] | None = None
    """A serving engine that decodes the same prompts: its acceptance beside that of the chain. Greedy only."""
    check_served: bool = False
    """Fail, once the report is written, where the engine's counts or answers are not those found here."""

    @model_validator(mode="after")
    def _engine_has_its_like(self) -> Self:
        if self.engine is None:
            if self.check_served:
                raise ValueError("check_served has no effect without engine")
            return self
        settings = self.evaluation
        if settings.temperature or not settings.compare_with_plain:
            raise ValueError("an engine is compared greedily: evaluation needs temperature 0 and compare_with_plain")
        chains = [system for system in settings.systems if isinstance(system, ChainSystem)]
        if len(chains) != 1 or chains[0].stop_below:
            found = ", ".join(chain.name for chain in chains) or "none"
            raise ValueError(f"an engine is compared with one chain of a fixed length; evaluation.systems has {found}")
        return self


def evaluate_recipe(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Evaluate, write the report, print its table on stderr, and return the summary.

    How long the drafter's training samples were, and which prompts they answered, is read from the provenance beside
    it where it has one. A drafter that cannot be loaded is an error: no speed is ever reported without it (X-13).
    """
    target = FrozenTarget.load(recipe.target)
    drafter = recipe.drafter.load(target)
    weights = hash_weights(recipe.drafter.checkpoint) if isinstance(recipe.drafter, TrainedSource) else None
    trained_length, answers = training_of(recipe.drafter)
    settings = recipe.evaluation
    if not settings.training_prompts and answers:
        settings = settings.model_copy(update={"training_prompts": answers})
    console = Console(stderr=True)
    with progress_bar(console) as bar:
        task = bar.add_task("evaluating", total=None)
        report = evaluate(
            target,
            drafter,
            settings,
            drafter_name=recipe.drafter.name,
            drafter_weights=weights,
            trained_length=trained_length,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            engine=recipe.engine,
        )
    page.write(report, recipe.output)
    console.print(page.table(report))
    if report.served is not None:
        console.print(f"{report.served.engine}: {report.served.verdict}; {report.served.reason}.", markup=False)
    if recipe.check_lossless:
        require_lossless(report)
    if recipe.check_served:
        require_served(report)
    return summary(report, recipe.output)


def require_lossless(report: Report) -> None:
    """Raises SpecdraftError that names each system whose verdict is failed, not certified or lossy by choice."""
    if found := [system for system in report.systems if not system.losslessness.lossless]:
        verdicts = "; ".join(f"{s.name}: {s.losslessness.verdict}, {s.losslessness.reason}" for s in found)
        raise SpecdraftError(f"{len(found)} of {len(report.systems)} systems not shown to be lossless. {verdicts}")


def require_served(report: Report) -> None:
    """Raises SpecdraftError where an engine's counts or answers are not those found here."""
    if report.served is not None and not report.served.equal:
        raise SpecdraftError(f"{report.served.engine} does not do as found here: {report.served.reason}")


def summary(report: Report, folder: Path) -> dict[str, Any]:
    """What the last line of stdout says."""
    systems = {
        system.name: {
            **system.acceptance.metrics(),
            "speedup": None if system.speedup is None else system.speedup.value,
            "tokens_per_second": system.time.tokens_per_second,
            "lossless": system.losslessness.verdict,
        }
        for system in report.systems
    }
    found = {"report": str(folder / "report.html"), "headline": report.headline, "systems": systems}
    if (served := report.served) is not None:
        counts = {"ours": served.ours.model_dump(mode="json"), "theirs": served.theirs.model_dump(mode="json")}
        found["served"] = {"engine": served.engine, "verdict": served.verdict, **counts, "reason": served.reason}
    return found


def training_of(source: Source) -> tuple[int | None, tuple[str, ...]]:
    """Longest sample that every trained drafter has seen, and the files of training answers that are still there."""
    parts: tuple[Source, ...] = (source,)
    if isinstance(source, HybridSource):
        parts = (source.first, source.second)
    elif isinstance(source, EnsembleSource):
        parts = source.drafters
    folders = [part.checkpoint for part in parts if isinstance(part, TrainedSource)]
    folders = [folder for folder in folders if (folder / FILE_NAME).exists()]
    data = [Provenance.read(folder).recipe.get("data", {}) for folder in folders]
    lengths = [one["max_length"] for one in data if one.get("max_length") is not None]
    answers = dict.fromkeys(name for one in data for name in one.get("answers", ()) if Path(name).is_file())
    return min(lengths, default=None), tuple(answers)

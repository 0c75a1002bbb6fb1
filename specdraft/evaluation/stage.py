"""`specdraft eval`: a target, a drafter and prompts in, a folder with the report out."""

import logging
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from specdraft.config import Recipe
from specdraft.data.batches import DataRecipe, load_rows
from specdraft.drafters import load_drafter
from specdraft.drafters.base import Drafter
from specdraft.drafters.early_exit import LayersDrafter, SearchRecipe, search
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.lookup import LookupDrafter
from specdraft.evaluation import page
from specdraft.evaluation.measure import EvalRecipe, evaluate
from specdraft.evaluation.report import Report
from specdraft.packing import pack_linears
from specdraft.provenance import FILE_NAME, Provenance
from specdraft.target import FrozenTarget, TargetRecipe

log = logging.getLogger(__name__)


class TrainedSource(Recipe):
    kind: Literal["trained"] = "trained"
    """A drafter that was trained here."""
    folder: Path
    """What `train` wrote."""

    @property
    def name(self) -> str:
        return str(self.folder)

    def load(self, target: FrozenTarget) -> Drafter:
        drafter = load_drafter(self.folder)
        drafter.attach(target)
        nn.Module.to(drafter, target.device)
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

    @property
    def name(self) -> str:
        return f"prompt lookup ({self.shortest} to {self.longest} tokens)"

    def load(self, target: FrozenTarget) -> Drafter:
        return LookupDrafter(self.shortest, self.longest)


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
        with _bar("searching layers", Console(stderr=True)) as bar:
            task = bar.add_task("searching layers", total=None)
            found = search(target, rows, wanted, lambda done, total: bar.update(task, completed=done, total=total))
        skip = sorted(set(range(1, target.num_layers + 1)) - set(found.layers))
        told = "%d of %d layers draft, %.1f %% as the target would, promising %.2f times its speed; next time: skip: %s"
        log.info(told, len(found.layers), target.num_layers, 100 * found.agreement, found.speed, skip)
        return LayersDrafter(target, found.layers)


Source = TrainedSource | LMSource | LookupSource | EarlyExitSource


class EvaluateRecipe(Recipe):
    target: TargetRecipe
    """The model whose answers are to stay the same."""
    drafter: Annotated[Source, Field(discriminator="kind")]
    """The drafter that is measured."""
    evaluation: EvalRecipe
    """On what, and how."""
    output: Path
    """Folder for report.json, report.md and report.html."""


def evaluate_recipe(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Evaluate, write the report, print its table on stderr, and return the summary.

    How long the drafter's training samples were, and which prompts they answered, is read from the provenance beside
    it where it has one. A drafter that cannot be loaded is an error: no speed is ever reported without it (X-13).
    """
    target = FrozenTarget.load(recipe.target)
    drafter = recipe.drafter.load(target)
    trained_length, answers = _training_of(recipe.drafter)
    settings = recipe.evaluation
    if not settings.training_prompts and answers:
        settings = settings.model_copy(update={"training_prompts": answers})
    console = Console(stderr=True)
    with _bar("evaluating", console) as bar:
        task = bar.add_task("evaluating", total=None)
        report = evaluate(
            target,
            drafter,
            settings,
            drafter_name=recipe.drafter.name,
            trained_length=trained_length,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    page.write(report, recipe.output)
    console.print(page.table(report))
    return summary(report, recipe.output)


def _bar(what: str, console: Console) -> Progress:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


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
    return {"report": str(folder / "report.html"), "headline": report.headline, "systems": systems}


def _training_of(source: Source) -> tuple[int | None, tuple[str, ...]]:
    """Longest training sample, and the files of training answers that are still there."""
    if not isinstance(source, TrainedSource) or not (source.folder / FILE_NAME).exists():
        return None, ()
    data = Provenance.read(source.folder).recipe.get("data", {})
    return data.get("max_length"), tuple(name for name in data.get("answers", ()) if Path(name).is_file())

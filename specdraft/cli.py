"""The `specdraft` command: one verb a stage, each a recipe and a function of it.

Heavy modules are imported inside the verbs, so that `specdraft --help` answers at once. Logs and progress go to
stderr; the last line of stdout is one JSON object. Exit codes: 0 done, 1 failed, 2 wrong use.
"""

import contextlib
import importlib
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from specdraft.config import Recipe


class Stage(NamedTuple):
    """Where a verb's recipe and function live; `module` is imported only when the verb runs or explains itself."""

    module: str
    recipe: str
    function: str
    help: str
    example: str

    def load(self) -> "tuple[type[Recipe], Callable[[Recipe], dict[str, Any]]]":
        module = importlib.import_module(self.module)
        return getattr(module, self.recipe), getattr(module, self.function)


STAGES = {
    "respond": Stage(
        "specdraft.data.respond",
        "RespondRecipe",
        "respond",
        "Have the target answer prompts: a drafter learns from the target's own words. Resumable.",
        "specdraft respond --config configs/eagle3-smollm2-135m/respond.yaml",
    ),
    "capture": Stage(
        "specdraft.data.store",
        "CaptureRecipe",
        "capture",
        "Keep the target's features of the answers on disk, so that several epochs pay for them once.",
        "specdraft capture --config configs/eagle3-smollm2-135m/capture.yaml",
    ),
    "train": Stage(
        "specdraft.training",
        "TrainRecipe",
        "train",
        "Train a drafter against the target's distributions. The checkpoint is what engines serve.",
        "specdraft train --config configs/eagle3-smollm2-135m.yaml training.learning_rate=3e-4",
    ),
    "eval": Stage(
        "specdraft.evaluation",
        "EvaluateRecipe",
        "evaluate_recipe",
        "Measure a drafter on prompts: alpha, tau, speed, losslessness; report.json, .md and .html.",
        "specdraft eval --config configs/eagle3-smollm2-135m/eval.yaml",
    ),
    "tune": Stage(
        "specdraft.evaluation.tune",
        "TuneRecipe",
        "tune",
        "Which drafter, chain or tree is best, up to which batch size; replayed where that is exact, then confirmed.",
        "specdraft tune --config configs/tune-smollm2-135m.yaml",
    ),
    "quantize": Stage(
        "specdraft.quantization",
        "QuantizeRecipe",
        "quantize",
        "Bring a trained drafter to INT8 or INT4, in the form that engines load, and report what acceptance it cost.",
        "specdraft quantize --config configs/quantize-smollm2-135m.yaml scheme=w8a8",
    ),
    "export": Stage(
        "specdraft.export",
        "ExportRecipe",
        "export",
        "Write a trained drafter in the layout that an engine loads, and check it in a fresh process.",
        "specdraft export --config configs/export-smollm2-135m.yaml format=safeailab",
    ),
    "import": Stage(
        "specdraft.export",
        "ImportRecipe",
        "import_drafter",
        "Take over a drafter that others trained, whatever layout it has, so that it can be measured here.",
        "specdraft import folder=their-head target.name=the-target output=runs/their-head",
    ),
    "publish": Stage(
        "specdraft.publish",
        "PublishRecipe",
        "publish",
        "Bring a drafter to the Hugging Face Hub, with a card of what was measured; sends nothing without upload=true.",
        "specdraft publish --config configs/publish-smollm2-135m.yaml upload=true",
    ),
}

Config = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML recipe; give it again for a layer on top of the first."),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that win over the files.")]
CheckLossless = Annotated[
    bool, typer.Option("--check-lossless", help="Exit with 1 where a system is not lossless: check_lossless=true.")
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="Have a serving engine decode the same prompts, and compare: engine.kind=vllm."),
]
CheckServed = Annotated[
    bool, typer.Option("--check-served", help="Exit with 1 where the engine counts otherwise: check_served=true.")
]
VerifyEngine = Annotated[
    str | None,
    typer.Option("--verify-engine", help="Have a serving engine load what was written: verify_engine.kind=vllm."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe as YAML and stop.")]


class StageCommand(TyperCommand):
    """A command whose help goes on with every setting of its recipe."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if self.name in STAGES:
            _print_settings(STAGES[self.name])


app = typer.Typer(
    help="Train, measure and publish drafters for lossless speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _main() -> None:
    """Train, measure and publish drafters for lossless speculative decoding.

    prompts -> respond -> (capture) -> train -> eval -> report. `specdraft VERB --help` names every setting.
    """


def _add_verb(name: str, stage: Stage) -> None:
    def verb(config: Config = None, overrides: Overrides = None, dry_run: DryRun = False) -> None:
        run(name, config or [], overrides or [], dry_run)

    def checked(
        config: Config = None,
        overrides: Overrides = None,
        check_lossless: CheckLossless = False,
        engine: Engine = None,
        check_served: CheckServed = False,
        dry_run: DryRun = False,
    ) -> None:
        flags = ["check_lossless=true"] * check_lossless + ["check_served=true"] * check_served
        run(name, config or [], [*(overrides or []), *flags, *_kind("engine", engine)], dry_run)

    def verified(
        config: Config = None,
        overrides: Overrides = None,
        verify_engine: VerifyEngine = None,
        dry_run: DryRun = False,
    ) -> None:
        run(name, config or [], [*(overrides or []), *_kind("verify_engine", verify_engine)], dry_run)

    help_ = f"{stage.help}\n\nExample: {stage.example}"
    with_flags: dict[str, Callable[..., None]] = {"eval": checked, "export": verified}
    app.command(name, cls=StageCommand, help=help_, no_args_is_help=True)(with_flags.get(name, verb))


def _kind(section: str, kind: str | None) -> list[str]:
    return [] if kind is None else [f"{section}.kind={kind}"]


def run(name: str, paths: list[Path], overrides: list[str], dry_run: bool = False) -> None:
    """Run one stage as the command does. Raises typer.Exit with code 1 or 2 when it fails."""
    from specdraft.config import RecipeError, SpecdraftError, load_recipe

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints is a log
            recipe_class, function = STAGES[name].load()
            recipe = load_recipe(recipe_class, paths, overrides)
            summary = None if dry_run else function(recipe)
    except SpecdraftError as error:
        typer.echo(f"specdraft {name}: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, RecipeError) else 1) from error
    if os.environ.get("RANK", "0") == "0":  # one answer, however many processes were launched
        typer.echo(recipe.to_yaml().rstrip() if summary is None else json.dumps(summary))


def launch(verb: str) -> None:
    """`specdraft VERB` with the arguments of the running script: what the files in recipes/ consist of."""
    app([verb, *sys.argv[1:]])


def _print_settings(stage: Stage) -> None:
    from specdraft.config import settings

    recipe_class, _ = stage.load()
    typer.echo(" Settings, given in a YAML file or as KEY=VALUE:\n")
    for setting in settings(recipe_class):
        default = "required" if setting.default is None else f"default {setting.default}"
        typer.echo(f"   {typer.style(setting.name, bold=True)}: {setting.kind}, {default}")
        typer.echo(textwrap.fill(setting.help, 100, initial_indent=" " * 7, subsequent_indent=" " * 7))


for _name, _stage in STAGES.items():
    _add_verb(_name, _stage)


if __name__ == "__main__":
    app()

"""How tau grows with the tokens that a drafter learned from: the checkpoints of training runs on the same prompts.

Give the folders that `specdraft train` wrote (with `training.save_every`, and `training.keep` high enough). A run that
has ended counts with its final weights as well; a checkpoint on the way still had a high learning rate. Greedy,
batch 8, acceptance alone. The table is on stdout, a drawing with a logarithmic axis in `--plot`, and one JSON object on
the last line.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
from matplotlib.figure import Figure
from rich.console import Console

from specdraft.data.batches import load_rows
from specdraft.data.conversations import Faults
from specdraft.decoding import generate
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.evaluation.page import number, piped
from specdraft.evaluation.prompts import read_prompts
from specdraft.evaluation.report import Estimate
from specdraft.evaluation.stage import TrainedSource
from specdraft.evaluation.statistics import Bootstrap, acceptance
from specdraft.progress import progress_bar
from specdraft.provenance import FILE_NAME
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.training import TrainRecipe
from specdraft.warping import Warp

SHAPES: dict[str, Shape] = {"chain of 4": Chain(4), "tree of 15": DynamicTree(5, 4, 15)}


class Point(NamedTuple):
    run: str
    positions: int
    """Supervised tokens seen; in a second epoch each counts again."""
    folder: Path
    final: bool


def points(run: Path, target: FrozenTarget, most: int) -> Iterator[Point]:
    """A run's final weights, and about `most` of its checkpoints, evenly spread over the logarithm of their tokens."""
    recipe = TrainRecipe.model_validate(json.loads((run / FILE_NAME).read_text())["recipe"])
    supervised = load_rows(recipe.data, target.tokenizer, target.end_ids).report.supervised

    def seen(folder: Path) -> int:
        return round(json.loads((folder / "trainer_state.json").read_text())["epoch"] * supervised)

    found = sorted((seen(folder), folder) for folder in run.glob("checkpoint-*"))
    step = (found[-1][0] / found[0][0]) ** (1 / most) if found else 1.0
    last = 0.0
    for positions, folder in found:
        if positions >= last * step:
            last = positions
            yield Point(run.name, positions, folder, final=False)
    if (run / "final").exists():
        yield Point(run.name, seen(run), run / "final", final=True)


def tau(target: FrozenTarget, point: Point, prompts: Sequence[Sequence[int]], cap: int) -> dict[str, Estimate]:
    drafter, found = TrainedSource(folder=point.folder).load(target), {}
    for name, shape in SHAPES.items():
        drafter.shape = shape
        done = generate(target, drafter, prompts, warp=Warp(0.0), max_new_tokens=cap, batch_size=8)
        rounds = [generation.rounds for generation in done.generations]
        bootstrap = Bootstrap(len(prompts), 4000, seed=0)
        found[name] = acceptance(rounds, [len(ids) for ids in prompts], [None] * len(prompts), bootstrap).tau
    return found


def draw(rows: Sequence[tuple[Point, dict[str, Estimate]]], path: Path) -> None:
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for color, name in zip(("C0", "C1"), SHAPES, strict=True):
        for run in dict.fromkeys(point.run for point, _ in rows):
            own = [(point, taus[name]) for point, taus in rows if point.run == run]
            value = [estimate.value for _, estimate in own]
            error = [[e.value - e.low for _, e in own], [e.high - e.value for _, e in own]]
            seen = [point.positions for point, _ in own]
            axes.errorbar(seen, value, error, marker=".", color=color, elinewidth=0.7, label=f"{name}, {run}")
    axes.set_xscale("log")
    axes.set_xlabel("supervised tokens seen in training")
    axes.set_ylabel("tau")
    axes.grid(visible=True, which="major", linewidth=0.4)
    axes.legend(frameon=False)
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders that `specdraft train` wrote")
    parser.add_argument("--target", default=".cache/smollm2-135m-instruct", help="as the demo makes it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=machine.DTYPE)
    parser.add_argument("--prompts", nargs="+", default=["prompts/held_out.jsonl"], help="to measure on")
    parser.add_argument("--max-new-tokens", type=int, default=56)
    parser.add_argument("--checkpoints", type=int, default=8, help="of each run, about so many")
    parser.add_argument("--plot", type=Path, help="where to draw it (.svg, .png)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    target = FrozenTarget.load(TargetRecipe(name=options.target, dtype=options.dtype))
    prompts = [prompt.ids for prompt in read_prompts(target, options.prompts, None, {}, Faults())]
    chosen = [point for run in options.runs for point in points(run, target, options.checkpoints)]
    rows: list[tuple[Point, dict[str, Estimate]]] = []
    with progress_bar(Console(stderr=True)) as bar:
        for point in bar.track(chosen, description="checkpoints"):
            rows.append((point, tau(target, point, prompts, options.max_new_tokens)))
    if options.plot is not None:
        draw(rows, options.plot)
    lines = [
        [point.run, f"{point.positions:,}", *(number(taus[name]) for name in SHAPES), "yes" if point.final else ""]
        for point, taus in rows
    ]
    print("\n".join(piped(["run", "tokens seen", *(f"tau, {name}" for name in SHAPES), "ended"], lines, 1)))
    kept: list[dict[str, Any]] = [
        {"run": point.run, "positions": point.positions, "final": point.final}
        | {name: estimate.model_dump() for name, estimate in taus.items()}
        for point, taus in rows
    ]
    print(json.dumps({"machine": machine.facts(str(target.dtype)), "prompts": len(prompts), "points": kept}))


if __name__ == "__main__":
    main()

"""Every drafting system on the same prompts, one at a time, in one race against one plain decoding: one table.

A trained drafter takes part where its folder is given (`--head eagle3=runs/demo/head/final`); lookup, lookahead and the
target's own layers need none. Prompts that are done are kept in the output folder: started again, it goes on. For the
speeds, leave the machine alone. The tables are on stdout, and on its last line one JSON object.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
from pydantic import TypeAdapter
from rich.console import Console

from specdraft.data.conversations import Faults
from specdraft.decoding import Generation, Round
from specdraft.evaluation import EvalRecipe
from specdraft.evaluation.measure import losslessness, racing, settled
from specdraft.evaluation.page import number, piped
from specdraft.evaluation.prompts import Prompt, read_prompts
from specdraft.evaluation.race import Run, decode_all, speedups
from specdraft.evaluation.report import RunTime
from specdraft.evaluation.stage import Source
from specdraft.evaluation.statistics import Bootstrap, acceptance
from specdraft.target import FrozenTarget, TargetRecipe

CHUNK = 10  # prompts that are kept together
HEADS = ("eagle3", "eagle1", "hydra", "medusa", "mtp", "lm", "early_exit")
LOOKUP = {"kind": "lookup"}


@dataclass
class Entry:
    name: str
    source: dict[str, Any]
    systems: list[dict[str, Any]]
    needs: tuple[str, ...] = ()
    """Which heads."""
    runs: list[Run] = field(default_factory=list)


def chain(gamma: int, **more: Any) -> dict[str, Any]:
    return {"kind": "chain", "gamma": gamma, **more}


def tree(**more: Any) -> dict[str, Any]:
    return {"kind": "tree", "depth": 5, "width": 4, "nodes": 15, **more}


def entries(heads: Mapping[str, str], answers: Sequence[str]) -> Iterator[Entry]:
    """What can be built of `heads`; calibration and search read `answers`."""
    trained = {name: {"kind": "trained", "folder": heads.get(name, "")} for name in HEADS}
    adaptive = [chain(6, stop_below=0.1), tree(stop_below=0.05), {"kind": "adaptive", "longest": 6}]
    static = {"kind": "static_tree", "nodes": 15, "calibrate": answers}
    searched = {"kind": "early_exit", "search": {"answers": answers, "rows": 16}}
    found = [
        Entry("EAGLE-3", trained["eagle3"], [chain(4), tree(), *adaptive], ("eagle3",)),
        Entry("EAGLE-1", trained["eagle1"], [chain(4), tree()], ("eagle1",)),
        Entry("Hydra", trained["hydra"], [chain(3)], ("hydra",)),
        Entry("Medusa", trained["medusa"], [chain(3), static], ("medusa",)),
        Entry("MTP", trained["mtp"], [chain(3)], ("mtp",)),
        Entry("draft LM", trained["lm"], [chain(4)], ("lm",)),
        Entry("early exit, adapter", trained["early_exit"], [chain(2)], ("early_exit",)),
        Entry("self-speculative, layers found by search", searched, [chain(2)]),
        Entry("prompt lookup", LOOKUP, [chain(4)]),
        Entry("lookahead", {"kind": "lookahead"}, [chain(4), tree(depth=4)]),
        Entry("lookup, else EAGLE-3", {"kind": "hybrid", "second": trained["eagle3"]}, [chain(4)], ("eagle3",)),
        Entry(
            "SpecInfer: EAGLE-3 + EAGLE-1, merged",
            {"kind": "ensemble", "drafters": [trained["eagle3"], trained["eagle1"]]},
            [chain(4)],
            ("eagle3", "eagle1"),
        ),
    ]
    return (entry for entry in found if all(name in heads for name in entry.needs))


def prepare(
    target: FrozenTarget,
    entry: Entry,
    recipe: EvalRecipe,
    prompts: Sequence[Prompt],
    answers: Sequence[str],
    folder: Path,
) -> None:
    """Load the entry's drafter and settle what its systems draft; layers that were searched for are kept."""
    found = folder / "layers.json"
    if "search" in entry.source and found.exists():
        entry.source = {"kind": "early_exit", "skip": json.loads(found.read_text())}
    drafter = TypeAdapter[Any](Source).validate_python(entry.source).load(target)
    if "search" in entry.source:
        found.write_text(json.dumps(sorted(set(range(1, target.num_layers + 1)) - set(drafter.layers))))
    asked = EvalRecipe.model_validate({"systems": entry.systems, "training_prompts": answers})
    asked = settled(target, drafter, asked.model_copy(update={"batch_size": recipe.batch_size}), prompts)
    racer = racing(drafter, asked)
    entry.runs = [Run(f"{entry.name}, {system.name}", racer, system.shape()) for system in asked.systems]


def kept(target: FrozenTarget, recipe: EvalRecipe, prompts: Sequence[Prompt], runs: Sequence[Run]) -> dict[str, Any]:
    """Decode a few prompts; by run, what its figures are made of."""
    plain, *others = [Run(run.name, run.drafter, run.shape) for run in runs]
    decode_all(target, recipe, prompts, [plain, *others], None)
    found: dict[str, Any] = {}
    for run in (plain, *others):
        found[run.name] = {
            "rounds": [generation.rounds for generation in run.generations],
            "batches": [batch.model_dump() for batch in run.batches],
        }
        if run is not plain:
            judged = losslessness(target, recipe, prompts, plain, run)
            found[run.name]["verdict"], found[run.name]["parted"] = judged.verdict, len(judged.divergences)
    return found


def restored(name: str, parts: Sequence[Mapping[str, Any]]) -> Run:
    """A run of what was kept of it."""
    rows = [[Round(*one) for one in row] for part in parts for row in part[name]["rounds"]]
    batches = [RunTime(**batch) for part in parts for batch in part[name]["batches"]]
    places = list(range(len(batches)))
    return Run(name, None, None, [Generation(rounds=row) for row in rows], batches, [1] * len(batches), places)


def tables(recipe: EvalRecipe, prompts: Sequence[Prompt], names: Sequence[str], parts: Sequence[Any]) -> list[str]:
    """Markdown: one line a system; then tau by category."""
    plain, bootstrap = restored("plain", parts), Bootstrap(len(prompts), recipe.bootstrap_samples, recipe.seed)
    lengths, categories = [len(prompt.ids) for prompt in prompts], [prompt.category for prompt in prompts]
    order = sorted({category for category in categories if category})
    whole, sliced = [], []
    for name in names:
        run = restored(name, parts)
        figures = acceptance([g.rounds for g in run.generations], lengths, categories, bootstrap)
        speed, decode = speedups(recipe, plain, run)
        verdicts = {part[name]["verdict"] for part in parts}
        parted = sum(part[name]["parted"] for part in parts)
        verdict = next(one for one in ("failed", "not certified", "ties", "identical") if one in verdicts)
        alphas = " ".join(f"{one.alpha.value or 0:.2f}" for one in figures.depths[:4])
        said = f"{verdict} ({parted})" if parted else verdict
        whole.append([name, number(figures.tau), alphas, number(speed), number(decode), said])
        taus = {part.name: part.tau.value for part in figures.slices if part.kind == "category"}
        sliced.append([name, *(f"{taus[one]:.2f}" if taus.get(one) else "–" for one in order)])
    head = ["system", "tau", "alpha by depth", "speed-up", "of decoding alone", "output (answers that part)"]
    return [*piped(head, whole, 1), "", *piped(["tau", *order], sliced, 1), ""]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench systems", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=".cache/smollm2-135m-instruct", help="as the demo makes it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=machine.DTYPE)
    parser.add_argument("--head", nargs="+", default=[], metavar="KIND=FOLDER", help=f"of {', '.join(HEADS)}")
    parser.add_argument("--answers", nargs="+", default=["runs/demo/answers.jsonl"], help="to calibrate and search on")
    parser.add_argument("--prompts", nargs="+", default=["prompts/held_out.jsonl"], help="to measure on")
    parser.add_argument("--every", type=int, default=1, help="use every so manieth prompt")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("runs/systems"))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    heads = dict(pair.split("=", 1) for pair in options.head)
    if unknown := set(heads) - set(HEADS):
        raise SystemExit(f"--head {', '.join(sorted(unknown))}: known are {', '.join(HEADS)}")
    target = FrozenTarget.load(TargetRecipe(name=options.target, dtype=options.dtype))
    prompts = read_prompts(target, options.prompts, None, {}, Faults())[:: options.every]
    recipe = EvalRecipe(max_new_tokens=options.max_new_tokens, turns=1, bootstrap_samples=4000)
    chosen = list(entries(heads, options.answers))
    options.output.mkdir(parents=True, exist_ok=True)
    console, parts = Console(stderr=True), []
    for start in range(0, len(prompts), CHUNK):
        path = options.output / f"prompts-{start:03}.json"
        if not path.exists():
            for entry in chosen:
                if not entry.runs:
                    prepare(target, entry, recipe, prompts, options.answers, options.output)
            runs = [Run("plain"), *(run for entry in chosen for run in entry.runs)]
            path.write_text(json.dumps(kept(target, recipe, prompts[start : start + CHUNK], runs)))
            console.print(f"{min(start + CHUNK, len(prompts))} of {len(prompts)} prompts done")
        parts.append(json.loads(path.read_text()))
    names = [name for name in parts[0] if name != "plain"]
    print("\n".join(tables(recipe, prompts, names, parts)))
    spent = sum(batch["seconds"] for part in parts for run in part.values() for batch in run["batches"])
    facts = machine.facts(str(target.dtype))
    print(json.dumps({"prompts": len(prompts), "systems": len(names), "seconds": round(spent), "machine": facts}))


if __name__ == "__main__":
    main()

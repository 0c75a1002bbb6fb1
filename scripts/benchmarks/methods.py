"""Every drafting method on one target: trained on the same answers for as many tokens, measured on the same prompts.

Each entry is trained by `specdraft train` with its file of configs/, then decodes the prompts as a chain and as a tree.
Acceptance is measured at batch 8 on all prompts, at temperature 1 as well; speed against plain decoding and the verdict
on the output, at batch 1 on a few: `--no-speed` leaves these for an hour in which the machine is idle. What is done is
kept in the output folder: started again, it goes on; entries can be asked for by name.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import machine
import numpy as np
import torch
from rich.console import Console

from specdraft.config import load_recipe
from specdraft.data.batches import DataRecipe, load_rows
from specdraft.data.conversations import Faults
from specdraft.decoding import Round, generate
from specdraft.drafters import DRAFTERS
from specdraft.drafters.base import Drafter, TrainableDrafter
from specdraft.drafters.lookup import LookupDrafter
from specdraft.drafters.shapes import Chain, DynamicTree
from specdraft.evaluation import EvalRecipe, evaluate
from specdraft.evaluation.page import number, piped
from specdraft.evaluation.prompts import Prompt, read_prompts
from specdraft.evaluation.report import Estimate
from specdraft.evaluation.stage import TrainedSource
from specdraft.evaluation.statistics import Bootstrap, acceptance
from specdraft.evaluation.systems import ChainSystem, TreeSystem
from specdraft.packing import pack_linears
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.training import TrainRecipe
from specdraft.warping import Warp

CONFIGS = Path(__file__).parents[2] / "configs"
CHAIN, TREE, SAMPLED = "chain of 4", "tree of 15", "chain of 4, temperature 1"
MEASURED = ((CHAIN, Chain(4), 0.0), (TREE, DynamicTree(5, 4, 15), 0.0), (SAMPLED, Chain(4), 1.0))
SAMPLES = 4000  # of the bootstrap
COMPARED = {"eagle3": "eagle3", "medusa": "medusa", "lm": "lm, cut from the target"}
"""Methods that are trained with every objective, and the entries that are trained as their config says."""
OBJECTIVES = ("forward_kl", "total_variation", "negative_log_acceptance", "lk_hybrid")


@dataclass(frozen=True)
class Entry:
    name: str
    config: str | None = None
    """Name of its file of configs/; None: nothing to load."""
    settings: tuple[str, ...] = ()
    trained: bool = True
    systems: tuple[str, ...] = (CHAIN, TREE, SAMPLED)
    """What is measured of it."""
    timed: bool = True


def objective(name: str) -> tuple[str, ...]:
    """Overrides that leave one term alone: layers are merged, so that the others are set to 0."""
    return tuple(f"objective.terms.{term}={float(term == name)}" for term in OBJECTIVES)


def entry_of(method: str, term: str) -> str:
    """The name of the entry that trains `method` with `term` alone: the method's own, where its config says so."""
    configured = load_recipe(TrainRecipe, [CONFIGS / f"{method}-smollm2-135m.yaml"], []).objective.terms
    return COMPARED[method] if configured == {term: 1.0} else f"{method}, {term}"


ENTRIES = (
    Entry("eagle3", "eagle3"),
    Entry("eagle1", "eagle1"),
    Entry("mtp", "mtp"),
    Entry("hydra", "hydra"),
    Entry("medusa", "medusa"),
    Entry("lm, cut from the target", "lm"),
    Entry("lm, cut from the target, undistilled", "lm", trained=False, systems=(CHAIN,)),
    Entry("early exit", "early-exit"),
    Entry("early exit, untrained", "early-exit", trained=False, systems=(CHAIN,)),
    Entry("prompt lookup", trained=False, systems=(CHAIN, SAMPLED)),
    *(
        Entry(name, method, objective(term), systems=(CHAIN, SAMPLED), timed=False)
        for method, entry in COMPARED.items()
        for term in OBJECTIVES
        if (name := entry_of(method, term)) != entry
    ),
)


@dataclass(frozen=True)
class Bench:
    target: FrozenTarget
    prompts: list[Prompt]
    folder: Path
    answers: tuple[str, ...]
    positions: int
    max_new_tokens: int

    def overrides(self, entry: Entry, supervised: int) -> list[str]:
        """The same data and as many tokens for every entry; the rest is its config's."""
        return [
            f"target.name={self.target.name}",
            f"data.answers={json.dumps(self.answers)}",
            "data.store=null",
            "data.max_length=384",
            f"training.output_dir={self.run_folder(entry)}",
            f"training.epochs={self.positions / supervised:.4f}",
            "training.save_every=null",
            *entry.settings,
        ]

    def run_folder(self, entry: Entry) -> Path:
        return self.folder / entry.name.replace(", ", "-").replace(" ", "-")

    def acceptance(self, entry: Entry, supervised: int) -> dict[str, Any]:
        """Train if need be, then decode all prompts: the entry's row."""
        row: dict[str, Any] = {"name": entry.name, "machine": machine.facts(str(self.target.dtype))}
        drafter = self.drafter(entry, supervised, row)
        for name, shape, temperature in MEASURED:
            if name not in entry.systems:
                continue
            drafter.shape = shape
            done = generate(
                self.target,
                drafter,
                [prompt.ids for prompt in self.prompts],
                warp=Warp(temperature),
                max_new_tokens=self.max_new_tokens,
                batch_size=8,
            )
            row[name] = self.figures([generation.rounds for generation in done.generations])
        return row

    def figures(self, rounds: Sequence[Sequence[Round]]) -> dict[str, Any]:
        lengths, categories = [len(prompt.ids) for prompt in self.prompts], [prompt.category for prompt in self.prompts]
        found = acceptance(rounds, lengths, categories, Bootstrap(len(self.prompts), SAMPLES, seed=0))
        return {
            "tau": found.tau.model_dump(),
            "alpha": [depth.alpha.model_dump() for depth in found.depths],
            "categories": {part.name: part.tau.model_dump() for part in found.slices if part.kind == "category"},
            "rounds": [len(row) for row in rounds],
            "tokens": [sum(1 + one.accepted for one in row) for row in rounds],
        }

    def speed(self, entry: Entry, supervised: int) -> dict[str, Any]:
        """Speed-up over plain decoding at batch 1 and the verdict on the output, by system."""
        systems = {CHAIN: ChainSystem(gamma=4), TREE: TreeSystem(depth=5, width=4, nodes=15)}
        wanted = {name: system for name, system in systems.items() if name in entry.systems}
        recipe = EvalRecipe(systems=tuple(wanted.values()), max_new_tokens=self.max_new_tokens, shown=0)
        drafter = self.drafter(entry, supervised, {})
        report = evaluate(self.target, drafter, recipe, prompts=spread(self.prompts, 12))
        found: dict[str, Any] = {"machine": machine.facts(str(self.target.dtype))}
        for name, system in zip(wanted, report.systems, strict=True):
            assert system.speedup is not None, "plain decoding is part of the recipe"
            found[name] = {"speedup": system.speedup.model_dump(), "verdict": system.losslessness.verdict}
        return found

    def drafter(self, entry: Entry, supervised: int, row: dict[str, Any]) -> Drafter:
        if entry.config is None:
            return LookupDrafter()
        path, overrides = CONFIGS / f"{entry.config}-smollm2-135m.yaml", self.overrides(entry, supervised)
        if entry.trained:
            if not (done := self.run_folder(entry) / "done.json").exists():
                command = [sys.executable, "-m", "specdraft.cli", "train", "--config", str(path), *overrides]
                answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                done.write_text(answer.splitlines()[-1])
            row["training"] = json.loads(done.read_text())
            made = cast(TrainableDrafter, TrainedSource(folder=self.run_folder(entry) / "final").load(self.target))
        else:
            recipe = load_recipe(TrainRecipe, [path], overrides)
            counts = torch.ones(self.target.vocab_size, dtype=torch.int64)
            made = DRAFTERS[recipe.drafter.kind].for_target(self.target, recipe.drafter, counts).eval()
            pack_linears(made)
        row["parameters"] = sum(weight.numel() for weight in made.parameters())
        return cast(Drafter, made)


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """As many of each category as can be, in turn."""
    seen: Counter[str | None] = Counter()
    ranked = []
    for prompt in prompts:
        ranked.append((seen[prompt.category], len(ranked), prompt))
        seen[prompt.category] += 1
    return [prompt for _, _, prompt in sorted(ranked, key=lambda item: item[:2])[:count]]


def interval(estimate: dict[str, Any] | None, digits: int = 2) -> str:
    return number(None if estimate is None else Estimate.model_validate(estimate), digits)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: one line an entry."""
    head = ["method", "parameters", "tokens/s in training", "alpha by depth", "tau, chain of 4", "tau, tree of 15"]
    head += ["tau, temperature 1", "speed, chain", "speed, tree", "output"]
    lines = []
    for row in rows:
        chain, tree, sampled = (row.get(name, {}) for name, _, _ in MEASURED)
        timed = [row.get("speed", {}).get(name, {}) for name in (CHAIN, TREE)]
        speed = row["training"]["positions_per_second"] if "training" in row else None
        lines.append(
            [
                row["name"],
                f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else "–",
                f"{speed:.0f}" if speed else "–",
                " ".join(f"{alpha['value']:.2f}" if alpha["value"] is not None else "–" for alpha in chain["alpha"]),
                *(interval(part.get("tau")) for part in (chain, tree, sampled)),
                *(interval(part.get("speedup")) for part in timed),
                ", ".join(sorted({part["verdict"] for part in timed if part})) or "–",
            ]
        )
    return piped(head, lines, 1)


def objectives(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: tau of the chain by objective, and what it has over forward KL on the same prompts."""
    known = {row["name"]: row for row in rows}
    lines = []
    for method, term in ((method, term) for method in COMPARED for term in OBJECTIVES):
        if (row := known.get(entry_of(method, term))) is None:
            continue
        cells = [method, term]
        for name, _, _ in MEASURED[::2]:
            found, base = row[name], known.get(entry_of(method, "forward_kl"), {}).get(name)
            cells += [interval(found["tau"]), "–" if base is None else interval(gain(found, base), 3)]
        lines.append(cells)
    head = ["method", "objective", *(word for name, _, _ in MEASURED[::2] for word in (name, "over forward KL"))]
    return piped(head, lines, 2)


def gain(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """The difference in tau, paired over prompts."""
    one, other = (tuple(np.array(part[name], dtype=float) for name in ("tokens", "rounds")) for part in (found, base))
    return Bootstrap(len(found["rounds"]), SAMPLES, seed=0).difference(one, other).model_dump()


def by_category(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: tau of the chain by category."""
    names = sorted({name for row in rows for name in row[CHAIN]["categories"]})
    taus = [[row[CHAIN]["categories"].get(name, {}).get("value") for name in names] for row in rows]
    lines = [["–" if tau is None else f"{tau:.2f}" for tau in line] for line in taus]
    return piped(["method", *names], [[row["name"], *line] for row, line in zip(rows, lines, strict=True)], 1)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench methods", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=".cache/smollm2-135m-instruct", help="as the demo makes it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the target in decoding")
    parser.add_argument("--answers", nargs="+", default=["runs/demo/answers.jsonl"], help="from `specdraft respond`")
    parser.add_argument("--prompts", nargs="+", default=["prompts/held_out.jsonl"], help="to measure on")
    parser.add_argument("--every", type=int, default=1, help="use every so manieth prompt")
    parser.add_argument("--positions", type=int, default=100_000, help="supervised tokens that each is trained on")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, default=Path("runs/methods"))
    parser.add_argument("--no-speed", action="store_true", help="leave it for a quiet hour: run again without this")
    parser.add_argument("--only", nargs="+", choices=[entry.name for entry in ENTRIES], metavar="NAME", help="of these")
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    target = FrozenTarget.load(TargetRecipe(name=options.target, dtype=options.dtype))
    prompts = read_prompts(target, options.prompts, None, {}, Faults())[:: options.every]
    data = DataRecipe(answers=tuple(options.answers), max_length=384)
    supervised = load_rows(data, target.tokenizer, target.end_ids).report.supervised
    bench = Bench(target, prompts, options.output, tuple(options.answers), options.positions, options.max_new_tokens)
    wanted = [entry for entry in ENTRIES if not options.only or entry.name in options.only]
    rows = []
    for entry in wanted:
        row = kept(bench, entry, "", lambda entry=entry: bench.acceptance(entry, supervised))  # type: ignore[misc]
        if entry.timed and not options.no_speed:
            row["speed"] = kept(bench, entry, ".speed", lambda entry=entry: bench.speed(entry, supervised))  # type: ignore[misc]
        rows.append(row)
    listed = [row for entry, row in zip(wanted, rows, strict=True) if entry.timed]
    print("\n".join([*table(listed), "", *by_category(listed), "", *objectives(rows), ""]))
    print(json.dumps({"rows": len(rows), "prompts": len(prompts), "output": str(options.output)}))


def kept(bench: Bench, entry: Entry, part: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` finds, or found when the benchmark ran before."""
    path = bench.folder / f"{bench.run_folder(entry).name}{part}.json"
    if not path.exists():
        began = time.monotonic()
        found = work()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
        Console(stderr=True).print(f"{entry.name}{part}: done in {time.monotonic() - began:.0f} s")
    return cast(dict[str, Any], json.loads(path.read_text()))


if __name__ == "__main__":
    main()

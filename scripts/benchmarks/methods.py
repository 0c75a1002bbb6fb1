"""Every drafting method on one target: trained on the same answers for as many tokens, measured on the same prompts.

Each entry is trained by `specdraft train` with its file of configs/, then decodes the prompts as a chain and as a tree.
Acceptance is measured at batch 8 on all prompts, speed at batch 1 on a few, each with and without temperature where the
table says so. What is done is kept in the output folder: started again, it goes on; entries can be asked for by name.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import machine
import torch
from rich.console import Console

from specdraft.config import load_recipe
from specdraft.data.batches import DataRecipe, load_rows
from specdraft.data.conversations import Faults
from specdraft.drafters import DRAFTERS
from specdraft.drafters.base import Drafter, TrainableDrafter
from specdraft.drafters.lookup import LookupDrafter
from specdraft.evaluation import EvalRecipe, evaluate
from specdraft.evaluation.measure import ChainSystem, TreeSystem
from specdraft.evaluation.prompts import Prompt, read_prompts
from specdraft.evaluation.report import SystemReport
from specdraft.evaluation.stage import TrainedSource
from specdraft.packing import pack_linears
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.training import TrainRecipe

CONFIGS = Path(__file__).parents[2] / "configs"
CHAIN, TREE = ChainSystem(gamma=4), TreeSystem(depth=5, width=4, nodes=15)
SAMPLED = "chain of 4, temperature 1"
OBJECTIVES = ("forward_kl", "total_variation", "negative_log_acceptance", "lk_hybrid")


@dataclass(frozen=True)
class Entry:
    name: str
    config: str | None = None
    """Name of its file of configs/; None: nothing to load."""
    settings: tuple[str, ...] = ()
    trained: bool = True
    systems: tuple[str, ...] = ("chain", "tree", "sampled", "speed")
    """What is measured of it."""


def objective(name: str) -> tuple[str, ...]:
    """Overrides that leave one term alone: layers are merged, so that the others are set to 0."""
    return tuple(f"objective.terms.{term}={float(term == name)}" for term in OBJECTIVES)


ENTRIES = (
    Entry("eagle3", "eagle3"),
    Entry("eagle1", "eagle1"),
    Entry("mtp", "mtp"),
    Entry("hydra", "hydra"),
    Entry("medusa", "medusa"),
    Entry("lm, cut from the target", "lm"),
    Entry("lm, cut from the target, undistilled", "lm", trained=False),
    Entry("early exit", "early-exit"),
    Entry("early exit, untrained", "early-exit", trained=False),
    Entry("prompt lookup", trained=False, systems=("chain", "sampled", "speed")),
    *(
        Entry(f"{method}, {term}", method, objective(term), systems=("chain", "sampled"))
        for method in ("eagle3", "medusa", "lm")
        for term in OBJECTIVES
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

    def measure(self, entry: Entry, supervised: int) -> dict[str, Any]:
        """Train if need be, then measure: the entry's row."""
        row: dict[str, Any] = {"name": entry.name, "machine": machine.facts(str(self.target.dtype))}
        drafter = self.drafter(entry, supervised, row)
        greedy = self.evaluated(drafter, entry, ("chain", "tree"), temperature=0.0)
        row |= {system.name: figures(system) for system in greedy}
        if "sampled" in entry.systems:
            [sampled] = self.evaluated(drafter, entry, ("chain",), temperature=1.0)
            row[SAMPLED] = figures(sampled)
        if "speed" in entry.systems:
            few = spread(self.prompts, 12)
            timed = self.evaluated(drafter, entry, ("chain", "tree"), 0.0, batch_size=1, prompts=few, plain=True)
            for system in timed:
                assert system.speedup is not None
                row[system.name] |= {
                    "speedup": system.speedup.model_dump(),
                    "verdict": system.losslessness.verdict,
                    "c": None if system.costs is None else system.costs.c,
                }
        return row

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

    def evaluated(
        self,
        drafter: Drafter,
        entry: Entry,
        shapes: Sequence[str],
        temperature: float,
        batch_size: int = 8,
        prompts: list[Prompt] | None = None,
        plain: bool = False,
    ) -> list[SystemReport]:
        systems = [{"chain": CHAIN, "tree": TREE}[shape] for shape in shapes if shape in entry.systems]
        recipe = EvalRecipe(
            systems=tuple(systems),
            temperature=temperature,
            max_new_tokens=self.max_new_tokens,
            batch_size=batch_size,
            compare_with_plain=plain,
            shown=0,
        )
        return evaluate(self.target, drafter, recipe, prompts=prompts or self.prompts).systems


def figures(system: SystemReport) -> dict[str, Any]:
    found = system.acceptance
    return {
        "tau": found.tau.model_dump(),
        "alpha": [depth.alpha.model_dump() for depth in found.depths],
        "categories": {part.name: part.tau.model_dump() for part in found.slices if part.kind == "category"},
    }


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """As many of each category as can be, in turn."""
    seen: Counter[str | None] = Counter()
    ranked = []
    for prompt in prompts:
        ranked.append((seen[prompt.category], len(ranked), prompt))
        seen[prompt.category] += 1
    return [prompt for _, _, prompt in sorted(ranked, key=lambda item: item[:2])[:count]]


def interval(estimate: dict[str, Any] | None) -> str:
    if estimate is None or estimate["value"] is None:
        return "–"
    return f"{estimate['value']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line an entry."""
    head = ["parameters", "tokens/s in training", "alpha by depth", "tau, chain of 4", "tau, tree of 15"]
    head += ["tau, temperature 1", "speed, chain", "speed, tree", "output"]
    lines = ["| method | " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1) + "---|"]
    for row in rows:
        chain, tree, sampled = (row.get(name, {}) for name in (CHAIN.name, TREE.name, SAMPLED))
        speed = row["training"]["positions_per_second"] if "training" in row else None
        cells = [
            f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else "–",
            f"{speed:.0f}" if speed else "–",
            " ".join(f"{alpha['value']:.2f}" if alpha["value"] is not None else "–" for alpha in chain["alpha"]),
            *(interval(part.get("tau")) for part in (chain, tree, sampled)),
            *(interval(part.get("speedup")) for part in (chain, tree)),
            ", ".join(sorted({part["verdict"] for part in (chain, tree) if "verdict" in part})) or "–",
        ]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_category(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: tau of the chain by category."""
    names = sorted({name for row in rows for name in row[CHAIN.name]["categories"]})
    lines = ["| method | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for row in rows:
        taus = [row[CHAIN.name]["categories"].get(name, {}).get("value") for name in names]
        lines.append(f"| {row['name']} | " + " | ".join("–" if tau is None else f"{tau:.2f}" for tau in taus) + " |")
    return "\n".join(lines)


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
    parser.add_argument("--only", nargs="+", choices=[entry.name for entry in ENTRIES], metavar="NAME", help="of these")
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    console = Console(stderr=True)
    target = FrozenTarget.load(TargetRecipe(name=options.target, dtype=options.dtype))
    prompts = read_prompts(target, options.prompts, None, {}, Faults())[:: options.every]
    data = DataRecipe(answers=tuple(options.answers), max_length=384)
    supervised = load_rows(data, target.tokenizer, target.end_ids).report.supervised
    bench = Bench(target, prompts, options.output, tuple(options.answers), options.positions, options.max_new_tokens)
    rows = []
    for entry in ENTRIES:
        if options.only and entry.name not in options.only:
            continue
        kept = options.output / f"{bench.run_folder(entry).name}.json"
        if not kept.exists():
            began = time.monotonic()
            console.print(f"{entry.name}: {options.positions if entry.trained else 0} positions of training")
            row = bench.measure(entry, supervised)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(row))
            console.print(f"{entry.name}: done in {time.monotonic() - began:.0f} s")
        rows.append(json.loads(kept.read_text()))
    print(f"{table(rows)}\n\n{by_category(rows)}\n")
    print(json.dumps({"rows": len(rows), "prompts": len(prompts), "output": str(options.output)}))


if __name__ == "__main__":
    main()

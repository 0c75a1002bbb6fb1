"""Training speed and memory of an EAGLE-3 head, ours and a peer's: the same head, the same batches, the same precision.

Every run has a process of its own, so that its peak memory is its own; the runs of all systems take turns. The first
step of each is warm-up and not timed; a step's time is from the end of the one before, data and bookkeeping included.
Progress is told on stderr, the table on stdout, and on its last line one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import machine
import torch
from transformers import TrainerCallback

from specdraft.config import SpecdraftError
from specdraft.data.batches import DataRecipe, TokenRows, batch_order, collate, load_rows
from specdraft.data.store import CaptureRecipe, capture
from specdraft.drafters.base import ObjectiveRecipe
from specdraft.drafters.eagle import Eagle3Recipe, default_taps
from specdraft.reduction import law_positions
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.trainer import DrafterTrainer, TrainingSettings
from specdraft.training import build, evidence_of

PEERS = {"economize": "0.3.2"}
SEED = 0


@dataclass(frozen=True)
class Job:
    """One run of one system, in a process of its own."""

    system: Literal["specdraft", "economize", "capture"]
    target: str
    answers: str
    dtype: str
    steps: int
    """Timed ones; one more is warm-up."""
    rows: int
    max_length: int
    unroll: int
    supervised: Literal["all", "answers"] = "all"
    vocabulary: int | None = None
    store: str | None = None

    @property
    def data(self) -> DataRecipe:
        return DataRecipe(
            answers=(self.answers,), max_length=self.max_length, limit=self.rows * (1 + self.steps), store=self.store
        )

    @property
    def target_recipe(self) -> TargetRecipe:
        return TargetRecipe(name=self.target, dtype=self.dtype, device="cpu")

    @property
    def eagle(self) -> Eagle3Recipe:
        return Eagle3Recipe(vocabulary=self.vocabulary, unroll=self.unroll)


def load(job: Job, target: FrozenTarget) -> tuple[TokenRows, list[dict[str, torch.Tensor]]]:
    """The rows, and one epoch of batches in the order in which our trainer takes them."""
    rows = load_rows(job.data, target.tokenizer, target.end_ids)
    if len(rows) < job.rows * (1 + job.steps):
        raise SpecdraftError(f"{job.answers} has {len(rows)} rows, too few for {1 + job.steps} steps of {job.rows}")
    if job.supervised == "all":
        rows.supervised[:] = True
    order = batch_order(rows.lengths, job.rows, seed=SEED, epoch=0)
    return rows, [collate([rows[row] for row in batch]) for batch in order]


class Ends(TrainerCallback):
    """Notes when each step ends: wall clock and the process's CPU time."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def run_specdraft(job: Job) -> dict[str, Any]:
    target = FrozenTarget.load(job.target_recipe)
    rows, batches = load(job, target)
    drafter = build(job.eagle, target, rows)
    drafter.objective = ObjectiveRecipe(fused=True, chunk=128)
    before = machine.resident()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingSettings(
            output_dir=Path(folder),
            max_steps=1 + job.steps,
            batch_size=job.rows,
            precision="bfloat16" if job.dtype == "bfloat16" else "float32",
            log_every=1,
            save_every=None,
            seed=SEED,
        )
        look, batch_rows = evidence_of(job.data, target, drafter, rows)
        trainer = DrafterTrainer(drafter, rows, settings.arguments(target.device, False), look=look, collate=batch_rows)
        ends = Ends()
        trainer.add_callback(ends)
        trainer.train()
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    return summary(batches, ends.times, ends.losses, before, parameters)


def run_economize(job: Job) -> dict[str, Any]:
    """With its own loop, objective and defaults; the target is the plain transformers model, as it expects it."""
    import economize
    from economize.techniques.eagle3 import Eagle3Config
    from economize.train import fit
    from transformers import AutoModelForCausalLM

    ours = FrozenTarget.load(job.target_recipe)
    taps = default_taps(ours.num_layers)
    _, batches = load(job, ours)
    del ours
    base = AutoModelForCausalLM.from_pretrained(job.target, dtype=getattr(torch, job.dtype))
    config = Eagle3Config(aux_layers=taps, train_steps=job.unroll)
    model = economize.apply(base, config)
    parameters = sum(parameter.numel() for parameter in model.technique_parameters())
    before = machine.resident()
    times: list[tuple[float, float]] = []
    losses: list[float] = []

    def note(record: dict[str, Any]) -> None:
        times.append((time.perf_counter(), time.process_time()))
        losses.append(record["loss"])

    fit(
        model,
        batches,
        "eagle3_ttt",
        steps=1 + job.steps,
        autocast="bfloat16" if job.dtype == "bfloat16" else None,
        log_every=1,
        seed=SEED,
        callbacks=[note],
    )
    return summary(batches, times, losses, before, parameters)


def run_capture(job: Job) -> dict[str, Any]:
    assert job.store is not None
    target = FrozenTarget.load(job.target_recipe)
    taps = default_taps(target.num_layers)
    recipe = CaptureRecipe(target=job.target_recipe, data=replace(job, store=None).data, taps=taps, output=job.store)
    return capture(recipe, target)


RUNS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "specdraft": run_specdraft,
    "economize": run_economize,
    "capture": run_capture,
}


def summary(
    batches: Sequence[dict[str, torch.Tensor]],
    ends: Sequence[tuple[float, float]],
    losses: Sequence[float],
    before: int,
    parameters: int,
) -> dict[str, Any]:
    timed = batches[1:]
    return {
        "seconds": ends[-1][0] - ends[0][0],
        "cpu_seconds": ends[-1][1] - ends[0][1],
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in timed),
        "positions": sum(int(law_positions(batch["labels"], 1).sum()) for batch in timed),
        "before_bytes": before,
        "peak_bytes": machine.peak_resident(),
        "parameters": parameters,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def in_a_process(job: Job) -> dict[str, Any]:
    """Run the job in a process of its own; its summary. Exits with the end of its log if it fails."""
    command = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-3000:]}\nthe run of {job.system} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    common: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("target", "answers", "dtype", "steps", "rows", "max_length", "unroll")
    }
    ours, peer = f"specdraft {version('specdraft')}", f"{arguments.peer} {version(arguments.peer)}"
    with tempfile.TemporaryDirectory() as folder:
        as_used = Job(
            "specdraft", **common, supervised="answers", vocabulary=arguments.vocabulary, store=f"{folder}/store"
        )
        jobs = {
            ours: Job("specdraft", **common),
            peer: Job(arguments.peer, **common),
            f"{ours}, answers": Job("specdraft", **common, supervised="answers"),
            f"{peer}, answers": Job(arguments.peer, **common, supervised="answers"),
            f"{ours}, as used": as_used,
        }
        if arguments.only_equal:
            jobs = {name: jobs[name] for name in (ours, peer)}
        else:
            in_a_process(replace(as_used, system="capture"))
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
        for repeat in range(arguments.repeats):
            for name, job in jobs.items():
                found[name].append(in_a_process(job))
                last = found[name][-1]
                pace = f"{last['tokens'] / last['seconds']:.0f} tokens/s"
                print(f"{name}: run {repeat + 1} of {arguments.repeats}, {pace}", file=sys.stderr, flush=True)
    systems = {name: aggregate(runs) for name, runs in found.items()}
    for name, system in systems.items():
        base = systems[f"{peer}, answers" if jobs[name].supervised == "answers" else peer]
        system["times_speed"] = system["tokens_per_second"] / base["tokens_per_second"]
        system["times_memory"] = system["peak_above_models_bytes"] / base["peak_above_models_bytes"]
    return {
        "bench": "train",
        "machine": machine.facts(arguments.dtype),
        "settings": {**common, "repeats": arguments.repeats, "reduced_vocabulary": arguments.vocabulary},
        "speed_ratio": systems[ours]["times_speed"],
        "memory_ratio": systems[ours]["times_memory"],
        "systems": systems,
        "runs": found,
    }


def aggregate(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    paces = [run["tokens"] / run["seconds"] for run in runs]
    return {
        "tokens_per_second": statistics.median(paces),
        "tokens_per_second_range": [min(paces), max(paces)],
        "tokens_per_cpu_second": statistics.median(run["tokens"] / run["cpu_seconds"] for run in runs),
        "positions_per_second": statistics.median(run["positions"] / run["seconds"] for run in runs),
        "peak_above_models_bytes": statistics.median(run["peak_bytes"] - run["before_bytes"] for run in runs),
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
        "parameters": runs[0]["parameters"],
    }


def table(result: dict[str, Any]) -> str:
    about, settings = result["machine"], result["settings"]
    lines = [
        f"EAGLE-3 head, {settings['unroll']} unrolled steps, {settings['rows']} rows of at most "
        f"{settings['max_length']} tokens, {settings['steps']} steps x {settings['repeats']}; {about['dtype']}, "
        f"{about['threads']} threads, {about['cpu']}",
        "",
        "| | tokens/s | lowest to highest | positions/s | peak above the models | peak in all | speed | memory |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, system in result["systems"].items():
        low, high = system["tokens_per_second_range"]
        lines.append(
            f"| {name} | {system['tokens_per_second']:.0f} | {low:.0f} to {high:.0f} | "
            f"{system['positions_per_second']:.0f} | {system['peak_above_models_bytes'] / 1e9:.2f} GB | "
            f"{system['peak_bytes'] / 1e9:.2f} GB | {system['times_speed']:.2f} x | {system['times_memory']:.2f} x |"
        )
    return "\n".join([*lines, "", NOTE.format(vocabulary=settings["reduced_vocabulary"]), ""])


NOTE = """\
tokens: of the batches, prompts included, padding not. positions: those trained at depth 1. The first two rows do
equal work: full vocabulary, every token supervised, the target read in every step. "answers": as these, but only the
answers are supervised. "as used": besides, {vocabulary} draft ids and stored features. speed and memory: of the
peer on the same labels; memory: the peak above what is resident once target and head are loaded."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench train", description=__doc__)
    parser.add_argument("--peer", choices=PEERS, default="economize", help="whom to compare with")
    parser.add_argument("--target", default=".cache/smollm2-135m-instruct", help="as the demo makes it")
    parser.add_argument("--answers", default="runs/demo/answers.jsonl", help="the target's answers, from `respond`")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=machine.DTYPE, help="of both sides")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--max-length", type=int, default=256, help="rows are cut to this many tokens")
    parser.add_argument("--unroll", type=int, default=4, help="unrolled steps")
    parser.add_argument("--vocabulary", type=int, default=4096, help="draft ids of the row `as used`")
    parser.add_argument("--only-equal", action="store_true", help="the two rows of equal work alone")
    return parser.parse_args(words)


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        job = Job(**json.loads(sys.argv[2]))
        print(json.dumps(RUNS[job.system](job)))
        return
    arguments = parse(sys.argv[1:])
    try:
        if version(arguments.peer) != PEERS[arguments.peer]:
            print(f"compared is {arguments.peer} {version(arguments.peer)}", file=sys.stderr)
        result = compare(arguments)
    except SpecdraftError as error:
        raise SystemExit(str(error)) from None
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""The demo's stages, in turn: target, respond, sample, capture, train, eval. Started by scripts/demo.

With --full also: the head in INT8 and INT4, each measured; exported and verified; published. Where HF_ENDPOINT names a
Hub it is uploaded there, with the token in HF_TOKEN; else the card and what would be uploaded are left in a folder.

Each stage is a `specdraft` command with a file of configs/, and with --quick also the layer of the same name in
configs/quick/. A stage that is done leaves a stamp and is skipped; one that was interrupted is started again and goes
on by itself. Logs and outputs are in runs/demo or runs/quick.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).parent.parent
CHECKPOINT = Path(".cache/smollm2-135m-instruct")
RUNS = "runs/demo"


class Work(NamedTuple):
    verb: str
    config: str
    output: str
    seconds: float
    """Expected, on two cores: the first estimate of the time left."""
    settings: tuple[str, ...] = ()
    """What is set beside the config."""


WORK = {
    "respond": Work("respond", "respond-smollm2-135m.yaml", "answers.jsonl", 130),
    "sample": Work("respond", "respond-sampled-smollm2-135m.yaml", "sampled.jsonl", 150),
    "capture": Work("capture", "capture-smollm2-135m.yaml", "store", 70),
    "train": Work("train", "eagle3-smollm2-135m.yaml", "head", 360),
    "eval": Work("eval", "eval-smollm2-135m.yaml", "report", 120),
}


def variant(name: str, seconds: float, *settings: str) -> dict[str, Work]:
    """Quantise the head, and measure that."""
    head, report = f"head-{name}", f"report-{name}"
    measured = (f"drafter.folder={RUNS}/{head}", f"output={RUNS}/{report}", "evaluation.training_log=null")
    return {
        name: Work("quantize", "quantize-smollm2-135m.yaml", head, seconds, (*settings, f"output={RUNS}/{head}")),
        f"{name}-eval": Work("eval", "eval-smollm2-135m.yaml", report, 120, measured),
    }


VARIANTS = ", ".join(
    f"{{name: {name}, folder: {RUNS}/head-{name}, reports: [{RUNS}/report-{name}/report.json]}}"
    for name in ("int8", "int4")
)
FULL = {
    **variant("int8", 150, "scheme=w8a8", "calibration=null"),
    **variant("int4", 180),
    "export": Work("export", "export-smollm2-135m.yaml", "head-speculators", 60),
    "publish": Work("publish", "publish-smollm2-135m.yaml", "published", 20, (f"variants=[{VARIANTS}]",)),
}
AFRESH = ("quantize", "export", "publish")
"""Verbs that begin again where they were interrupted."""
QUICK = {"respond": 25, "capture": 15, "train": 25, "eval": 45}
COUNT = re.compile(rb"(\d+)(?:/| of )(\d+)")
PERCENT = re.compile(rb"(?<![\d.])(\d+)%()(?:\x1b\[[\d;]*m)* *(?:\||[\d-]+:)")  # of a bar, not of a log line
LIVE_BARS = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": "100"}  # rich draws bars into a pipe as well
OTHER_BARS = re.compile(rb"^\s*(Loading|Writing|Converting)")


class Stage(NamedTuple):
    name: str
    command: list[str]
    inputs: list[Path]  # files whose content decides the outcome, besides what the stages before made
    output: Path
    seconds: float
    afresh: bool = False
    """What an interruption left of it is removed before it begins."""


def stages(folder: Path, quick: bool, full: bool) -> list[Stage]:
    made = []
    if not CHECKPOINT.exists():  # it appears only when it is complete
        made = [Stage("target", [sys.executable, "scripts/smollm2.py", str(CHECKPOINT)], [], CHECKPOINT, 60)]
    for name, work in (WORK | FULL if full else WORK).items():
        if quick and name not in QUICK:
            continue
        files = [Path("configs") / work.config, Path("configs/quick") / work.config][: 1 + quick]
        options = [word for file in files for word in ("--config", str(file))]
        prompts = "train" if work.verb in ("respond", "capture", "train") else "held_out"
        command = [sys.executable, "-m", "specdraft.cli", work.verb, *options, *work.settings]
        output = folder / work.output
        if work.verb == "publish" and "HF_ENDPOINT" in os.environ:
            name, output = "upload", folder / "uploaded"
            command = ["env", "HF_HUB_OFFLINE=0", *command, f"output={output}", "upload=true"]
        inputs = [*files, Path(f"prompts/{prompts}.jsonl")]
        made.append(Stage(name, command, inputs, output, QUICK[name] if quick else work.seconds, work.verb in AFRESH))
    return made


class Progress:
    """How far the running stage is, read from the counts ("12/420") or shares ("3%") that its progress bar writes."""

    def __init__(self, stream: IO[bytes], log: IO[bytes]) -> None:
        self.fraction: float | None = None
        self._total: int | None = None
        self._reader = threading.Thread(target=self._read, args=(stream, log), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[bytes], log: IO[bytes]) -> None:
        while chunk := os.read(stream.fileno(), 65536):
            log.write(chunk)
            log.flush()
            for line in re.split(rb"[\r\n]", chunk):
                if not OTHER_BARS.match(line):
                    self._note(line)

    def _note(self, line: bytes) -> None:
        found = COUNT.findall(line) or PERCENT.findall(line)
        for done, total in ((int(a), int(b or 100)) for a, b in found):
            self._total = self._total or total  # the first bar is the stage's own
            if total == self._total and 0 < done <= total:
                self.fraction = done / total

    def finish(self) -> None:
        self._reader.join()


class Clock:
    """Elapsed time and an estimate of the time left, corrected by how fast this machine has been so far."""

    def __init__(self, todo: Sequence[Stage]) -> None:
        self.began = time.monotonic()
        self.todo = list(todo)
        self.expected = self.measured = 0.0

    @property
    def pace(self) -> float:
        return (self.measured + 60) / (self.expected + 60)

    def left(self, elapsed: float, fraction: float | None) -> float:
        here = max(self.todo[0].seconds * self.pace - elapsed, 5)
        if fraction and elapsed > 5:
            here = elapsed * (1 - fraction) / fraction
        return here + self.pace * sum(stage.seconds for stage in self.todo[1:])

    def done(self, seconds: float) -> None:
        self.expected += self.todo.pop(0).seconds
        self.measured += seconds

    def line(self, elapsed: float, fraction: float | None) -> str:
        share = "" if fraction is None else f" {fraction:4.0%}"
        spent = time.monotonic() - self.began
        return (
            f"{self.todo[0].name:<8}{share}  {minutes(spent)} spent, about {minutes(self.left(elapsed, fraction))} left"
        )


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def run(stage: Stage, clock: Clock, folder: Path) -> dict[str, Any]:
    """Run a stage under one line of progress; its summary. Exits with the tail of the log if it fails."""
    log_path = folder / f"{stage.name}.log"
    began = time.monotonic()
    with (
        log_path.open("ab") as log,
        subprocess.Popen(stage.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        progress = Progress(process.stderr, log)
        try:
            watch(process, progress, clock)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise SystemExit("\nInterrupted. The same command goes on from here.") from None
        progress.finish()
        answer = process.stdout.read().decode().strip().splitlines()
    say("")
    if process.returncode:
        tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        raise SystemExit(
            "\n".join([*tail, f"{stage.name} failed with exit code {process.returncode}; log: {log_path}"])
        )
    clock.done(time.monotonic() - began)
    print(f"{stage.name:<8} done in {minutes(time.monotonic() - began)}", file=sys.stderr)
    return json.loads(answer[-1]) if answer else {}


def watch(process: subprocess.Popen[bytes], progress: Progress, clock: Clock) -> None:
    """Say how far it is until the process ends: each second on a terminal, each 20 seconds in a log."""
    began, said = time.monotonic(), -20.0
    while process.poll() is None:
        elapsed = time.monotonic() - began
        if sys.stderr.isatty() or elapsed - said >= 20:
            say(clock.line(elapsed, progress.fraction))
            said = elapsed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)


def say(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="less of everything, under 4 minutes on 2 cores")
    length.add_argument("--full", action="store_true", help="also quantise, export and publish; half as long again")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.chdir(ROOT)
    os.environ.update(LIVE_BARS, HF_HUB_OFFLINE="1")
    folder = Path("runs/quick" if asked.quick else RUNS)
    folder.mkdir(parents=True, exist_ok=True)

    key, todo = "", []
    line = stages(folder, asked.quick, asked.full)
    for stage in line:
        if stage.inputs:
            key = hashlib.sha256(b"".join([key.encode(), *(path.read_bytes() for path in stage.inputs)])).hexdigest()
        if not is_done(stage, folder, key):
            todo.append((stage, key))
    clock = Clock([stage for stage, _ in todo])
    for stage, key in todo:
        if stage.afresh:
            shutil.rmtree(stage.output, ignore_errors=True)
        summary = run(stage, clock, folder)
        stamp(stage, folder).write_text(json.dumps({"key": key, "summary": summary}), encoding="utf-8")
    show(folder / "report")
    if asked.full:
        print(f"The card: {line[-1].output / 'main' / 'README.md'}")


def stamp(stage: Stage, folder: Path) -> Path:
    return folder / f"{stage.name}.done.json"


def is_done(stage: Stage, folder: Path, key: str) -> bool:
    """Whether the stage's output is complete. Exits if it was made with other settings: it is never overwritten."""
    if not stage.output.exists() or not stamp(stage, folder).exists():
        return False
    if json.loads(stamp(stage, folder).read_text(encoding="utf-8"))["key"] != key:
        raise SystemExit(f"{stage.output} was made with other settings; move it away to have it made anew")
    return True


def show(report: Path) -> None:
    """The table of the report, and where the page is."""
    lines = (report / "report.md").read_text(encoding="utf-8").splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("|"))
    end = next(place for place in range(head, len(lines)) if not lines[place].startswith("|"))
    print("\n".join([*lines[:end], "", f"The report: {report / 'report.html'}"]))


if __name__ == "__main__":
    main()

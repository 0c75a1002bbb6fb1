"""What tuning found: the candidates, what they promise at each batch size, and what a confirmation run measured."""

from pathlib import Path
from typing import Literal

from pydantic import JsonValue
from rich.table import Table

from specdraft.evaluation.page import drawn, number, piped
from specdraft.evaluation.report import Acceptance, Estimate, Section

DEFINITIONS: dict[str, str] = {
    "replayed": (
        "The rounds were walked on the target's own greedy answers, from one pass of the drafter over them: they are "
        "decoding's own, to the count (in half precision: but for rounding where two tokens all but tie)."
    ),
    "decoded": "The rounds were decoded: a sampled draft, a dynamic tree, or a drafter without a pass of its own.",
    "tau": "Tokens per target pass, the free token included, before the last round of an answer is trimmed.",
    "emitted per pass": "Tokens that really entered the output over target passes, the first token's not counted.",
    "predicted": (
        "Predicted decode speed over plain decoding's at this batch size: emitted per pass over the cost of a round, "
        "drafting, target pass, verification and the drafter's reading of what was accepted timed one by one, in steps "
        "of plain decoding. The interval is that of the tokens; the costs count as known."
    ),
    "best gamma": "The fastest of the chains that were asked for, as predicted; 0: none is faster than plain decoding.",
    "break-even alpha": "The alpha, equal at every depth, at which this chain neither gains nor loses time.",
    "stops paying": (
        "The batch size from which no shape that was asked for is predicted to be faster than plain decoding, between "
        "two measured sizes on a straight line over the logarithm of the size."
    ),
    "overlap": (
        "overlap_d = sum_x min(p, q) at every place of the answers, teacher-forced. It is not alpha: decoding does not "
        "come by every place."
    ),
    "interval": "95 % interval in brackets: bootstrap over prompts; between drafters paired, the same prompts in both.",
    "confirmed": "Decoded again, beside plain decoding of the same prompts: measured, not predicted.",
}


class Speed(Section):
    """One shape at one batch size."""

    batch_size: int
    c: float
    v: float
    nodes: float
    round_cost: float
    """A whole round over a step of plain decoding."""
    predicted: Estimate
    break_even_alpha: float | None
    """None: not even alpha 1 pays; or the shape is no chain."""


class Candidate(Section):
    system: str
    shape: dict[str, JsonValue]
    how: Literal["replayed", "decoded"]
    acceptance: Acceptance
    speeds: list[Speed]
    """In the order of the batch sizes."""


class BatchPoint(Section):
    batch_size: int
    system: str
    """The fastest shape, as predicted."""
    predicted: Estimate
    best_gamma: int | None
    """0: no chain is faster than plain decoding. None: no chain was asked for."""


class Tuned(Section):
    """What one drafter does."""

    drafter: str
    candidates: list[Candidate]
    by_batch: list[BatchPoint]
    stops_paying: float | None
    """None: drafting pays at every batch size that was measured."""
    overlaps: list[Estimate]
    """overlap_d by depth, where decoding samples. Not alpha."""

    def named(self, system: str) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.system == system), None)


class Comparison(Section):
    """Two drafters on the same prompts: `one` minus `other`, paired."""

    one: str
    other: str
    system: str | None
    """The shape at which tau is compared, one that both draft; None: there is none."""
    tau: Estimate | None
    speed: Estimate
    """Of the predicted speeds, each with its own best shape, at the first batch size."""
    verdicts: list[str]


class Confirmation(Section):
    drafter: str
    system: str
    batch_size: int
    prompts: int
    predicted: Estimate
    decode_speedup: Estimate
    """Without reading prompts: what `predicted` predicts."""
    speedup: Estimate
    tau: Estimate
    lossless: str
    sentence: str


class Tuning(Section):
    schema_version: Literal[1] = 1
    created: str
    target: str
    target_fingerprint: str
    hardware: str
    dtype: str
    threads: int
    temperature: float
    max_new_tokens: int
    prompts: int
    drafters: list[Tuned]
    comparisons: list[Comparison]
    confirmations: list[Confirmation]
    warnings: list[str]
    provenance: dict[str, JsonValue]
    definitions: dict[str, str] = DEFINITIONS

    @property
    def headline(self) -> str:
        if self.confirmations:
            best = max(self.confirmations, key=lambda found: _value(found.decode_speedup))
            return f"{best.drafter}: {best.sentence}"
        tuned = max(self.drafters, key=lambda found: _value(found.by_batch[0].predicted))
        point = tuned.by_batch[0]
        return (
            f"{tuned.drafter}: the {point.system} should decode {number(point.predicted)} times as fast as plain "
            f"decoding at batch size {point.batch_size}; that was not confirmed."
        )

    def write(self, folder: Path) -> None:
        """`tune.json` and `tune.md`, into `folder`, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tune.json").write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (folder / "tune.md").write_text(markdown(self), encoding="utf-8")


def verdict(one: str, other: str, difference: Estimate, unit: str) -> str:
    """In words, what the difference `one` - `other` shows."""
    value, low, high = difference.value, difference.low, difference.high
    if value is None or low is None or high is None:
        return f"no difference in {unit} shown: there are too few prompts for an interval"
    if low <= 0 <= high:
        return f"no difference in {unit} shown: {value:+.2f} [{low:.2f}, {high:.2f}] for {one} over {other}"
    if value < 0:
        one, other, value, low, high = other, one, -value, -high, -low
    return f"{one} is better than {other}: {value:+.2f} {unit} [{low:.2f}, {high:.2f}]"


def rows(tuning: Tuning) -> tuple[list[str], list[list[str]]]:
    """The main table: a line a candidate, the predicted speed at each batch size behind it."""
    sizes = [point.batch_size for point in tuning.drafters[0].by_batch]
    header = ["drafter", "shape", "how", "tau", "emitted per pass", "alpha by depth"]
    header += [f"c, batch {sizes[0]}", f"break-even alpha, batch {sizes[0]}"]
    header += [f"predicted, batch {size}" for size in sizes]
    lines = []
    for tuned in tuning.drafters:
        for found in tuned.candidates:
            first, alphas = found.speeds[0], [d.alpha.value for d in found.acceptance.depths]
            break_even = "–" if first.break_even_alpha is None else f"{100 * first.break_even_alpha:.0f} %"
            figures = [number(found.acceptance.tau), number(found.acceptance.emitted_per_pass)]
            by_depth = " ".join("–" if alpha is None else f"{alpha:.2f}" for alpha in alphas)
            costs = [f"{first.c:.3f}", break_even, *(number(speed.predicted) for speed in found.speeds)]
            lines.append([tuned.drafter, found.system, found.how, *figures, by_depth, *costs])
    return header, lines


def findings(tuning: Tuning) -> list[str]:
    """What the table says, in sentences."""
    said = []
    for tuned in tuning.drafters:
        for point in tuned.by_batch:
            gamma = "" if point.best_gamma is None else f"; best gamma {point.best_gamma}"
            what = f"{point.system}, {number(point.predicted)} times plain decoding, predicted{gamma}"
            said.append(f"{tuned.drafter} at batch {point.batch_size}: {what}.")
        if tuned.stops_paying is None:
            said.append(f"{tuned.drafter}: drafting pays at every batch size that was measured.")
        elif tuned.stops_paying == tuned.by_batch[0].batch_size:
            said.append(f"{tuned.drafter}: drafting is not predicted to pay, at batch {tuned.by_batch[0].batch_size}.")
        else:
            said.append(f"{tuned.drafter}: drafting stops paying at a batch size of about {tuned.stops_paying:.0f}.")
        if tuned.overlaps:
            overlaps = ", ".join(number(overlap, 3) for overlap in tuned.overlaps)
            said.append(f"{tuned.drafter}: overlap_d (teacher-forced, not alpha) by depth: {overlaps}.")
    said += [f"{text}." for comparison in tuning.comparisons for text in comparison.verdicts]
    for found in tuning.confirmations:
        measured, predicted = number(found.decode_speedup), number(found.predicted)
        what = f"{found.drafter}, {found.system}, {found.prompts} prompts at batch {found.batch_size}"
        said.append(
            f"Confirmed: {what}: decode speed-up {measured} (predicted {predicted}), end to end "
            f"{number(found.speedup)}, tau {number(found.tau)}, lossless: {found.lossless}."
        )
    return said


def table(tuning: Tuning) -> Table:
    """For the terminal."""
    return drawn(tuning.headline, [*findings(tuning), *tuning.warnings], *rows(tuning), left=3)


def markdown(tuning: Tuning) -> str:
    text = [f"# Tuning drafters for {tuning.target}", "", f"**{tuning.headline}**", ""]
    text += [f"> {warning}\n" for warning in tuning.warnings]
    text += piped(*rows(tuning), left=3)
    text += ["", *(f"* {finding}" for finding in findings(tuning)), "", "## Setting", ""]
    text += [
        f"* {tuning.prompts} prompts, answers of at most {tuning.max_new_tokens} tokens, temperature "
        f"{tuning.temperature:g}",
        f"* {tuning.hardware}, {tuning.threads} threads, {tuning.dtype}",
        "",
        "## Definitions",
        "",
    ]
    text += [f"* **{name}**: {meaning}" for name, meaning in tuning.definitions.items()]
    return "\n".join(text) + "\n"


def _value(estimate: Estimate) -> float:
    return -1.0 if estimate.value is None else estimate.value

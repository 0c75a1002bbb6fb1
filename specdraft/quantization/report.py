"""What quantising a drafter changed: its size, what it is made of, and how it fares beside what it was."""

from pathlib import Path

from pydantic import JsonValue
from rich.table import Table
from safetensors.torch import load_file

from specdraft.evaluation.page import drawn, number, piped
from specdraft.evaluation.report import Acceptance, Estimate, Losslessness, Section

FILE_NAME = "quantize.json"
DEFINITIONS: dict[str, str] = {
    "bytes": "Of all weight files; in linear weights: of the layers that were quantised, scales and shapes included.",
    "tau": "Tokens per target pass, the free token included, before the last round of an answer is trimmed.",
    "alpha": "Acceptance rate at each depth, of the rounds that came so far and were offered a token there.",
    "change of tau": "tau after over tau before, less one; the same prompts in both, resampled together.",
    "draft step": "Seconds of one depth of drafting below a middling prompt: median of repeats, both forms in turn.",
    "speed-up": "Tokens per second over plain decoding's, prompts included, batch by batch in turn.",
    "alarm": "tau fell by a larger share than was allowed.",
    "arithmetic": (
        "INT8 inputs are multiplied as integers here. Weights without them are multiplied as the numbers that they "
        "stand for: acceptance is that of the quantised weights, speed is not what an engine's kernels reach."
    ),
    "interval": "95 % interval in brackets: bootstrap over prompts (speed: over batches).",
}


class Weights(Section):
    """What a checkpoint's files hold."""

    bytes: int
    linear_bytes: int
    """Of the layers that are quantised after."""
    by_dtype: dict[str, int]
    """Bytes by dtype of the tensors."""

    @classmethod
    def of(cls, folder: Path, layers: set[str], prefix: str = "") -> "Weights":
        """`layers`: names of the layers that are quantised, in the module; its tensors may lack a `prefix` of them."""
        by_dtype: dict[str, int] = {}
        linear = 0
        bare = {layer.removeprefix(prefix) for layer in layers}
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            for name, tensor in load_file(file).items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                by_dtype[dtype] = by_dtype.get(dtype, 0) + tensor.nbytes
                linear += tensor.nbytes if name.rpartition(".")[0] in bare else 0
        return cls(bytes=sum(file.stat().st_size for file in files), linear_bytes=linear, by_dtype=by_dtype)


class Side(Section):
    """One form of the drafter, with one system."""

    acceptance: Acceptance
    draft_step_seconds: float
    tokens_per_second: float
    speedup: Estimate
    losslessness: Losslessness


class Pair(Section):
    system: str
    shape: dict[str, JsonValue]
    before: Side
    after: Side
    tau_ratio: Estimate
    """After over before; paired."""
    tau_difference: Estimate
    """After minus before; paired."""
    alarm: bool


class QuantizeReport(Section):
    schema_version: int = 1
    created: str
    target: str
    target_fingerprint: str
    drafter: str
    kind: str
    scheme: str
    rounding: str
    """How weights became integers."""
    quantized: list[str]
    """Names of the layers."""
    untouched: list[str]
    """Names of the linear layers that were left alone."""
    before: Weights
    after: Weights
    hardware: str
    target_dtype: str
    threads: int
    max_loss: float
    pairs: list[Pair]
    warnings: list[str]
    provenance: dict[str, JsonValue]
    definitions: dict[str, str] = DEFINITIONS

    @property
    def alarms(self) -> list[str]:
        return [
            f"{pair.system}: tau fell from {number(pair.before.acceptance.tau)} to "
            f"{number(pair.after.acceptance.tau)}, by {100 * (1 - (pair.tau_ratio.value or 0)):.1f} %, where "
            f"{100 * self.max_loss:g} % are allowed"
            for pair in self.pairs
            if pair.alarm
        ]

    @property
    def headline(self) -> str:
        size = f"{self.before.bytes / 1e6:.1f} MB to {self.after.bytes / 1e6:.1f} MB"
        if not self.pairs:
            return f"{self.scheme}: {size}; acceptance was not measured."
        changes = ", ".join(f"{_change(pair.tau_ratio)} ({pair.system})" for pair in self.pairs)
        return f"{self.scheme}: {size}; tau changed by {changes}."

    def write(self, folder: Path) -> None:
        """`quantize.json` and `quantize.md`."""
        (folder / FILE_NAME).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (folder / "quantize.md").write_text(markdown(self), encoding="utf-8")


def _change(ratio: Estimate) -> str:
    if ratio.value is None:
        return "–"
    bounds = [f"{100 * (bound - 1):+.1f}" for bound in (ratio.value, ratio.low, ratio.high) if bound is not None]
    return f"{bounds[0]} %" if len(bounds) < 3 else f"{bounds[0]} % [{bounds[1]}, {bounds[2]}]"


def rows(report: QuantizeReport) -> tuple[list[str], list[list[str]]]:
    """The table: two lines a system, before and after."""
    header = [
        "system",
        "form",
        "MB",
        "tau",
        "change of tau",
        "alpha by depth",
        "draft step, ms",
        "speed-up",
        "lossless",
    ]
    lines = []
    for pair in report.pairs:
        for form, side, weights in (("before", pair.before, report.before), ("after", pair.after, report.after)):
            alphas = " ".join(number(depth.alpha) for depth in side.acceptance.depths)
            change = "" if form == "before" else _change(pair.tau_ratio) + (" ALARM" if pair.alarm else "")
            figures = [f"{weights.bytes / 1e6:.1f}", number(side.acceptance.tau), change, alphas]
            speeds = [f"{1000 * side.draft_step_seconds:.2f}", number(side.speedup)]
            lines.append([pair.system, form, *figures, *speeds, side.losslessness.verdict])
    return header, lines


def table(report: QuantizeReport) -> Table:
    """For the terminal."""
    return drawn(report.headline, [*report.alarms, *report.warnings], *rows(report), left=2)


def markdown(report: QuantizeReport) -> str:
    text = [f"# {report.drafter}, quantised", "", f"**{report.headline}**", ""]
    text += [f"> ALARM: {alarm}\n" for alarm in report.alarms] + [f"> {warning}\n" for warning in report.warnings]
    if report.pairs:
        text += [*piped(*rows(report), left=2), ""]
    for form, weights in (("before", report.before), ("after", report.after)):
        held = ", ".join(f"{dtype} {size / 1e6:.2f} MB" for dtype, size in sorted(weights.by_dtype.items()))
        text.append(f"* {form}: {weights.bytes:,} bytes, {weights.linear_bytes:,} in linear weights; {held}")
    text += [
        f"* {report.scheme}; {report.rounding}",
        f"* quantised: {', '.join(report.quantized)}",
        f"* left alone: {', '.join(report.untouched) or 'no linear layer'}; norms, embeddings and tables always",
        f"* target {report.target} in {report.target_dtype}; {report.hardware}, {report.threads} threads",
        "",
        "## Definitions",
        "",
    ]
    text += [f"* **{name}**: {meaning}" for name, meaning in report.definitions.items()]
    return "\n".join(text) + "\n"


def bits_of(folder: Path) -> dict[str, int]:
    """Bits of each quantised layer's weights, as its tensors in the files say: not what a config claims (Q-03)."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            layer, _, part = name.rpartition(".")
            if part == "weight_packed":
                found[layer] = round(32 * tensor.shape[1] / int(tensors[f"{layer}.weight_shape"][1]))
            elif part == "weight" and f"{layer}.weight_scale" in tensors:
                found[layer] = 8 * tensor.itemsize
    return found

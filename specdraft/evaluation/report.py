"""The Report: what an evaluation found, how it knows, and what every figure in it means.

`report.json` is this model, word for word; its schema has a version, and a reader of another version says so.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from specdraft.config import SpecdraftError

SCHEMA_VERSION = 1
SliceKind = Literal["category", "output position", "prompt length"]

DEFINITIONS: dict[str, str] = {
    "interval": (
        "95 % interval in brackets: percentile bootstrap over prompts (whole prompts are drawn with replacement; for "
        "speed, whole batches, each with its plain twin). Absent where fewer than two prompts (batches) contribute."
    ),
    "round": (
        "One pass of the target over one row: the root and the tokens drafted below it. The first token after a "
        "prompt comes from reading the prompt and belongs to no round."
    ),
    "tau": (
        "Tokens per target pass, the free token included: 1 + the sum of reach over depths. Tokens that an end of "
        "text or the length cap cuts off the last round still count here."
    ),
    "emitted per pass": "Tokens that really entered the output over rounds: tau after the last round was trimmed.",
    "alpha": (
        "Acceptance rate at depth d: rounds in which some candidate at depth d was accepted, over rounds that "
        "accepted depth d - 1 and were offered a candidate at depth d. Without a depth: all depths together."
    ),
    "analytic alpha": (
        "The mean, over the same depths and rounds, of the probability with which a candidate was to be accepted; in "
        "a chain sum_x min(p(x), q(x)). It estimates the same thing as alpha with less noise (for greedy decoding "
        "the two are equal)."
    ),
    "offer": "Share of the rounds that reached depth d - 1 in which a candidate at depth d was offered.",
    "reach": "Share of all rounds in which depth d was accepted: the product of offer and alpha up to depth d.",
    "acceptance ratio": (
        "Accepted over proposed tokens, all of a tree's candidates counted. Not alpha: tokens drafted behind a "
        "rejected one, and siblings of an accepted one, count as lost."
    ),
    "tokens/s": "New tokens over wall-clock seconds, prompt reading included.",
    "speed-up": (
        "Tokens/s of speculative over plain decoding: same prompts, same process, same loop, batch by batch in turn."
    ),
    "decode speed-up": "The same without the time for reading prompts, in which drafting cannot help.",
    "time": (
        "Share of the wall-clock seconds: prompts, target passes (head and warping included), drafting (the drafter's "
        "reading of prompts and accepted tokens included), and everything else."
    ),
    "c": "Time of one draft step (one depth of drafting) over the time of a target pass of one token a row.",
    "v(n)": "Time of a target pass of n tokens a row over the time of a pass of one.",
    "predicted speed-up": (
        "tau / (v(n) + depth * c) from the measured parts, n = 1 + the mean number of drafted tokens; no time "
        "for anything else. Compare with the decode speed-up."
    ),
    "break-even alpha": (
        "The alpha, equal at every depth, at which a chain of this length neither gains nor loses time."
    ),
    "best gamma": (
        "The chain length with the highest predicted speed-up at the measured acceptance and costs; beyond the "
        "measured depths the last depth's acceptance is carried on."
    ),
    "lossless, greedy": (
        "Every answer equals plain decoding's token for token. In half precision a pass over several tokens rounds "
        "otherwise than a pass over one, so an answer may part where the target itself has nearly equal best tokens: "
        "where both tokens lie, in float32, within tie_factor * e of the best logit, e being the largest change of any "
        "logit between the target's plain passes in its own dtype and in float32 there. Each parting is listed."
    ),
    "lossless, sampled": (
        "Each emitted token's place in the target's law (its randomised probability integral transform) is uniform "
        "on (0, 1) if and only if tokens follow that law. Tested (Kolmogorov-Smirnov): the places with tokens in order "
        "of p, and of p over the draft law, the mean of the latter, and the places of drawn drafts in the law that the "
        "drafter hands on. Failed below p = 0.001, the smallest p times the number of tests: at most one lossless run "
        "in a thousand fails. A run without these values is not certified."
    ),
    "lossy by choice": (
        "Typical acceptance was asked for: a token x is accepted where p(x) > min(epsilon, delta * exp(-H(p))), "
        "H the entropy of the target's law p, whatever it was drafted from. Answers do not follow the target's law; "
        "alpha, tau and speed are not comparable with those of a lossless run, and analytic alpha is alpha itself."
    ),
}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Estimate(Section):
    """A figure with its 95 % interval; None where there is nothing to divide by, or too little to resample."""

    value: float | None
    low: float | None = None
    high: float | None = None


class DepthFigures(Section):
    depth: int
    offers: int
    """Rounds that reached depth - 1 and were offered a candidate here: what alpha divides by."""
    offer: Estimate
    alpha: Estimate
    analytic_alpha: Estimate
    reach: Estimate


class Slice(Section):
    """The main figures over a part of the rounds."""

    kind: SliceKind
    name: str
    prompts: int
    rounds: int
    tau: Estimate
    alpha: Estimate
    analytic_alpha: Estimate


class Acceptance(Section):
    """What was accepted, over all prompts."""

    rounds: int
    proposed: int
    accepted: int
    tau: Estimate
    emitted_per_pass: Estimate
    alpha: Estimate
    analytic_alpha: Estimate
    acceptance_ratio: Estimate
    depths: list[DepthFigures]
    slices: list[Slice]
    emitted_histogram: list[int]
    """Rounds by the number of tokens that they emitted: index 0, 1, 2, ..."""

    def metrics(self) -> dict[str, float]:
        """The figures by name, as a training log wants them: tau, alpha, analytic_alpha, alpha_1, alpha_2, ..."""
        named = {"tau": self.tau, "alpha": self.alpha, "analytic_alpha": self.analytic_alpha}
        named |= {f"alpha_{figures.depth}": figures.alpha for figures in self.depths}
        return {name: estimate.value for name, estimate in named.items() if estimate.value is not None}


class RunTime(Section):
    """Where the seconds of one run went; `other_seconds` is everything but prompt, target and drafter."""

    new_tokens: int
    passes: int
    seconds: float
    prefill_seconds: float
    target_seconds: float
    drafter_seconds: float

    @property
    def other_seconds(self) -> float:
        return max(self.seconds - self.prefill_seconds - self.target_seconds - self.drafter_seconds, 0.0)

    def share(self, part: Literal["prefill", "target", "drafter", "other"]) -> float:
        spent = {"prefill": self.prefill_seconds, "target": self.target_seconds, "drafter": self.drafter_seconds}
        return (self.other_seconds if part == "other" else spent[part]) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


class GammaPoint(Section):
    """What a chain of `gamma` would do: tau from the measured depths (`measured`) or carried on beyond them."""

    gamma: int
    tau: float
    predicted_speedup: float
    measured: bool


class Costs(Section):
    """Timed parts, in seconds, at the run's batch size and a middling prompt."""

    pass_seconds: dict[int, float]
    """Target pass by number of tokens a row."""
    draft_step_seconds: float
    c: float
    nodes: float
    """Tokens a row that this system's pass held beyond the root, on average."""
    v: float
    predicted_speedup: float
    break_even_alpha: float | None
    """None: no alpha breaks even; or the system is no chain."""
    best_gamma: int | None
    """0: do not speculate. Chains only, as `by_gamma`."""
    by_gamma: list[GammaPoint]


class Divergence(Section):
    """Where a greedy answer first parts from plain decoding's."""

    prompt: int
    position: int
    """Index into the answer's tokens."""
    plain_token: int | None
    speculative_token: int | None
    """None: the answer had ended."""
    top2_margin: float
    """Target's best logit minus its second, in float32, after the tokens that both share."""
    gap: float | None = None
    """Best logit minus the lower of the two tokens' own, there, in float32; None where one answer had ended."""
    rounding: float | None = None
    """Largest change of any logit there between the target's own dtype and float32, by plain passes."""


class Losslessness(Section):
    verdict: Literal["identical", "ties", "law holds", "failed", "not certified", "lossy by choice"]
    reason: str
    compared: int = 0
    """Answers compared (greedy) or tokens tested (sampled)."""
    divergences: list[Divergence] = []
    ks_distance: float | None = None
    p_value: float | None = None

    @property
    def lossless(self) -> bool:
        return self.verdict in ("identical", "ties", "law holds")


class SystemReport(Section):
    name: str
    shape: dict[str, JsonValue]
    acceptance: Acceptance
    time: RunTime
    speedup: Estimate | None
    decode_speedup: Estimate | None
    costs: Costs | None
    losslessness: Losslessness


class Piece(Section):
    """Some text of an answer and how it came: the first token of all, an accepted draft, the target's own token after a
    rejected draft (`corrected`), or after the last draft was accepted or none was offered (`free`)."""

    kind: Literal["first", "accepted", "corrected", "free"]
    text: str
    round: int


class Sample(Section):
    prompt: str
    category: str | None
    system: str
    tau: float | None
    pieces: list[Piece]


class Curve(Section):
    """A training curve: values over optimiser steps."""

    name: str
    steps: list[int]
    values: list[float]


class Setting(Section):
    """What ran, where, on what."""

    target: str
    target_fingerprint: str
    drafter: str
    device: str
    hardware: str
    dtype: str
    threads: int
    batch_size: int
    temperature: float
    top_k: int | None
    top_p: float | None
    max_new_tokens: int
    acceptance: str = "exact"
    """The rule by which drafted tokens are accepted."""
    seed: int
    prompts: int
    categories: dict[str, int]
    training_overlap: int | None
    """Evaluation prompts that also stand among the training prompts; None: not known."""
    trained_length: int | None
    """Longest sequence that the drafter was trained on; None: not known."""


class Report(Section):
    schema_version: Literal[1] = 1
    created: str
    setting: Setting
    plain: RunTime | None
    systems: list[SystemReport]
    samples: list[Sample]
    training: list[Curve]
    warnings: list[str]
    provenance: dict[str, JsonValue]
    definitions: dict[str, str] = DEFINITIONS

    @property
    def best(self) -> SystemReport:
        """The system that the headline speaks of: the fastest; where speed was not compared, the highest tau."""
        return max(self.systems, key=lambda s: (_value(s.speedup), _value(s.acceptance.tau)))

    @property
    def headline(self) -> str:
        best = self.best
        return f"{speed_sentence(best)} {lossless_sentence([system.losslessness for system in self.systems])}"

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Raises SpecdraftError for a file of another schema."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise SpecdraftError(f"{path} is no report of schema {SCHEMA_VERSION}: {error}; evaluate again") from error


def speed_sentence(system: SystemReport) -> str:
    """What a manager wants to know first."""
    tau = f"{system.acceptance.tau.value or 1:.2f} tokens per target pass"
    if system.speedup is None or system.speedup.value is None:
        return f"The {system.name} emits {tau}; its speed was not compared with plain decoding."
    value, low, high = system.speedup.value, system.speedup.low, system.speedup.high
    between = "" if low is None or high is None else f" (95 % interval {low:.2f} to {high:.2f})"
    if low is not None and high is not None and low <= 1 <= high:
        verb = f"is not measurably faster or slower than plain decoding: {value:.2f} times its speed"
    elif value >= 1:
        verb = f"answers {value:.2f} times as fast as plain decoding"
    else:
        verb = f"is slower than plain decoding: {value:.2f} times its speed"
    return f"The {system.name} {verb}{between}, at {tau}."


def lossless_sentence(found: list[Losslessness]) -> str:
    verdicts = {item.verdict for item in found}
    if "lossy by choice" in verdicts:
        return "It is not lossless, by choice: typical acceptance changes what is answered."
    if "failed" in verdicts:
        return "It is not lossless: answers differ from the target's."
    if "not certified" in verdicts:
        return "That answers are unchanged is not certified."
    if "ties" in verdicts:
        return "Answers are the target's own, but for rounding where its two best tokens tie."
    return (
        "Answers are unchanged, token for token." if "identical" in verdicts else "Answers follow the target's own law."
    )


def _value(estimate: Estimate | None) -> float:
    return -1.0 if estimate is None or estimate.value is None else estimate.value

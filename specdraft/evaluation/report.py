"""The Report: what an evaluation found, how it knows, and what every figure in it means.

`report.json` is this model, word for word; its schema has a version, and a reader of another version says so.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from specdraft.config import SpecdraftError
from specdraft.evaluation.definitions import DEFINITIONS
from specdraft.evaluation.served_counts import Served

SCHEMA_VERSION = 1
SliceKind = Literal["category", "output position", "prompt length"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Estimate(Section):
    """A figure with its 95 % interval; None where there is nothing to divide by, or too little to resample."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def bounds(self) -> tuple[float, float, float] | None:
        """low, value and high, where there are all three."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return self.low, self.value, self.high


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


class Bin(Section):
    """Drafted tokens whose parent was accepted and that the drafter found about equally likely."""

    low: float
    high: float
    """The drafter's probability of them lies in [low, high); 1 belongs to the last bin."""
    nodes: int
    confidence: float
    """Mean of the drafter's probability."""
    accepted: Estimate
    target: Estimate
    """Mean of the target's own probability of them, warped; greedy decoding: the share that are its likeliest."""


class Calibration(Section):
    """Whether the drafter is as often right as it says."""

    nodes: int
    error: Estimate
    """Expected calibration error: mean over nodes of |confidence - target|, each the mean of its bin."""
    bins: list[Bin]
    """Those that hold a node, rising."""


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
    iid_tau: Estimate = Estimate(value=None)
    """tau with the one `alpha` at every depth, offers as they were."""
    iid_departure: Estimate = Estimate(value=None)
    """tau over `iid_tau`, less 1."""
    calibration: Calibration | None = None
    """None: the drafter gives no probabilities."""

    def disagreements(self) -> list[str]:
        """Where counted and analytic alpha are further apart than their intervals and chance allow: one is wrong."""
        pairs = [("", self.alpha, self.analytic_alpha, sum(figures.offers for figures in self.depths))]
        pairs += [(f" at depth {d.depth}", d.alpha, d.analytic_alpha, d.offers) for d in self.depths]
        return [
            f"alpha{where} was counted as {100 * (counted.value or 0):.1f} %, but should have been "
            f"{100 * (analytic.value or 0):.1f} % by the laws: beyond both intervals"
            for where, counted, analytic, offers in pairs
            if _apart(counted, analytic, offers)
        ]

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
    rest_seconds: float = 0.0
    """What a round does beside drafting and its pass: verification, commit, the drafter's reading of what is new."""
    round_cost: float = 1.0
    """A whole round of this system over a step of plain decoding."""
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


class BatchSpeed(Section):
    """Speed-up at one batch size."""

    batch_size: int
    batches: int
    """Full ones; where prompts are too few for them, prompts were decoded again."""
    speedup: Estimate
    decode_speedup: Estimate
    predicted: Estimate
    """Of the decode speed-up."""


class SystemReport(Section):
    name: str
    shape: dict[str, JsonValue]
    acceptance: Acceptance
    time: RunTime
    speedup: Estimate | None
    decode_speedup: Estimate | None
    costs: Costs | None
    losslessness: Losslessness
    predicted: Estimate | None = None
    """Of the decode speed-up, at the setting's batch size."""
    by_batch: list[BatchSpeed] = []
    """At the batch sizes asked for, rising."""
    stops_paying: float | None = None
    """The batch size from which the decode speed-up is 1 or less; None: not at any that was asked for."""


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
    drafter_weights: str | None = None
    """`provenance.hash_weights` of a trained drafter's folder; None: no trained drafter alone, or not known."""
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
    controls: str = "none"
    """Penalties and stop strings, in every run."""
    seed: int
    prompts: int
    answers: int | None = None
    """Of each run: one a turn, so more than prompts where users ask on; None: as many as prompts."""
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
    served: Served | None = None
    """An engine's counts beside ours, where one was asked."""
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


def _apart(counted: Estimate, analytic: Estimate, offers: int) -> bool:
    """Intervals that do not meet, and a difference that so many tosses with the analytic chance make once in 1,000."""
    if (one := counted.bounds) is None or (other := analytic.bounds) is None:
        return False
    (low, alpha, high), (least, chance, most) = one, other
    deviation = (max(chance * (1 - chance), 0.0) / max(offers, 1)) ** 0.5
    return (low > most or high < least) and abs(alpha - chance) > 3.3 * deviation + 1e-6

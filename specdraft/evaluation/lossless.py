"""Did speculative decoding change an answer? Token for token when greedy, in law when sampled."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from specdraft.decoding import Generation
from specdraft.evaluation.report import Divergence, Losslessness
from specdraft.target import FrozenTarget
from specdraft.verify import Thresholds
from specdraft.warping import Processors

FAILED_BELOW = 0.001
"""A sampled run fails below this p-value: at most one lossless run in a thousand fails, all tests together."""
TIE_FACTOR = 2.0
"""Two logits that each move by at most e in half precision may change places where they lie within 2e."""


def compare_greedy(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    tie_factor: float = TIE_FACTOR,
    processors: Processors | None = None,
) -> Losslessness:
    """Token identity (E-01). In float32 and float64 any divergence fails. In half precision a divergence is excused
    where both tokens lie, in float32, within `tie_factor` * e of the best logit; e is what the dtype itself does to
    the target there: the largest change of any logit between its plain passes in its own dtype and in float32.
    `processors`: those that both were decoded with."""
    parted = [
        (index, _first_difference(a.tokens, b.tokens))
        for index, (a, b) in enumerate(zip(plain, speculative, strict=True))
        if a.tokens != b.tokens
    ]
    compared = len(plain)
    if not parted:
        return Losslessness(
            verdict="identical", reason=f"all {compared} answers are token-identical", compared=compared
        )
    own = [_next(target, prompts[index], plain[index].tokens[:place], processors) for index, place in parted]
    with in_float32(target.model):
        exact = [_next(target, prompts[index], plain[index].tokens[:place], processors) for index, place in parted]
    divergences = [
        _divergence(index, place, plain[index].tokens, speculative[index].tokens, logits)
        for (index, place), logits in zip(parted, zip(own, exact, strict=True), strict=True)
    ]
    where = f"{len(parted)} of {compared} answers part from plain decoding's"
    name = str(target.dtype).removeprefix("torch.")
    half = target.dtype in (torch.bfloat16, torch.float16)
    beyond = [d for d in divergences if d.gap is None or d.rounding is None or d.gap > tie_factor * d.rounding]
    allowed = f"{tie_factor:g} times what {name} itself does to the target's logits there"
    if not half:
        widest = max(divergence.top2_margin for divergence in divergences)
        reason = f"{where}, which a {name} target does not excuse (widest margin {widest:.3g})"
    elif not beyond:
        closest = max(divergences, key=lambda d: (d.gap or 0.0) - tie_factor * (d.rounding or 0.0))
        reason = f"{where}, each within {allowed} (the nearest to it: {_distance(closest, tie_factor)})"
    else:
        reason = (
            f"{where}, {len(beyond)} of them by more than {allowed} (the first: {_distance(beyond[0], tie_factor)})"
        )
    verdict: Literal["ties", "failed"] = "ties" if half and not beyond else "failed"
    return Losslessness(verdict=verdict, reason=reason, compared=compared, divergences=divergences)


def _next(target: FrozenTarget, prompt: Sequence[int], answer: Sequence[int], processors: Processors | None) -> Tensor:
    """`next_logits` as they are decoded with."""
    logits, text = next_logits(target, [*prompt, *answer]), torch.tensor([[*prompt, *answer]], device=target.device)
    for processor in () if processors is None else processors(len(prompt)):
        logits = processor(text, logits[None])[0]
    return logits


def _divergence(
    index: int, place: int, plain: Sequence[int], speculative: Sequence[int], logits: tuple[Tensor, Tensor]
) -> Divergence:
    """`logits` [V] of the target after what both answers share: in its own dtype and in float32."""
    own, exact = logits
    tokens = [row[place] if place < len(row) else None for row in (plain, speculative)]
    lowest = None if None in tokens else min(float(exact[token]) for token in tokens if token is not None)
    best = exact.topk(2).values
    return Divergence(
        prompt=index,
        position=place,
        plain_token=tokens[0],
        speculative_token=tokens[1],
        top2_margin=float(best[0] - best[1]),
        gap=None if lowest is None else float(best[0]) - lowest,
        rounding=float((own - exact).nan_to_num(0.0).abs().max()),  # what is forbidden is so in both
    )


def _distance(divergence: Divergence, tie_factor: float) -> str:
    if divergence.gap is None:
        return f"answer {divergence.prompt}, of which one had ended"
    allowed = tie_factor * (divergence.rounding or 0.0)
    return f"answer {divergence.prompt}, {divergence.gap:.3g} below the best logit where {allowed:.3g} is allowed"


def check_sampled(generations: Sequence[Generation]) -> Losslessness:
    """Do emitted tokens follow the target's law, and drafted ones the law that was handed on to verification?

    Four tests of the run's randomised transforms, each where there are some: Kolmogorov-Smirnov of the tokens' places
    in the target's law, in falling order of p; of their places in rising order of p over the draft law, and the mean
    of these (a wrong rule favours or slights what was drafted too often); and of the drawn trials' places in their
    laws, since a tree that was merged, sorted or pruned by value after it was drawn, or that hands on a q before
    warping, changes the law of its trials far more than that of what comes out. p is Bonferroni's: the smallest p times
    the number of tests. Run over tokens one after the other, each transform is uniform given all before it.

    Tokens without a transform are not certified (E-34): only a run that verifies against p records them.
    """
    tokens = sum(len(generation.tokens) for generation in generations)
    places = [place for generation in generations for place in generation.transforms.tokens]
    if len(places) != tokens or not tokens:
        reason = (
            f"not known to be distribution-exact: {len(places)} of {tokens} tokens have a place in the target's law"
        )
        return Losslessness(verdict="not certified", reason=reason, compared=len(places))
    by_draft = [place for generation in generations for place in generation.transforms.drafts if place is not None]
    trials = [place for generation in generations for place in generation.transforms.trials]
    distance, p_value = kolmogorov_smirnov(places)
    found = {f"{tokens} tokens' places in the target's law": p_value}
    if by_draft:
        found[f"{len(by_draft)} tokens' places by how often they were drafted"] = kolmogorov_smirnov(by_draft)[1]
        found["the mean of these"] = uniform_mean(by_draft)
    if trials:
        found[f"{len(trials)} drawn drafts' places in the law that the drafter hands on"] = kolmogorov_smirnov(trials)[
            1
        ]
    worst = min(found, key=found.__getitem__)
    together = min(1.0, len(found) * found[worst])
    holds = together >= FAILED_BELOW
    listed = ", ".join(f"{name} (p = {p:.2g})" for name, p in found.items())
    reason = (
        f"{'uniform' if holds else 'not uniform'}: {listed}; together p = {together:.2g}, failed below {FAILED_BELOW}"
    )
    return Losslessness(
        verdict="law holds" if holds else "failed",
        reason=reason if holds else f"{reason}; the worst: {worst}",
        compared=tokens,
        ks_distance=distance,
        p_value=together,
    )


def lossy_by_choice(generations: Sequence[Generation], thresholds: Thresholds) -> Losslessness:
    """Of a run with typical acceptance, which nothing certifies (E-34): how far its tokens are from p."""
    found = check_sampled(generations)
    reason = (
        f"typical acceptance (epsilon {thresholds.epsilon:g}, delta {thresholds.delta:g}) was asked for, which is not "
        f"distribution-exact; {found.reason}"
    )
    return found.model_copy(update={"verdict": "lossy by choice", "reason": reason})


def kolmogorov_smirnov(values: Sequence[float]) -> tuple[float, float]:
    """Distance of the values' empirical law from the uniform on (0, 1), and its p-value.

    Asymptotic law at (sqrt(n) + 0.12 + 0.11 / sqrt(n)) * distance (Stephens, 1970). Raises ValueError for no values.
    """
    if not values:
        raise ValueError("no values to test")
    ordered, n = np.sort(np.asarray(values, dtype=np.float64)), len(values)
    steps = np.arange(n + 1) / n
    distance = float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
    root = math.sqrt(n)
    return distance, kolmogorov_survival((root + 0.12 + 0.11 / root) * distance)


def uniform_mean(values: Sequence[float]) -> float:
    """Two-sided p-value of the values' mean being 1/2, as of uniform ones: normal, of variance 1 / 12 n."""
    return math.erfc(abs(float(np.mean(values)) - 0.5) * math.sqrt(6 * len(values)))


def kolmogorov_survival(x: float) -> float:
    """P(K > x) of the Kolmogorov distribution: 2 sum_k (-1)^(k-1) exp(-2 k^2 x^2), or for small x its theta-function
    twin 1 - sqrt(2 pi) / x sum_k exp(-(2k - 1)^2 pi^2 / (8 x^2)), whichever converges at once."""
    if x <= 0:
        return 1.0
    if x < 1:
        series = sum(math.exp(-((2 * k - 1) ** 2) * math.pi**2 / (8 * x * x)) for k in range(1, 6))
        return 1 - math.sqrt(2 * math.pi) / x * series
    return 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 8))


@torch.no_grad()
def next_logits(target: FrozenTarget, tokens: Sequence[int]) -> Tensor:
    """The target's logits after `tokens`, float32 [V], by a plain forward pass of the model itself."""
    ids = torch.tensor([list(tokens)], device=target.device)
    return target.model(input_ids=ids, use_cache=False).logits[0, -1].float()


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Half-precision weights as float32 for a while, in place; the way back is exact."""
    halves = [
        (tensor, tensor.dtype)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.dtype in (torch.bfloat16, torch.float16)
    ]
    try:
        for tensor, _ in halves:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in halves:
            tensor.data = tensor.data.to(dtype)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

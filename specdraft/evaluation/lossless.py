"""Did speculative decoding change an answer? Token for token when greedy, in law when sampled."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from specdraft.decoding import Generation
from specdraft.evaluation.report import Divergence, Losslessness
from specdraft.target import FrozenTarget
from specdraft.verify import Thresholds

FAILED_BELOW = 0.001
"""A sampled run fails below this p-value: one lossless run in a thousand fails by chance."""


def compare_greedy(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    tie_margin: float,
) -> Losslessness:
    """Token identity (E-01). In float32 and float64 any divergence fails; in half precision one is a tie if the
    target's two best logits, computed again in float32, lie within `tie_margin` of each other."""
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
    divergences = []
    with in_float32(target.model):
        for index, place in parted:
            a, b = plain[index].tokens, speculative[index].tokens
            margin = top2_margin(target, [*prompts[index], *a[:place]])
            tokens = [row[place] if place < len(row) else None for row in (a, b)]
            divergences.append(
                Divergence(
                    prompt=index, position=place, plain_token=tokens[0], speculative_token=tokens[1], top2_margin=margin
                )
            )
    widest = max(divergence.top2_margin for divergence in divergences)
    half = target.dtype in (torch.bfloat16, torch.float16)
    ties = half and widest <= tie_margin
    where = f"{len(parted)} of {compared} answers part from plain decoding's"
    name = str(target.dtype).removeprefix("torch.")
    if ties:
        reason = (
            f"{where}, each at a near tie of the target's two best logits (margin at most {widest:.3g}, {name} target)"
        )
    elif half:
        reason = f"{where}; the widest margin, {widest:.3g}, is no tie (allowed for {name}: {tie_margin:g})"
    else:
        reason = f"{where}, which a {name} target does not excuse (widest margin {widest:.3g})"
    return Losslessness(verdict="ties" if ties else "failed", reason=reason, compared=compared, divergences=divergences)


def check_sampled(generations: Sequence[Generation]) -> Losslessness:
    """Kolmogorov-Smirnov test of all tokens' randomised transforms under the target's law.

    Tokens without a transform are not certified (E-34): only a run that verifies against p records them.
    """
    tokens = sum(len(generation.tokens) for generation in generations)
    places = [place for generation in generations for place in generation.pit]
    if len(places) != tokens or not tokens:
        reason = (
            f"not known to be distribution-exact: {len(places)} of {tokens} tokens have a place in the target's law"
        )
        return Losslessness(verdict="not certified", reason=reason, compared=len(places))
    distance, p_value = kolmogorov_smirnov(places)
    holds = p_value >= FAILED_BELOW
    smallest = 1.95 / math.sqrt(tokens)
    reason = (
        f"the places of {tokens} tokens in the target's law are {'' if holds else 'not '}uniform: "
        f"distance {distance:.4f}, p = {p_value:.2g} (distances above {smallest:.4f} fail)"
    )
    return Losslessness(
        verdict="law holds" if holds else "failed",
        reason=reason,
        compared=tokens,
        ks_distance=distance,
        p_value=p_value,
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
def top2_margin(target: FrozenTarget, tokens: Sequence[int]) -> float:
    """The target's best logit minus its second best after `tokens`, by a plain forward pass of the model itself."""
    ids = torch.tensor([list(tokens)], device=target.device)
    best = target.model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


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

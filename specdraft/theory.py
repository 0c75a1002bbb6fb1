"""What acceptance is worth: tokens per target pass, speedup, the best draft length, and when speculation loses.

alpha, offer, reach, tau, gamma, c and v(n) mean what `specdraft` says they mean. Closed forms are those of Leviathan et
al. (arXiv:2211.17192); measured rates per depth take the place of one alpha for all depths by the same sum.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

PassCost = Callable[[int], float]
"""v(n): the cost of a target pass over n tokens, in target steps of one token."""


def flat(tokens: int) -> float:
    """The v(n) of a target whose pass costs the same however many tokens it scores."""
    return 1.0


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per target pass of a chain with the same alpha at each depth: (1 - alpha^(gamma+1)) / (1 - alpha)."""
    return tau([alpha] * gamma)


def reaches(alphas: Sequence[float], offers: Sequence[float] | None = None) -> list[float]:
    """Share of all rounds in which each depth was accepted: the product of offer * alpha from depth 1 down to it.

    alphas [depths] and offers [depths] in [0, 1]; offers None: every depth that is reached is offered a candidate.
    Raises ValueError for a rate out of range or lists of different length.
    """
    offers = [1.0] * len(alphas) if offers is None else offers
    for rate in (*alphas, *offers):
        if not 0 <= rate <= 1:
            raise ValueError(f"a rate must lie in [0, 1], got {rate}")
    return list(accumulate((alpha * offer for alpha, offer in zip(alphas, offers, strict=True)), mul))


def tau(alphas: Sequence[float], offers: Sequence[float] | None = None) -> float:
    """Tokens emitted per target pass, the free one included: 1 + the sum of the reaches."""
    return 1 + sum(reaches(alphas, offers))


def speedup(tokens: float, gamma: int, c: float, v: PassCost = flat) -> float:
    """Speed against plain decoding of a chain that emits `tokens` per pass: tokens / (v(gamma + 1) + gamma * c).

    c is the cost of one draft step in target steps. gamma 0 is plain decoding.
    """
    return tokens / _round_cost(gamma, c, v)


def break_even_alpha(gamma: int, c: float, v: PassCost = flat) -> float | None:
    """The alpha above which a chain of gamma tokens is faster than plain decoding; None: not even alpha 1 pays."""
    cost = _round_cost(gamma, c, v)
    if cost > gamma + 1:
        return None
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if expected_tokens(middle, gamma) < cost else (low, middle)
    return high if expected_tokens(low, gamma) < cost else low


def best_gamma(
    alphas: Sequence[float], c: float, v: PassCost = flat, offers: Sequence[float] | None = None
) -> tuple[int, float]:
    """The draft length from 0 to len(alphas) that is fastest, the shortest of equal ones, and its speedup.

    alphas [depths], by depth; a constant alpha is [alpha] * longest. Length 0 means: do not speculate.
    """
    rates = [1.0, *reaches(alphas, offers)]
    speeds = [speedup(tokens, gamma, c, v) for gamma, tokens in enumerate(accumulate(rates))]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return best, speeds[best]


def _round_cost(gamma: int, c: float, v: PassCost) -> float:
    if gamma < 0 or c < 0:
        raise ValueError(f"gamma and c must not be negative, got gamma {gamma} and c {c}")
    return v(gamma + 1) + gamma * c

"""Closed forms against worked numbers."""

from itertools import pairwise

import pytest

from specdraft.theory import best_gamma, break_even_alpha, expected_tokens, reaches, speedup, tau


def test_worked_numbers() -> None:
    tokens = expected_tokens(0.8, 4)
    assert tokens == pytest.approx((1 - 0.8**5) / (1 - 0.8)) == pytest.approx(3.3616)
    assert speedup(tokens, 4, 0.05) == pytest.approx(2.8, abs=0.005)
    assert speedup(tokens, 4, 0.3) == pytest.approx(1.528, abs=0.0005)


@pytest.mark.parametrize(("alpha", "tokens"), [(0.0, 1.0), (1.0, 6.0)])
def test_expected_tokens_at_the_ends(alpha: float, tokens: float) -> None:
    assert expected_tokens(alpha, 5) == tokens


def test_e28_tau_counts_the_free_token_of_every_round() -> None:
    accepted, gamma = [4, 4, 2, 0], 4
    marginal = [sum(a >= d for a in accepted) / len(accepted) for d in range(1, gamma + 1)]
    conditional = [after / before for before, after in pairwise([1.0, *marginal])]
    assert sum(accepted) / (gamma * len(accepted)) == 0.625
    assert marginal == [0.75, 0.75, 0.5, 0.5]
    assert conditional == pytest.approx([0.75, 1, 2 / 3, 1])
    assert reaches(conditional) == pytest.approx(marginal)
    assert tau(conditional) == pytest.approx(3.5) == pytest.approx(sum(a + 1 for a in accepted) / len(accepted))


def test_e29_accepted_over_proposed_is_not_alpha() -> None:
    tokens = expected_tokens(0.8, 5)
    assert tokens == pytest.approx(3.689, abs=0.0005)
    assert tokens == pytest.approx(1 + sum(reaches([0.8] * 5)))
    assert (tokens - 1) / 5 == pytest.approx(0.538, abs=0.0005)


def test_offers_scale_what_is_reached() -> None:
    assert reaches([0.5, 0.5], [0.5, 1.0]) == [0.25, 0.125]
    assert tau([0.5, 0.5], [0.5, 1.0]) == 1.375
    assert tau([]) == 1


def test_measured_pass_cost_takes_the_place_of_one() -> None:
    assert speedup(3.0, 4, 0.05, lambda n: 1 + 0.1 * (n - 1)) == pytest.approx(3 / 1.6)


@pytest.mark.parametrize(("gamma", "c"), [(1, 0.3), (4, 0.05), (4, 0.3), (7, 0.9)])
def test_at_break_even_the_speedup_is_one(gamma: int, c: float) -> None:
    alpha = break_even_alpha(gamma, c)
    assert alpha is not None
    assert speedup(expected_tokens(alpha, gamma), gamma, c) == pytest.approx(1, abs=1e-12)


def test_break_even_has_ends() -> None:
    assert break_even_alpha(4, 0.0) == 0
    assert break_even_alpha(4, 1.0) == 1
    assert break_even_alpha(4, 1.1) is None
    assert break_even_alpha(2, 0.1, lambda n: float(n)) is None


def test_best_gamma_is_the_best_of_all() -> None:
    speeds = [speedup(expected_tokens(0.8, g), g, 0.05) for g in range(21)]
    gamma, speed = best_gamma([0.8] * 20, 0.05)
    assert speed == pytest.approx(max(speeds)) == pytest.approx(speeds[gamma])
    assert 0 < gamma < 20


def test_best_gamma_zero_says_that_speculation_loses() -> None:
    assert best_gamma([0.2] * 5, 0.5) == (0, 1.0)
    assert best_gamma([0.9] * 5, 0.05, lambda n: float(n))[0] == 0
    assert best_gamma([0.9] * 5, 0.05, offers=[0.0] * 5) == (0, 1.0)


@pytest.mark.parametrize(("alphas", "offers"), [([1.2], None), ([0.5], [-0.1]), ([0.5, 0.5], [1.0])])
def test_impossible_rates_are_refused(alphas: list[float], offers: list[float] | None) -> None:
    with pytest.raises(ValueError, match=r"must lie in|shorter"):
        tau(alphas, offers)


@pytest.mark.parametrize(("gamma", "c"), [(-1, 0.1), (1, -0.1)])
def test_negative_costs_are_refused(gamma: int, c: float) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        speedup(1.0, gamma, c)

"""The verdict: Kolmogorov-Smirnov against known numbers, token identity, and what it takes to be excused or caught."""

import numpy as np
import pytest
import torch
from evaluation.markov import law, markov_target

from specdraft.decoding import Generation
from specdraft.evaluation.lossless import (
    check_sampled,
    compare_greedy,
    in_float32,
    kolmogorov_smirnov,
    kolmogorov_survival,
    top2_margin,
)


@pytest.mark.parametrize(
    ("x", "p"), [(0.5712, 0.9), (0.8276, 0.5), (1.2238, 0.1), (1.3581, 0.05), (1.6276, 0.01), (1.9495, 0.001)]
)
def test_kolmogorov_law_at_its_tabled_quantiles(x: float, p: float) -> None:
    assert kolmogorov_survival(x) == pytest.approx(p, rel=1e-3)


def test_both_series_of_the_kolmogorov_law_meet() -> None:
    assert kolmogorov_survival(1 - 1e-9) == pytest.approx(kolmogorov_survival(1.0), rel=1e-7)
    assert kolmogorov_survival(0.0) == 1
    assert kolmogorov_survival(0.1) == pytest.approx(1)


def test_distance_from_the_uniform() -> None:
    distance, _ = kolmogorov_smirnov([0.1, 0.2, 0.3, 0.9])
    assert distance == pytest.approx(0.45)  # at 0.3: three of four values, 0.75 - 0.3
    _, even = kolmogorov_smirnov([(i + 0.5) / 100 for i in range(100)])
    assert even == pytest.approx(1)


def test_p_values_are_uniform_under_the_null() -> None:
    generator = np.random.default_rng(0)
    found = [kolmogorov_smirnov(generator.random(60).tolist())[1] for _ in range(1000)]
    assert np.mean(np.array(found) < 0.05) == pytest.approx(0.05, abs=0.02)
    assert np.mean(np.array(found) < 0.5) == pytest.approx(0.5, abs=0.05)


def sampled(pit: list[float]) -> list[Generation]:
    return [Generation(tokens=[1] * len(pit), pit=pit)]


def test_uniform_places_hold_and_skewed_ones_are_caught() -> None:
    generator = np.random.default_rng(1)
    assert check_sampled(sampled(generator.random(3000).tolist())).verdict == "law holds"
    skewed = check_sampled(sampled((generator.random(3000) ** 1.2).tolist()))
    assert skewed.verdict == "failed"
    assert not skewed.lossless


def test_e34_a_run_that_records_no_law_is_not_certified() -> None:
    """Typical acceptance has no p to place its tokens in."""
    found = check_sampled([Generation(tokens=[1, 2, 3], pit=[])])
    assert found.verdict == "not certified"
    assert "not known to be distribution-exact" in found.reason
    assert not found.lossless


def greedy_pair(place: int = 2) -> tuple[list[Generation], list[Generation]]:
    plain = [Generation(tokens=[3, 4, 5, 6]), Generation(tokens=[1, 2, 3])]
    other = [Generation(tokens=[3, 4, 5, 6]), Generation(tokens=[1, 2, 3])]
    other[0].tokens[place] = 7
    return plain, other


def test_e01_identical_answers_are_lossless() -> None:
    target, plain = markov_target(law(0)), greedy_pair()[0]
    found = compare_greedy(target, [[1], [2]], plain, plain, tie_margin=0.25)
    assert (found.verdict, found.compared, found.divergences) == ("identical", 2, [])


def test_e01_float32_excuses_no_divergence() -> None:
    found = compare_greedy(markov_target(law(0)), [[1], [2]], *greedy_pair(), tie_margin=100)
    assert found.verdict == "failed"
    (divergence,) = found.divergences
    assert (divergence.prompt, divergence.position) == (0, 2)
    assert (divergence.plain_token, divergence.speculative_token) == (5, 7)


def test_e01_bfloat16_excuses_ties_alone() -> None:
    p = law(0)
    margin = float(p[4].log().topk(2).values.diff().abs())
    target = markov_target(p, torch.bfloat16)
    for allowed, verdict in ((margin * 1.1, "ties"), (margin * 0.9, "failed")):
        found = compare_greedy(target, [[1], [2]], *greedy_pair(), tie_margin=allowed)
        assert found.verdict == verdict
        assert found.divergences[0].top2_margin == pytest.approx(margin, abs=0.03)
    assert target.dtype == torch.bfloat16


def test_answers_that_end_differently_diverge_at_the_end() -> None:
    plain, other = [Generation(tokens=[3, 4])], [Generation(tokens=[3, 4, 5])]
    (divergence,) = compare_greedy(markov_target(law(0)), [[1]], plain, other, tie_margin=0.1).divergences
    assert (divergence.position, divergence.plain_token, divergence.speculative_token) == (2, None, 5)


def test_float32_for_a_while_and_back_exactly() -> None:
    target = markov_target(law(0), torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    with in_float32(target.model):
        assert {parameter.dtype for parameter in target.model.parameters()} == {torch.float32}
        assert top2_margin(target, [1, 2]) > 0
    after = target.model.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )

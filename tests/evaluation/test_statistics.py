"""Figures from rounds against closed forms, and intervals that cover what they claim to."""

import numpy as np
import pytest
import torch

from specdraft.decoding import Round
from specdraft.evaluation.report import Acceptance
from specdraft.evaluation.statistics import Bootstrap, Counts, RoundTable, acceptance, calibration
from specdraft.reliability import BINS
from specdraft.theory import tau


def chain_round(accepted: int, gamma: int = 4, emitted: int | None = None, chance: float = 0.5) -> Round:
    offered = min(accepted + 1, gamma)
    return Round(offered, accepted, accepted + 1 if emitted is None else emitted, gamma, (chance,) * offered)


def markov_rounds(alpha: float, gamma: int, rounds: int, generator: np.random.Generator) -> list[Round]:
    """Rounds of a chain whose every drafted token survives with the same chance."""
    survived = generator.random((rounds, gamma)) < alpha
    return [chain_round(int(n), gamma, chance=alpha) for n in np.cumprod(survived, axis=1).sum(1)]


def figures(rows: list[list[Round]], **changes: object) -> Acceptance:
    given = {"prompt_lengths": [10] * len(rows), "categories": [None] * len(rows), **changes}
    return acceptance(rows, bootstrap=Bootstrap(len(rows), 500, seed=0), **given)  # type: ignore[arg-type]


def test_e28_tau_counts_the_free_token_and_every_round() -> None:
    found = figures([[chain_round(4), chain_round(4)], [chain_round(2), chain_round(0)]])
    assert (found.accepted, found.proposed, found.rounds) == (10, 16, 4)
    assert found.acceptance_ratio.value == pytest.approx(0.625)
    assert found.tau.value == pytest.approx(3.5)
    assert [d.reach.value for d in found.depths] == pytest.approx([0.75, 0.75, 0.5, 0.5])
    assert [d.alpha.value for d in found.depths] == pytest.approx([0.75, 1, 2 / 3, 1])
    assert [d.offer.value for d in found.depths] == [1, 1, 1, 1]
    assert [d.offers for d in found.depths] == [4, 3, 3, 2]
    assert found.emitted_histogram == [0, 1, 0, 1, 0, 2]


def test_e29_alpha_is_not_the_acceptance_ratio() -> None:
    """Expected counts of alpha .8, gamma 5: tau 3.689 and accepted / proposed .538."""
    share = [0.2 * 0.8**n for n in range(5)] + [0.8**5]
    found = figures([[chain_round(n, 5, chance=0.8) for n in range(6) for _ in range(round(20_000 * share[n]))]])
    assert found.tau.value == pytest.approx(3.689, abs=1e-3)
    assert found.acceptance_ratio.value == pytest.approx(0.538, abs=1e-3)
    assert found.alpha.value == pytest.approx(0.8, abs=1e-3)
    assert found.analytic_alpha.value == pytest.approx(0.8)
    reaches = [d.reach.value or 0 for d in found.depths]
    assert found.tau.value == pytest.approx(1 + sum(reaches))
    products = np.cumprod([(d.alpha.value or 0) * (d.offer.value or 0) for d in found.depths])
    assert reaches == pytest.approx(products)


def test_offer_falls_where_nothing_was_drafted_and_alpha_does_not() -> None:
    """Lookup without a match drafts nothing: the round counts for offer and reach, not for alpha."""
    found = figures([[Round(0, 0, 1, 0, ()), chain_round(1, 1), chain_round(1, 1), chain_round(0, 1)]])
    (depth,) = found.depths
    assert depth.offer.value == pytest.approx(0.75)
    assert depth.alpha.value == pytest.approx(2 / 3)
    assert depth.reach.value == pytest.approx(0.5)
    assert found.tau.value == pytest.approx(1.5)


def test_e13_trimmed_tokens_count_for_tau_and_not_for_the_output() -> None:
    found = figures([[chain_round(4), chain_round(4, emitted=3)]])
    assert found.tau.value == pytest.approx(5)
    assert found.emitted_per_pass.value == pytest.approx(4)


def test_slices_by_category_position_and_prompt_length() -> None:
    rows = [[chain_round(4)] * 5, [chain_round(0)] * 20, []]
    found = figures(rows, categories=["code", "chat", "chat"], prompt_lengths=[10, 49, 5], trained_length=48)
    by = {(part.kind, part.name): part for part in found.slices}
    assert by["category", "code"].tau.value == 5
    assert by["category", "chat"].tau.value == 1
    assert by["category", "code"].tau.low is None, "one prompt has no interval"
    assert by["output position", "0 to 15"].rounds == 3 + 15  # starts 1, 6, 11 and 1 .. 15
    assert by["output position", "16 to 31"].rounds == 2 + 5
    assert by["prompt length", "0 to 48"].tau.value == 5
    assert by["prompt length", "49 to 63"].tau.value == 1, "x07: beyond the trained length is a bucket of its own"
    for kind in ("category", "output position", "prompt length"):
        assert sum(part.rounds for part in found.slices if part.kind == kind) == 25


def test_figures_without_rounds_are_absent_not_zero() -> None:
    found = figures([[], []])
    assert found.tau.value is None
    assert found.alpha.value is None
    assert found.depths == []
    assert found.slices == []


@pytest.mark.parametrize("prompts", [30, 100])
def test_bootstrap_covers_the_truth_when_prompts_differ(prompts: int) -> None:
    """Each prompt has an alpha of its own, so rounds are not independent: resampling them would cover too little."""
    generator, trials, hits = np.random.default_rng(5), 200, 0
    truth = 0.7
    for trial in range(trials):
        easy = generator.beta(7, 3, size=prompts)
        tops = generator.binomial(40, easy).astype(float)
        found = Bootstrap(prompts, 400, seed=trial).ratio(tops, np.full(prompts, 40.0))
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= truth <= found.high
    assert 0.90 <= hits / trials <= 0.985


def test_paired_speedup_is_sharper_than_its_parts() -> None:
    """Prompts differ tenfold in length, the ratio of speeds hardly: pairing keeps that out of the interval."""
    generator = np.random.default_rng(1)
    tokens = generator.uniform(20, 200, 40)
    plain, fast = tokens / 10, tokens / 20 * generator.uniform(0.95, 1.05, 40)
    found = Bootstrap(40, 1000, seed=0).quotient((tokens, fast), (tokens, plain))
    assert found.value == pytest.approx(2, rel=0.03)
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low < 0.1


def test_bootstrap_repeats_with_its_seed() -> None:
    top, bottom = np.arange(9.0), np.full(9, 10.0)
    assert Bootstrap(9, 100, seed=3).ratio(top, bottom) == Bootstrap(9, 100, seed=3).ratio(top, bottom)


def test_known_chain_lies_within_its_interval() -> None:
    generator = np.random.default_rng(2)
    rows = [markov_rounds(0.6, 3, 25, generator) for _ in range(60)]
    found = figures(rows)
    for estimate, truth in ((found.alpha, 0.6), (found.tau, 1 + 0.6 + 0.36 + 0.216)):
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low <= truth <= estimate.high
    assert Counts.of(RoundTable.of(rows)).emitted.sum() == sum(r.emitted for row in rows for r in row)


def test_e29_where_tokens_survive_alike_tau_is_that_of_one_alpha_and_else_it_says_how_far() -> None:
    generator = np.random.default_rng(1)
    found = figures([markov_rounds(0.6, 4, 200, generator) for _ in range(20)])
    assert found.iid_tau.value == pytest.approx(tau([found.alpha.value or 0] * 4))
    assert found.iid_departure.bounds is not None
    low, _, high = found.iid_departure.bounds
    assert low < 0 < high
    falling = [np.cumprod(generator.random((200, 4)) < (0.9, 0.5, 0.2, 0.1), axis=1).sum(1) for _ in range(20)]
    found = figures([[chain_round(int(n)) for n in row] for row in falling])
    assert found.tau.value is not None
    assert found.iid_tau.value is not None
    assert found.iid_departure.value == pytest.approx(found.tau.value / found.iid_tau.value - 1)
    assert abs(found.iid_departure.value) > 0.03, "one alpha for all depths misleads"


def test_e05_counted_alpha_that_parts_from_the_laws_is_warned_of() -> None:
    """A drafter that hands on another law than it drew from: what should have been accepted is not."""
    generator = np.random.default_rng(2)
    honest = [markov_rounds(0.7, 3, 60, generator) for _ in range(10)]
    assert figures(honest).disagreements() == []
    liar = [[r._replace(chances=(0.9,) * r.offered) for r in row] for row in honest]
    said = figures(liar).disagreements()
    assert said
    assert "counted as 69" in said[0]
    assert "90.0 %" in said[0]
    few = [[chain_round(1, 1, chance=0.7)] for _ in range(4)]  # four of four: the interval has no width, chance has
    assert figures(few).disagreements() == []


def test_calibration_of_a_drafter_that_is_too_sure_of_itself() -> None:
    sums = torch.zeros(3, BINS, 4, dtype=torch.float64)
    sums[:, 9] = torch.tensor([10, 9.5, 8, 8])
    sums[:2, 4] = torch.tensor([5, 2.25, 3, 2.25])
    found = calibration([*sums, None], Bootstrap(4, 200, seed=0))
    assert found is not None
    assert found.nodes == 40
    assert [(bin_.low, bin_.nodes) for bin_ in found.bins] == [(0.4, 10), (0.9, 30)]
    assert [bin_.confidence for bin_ in found.bins] == pytest.approx([0.45, 0.95])
    assert [bin_.accepted.value for bin_ in found.bins] == pytest.approx([0.6, 0.8])
    assert [bin_.target.value for bin_ in found.bins] == pytest.approx([0.45, 0.8])
    assert found.error.value == pytest.approx(30 / 40 * 0.15)
    assert found.error.low is not None
    assert calibration([None, None], Bootstrap(2, 100, seed=0)) is None

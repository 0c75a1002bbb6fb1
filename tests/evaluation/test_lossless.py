"""The verdict: Kolmogorov-Smirnov against known numbers, token identity, and what it takes to be excused or caught."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from evaluation.markov import law, markov_target
from models import tiny_model
from torch import Tensor

from specdraft import decoding
from specdraft.decoding import Generation, generate
from specdraft.dice import Dice
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.shapes import Chain
from specdraft.evaluation.lossless import (
    FAILED_BELOW,
    check_sampled,
    compare_greedy,
    in_float32,
    kolmogorov_smirnov,
    kolmogorov_survival,
    next_logits,
)
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict, verify
from specdraft.warping import Warp
from specdraft.witness import Transforms


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
    return [Generation(tokens=[1] * len(pit), transforms=Transforms(tokens=pit))]


def test_uniform_places_hold_and_skewed_ones_are_caught() -> None:
    generator = np.random.default_rng(1)
    assert check_sampled(sampled(generator.random(3000).tolist())).verdict == "law holds"
    skewed = check_sampled(sampled((generator.random(3000) ** 1.2).tolist()))
    assert skewed.verdict == "failed"
    assert not skewed.lossless


def test_e34_a_run_that_records_no_law_is_not_certified() -> None:
    """Typical acceptance has no p to place its tokens in."""
    found = check_sampled([Generation(tokens=[1, 2, 3])])
    assert found.verdict == "not certified"
    assert "not known to be distribution-exact" in found.reason
    assert not found.lossless


def test_a_run_whose_drafts_follow_another_law_than_was_handed_on_is_caught_by_them_alone() -> None:
    generator = np.random.default_rng(2)
    found = sampled(generator.random(500).tolist())
    found[0].transforms.drafts = [None, *generator.random(499).tolist()]
    found[0].transforms.trials = generator.random(900).tolist()
    assert check_sampled(found).verdict == "law holds"
    found[0].transforms.trials = (0.2 + 0.8 * generator.random(900)).tolist()
    failed = check_sampled(found)
    assert failed.verdict == "failed"
    assert "the worst: 900 drawn drafts' places" in failed.reason


def test_the_false_alarm_rate_is_at_most_what_is_stated() -> None:
    """Lossless runs of independent transforms, short and long: at most 0.1 % fail (with four standard deviations to
    spare), and the joint p-value is never too small at larger levels either."""
    generator = np.random.default_rng(3)
    for tokens, runs in ((40, 3000), (400, 600)):
        values = generator.random((runs, 3, tokens))
        found = []
        for one in values:
            places, drafts, trials = one.tolist()
            found.append(check_sampled([Generation([1] * tokens, transforms=Transforms(places, [*drafts], trials))]))
        p = np.array([one.p_value for one in found])
        for level in (FAILED_BELOW, 0.01, 0.05, 0.2):
            assert (p < level).mean() < level + 4 * (level * (1 - level) / runs) ** 0.5


def greedy_pair(place: int = 2) -> tuple[list[Generation], list[Generation]]:
    plain = [Generation(tokens=[3, 4, 5, 6]), Generation(tokens=[1, 2, 3])]
    other = [Generation(tokens=[3, 4, 5, 6]), Generation(tokens=[1, 2, 3])]
    other[0].tokens[place] = 7
    return plain, other


def test_e01_identical_answers_are_lossless() -> None:
    target, plain = markov_target(law(0)), greedy_pair()[0]
    found = compare_greedy(target, [[1], [2]], plain, plain)
    assert (found.verdict, found.compared, found.divergences) == ("identical", 2, [])


def test_e01_float32_excuses_no_divergence() -> None:
    found = compare_greedy(markov_target(law(0)), [[1], [2]], *greedy_pair(), tie_factor=1e9)
    assert found.verdict == "failed"
    (divergence,) = found.divergences
    assert (divergence.prompt, divergence.position) == (0, 2)
    assert (divergence.plain_token, divergence.speculative_token) == (5, 7)


def test_e01_what_is_allowed_is_what_the_dtype_does_to_the_logits() -> None:
    target = markov_target(law(0), torch.bfloat16)
    (divergence,) = compare_greedy(target, [[1], [2]], *greedy_pair()).divergences
    own = next_logits(target, [1, 3, 4])
    with in_float32(target.model):
        exact = next_logits(target, [1, 3, 4])
    assert divergence.rounding == pytest.approx(float((own - exact).abs().max()))
    assert divergence.rounding is not None
    assert divergence.rounding > 0
    assert divergence.gap == pytest.approx(float(exact.max() - min(exact[5], exact[7])))
    needed = divergence.gap / divergence.rounding
    for factor, verdict in ((needed * 1.01, "ties"), (needed * 0.99, "failed"), (2.0, "failed")):
        assert compare_greedy(target, [[1], [2]], *greedy_pair(), tie_factor=factor).verdict == verdict
    assert target.dtype == torch.bfloat16


class Nearly(NamedTuple):
    """A bfloat16 model that parted from itself: its answers, and what it answers to several tokens at once."""

    target: FrozenTarget
    prompts: list[list[int]]
    plain: list[Generation]
    drafted: list[Generation]


@pytest.fixture(scope="module")
def nearly() -> Nearly:
    """Small weights: the best logits all but tie, as those of a real model do now and then."""
    model = tiny_model(seed=4, eos_token_id=None)
    model.generation_config.eos_token_id = None
    target = FrozenTarget(model.to(torch.bfloat16))
    drafter = LMDrafter.of(target, target)
    drafter.shape = Chain(5)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 96, (24, 6), generator=draw).tolist()
    runs = [
        generate(target, each, prompts, warp=Warp(), max_new_tokens=20, batch_size=24).generations
        for each in (None, drafter)
    ]
    return Nearly(target, prompts, *runs)


def test_e01_a_real_divergence_in_bfloat16_is_excused(nearly: Nearly) -> None:
    found = compare_greedy(nearly.target, nearly.prompts, nearly.plain, nearly.drafted)
    assert found.divergences, "bfloat16 rounds otherwise in a pass over several tokens"
    assert found.verdict == "ties", found.reason
    assert found.lossless


def test_e01_a_wrong_rules_divergence_in_bfloat16_is_not_excused(
    nearly: Nearly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that believes the first drafted token unseen."""

    def credulous(tree: DraftTree, ids: Tensor, dice: Dice) -> Verdict:
        return verify(tree, torch.cat([tree.tokens[:, :1], ids[:, 1:]], 1), dice)

    drafter = LMDrafter.of(FrozenTarget(tiny_model(seed=1, eos_token_id=None).to(torch.bfloat16)), nearly.target)
    drafter.shape = Chain(3)
    monkeypatch.setattr(decoding, "verify", credulous)
    prompts, plain = nearly.prompts[:8], nearly.plain[:8]
    wrong = generate(nearly.target, drafter, prompts, warp=Warp(), max_new_tokens=4, batch_size=8).generations
    found = compare_greedy(nearly.target, prompts, plain, wrong)
    assert found.verdict == "failed"
    assert "by more than 2 times what bfloat16 itself does" in found.reason


def test_e01_an_answer_that_ended_while_the_other_went_on_is_never_excused() -> None:
    plain, other = [Generation(tokens=[3, 4])], [Generation(tokens=[3, 4, 5])]
    target = markov_target(law(0), torch.bfloat16)
    assert compare_greedy(target, [[1]], plain, other, tie_factor=1e9).verdict == "failed"


def test_answers_that_end_differently_diverge_at_the_end() -> None:
    plain, other = [Generation(tokens=[3, 4])], [Generation(tokens=[3, 4, 5])]
    (divergence,) = compare_greedy(markov_target(law(0)), [[1]], plain, other).divergences
    assert (divergence.position, divergence.plain_token, divergence.speculative_token) == (2, None, 5)


def test_float32_for_a_while_and_back_exactly() -> None:
    target = markov_target(law(0), torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    with in_float32(target.model):
        assert {parameter.dtype for parameter in target.model.parameters()} == {torch.float32}
        assert next_logits(target, [1, 2]).shape == (8,)
    after = target.model.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )

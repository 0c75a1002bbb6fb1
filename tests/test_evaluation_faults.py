"""Faults that evaluators of speculative decoding have had, by their id, as `evaluate` would show them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from evaluation.broken import ShapedDrafter, SiblingsDrafter
from evaluation.markov import VOCABULARY, MarkovDrafter, law, markov_target
from models import tiny_model
from torch import Tensor

from specdraft.decoding import Decoding, Generation, _Batch, _Row, generate
from specdraft.dice import SeededDice
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.evaluation import EvalRecipe, Prompt, Report, evaluate
from specdraft.evaluation.lossless import compare_greedy
from specdraft.evaluation.page import markdown
from specdraft.evaluation.report import Estimate
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

PROMPTS = [Prompt([i % 3], f"prompt {i}") for i in range(24)]


def same_everywhere(*probabilities: float) -> Tensor:
    """A chain that forgets; the other tokens of the vocabulary have no probability to speak of."""
    row = torch.tensor([*probabilities, *[1e-30] * (VOCABULARY - len(probabilities))], dtype=torch.float64)
    return row.expand(VOCABULARY, -1).contiguous()


def report(p: Tensor, drafter: MarkovDrafter, **changes: Any) -> Report:
    given = {
        "systems": [{"kind": "chain", "gamma": 1}],
        "temperature": 1.0,
        "max_new_tokens": 20,
        "batch_size": 24,
        "bootstrap_samples": 200,
        "compare_with_plain": False,
        **changes,
    }
    return evaluate(markov_target(p), drafter, EvalRecipe.model_validate(given), prompts=PROMPTS)


def alpha(found: Report) -> Estimate:
    """The chance at depth 1: the mean of exact probabilities."""
    return found.systems[0].acceptance.depths[0].analytic_alpha


def marginal(p: Tensor, drafter: MarkovDrafter, shape: Shape, warp: Warp) -> list[float]:
    drafter.shape = shape
    run = generate(markov_target(p), drafter, [[0]] * 100, warp=warp, max_new_tokens=12, batch_size=100, seed=2)
    tokens = torch.tensor([token for generation in run.generations for token in generation.tokens])
    return (tokens.bincount(minlength=4) / len(tokens)).tolist()


P4, Q4 = same_everywhere(0.5, 0.3, 0.2), same_everywhere(0.2, 0.5, 0.3)
P5, Q5 = same_everywhere(0.5, 0.3, 0.1, 0.1), same_everywhere(0.4, 0.4, 0.1, 0.1)
NOISE = 0.06  # four standard deviations of a share of 1,200 tokens


def test_e04_alpha_and_what_is_emitted() -> None:
    assert alpha(report(P4, MarkovDrafter(Q4))).value == pytest.approx(0.7, abs=1e-4)
    assert marginal(P4, MarkovDrafter(Q4), Chain(2), Warp(1.0))[:3] == pytest.approx([0.5, 0.3, 0.2], abs=NOISE)


def test_e05_what_is_emitted_is_the_warped_law() -> None:
    found = marginal(P5, MarkovDrafter(Q5), Chain(2), Warp(1.0, top_k=2))
    assert found[:2] == pytest.approx([0.625, 0.375], abs=NOISE)
    assert found[2] == found[3] == 0


def test_e06_alpha_is_that_of_both_sides_warped_and_the_settings_are_printed() -> None:
    found = report(P5, MarkovDrafter(Q5), top_k=2)
    assert alpha(found).value == pytest.approx(0.875, abs=1e-4)
    assert (found.setting.temperature, found.setting.top_k, found.setting.top_p) == (1.0, 2, None)
    assert "top-k 2" in markdown(found)
    assert alpha(report(P5, MarkovDrafter(Q5))).value == pytest.approx(0.9, abs=1e-4)


def test_e06_at_half_temperature_the_laws_are_squared() -> None:
    p, q = P5[0] ** 2 / (P5[0] ** 2).sum(), Q5[0] ** 2 / (Q5[0] ** 2).sum()
    found = alpha(report(P5, MarkovDrafter(Q5), temperature=0.5))
    assert found.value == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-4)


def test_e08_an_argmax_that_is_proposed_has_a_one_hot_q() -> None:
    found = report(P4, ShapedDrafter(Q4), systems=[{"kind": "tree", "depth": 1, "width": 1, "nodes": 1}])
    assert alpha(found).value == pytest.approx(0.3, abs=1e-4)
    emitted = marginal(P4, ShapedDrafter(Q4), DynamicTree(1, 1, 1), Warp(1.0))
    assert emitted[:3] == pytest.approx([0.5, 0.3, 0.2], abs=NOISE)


def test_e10_two_siblings_at_the_root() -> None:
    two = {"systems": [{"kind": "chain", "gamma": 2}]}
    apart, together = (alpha(report(P4, SiblingsDrafter(Q4, group), **two)) for group in (-1, 0))
    for found, truth in ((apart, 0.76), (together, 0.8086)):
        assert found.low is not None
        assert found.high is not None
        assert found.low - 0.01 < truth < found.high + 0.01
        assert found.value == pytest.approx(truth, abs=0.03)
    chosen = report(P4, ShapedDrafter(Q4), systems=[{"kind": "tree", "depth": 1, "width": 2, "nodes": 2}])
    assert alpha(chosen).value == pytest.approx(0.5, abs=1e-4)


def test_e11_a_drafter_that_is_the_target_is_always_accepted() -> None:
    p = law(0)
    drafter = MarkovDrafter(p)
    [system] = report(p, drafter, systems=[{"kind": "chain", "gamma": 3}]).systems
    assert system.acceptance.alpha.value == pytest.approx(1, abs=2e-3), "float32 rounding alone may reject"
    assert system.losslessness.verdict == "law holds"
    drafter.shape = Chain(3)
    run = generate(markov_target(p), drafter, [[1]], warp=Warp(1.0), max_new_tokens=40)
    assert max(run.generations[0].tokens) < VOCABULARY


def tiny(seed: int = 0, **changes: Any) -> FrozenTarget:
    model = tiny_model(seed=seed, **changes)
    model.generation_config.eos_token_id = changes.get("eos_token_id", 2)
    return FrozenTarget(model)


def rows(lengths: Sequence[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 96, (length,), generator=draw).tolist() for length in lengths]


def test_e01_two_hundred_answers_are_identical_in_float32() -> None:
    target = tiny()
    drafter = LMDrafter.of(tiny(seed=1), target)
    drafter.shape = Chain(3)
    prompts = rows([3 + i % 5 for i in range(200)])
    plain, fast = (
        generate(target, each, prompts, warp=Warp(), max_new_tokens=4, batch_size=50).generations
        for each in (None, drafter)
    )
    assert compare_greedy(target, prompts, plain, fast).verdict == "identical"


def test_e12_the_targets_end_ends_an_answer_and_the_drafters_does_not() -> None:
    target = tiny(eos_token_id=None)
    prompts = rows([4, 6, 9])
    free = [g.tokens for g in generate(target, None, prompts, warp=Warp(), max_new_tokens=12).generations]
    theirs, ours = free[0][2], next(token for token in free[0][4:] if token not in free[0][:4])
    target.model.generation_config.eos_token_id = ours
    reader = tiny(eos_token_id=theirs)  # the target's own weights: whatever it drafts is accepted
    drafter = LMDrafter.of(reader, target)
    drafter.shape = Chain(5)
    found = generate(target, drafter, prompts, warp=Warp(), max_new_tokens=12, batch_size=3).generations
    cut = [answer[: answer.index(ours) + 1] if ours in answer else answer for answer in free]
    assert [generation.tokens for generation in found] == cut
    assert theirs in found[0].tokens[:-1]
    assert found[0].ended == "end token"


def test_e13_e28_e29_tau_is_one_and_the_reaches_and_every_token_is_counted_once() -> None:
    found = report(law(0), MarkovDrafter(law(1)), systems=[{"kind": "chain", "gamma": 4}]).systems[0]
    figures = found.acceptance
    assert figures.tau.value == pytest.approx(1 + sum(depth.reach.value or 0 for depth in figures.depths))
    emitted = sum(count * rounds for count, rounds in enumerate(figures.emitted_histogram))
    assert emitted + len(PROMPTS) == found.time.new_tokens == 24 * 20
    assert figures.acceptance_ratio.value == pytest.approx(figures.accepted / figures.proposed)
    assert figures.acceptance_ratio.value != figures.alpha.value


def test_e19_after_every_round_the_cache_holds_all_but_the_newest_token() -> None:
    """k = 4 of which 0 to 4 are accepted, rows of different lengths."""
    target = tiny(eos_token_id=None)
    drafter = LMDrafter.of(tiny(seed=1, eos_token_id=None), target)
    drafter.shape = Chain(4)
    prompts = rows([3, 7, 5])
    found = Decoding([Generation() for _ in prompts])
    asked = [_Row(one, prompt, 40, frozenset()) for one, prompt in zip(found.generations, prompts, strict=True)]
    batch = _Batch(target, drafter, Warp(6.0), found, asked, SeededDice(range(5, 8)))
    batch.prefill()
    for _ in range(6):
        batch.round()
        due = [len(prompt) + len(one.tokens) - 1 for prompt, one in zip(prompts, found.generations, strict=True)]
        assert batch.session.cache.lengths.tolist() == due
        assert batch.memory.session.cache.lengths.tolist() == [length + 1 for length in due], "it has read the root"


def test_e27_a_system_is_measured_alike_whatever_ran_before() -> None:
    two, four = {"kind": "chain", "gamma": 2}, {"kind": "chain", "gamma": 4}
    once, again = (
        {s.name: s.acceptance for s in report(law(0), MarkovDrafter(law(1)), systems=systems, max_new_tokens=8).systems}
        for systems in ([two, four], [four, two])
    )
    assert once == again


@pytest.mark.parametrize("size", [1, 7])
def test_e25_e36_figures_do_not_depend_on_the_batch(size: int) -> None:
    small, whole = (
        report(law(0), MarkovDrafter(law(1)), batch_size=each, max_new_tokens=4).systems[0].acceptance
        for each in (size, 24)
    )
    assert small == whole

"""The whole evaluation on a target and a drafter that are known exactly."""

import json
from pathlib import Path

import pytest
import torch
from evaluation.markov import MarkovDrafter, known_answer, law, markov_target

from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.dice import Dice
from specdraft.drafters.shapes import Chain
from specdraft.evaluation import ChainSystem, EvalRecipe, Prompt, Report, evaluate
from specdraft.evaluation.report import Estimate
from specdraft.tree import DraftTree
from specdraft.warping import Warp

P, Q = law(0), (0.75 * law(0) + 0.25 * law(1))
PROMPTS = [Prompt([i % 8, (3 * i) % 8], f"prompt {i}", ("odd", "even")[i % 2]) for i in range(48)]


def recipe(**changes: object) -> EvalRecipe:
    given = {
        "systems": [{"kind": "chain", "gamma": 3}],
        "temperature": 1.0,
        "max_new_tokens": 60,
        "batch_size": 16,
        "bootstrap_samples": 500,
        "seed": 6,
        **changes,
    }
    return EvalRecipe.model_validate(given)


@pytest.fixture(scope="module")
def sampled() -> Report:
    return evaluate(markov_target(P), MarkovDrafter(Q), recipe(), prompts=PROMPTS)


def holds(estimate: Estimate, truth: float) -> bool:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= truth <= estimate.high


def test_known_answer_lies_within_the_reported_intervals(sampled: Report) -> None:
    truth = known_answer(P, Q, gamma=3)
    found = sampled.systems[0].acceptance
    assert holds(found.tau, truth.tau)
    assert holds(found.alpha, truth.alpha)
    assert holds(found.analytic_alpha, truth.alpha)
    assert all(holds(d.reach, reach) for d, reach in zip(found.depths, truth.reaches, strict=True))
    assert found.analytic_alpha.low is not None
    assert found.analytic_alpha.high is not None
    assert found.analytic_alpha.high - found.analytic_alpha.low < 0.05, "an interval that says something"


def test_exact_sampling_passes_and_the_report_is_whole(sampled: Report, tmp_path: Path) -> None:
    system = sampled.systems[0]
    assert system.losslessness.verdict == "law holds"
    assert system.losslessness.compared == system.time.new_tokens == 48 * 60
    assert system.speedup is not None
    assert system.speedup.low is not None
    assert system.costs is not None
    assert system.costs.by_gamma[2].tau == pytest.approx(system.acceptance.tau.value)
    assert [point.measured for point in system.costs.by_gamma][:4] == [True, True, True, False]
    spent = [system.time.share(part) for part in ("prefill", "target", "drafter", "other")]
    assert sum(spent) == pytest.approx(1)
    assert sampled.setting.categories == {"odd": 24, "even": 24}
    assert {s.name for s in system.acceptance.slices if s.kind == "category"} == {"odd", "even"}
    sampled.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == sampled


def test_a_drafter_that_draws_from_another_law_than_it_hands_on_is_caught() -> None:
    liar = MarkovDrafter(Q, drawn=law(1, sharpness=4))
    found = evaluate(markov_target(P), liar, recipe(compare_with_plain=False), prompts=PROMPTS)
    assert found.systems[0].losslessness.verdict == "failed"
    assert "not lossless" in found.headline


def test_greedy_answers_are_identical_and_two_systems_share_a_report() -> None:
    systems = [{"kind": "chain", "gamma": 2}, {"kind": "chain", "gamma": 4}]
    seen: list[tuple[int, int]] = []
    found = evaluate(
        markov_target(P),
        MarkovDrafter(Q),
        recipe(systems=systems, temperature=0.0, max_new_tokens=12),
        prompts=PROMPTS,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [system.name for system in found.systems] == ["chain of 2", "chain of 4"]
    assert [system.losslessness.verdict for system in found.systems] == ["identical", "identical"]
    assert found.plain is not None
    assert found.plain.new_tokens == found.systems[0].time.new_tokens == 48 * 12
    assert seen[-1] == (3 * 48, 3 * 48)
    for system in found.systems:  # a greedy draft survives or not: chance and outcome are one
        assert system.acceptance.alpha.value == pytest.approx(system.acceptance.analytic_alpha.value)


def test_e13_every_token_belongs_to_a_round_but_the_first() -> None:
    drafter = MarkovDrafter(Q)
    drafter.shape = Chain(3)
    decoding = generate(
        markov_target(P), drafter, [[1, 2], [3]], warp=Warp(1.0), max_new_tokens=23, batch_size=2, seed=5
    )
    for generation in decoding.generations:
        assert sum(r.emitted for r in generation.rounds) + 1 == len(generation.tokens) == 23
        assert all(r.emitted == r.accepted + 1 for r in generation.rounds[:-1])
        assert generation.rounds[-1].emitted <= generation.rounds[-1].accepted + 1
        assert all(len(r.chances) == r.offered and r.accepted <= r.offered <= r.accepted + 1 for r in generation.rounds)


def test_e36_the_same_seed_gives_the_same_figures() -> None:
    made = [
        evaluate(
            markov_target(P), MarkovDrafter(Q), recipe(max_new_tokens=8, compare_with_plain=False), prompts=PROMPTS
        )
        for _ in range(2)
    ]
    assert made[0].systems[0].acceptance == made[1].systems[0].acceptance


def test_x07_prompts_beyond_the_trained_length_are_warned_of() -> None:
    long = [*PROMPTS[:20], Prompt([1] * 48, "long")]
    found = evaluate(
        markov_target(P),
        MarkovDrafter(Q),
        recipe(max_new_tokens=4, compare_with_plain=False),
        prompts=long,
        trained_length=32,
    )
    assert any("1 prompts are longer than the 32 tokens" in warning for warning in found.warnings)
    parts = {part.name for part in found.systems[0].acceptance.slices if part.kind == "prompt length"}
    assert parts == {"0 to 32", "33 to 63"}


def test_x08_overlap_with_the_training_prompts_is_counted(tmp_path: Path) -> None:
    training = tmp_path / "train.jsonl"
    rows = [{"prompt": " Prompt  1"}, {"messages": [{"role": "user", "content": "prompt 2"}]}, {"prompt": "other"}]
    training.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"training_prompts": [str(training)], "max_new_tokens": 2, "compare_with_plain": False}
    found = evaluate(markov_target(P), MarkovDrafter(Q), recipe(**changes), prompts=PROMPTS)
    assert found.setting.training_overlap == 2
    assert any("2 of 48 prompts also stand among the training prompts" in warning for warning in found.warnings)


class SilentDrafter(MarkovDrafter):
    def propose(self, memory: torch.Tensor, *, warp: Warp, dice: Dice) -> DraftTree:
        return DraftTree.empty(len(memory))


def test_x13_a_run_without_drafts_is_no_report() -> None:
    with pytest.raises(SpecdraftError, match="proposed nothing"):
        evaluate(markov_target(P), SilentDrafter(Q), recipe(max_new_tokens=4), prompts=PROMPTS[:16])


def test_systems_of_one_name_are_refused() -> None:
    twice = recipe().model_copy(update={"systems": (ChainSystem(gamma=2), ChainSystem(gamma=2))})
    with pytest.raises(SpecdraftError, match="each once"):
        evaluate(markov_target(P), MarkovDrafter(Q), twice, prompts=PROMPTS)

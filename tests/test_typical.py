"""Typical acceptance: what it accepts, that its law is not the target's, and that it is never called lossless."""

from typing import Any

import pytest
import torch
from enumeration import Trial, constant, context, drawn, outcomes, results
from enumeration import law as law_of
from evaluation.markov import MarkovDrafter, law, markov_target
from pydantic import ValidationError

from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.dice import SeededDice
from specdraft.drafters.shapes import Chain
from specdraft.evaluation import EvalRecipe, Prompt, evaluate, page
from specdraft.tree import DraftTree
from specdraft.verify import Thresholds, typical
from specdraft.warping import Warp

RULE = Thresholds(0.09, 0.3)


def tree(tokens: list[int], parents: list[int]) -> DraftTree:
    both = torch.tensor([tokens, tokens]), torch.tensor([parents, parents])
    return DraftTree.chosen(*both, torch.tensor([[True] * len(tokens), [True] * (len(tokens) - 1) + [False]]))


def test_the_longest_path_of_likely_tokens_is_accepted_and_of_equals_the_likeliest() -> None:
    """Nodes 0: 1, 1: 2, 2: 1-3, 3: 2-3, 4: 2-0, 5: 2-0-1; the second row lacks node 5."""
    p = torch.zeros(2, 7, 4)
    p[:, 0] = torch.tensor([0.04, 0.3, 0.56, 0.1])
    p[:, 1] = torch.tensor([0.4, 0.1, 0.1, 0.4])  # below 1
    p[:, 2] = torch.tensor([0.05, 0.45, 0.05, 0.45])  # below 2: token 0 has 0.05, under both thresholds
    p[:, 3:] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    drafted = tree([1, 2, 3, 3, 0, 1], [-1, -1, 0, 1, 1, 4])
    found = typical(drafted, p, RULE, SeededDice([0, 1]))
    assert found.path.tolist() == [[1, 3, -1]] * 2, "0.56 * 0.45 is more than 0.3 * 0.4"
    assert found.accepted.tolist() == [2, 2]
    assert found.token.tolist() == [3, 3]
    assert found.offered.tolist() == [[True, True, False]] * 2
    assert found.chance.tolist() == [[1, 1, 0]] * 2
    p[:, 2], p[:, 5] = torch.tensor([0.2, 0.3, 0.2, 0.3]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    found = typical(drafted, p, RULE, SeededDice([0, 1]))
    assert found.path.tolist() == [[1, 4, 5], [1, 3, -1]], "0.2 is enough; padding is no node"


def test_the_threshold_falls_where_the_target_is_unsure() -> None:
    """16 equal tokens: exp(-H) = 1/16, so 0.3 / 16 is asked for; with a sure target it is epsilon."""
    flat, sure = torch.full((16,), 1 / 16), torch.tensor([0.92, 0.08] + [0.0] * 14)
    for one, want in ((flat, 1), (sure, 0)):
        found = typical(DraftTree.chain(torch.tensor([[1]])), one.expand(1, 2, -1), RULE, SeededDice([0]))
        assert found.accepted.tolist() == [want]
        assert found.offered.tolist() == [[True]]


def test_without_a_draft_the_next_token_is_drawn_from_p_and_greedy_ids_are_refused() -> None:
    p = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    found = typical(DraftTree.empty(2), p, RULE, SeededDice([0, 1]))
    assert found.token.tolist() == [1, 0]
    assert not found.offered.any()
    with pytest.raises(ValueError, match="p must be laws"):
        typical(DraftTree.empty(2), torch.tensor([[0], [0]]), RULE, SeededDice([0, 1]))


def test_e34_its_law_is_not_the_targets() -> None:
    """Enumerated: a drafter that draws token 1 alone is believed wherever p(1) is over the threshold."""
    p, q = constant(0.6, 0.3, 0.1), constant(0.0, 1.0, 0.0)

    def run(dice: Any, batch: int) -> list[int]:
        drafted = drawn([Trial()], q)(dice, batch)
        verdict = typical(drafted, p[context(drafted.tokens)], RULE, dice)
        return [result.emitted[0] for result in results(drafted, verdict)]

    assert law_of(outcomes(run)) == pytest.approx({1: 1.0})


def test_e34_it_is_off_by_default_refused_where_it_says_nothing_and_changes_what_is_written() -> None:
    assert EvalRecipe().lossy is None
    with pytest.raises(ValidationError, match="no effect at temperature 0"):
        EvalRecipe.model_validate({"acceptance": {"kind": "typical"}})
    target, drafter = markov_target(law(0)), MarkovDrafter(law(1))
    drafter.shape = Chain(3)
    settings: dict[str, Any] = {"max_new_tokens": 20, "batch_size": 2}
    with pytest.raises(SpecdraftError, match="temperature above 0"):
        generate(target, drafter, [[1], [2]], warp=Warp(), lossy=RULE, **settings)
    exact, lossy = (generate(target, drafter, [[1], [2]], warp=Warp(1.0), lossy=r, **settings) for r in (None, RULE))
    assert exact.generations != lossy.generations
    for generation in lossy.generations:
        assert sum(r.emitted for r in generation.rounds) + 1 == len(generation.tokens) == 20


def test_e34_a_report_never_calls_it_lossless() -> None:
    recipe = {
        "systems": [{"kind": "chain", "gamma": 3}],
        "acceptance": {"kind": "typical", "epsilon": 0.05},
        "temperature": 1.0,
        "max_new_tokens": 40,
        "batch_size": 16,
        "bootstrap_samples": 100,
    }
    prompts = [Prompt([i % 8], f"prompt {i}") for i in range(32)]
    found = evaluate(markov_target(law(0)), MarkovDrafter(law(1)), EvalRecipe.model_validate(recipe), prompts=prompts)
    [system] = found.systems
    assert system.losslessness.verdict == "lossy by choice"
    assert not system.losslessness.lossless
    assert "not distribution-exact" in system.losslessness.reason
    assert system.losslessness.p_value is not None
    assert system.losslessness.p_value < 0.001, "the law is another one, and the report says how far"
    assert found.headline.endswith("It is not lossless, by choice: typical acceptance changes what is answered.")
    assert found.setting.acceptance == "typical (epsilon 0.05, delta 0.3), lossy by choice"
    text = page.markdown(found)
    assert "| lossy by choice |" in text
    assert "typical (epsilon 0.05" in text
    assert {name: value for name, value, *_ in page._tiles(found)}["lossless"] == "no"

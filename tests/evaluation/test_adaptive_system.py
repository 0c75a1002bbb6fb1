"""Drafts that adapt, evaluated beside those that do not."""

import pytest
from evaluation.broken import ShapedDrafter
from evaluation.markov import law, markov_target
from pydantic import ValidationError

from specdraft.config import SpecdraftError
from specdraft.drafters.shapes import Chain, Choice, DynamicTree
from specdraft.evaluation import EvalRecipe, Prompt, evaluate
from specdraft.evaluation.systems import AdaptiveSystem, ChainSystem, TreeSystem

P, Q = law(0), (0.75 * law(0) + 0.25 * law(1))
PROMPTS = [Prompt([i % 8, (3 * i) % 8], f"prompt {i}", None) for i in range(8)]
SYSTEMS = [
    {"kind": "chain", "gamma": 3},
    {"kind": "chain", "gamma": 3, "stop_below": 0.3},
    {"kind": "tree", "depth": 2, "width": 2, "nodes": 5, "stop_below": 0.2},
    {"kind": "adaptive", "longest": 3, "trees": [{"depth": 2, "width": 2, "nodes": 5}]},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_systems_that_adapt_share_a_report_with_those_that_do_not(temperature: float) -> None:
    given = {"systems": SYSTEMS, "temperature": temperature, "max_new_tokens": 30, "batch_size": 4}
    recipe = EvalRecipe.model_validate({**given, "bootstrap_samples": 100})
    report = evaluate(markov_target(P), ShapedDrafter(Q), recipe, prompts=PROMPTS)
    whole, stops, tree, adapts = report.systems
    assert [system.name for system in report.systems] == [
        "chain of 3",
        "chain of 3, stop below 0.3",
        "tree of 5, stop below 0.2",
        "adaptive, up to 3 or tree of 5 (2 deep, 2 wide)",
    ]
    assert {system.losslessness.verdict for system in report.systems} == {"law holds" if temperature else "identical"}
    per_round = [system.acceptance.proposed / system.acceptance.rounds for system in (whole, stops, tree)]
    assert per_round[0] == 3
    assert 0 < per_round[1] < 3
    assert 0 < per_round[2] < 5
    found = adapts.shape["costs"]
    assert isinstance(found, list)
    assert len(found) == 5, "a report names what was measured"
    assert all(system.costs is not None and system.costs.predicted_speedup > 0 for system in report.systems)
    assert whole.costs is not None
    assert stops.costs is not None
    assert whole.costs.by_gamma
    assert not stops.costs.by_gamma, "a chain that stops is no point on the curve of fixed lengths"


def test_what_a_system_drafts_follows_from_its_settings() -> None:
    assert ChainSystem(gamma=3, stop_below=0.3).shape() == Chain(3, 0.3)
    assert TreeSystem(depth=2, width=2, nodes=5, stop_below=0.1).shape() == DynamicTree(2, 2, 5, 0.1)
    known = AdaptiveSystem(kind="adaptive", longest=1, costs=(1.0, 1.2), prior=0.7)
    assert known.shape() == Choice((Chain(0), Chain(1)), (1.0, 1.2), prior=0.7)
    with pytest.raises(SpecdraftError, match="not been measured"):
        AdaptiveSystem(kind="adaptive").shape()


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"longest": 0}, "nothing to draft"),
        ({"longest": 1, "costs": [1.0]}, "2 numbers above 0"),
        ({"longest": 1, "costs": [1.0, 0.0]}, "2 numbers above 0"),
        ({"trees": [{}, {}]}, "name each once"),
    ],
)
def test_settings_without_an_effect_are_errors(settings: dict[str, object], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        AdaptiveSystem.model_validate({"kind": "adaptive", **settings})

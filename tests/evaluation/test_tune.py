"""The `tune` verb: replayed where that is exact, confirmed by decoding, paired where drafters are compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tiny_chat import write_target

from specdraft.config import SpecdraftError
from specdraft.data.respond import RespondRecipe, respond
from specdraft.drafters import DRAFTERS
from specdraft.evaluation.curve import stops_paying
from specdraft.evaluation.report import Estimate
from specdraft.evaluation.statistics import Bootstrap
from specdraft.evaluation.tune import TuneRecipe, tune
from specdraft.evaluation.tune_report import Tuning, verdict
from specdraft.target import FrozenTarget, TargetRecipe

QUESTIONS = ["one two one two", "three", "what is the capital of France?", "two and two"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, two drafters for it, and prompts."""
    folder = tmp_path_factory.mktemp("tune")
    write_target(folder / "target")
    target = FrozenTarget.load(TargetRecipe(name=str(folder / "target"), dtype="float32"))
    for kind in ("eagle3", "medusa"):
        recipe: Any = DRAFTERS[kind].recipe_class(kind=kind, **({"heads": 2} if kind == "medusa" else {}))
        drafter = DRAFTERS[kind].for_target(target, recipe, torch.ones(target.vocab_size, dtype=torch.int64))
        drafter.save_pretrained(folder / kind)
    rows = [{"prompt": text, "category": "chat"} for text in QUESTIONS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are timed once: what they are is not what is tested."""
    monkeypatch.setattr("specdraft.evaluation.costs._REPEATS", 1)


def recipe(folder: Path, output: Path, **changes: Any) -> TuneRecipe:
    settings = {
        "target": {"name": str(folder / "target"), "dtype": "float32"},
        "drafters": [{"kind": "trained", "folder": folder / "eagle3"}],
        "prompts": [str(folder / "prompts.jsonl")],
        "max_new_tokens": 10,
        "gammas": [1, 3],
        "bootstrap_samples": 100,
        "output": output,
    }
    settings.update(changes)
    return TuneRecipe.model_validate({name: value for name, value in settings.items() if value is not None})


def read(output: Path) -> Tuning:
    return Tuning.model_validate_json((output / "tune.json").read_text())


def test_what_is_replayed_is_what_the_confirmation_measures(folder: Path, tmp_path: Path) -> None:
    drafters = [{"kind": "trained", "folder": folder / "eagle3"}, {"kind": "lookup"}]
    trees = [{"kind": "static_tree", "paths": [[0], [1], [0, 0]]}, {"kind": "tree", "depth": 2, "width": 2, "nodes": 3}]
    found = tune(recipe(folder, tmp_path, drafters=drafters, trees=trees, batch_sizes=[1, 3], confirm=3))
    assert json.loads(json.dumps(found)) == found
    tuning = read(tmp_path)
    head, lookup = tuning.drafters
    hows = {candidate.system: candidate.how for candidate in head.candidates}
    replayed = dict.fromkeys(("chain of 1", "chain of 3", "static tree of 3"), "replayed")
    assert hows == {**replayed, "tree of 3": "decoded"}
    assert {candidate.how for candidate in lookup.candidates} == {"decoded"}
    assert sum("lookup" in warning and "left out" in warning for warning in tuning.warnings) == 2
    assert [point.batch_size for point in head.by_batch] == [1, 3]
    assert len(tuning.confirmations) == 3
    for confirmed in tuning.confirmations:
        tuned = next(tuned for tuned in tuning.drafters if tuned.drafter == confirmed.drafter)
        candidate = tuned.named(confirmed.system)
        assert candidate is not None
        assert candidate.acceptance.tau == confirmed.tau
        assert confirmed.lossless == "identical"
    [comparison] = tuning.comparisons
    assert comparison.system in {"chain of 1", "chain of 3"}
    assert len(found["verdicts"]) == 2
    page = (tmp_path / "tune.md").read_text()
    assert "| chain of 3 | replayed |" in page
    assert "Confirmed: " in page


def test_recorded_answers_are_tuned_on_without_decoding(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = tmp_path / "answers.jsonl"
    written: dict[str, Any] = {
        "target": {"name": str(folder / "target"), "dtype": "float32"},
        "prompts": [str(folder / "prompts.jsonl")],
        "temperature": 0,
        "max_new_tokens": 10,
        "output": str(answers),
    }
    respond(RespondRecipe.model_validate(written))
    tune(recipe(folder, tmp_path / "a", confirm=0))
    recorded = {"prompts": None, "answers": [str(answers)], "confirm": 0}

    def no_decoding(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be decoded")

    monkeypatch.setattr("specdraft.evaluation.tune.generate", no_decoding)
    monkeypatch.setattr("specdraft.evaluation.candidates.generate", no_decoding)
    found = tune(recipe(folder, tmp_path / "b", **recorded))
    assert "not confirmed" in found["headline"]
    a, b = (read(tmp_path / name).drafters[0].candidates for name in ("a", "b"))
    assert [c.acceptance for c in a] == [c.acceptance for c in b]
    with pytest.raises(SpecdraftError, match=r"temperature 0\.0, not 0\.7"):
        tune(recipe(folder, tmp_path / "c", temperature=0.7, **recorded))
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    for row in rows:
        row["answers"][0]["answer_ids"] = [3] * 8
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SpecdraftError, match="not its greedy answers"):
        tune(recipe(folder, tmp_path / "c", **recorded))


def test_sampling_gives_overlaps_by_name_and_decodes(folder: Path, tmp_path: Path) -> None:
    medusa = [{"kind": "trained", "folder": folder / "medusa"}]
    tune(recipe(folder, tmp_path, drafters=medusa, temperature=1.0, gammas=[2, 3], confirm=0))
    tuning = read(tmp_path)
    [tuned] = tuning.drafters
    assert [(c.system, c.how) for c in tuned.candidates] == [("chain of 2", "decoded")]
    assert any("chain of 3: left out" in warning for warning in tuning.warnings)
    assert len(tuned.overlaps) == 2
    assert all(overlap.value is not None and 0 < overlap.value <= 1 for overlap in tuned.overlaps)
    assert "overlap_d (teacher-forced, not alpha)" in (tmp_path / "tune.md").read_text()


def test_nothing_to_draft_is_an_error(folder: Path, tmp_path: Path) -> None:
    medusa = [{"kind": "trained", "folder": folder / "medusa"}]
    with pytest.raises(SpecdraftError, match="can draft nothing"):
        tune(recipe(folder, tmp_path, drafters=medusa, gammas=[5]))
    assert not (tmp_path / "tune.json").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answers": ["a.jsonl"]}, "one of them"),
        ({"prompts": None}, "one of them"),
        ({"batch_sizes": [4, 1]}, "must rise"),
        ({"gammas": []}, "must name one or more"),
        ({"gammas": [2, 2]}, "each once"),
        ({"drafters": [{"kind": "lookup"}, {"kind": "lookup"}]}, "each once"),
        ({"confirm": 0, "confirm_prompts": 3}, "no effect"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=said):
        recipe(tmp_path, tmp_path, **changes)


def test_where_drafting_stops_paying() -> None:
    assert stops_paying([1, 2, 4], [1.5, 1.3, 1.1]) is None
    assert stops_paying([1, 2], [0.9, 0.8]) == 1
    assert stops_paying([1, 4, 16], [1.6, 1.2, 0.8]) == pytest.approx(8)  # half way, on the logarithm


def test_verdicts_name_the_better_one_first() -> None:
    shown = verdict("A", "B", Estimate(value=-0.21, low=-0.30, high=-0.12), "tau")
    assert shown == "B is better than A: +0.21 tau [0.12, 0.30]"
    assert verdict("A", "B", Estimate(value=0.1, low=-0.1, high=0.3), "tau").startswith("no difference in tau shown")
    assert "too few" in verdict("A", "B", Estimate(value=0.1), "tau")


def test_a_paired_difference_is_narrower_than_its_parts() -> None:
    """Prompts differ much, the drafters on each prompt little: pairing shows what intervals of each alone hide."""
    stream = np.random.default_rng(0)
    rounds = np.full(40, 10.0)
    one = rounds * (1 + stream.uniform(0, 3, 40))
    other = one - 1
    bootstrap = Bootstrap(40, 500, 0)
    found = bootstrap.difference((one, rounds), (other, rounds))
    assert found.value == pytest.approx(0.1)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)
    alone = bootstrap.ratio(one, rounds)
    assert alone.low is not None
    assert alone.high is not None
    assert alone.high - alone.low > 0.3
    unlike = bootstrap.difference((one, rounds), (one[::-1].copy(), rounds))
    assert unlike.low is not None
    assert unlike.high is not None
    assert unlike.low < 0 < unlike.high

"""scripts/bench on tiny models: both benchmarks run to the end, compare equal work, and say what they measured."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from tiny_chat import chat_tokenizer

from specdraft.drafters.eagle import Eagle3Drafter, Eagle3Recipe
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.training import TrainRecipe, train

BENCHMARKS = Path(__file__).parent.parent / "scripts" / "benchmarks"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    tokenizer = chat_tokenizer()
    folder = tmp_path / "target"
    tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    turns = [
        [
            {"role": "user", "content": "what is the capital of France?"},
            {"role": "assistant", "content": "Paris is the capital. " * (1 + row % 3)},
        ]
        for row in range(6)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns), encoding="utf-8")
    return path


def bench(verb: str, *words: object) -> tuple[str, dict[str, Any]]:
    """What it printed, and the JSON object on the last line."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{verb}.py"), *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_training_does_equal_work_on_both_sides(target: Path, answers: Path) -> None:
    if importlib.util.find_spec("economize") is None:
        pytest.skip("economize is not installed; scripts/bench installs it")
    words = ("--target", target, "--answers", answers, "--steps", 1, "--repeats", 1, "--rows", 3, "--only-equal")
    shown, result = bench("train", *words)
    (ours,), (theirs,) = result["runs"].values()
    for name in ("tokens", "positions", "parameters"):
        assert ours[name] == theirs[name] > 0, name
    assert ours["peak_bytes"] > ours["before_bytes"] > 0
    assert result["speed_ratio"] == pytest.approx(
        ours["tokens"] / ours["seconds"] / (theirs["tokens"] / theirs["seconds"])
    )
    assert "peak above the models" in shown


@pytest.mark.slow
def test_a_run_as_used_reads_stored_features_and_drafts_fewer_ids(target: Path, answers: Path, tmp_path: Path) -> None:
    job = {"target": str(target), "answers": str(answers), "dtype": "float32", "steps": 1, "rows": 3}
    job |= {"max_length": 256, "unroll": 2, "supervised": "answers", "vocabulary": 64, "store": str(tmp_path / "store")}
    _, captured = bench("train", "--job", json.dumps(job | {"system": "capture"}))
    assert captured["rows"] == 6
    _, run = bench("train", "--job", json.dumps(job | {"system": "specdraft"}))
    assert 0 < run["positions"] < run["tokens"]
    assert run["last_loss"] > 0


@pytest.mark.slow
def test_decoding_gives_the_same_output_everywhere(target: Path, answers: Path, tmp_path: Path) -> None:
    whole = FrozenTarget.load(TargetRecipe(name=str(target), device="cpu"))
    counts = torch.ones(whole.vocab_size, dtype=torch.int64)
    Eagle3Drafter.for_target(whole, Eagle3Recipe(), counts).save_pretrained(tmp_path / "head")
    words = ["--target", target, "--prompts", answers, "--limit", 2, "--layers", 2, "--repeats", 1]
    words += ["--max-new-tokens", 8, "--dtype", "float32", "--head", tmp_path / "head"]
    with_peer = importlib.util.find_spec("economize") is not None  # scripts/bench installs it
    shown, result = bench("decode", *words, *["--peer", "economize"] * with_peer)
    systems = result["systems"]
    assert len(systems) == (20 if with_peer else 12)
    assert {row["tokens"] for row in systems.values()} == {16}
    assert not any(row["different_outputs"] for row in systems.values())
    assert systems["specdraft, plain"]["tokens_per_pass"] == 1
    shares = systems["specdraft, draft LM"]["shares"]
    assert shares["target"] + shares["drafter"] + shares["neither"] == pytest.approx(1)
    assert 0 < shares["outside_model_calls"] < 1
    for drafts in ("draft LM", "head") if with_peer else ():  # the same drafter is right as often in either loop
        ours, theirs = (systems[f"{owner}, {drafts}"]["tokens_per_pass"] for owner in ("specdraft", "economize"))
        assert ours == theirs
    assert ("is left out" in shown) != with_peer


@pytest.mark.slow
def test_growth_is_measured_at_checkpoints_and_at_the_end(target: Path, answers: Path, tmp_path: Path) -> None:
    settings = {"output_dir": tmp_path / "run", "max_steps": 4, "batch_size": 2, "save_every": 1, "keep": 9}
    recipe = {"target": {"name": str(target)}, "data": {"answers": [str(answers)]}, "drafter": {"kind": "eagle3"}}
    trained = train(TrainRecipe.model_validate({**recipe, "training": settings}))
    words = ("--target", target, "--prompts", answers, "--max-new-tokens", 6, "--plot", tmp_path / "growth.svg")
    shown, result = bench("growth", tmp_path / "run", "--checkpoints", 2, *words)
    assert shown.count("\n| run |") == len(result["points"]) >= 3
    assert [point["final"] for point in result["points"]] == [False] * (len(result["points"]) - 1) + [True]
    rows = 4 * 2  # the first supervised token of each is no prediction of an EAGLE head
    assert result["points"][-1]["positions"] == trained["positions"] + rows > result["points"][0]["positions"] > 0
    assert "</svg>" in (tmp_path / "growth.svg").read_text()


@pytest.mark.slow
def test_every_system_is_measured_once_and_kept(target: Path, answers: Path, tmp_path: Path) -> None:
    whole = FrozenTarget.load(TargetRecipe(name=str(target), device="cpu"))
    counts = torch.ones(whole.vocab_size, dtype=torch.int64)
    Eagle3Drafter.for_target(whole, Eagle3Recipe(), counts).save_pretrained(tmp_path / "head")
    words = ["--target", target, "--dtype", "float32", "--answers", answers, "--prompts", answers, "--every", 3]
    words += ["--max-new-tokens", 6, "--head", f"eagle3={tmp_path / 'head'}", "--output", tmp_path / "kept"]
    shown, result = bench("systems", *words)
    assert (result["prompts"], result["systems"]) == (2, 10)
    rows = [line for line in shown.splitlines() if line.count("|") == 7][2:]
    assert len(rows) == 10
    assert all(row.endswith("| identical |") for row in rows)
    assert json.loads((tmp_path / "kept" / "layers.json").read_text())
    again, _ = bench("systems", *words)
    assert again.splitlines()[:-1] == shown.splitlines()[:-1]


def test_a_verdict_is_over_the_fastest_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    decode = importlib.import_module("decode")
    speeds = {
        ("transformers", "plain", False): 10.0,
        ("transformers", "lookup", False): 8.0,
        ("economize", "lookup", False): 16.0,
        ("transformers", "lookup", True): 40.0,
        ("specdraft", "lookup", False): 24.0,
        ("specdraft", "head, tree", False): 32.0,
    }
    systems = {decode.System(owner, drafts, list, packed): v for (owner, drafts, packed), v in speeds.items()}
    rows = {system.name: {"tokens_per_second": speed} for system, speed in systems.items()}
    as_loaded, packed = (decode.verdict(list(systems), rows, packed=packed) for packed in (False, True))
    assert (as_loaded["best_of_ours"], as_loaded["best_of_theirs"]) == ("specdraft, head, tree", "economize, lookup")
    assert (as_loaded["over_best"], as_loaded["like_for_like"]) == (2.0, {"lookup": 1.5})
    assert (packed["over_best"], packed["like_for_like"]) == (0.8, {"lookup": 0.6})


@pytest.mark.slow
def test_the_losses_memory_is_measured_beside_a_dense_one() -> None:
    words = ("--tokens", 512, "--dense-tokens", 256, "--vocabulary", 20_000, "--width", 32, "--depths", 2)
    shown, result = bench("memory", *words, "--chunk", 16)
    assert result["chunked"]["positions"] == [512, 504]
    assert 0 < result["chunked"]["added_bytes"] < result["dense"]["added_bytes"]
    assert result["goal_met"]
    assert "added at the peak" in shown


def test_a_draft_has_fewer_layers_than_its_target(target: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "decode.py"), "--target", str(target), "--layers", "4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "a draft of 4 layers: allowed are 1 to 3" in done.stderr

"""From files to files: the `eval` verb on a tiny target that lies in a folder."""

import json
from pathlib import Path

import pytest
from tiny_chat import chat_tokenizer, write_target

from specdraft.config import SpecdraftError
from specdraft.data.conversations import RowError, parse_row
from specdraft.decoding import Generation, Round
from specdraft.evaluation import EvaluateRecipe, Report, evaluate_recipe
from specdraft.evaluation.exhibits import pieces, training_curves
from specdraft.evaluation.prompts import question
from specdraft.provenance import Provenance


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def recipe(target: Path, folder: Path, drafter: dict) -> EvaluateRecipe:
    rows = [{"prompt": "one two one two", "category": "chat"}, {"turns": ["three", "four"]}, {"prompt": 5}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvaluateRecipe.model_validate(
        {
            "target": {"name": str(target), "dtype": "float32"},
            "drafter": drafter,
            "evaluation": {
                "prompts": [str(folder / "prompts.jsonl")],
                "systems": [{"kind": "chain", "gamma": 2}],
                "max_new_tokens": 24,
                "bootstrap_samples": 100,
            },
            "output": folder / "report",
        }
    )


def test_eval_writes_the_report_and_sums_it_up(target_folder: Path, tmp_path: Path) -> None:
    found = evaluate_recipe(recipe(target_folder, tmp_path, {"kind": "lookup"}))
    assert json.loads(json.dumps(found)) == found
    assert found["systems"]["chain of 2"]["lossless"] == "identical"
    assert found["systems"]["chain of 2"]["tau"] >= 1
    report = Report.load(tmp_path / "report" / "report.json")
    assert report.headline == found["headline"]
    assert report.setting.prompts == 2
    assert [sample.prompt for sample in report.samples] == ["one two one two", "three", "four"]
    assert any("1 rows cannot be used" in warning for warning in report.warnings)
    assert (tmp_path / "report" / "report.html").read_text().startswith("<!doctype html>")


def test_x13_a_drafter_that_cannot_be_loaded_stops_everything(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecdraftError):
        evaluate_recipe(recipe(target_folder, tmp_path, {"kind": "trained", "folder": tmp_path / "nothing"}))
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "a"}, ["a"]),
        ({"turns": ["a", "b"]}, ["a"]),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, ["s", "a"]),
        (
            {
                "messages": [
                    {"role": role, "content": text}
                    for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
                ]
            },
            ["a", "b", "c"],
        ),
    ],
)
def test_the_last_question_is_asked_with_what_came_before(row: dict, asked: list[str]) -> None:
    assert [message["content"] for message in question(parse_row(row))] == asked


def test_a_rendered_text_is_no_prompt() -> None:
    with pytest.raises(RowError, match="no prompt"):
        question(parse_row({"text": "<|im_start|>user"}))


def test_pieces_say_who_wrote_each_token() -> None:
    rounds = [
        Round(2, 1, 2, 4, (0.5, 0.5)),
        Round(2, 2, 3, 2, (0.5, 0.5)),
        Round(0, 0, 1, 0, ()),
        Round(2, 2, 1, 2, (1, 1)),
    ]
    answer = Generation(tokens=list(range(8)), rounds=rounds, ended=True)
    found = [(piece.kind, piece.round) for piece in pieces(None, answer)]
    assert found == [
        ("first", 0),
        ("accepted", 1),
        ("corrected", 1),
        ("accepted", 2),
        ("accepted", 2),
        ("free", 2),
        ("free", 3),  # nothing was offered
        ("accepted", 4),  # cut off by an end of text
    ]


def test_characters_of_several_tokens_are_shown_whole() -> None:
    tokenizer = chat_tokenizer()
    tokens = tokenizer("naïve 漢字 ok", add_special_tokens=False)["input_ids"]
    found = pieces(tokenizer, Generation(tokens=tokens, rounds=[Round(0, 0, 1, 0, ())] * (len(tokens) - 1)))
    assert "".join(piece.text for piece in found) == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece.text for piece in found)


def test_training_curves_come_from_the_trainers_log(tmp_path: Path) -> None:
    log = [
        {"step": 1, "loss": 3.0, "overlap_1": 0.2, "learning_rate": 1},
        {"step": 2, "loss": 2.0},
        {"step": 2, "eval_alpha_1": 0.4},
    ]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": log}))
    found = {curve.name: (curve.steps, curve.values) for curve in training_curves(path)}
    assert found == {"loss": ([1, 2], [3.0, 2.0]), "overlap_1": ([1], [0.2]), "eval_alpha_1": ([2], [0.4])}
    path.write_text("{}")
    with pytest.raises(SpecdraftError, match=r"no trainer_state\.json"):
        training_curves(path)


def test_x07_x08_what_training_saw_is_read_from_the_drafters_provenance(target_folder: Path, tmp_path: Path) -> None:
    from specdraft.evaluation.stage import TrainedSource, training_of

    answers = tmp_path / "answers.jsonl"
    answers.write_text("{}\n")
    made_by = recipe(target_folder, tmp_path, {"kind": "lookup"})
    made = Provenance.of(made_by, seed=0, target="t", fingerprint="f", data=[])
    made.recipe["data"] = {"max_length": 384, "answers": [str(answers), str(tmp_path / "gone.jsonl")]}
    made.write(tmp_path)
    assert training_of(TrainedSource(folder=tmp_path)) == (384, (str(answers),))
    (tmp_path / "elsewhere").mkdir()
    assert training_of(TrainedSource(folder=tmp_path / "elsewhere")) == (None, ())

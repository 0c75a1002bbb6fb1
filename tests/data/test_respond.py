import json
from pathlib import Path

import pytest
import torch
from models import tiny_model
from tiny_chat import ALWAYS_THINKS, CHATML, chat_tokenizer

from specdraft.config import SpecdraftError
from specdraft.data.batches import IGNORED, DataRecipe, load_rows
from specdraft.data.respond import RespondRecipe, respond, write_answers
from specdraft.dice import SeededDice
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.warping import Warp


def tiny_target(template=CHATML, seed=0, **changes) -> FrozenTarget:
    tokenizer = chat_tokenizer(template)
    changes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **changes}
    return FrozenTarget(tiny_model(seed=seed, num_hidden_layers=2, **changes), tokenizer, "tiny")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "what is " * n} for n in range(1, 6)]
    rows.append({"turns": ["one?", "and two?"], "category": "math"})
    rows.append({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a human's"}]})
    rows.append({"conversations": []})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RespondRecipe(
        target=TargetRecipe(name="tiny"),
        prompts=(str(path),),
        output=str(tmp_path / "out" / "answers.jsonl"),
        max_new_tokens=8,
        batch_size=3,
    )


def lines(recipe):
    with open(recipe.output) as file:
        return {row["id"]: row for row in map(json.loads, file)}


def with_(recipe, **changes):
    return recipe.model_copy(update=changes)


def test_answers_are_what_the_model_emits_greedily(target):
    prompts = [list(range(20, 20 + n)) for n in (3, 9, 5, 1)]
    found = write_answers(target, prompts, Warp(), SeededDice([0] * 4), 12)
    for prompt, answer in zip(prompts, found, strict=True):
        want = target.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )
        assert prompt + answer == want[0].tolist()


def test_a_rows_sampled_answer_does_not_depend_on_its_neighbours(target):
    prompts = [list(range(20, 20 + n)) for n in (3, 9, 5)]
    warp = Warp(1.0, 20, 0.9)
    together = write_answers(target, prompts, warp, SeededDice([1, 2, 3]), 10)
    alone = [write_answers(target, [prompt], warp, SeededDice([seed]), 10)[0] for seed, prompt in enumerate(prompts, 1)]
    assert together == alone
    assert together != write_answers(target, prompts, warp, SeededDice([4, 5, 6]), 10)


def test_every_user_turn_is_answered_by_the_target(target, recipe):
    summary = respond(recipe, target)
    rows = lines(recipe)
    assert summary["rows"] == summary["answered"] == len(rows) == 7
    assert summary["skipped"] == {"empty conversation": 1}
    assert sum(summary["finish"].values()) == 8
    (turns,) = (row for row in rows.values() if row.get("category") == "math")
    assert [message["role"] for message in turns["messages"]] == ["user", "assistant"] * 2
    assert [answer["message"] for answer in turns["answers"]] == [1, 3]
    history = target.tokenizer.apply_chat_template(turns["messages"][:3], add_generation_prompt=True)["input_ids"]
    assert turns["answers"][1]["prompt_ids"] == history
    assert "a human's" not in Path(recipe.output).read_text()
    for row in rows.values():
        for answer in row["answers"]:
            ended = answer["answer_ids"][-1] in target.end_ids
            assert answer["finish"] == ("end" if ended else "length")
            assert ended or len(answer["answer_ids"]) == 8


def test_d23_rows_say_who_wrote_them(target, recipe, tmp_path):
    respond(with_(recipe, temperature=0.7), target)
    data = DataRecipe(answers=(recipe.output,), cache_dir=str(tmp_path / "cache"))
    rows = load_rows(data, target.tokenizer, target.end_ids)
    assert rows.report.written_by == {f"tiny ({target.fingerprint}) at temperature 0.7": len(rows)}


def test_training_rows_are_prompt_and_emitted_ids(target, recipe, tmp_path):
    respond(recipe, target)
    data = DataRecipe(answers=(recipe.output,), cache_dir=str(tmp_path / "cache"))
    rows = load_rows(data, target.tokenizer, target.end_ids)
    found = [(row["input_ids"].tolist(), row["labels"][row["labels"] != IGNORED].tolist()) for row in rows]
    for written in lines(recipe).values():
        for answer in written["answers"][:1]:
            whole = answer["prompt_ids"] + answer["answer_ids"]
            assert any(ids[: len(whole)] == whole for ids, _ in found)
        if len(written["answers"]) == 1:
            assert (whole, answer["answer_ids"]) in found


@pytest.mark.parametrize("cut", [b"", b'{"id": "ab', b'{"id": "ab", "messages"'])
def test_a_stopped_run_goes_on_where_it_was(target, recipe, cut):
    settings = {"temperature": 1.0, "seed": 5}
    respond(with_(recipe, **settings), target)
    whole = lines(recipe)
    kept = Path(recipe.output).read_bytes().splitlines(keepends=True)[:4]
    with open(recipe.output, "wb") as file:
        file.write(b"".join(kept) + cut)
    summary = respond(with_(recipe, batch_size=2, **settings), target)
    assert summary["answered"] == 3
    assert lines(recipe) == whole
    assert Path(recipe.output).read_bytes().startswith(b"".join(kept))
    assert respond(with_(recipe, **settings), target)["answered"] == 0


def test_more_samples_of_each_prompt_are_added(target, recipe):
    recipe = with_(recipe, temperature=1.0)
    respond(recipe, target)
    once = lines(recipe)
    assert respond(with_(recipe, samples=3), target)["answered"] == 14
    thrice = lines(recipe)
    assert {id: thrice[id] for id in once} == once
    said = {id: [answer["answer_ids"] for answer in row["answers"]] for id, row in thrice.items()}
    for id in once:
        drawn = [said[id], said[f"{id}#2"], said[f"{id}#3"]]
        assert len({str(answer) for answer in drawn}) == 3
    with pytest.raises(ValueError, match="samples has no effect at temperature 0"):
        RespondRecipe.model_validate({**recipe.model_dump(), "samples": 2, "temperature": 0})


def test_other_settings_or_another_target_need_another_file(target, recipe):
    respond(with_(recipe, limit=2), target)
    before = Path(recipe.output).read_text()
    with pytest.raises(SpecdraftError, match=r"jsonl:1: was written with other settings \(temperature 0.0, now 1.0\)"):
        respond(with_(recipe, temperature=1.0), target)
    with pytest.raises(SpecdraftError, match="fingerprint"):
        respond(recipe, tiny_target(seed=1))
    assert Path(recipe.output).read_text() == before
    assert respond(with_(recipe, limit=3), target)["answered"] == 1


def test_a_file_that_respond_did_not_write_is_left_alone(target, recipe, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "mine"}\n')
    with pytest.raises(SpecdraftError, match=r"other\.jsonl:1: not a line that `respond` wrote"):
        respond(with_(recipe, output=str(other)), target)
    assert other.read_text() == '{"prompt": "mine"}\n'


def test_prompts_that_do_not_fit_are_counted(target, recipe):
    with pytest.raises(SpecdraftError, match="leaves no room for a prompt: context is 256"):
        respond(with_(recipe, max_new_tokens=256), target)
    summary = respond(with_(recipe, max_prompt_tokens=20), target)
    assert summary["skipped"]["prompt longer than 20 tokens"] > 0
    assert summary["answered"] + sum(summary["skipped"].values()) == 8


def test_d15_strict_names_the_lines(target, recipe):
    with pytest.raises(SpecdraftError, match=r"prompts\.jsonl:8: empty conversation"):
        respond(with_(recipe, strict=True), target)


def test_d08_an_answer_that_closes_its_prompts_think_tag_is_kept_whole(recipe, tmp_path):
    target = tiny_target(ALWAYS_THINKS)
    respond(with_(recipe, limit=2), target)
    for row in lines(recipe).values():
        prompt = target.tokenizer.decode(row["answers"][0]["prompt_ids"])
        assert prompt.endswith("<think>\n")


def test_a_chat_with_tool_results_keeps_its_history(target, recipe, tmp_path):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "calling", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "an old answer"},
    ]
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    respond(with_(recipe, prompts=(str(path),)), target)
    (row,) = lines(recipe).values()
    assert row["messages"][:3] == messages[:3]
    assert [answer["message"] for answer in row["answers"]] == [3]
    assert row["messages"][3]["content"] != "an old answer"


def test_one_long_prompt_does_not_make_its_batch_wide(target, recipe, monkeypatch):
    path = Path(recipe.prompts[0])
    path.write_text("".join(json.dumps({"prompt": "what is " * n}) + "\n" for n in (1, 2, 40, 3)))
    batches = []

    def noted(target, prompts, *rest):
        batches.append(sorted(map(len, prompts)))
        return write_answers(target, prompts, *rest)

    monkeypatch.setattr("specdraft.data.respond.write_answers", noted)
    assert respond(with_(recipe, batch_size=4), target)["answered"] == 4
    assert [len(batch) for batch in batches] == [1, 3]
    assert batches[0][0] > 2 * batches[1][-1]

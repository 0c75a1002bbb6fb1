import json
import multiprocessing
import time

import pytest
import torch
from tiny_chat import CHATML, THINKING, chat_tokenizer

from specdraft.config import SpecdraftError
from specdraft.data import batches
from specdraft.data.batches import IGNORED, DataRecipe, LengthBatches, batch_order, collate, load_rows


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat("what is it? " * n, "four " * (n + 1))) + "\n" for n in range(1, 8)))
    return DataRecipe(answers=(str(path),), cache_dir=str(tmp_path / "cache"))


def with_(recipe: DataRecipe, **changes) -> DataRecipe:
    return recipe.model_copy(update=changes)


def test_rows_have_labels_where_supervised(recipe):
    rows = load_rows(recipe, chat_tokenizer())
    assert len(rows) == rows.report.rows == rows.report.conversations == 7
    for number, row in enumerate([rows[n] for n in range(7)]):
        assert row["row"] == number
        kept = row["labels"] != IGNORED
        assert torch.equal(row["labels"][kept], row["input_ids"][kept])
        assert 0 < kept.sum() < len(kept)
    assert rows.report.tokens == rows.lengths.sum()
    counts = rows.token_counts(500)
    assert counts.sum() == rows.report.supervised
    assert counts[chat_tokenizer().eos_token_id] == 7
    assert rows.report.written_by == {"unknown": 7}


def test_d21_the_cache_knows_all_that_decides_its_content(recipe):
    builds = []
    build, batches.build_rows = batches.build_rows, lambda *given: builds.append(1) or build(*given)
    try:
        load_rows(with_(recipe, max_length=64), chat_tokenizer())
        load_rows(with_(recipe, max_length=64), chat_tokenizer())
        assert len(builds) == 1
        load_rows(with_(recipe, max_length=128), chat_tokenizer())
        load_rows(recipe, chat_tokenizer(CHATML + "{# of another version #}"))
        load_rows(recipe, chat_tokenizer(end="<|endoftext|>"))
        load_rows(recipe, chat_tokenizer(THINKING))
        load_rows(with_(recipe, chat_template_kwargs={"enable_thinking": False}), chat_tokenizer(THINKING))
        load_rows(with_(recipe, min_supervised=2), chat_tokenizer())
        load_rows(recipe, chat_tokenizer(), end_ids=[1, 2])
        assert len(builds) == 8
        with open(recipe.answers[0], "a") as file:
            file.write(json.dumps(chat("one more?", "yes")) + "\n")
        assert len(load_rows(recipe, chat_tokenizer())) == 8
        assert len(builds) == 9
    finally:
        batches.build_rows = build


def test_d21_a_cached_report_is_the_built_one(recipe):
    built = load_rows(recipe, chat_tokenizer())
    cached = load_rows(recipe, chat_tokenizer())
    assert cached.report == built.report
    assert cached.key == built.key
    assert torch.equal(cached.ids, built.ids)


def test_d19_an_answer_behind_max_length_is_named_so(recipe):
    with open(recipe.answers[0], "a") as file:
        file.write(json.dumps(chat("what is the capital? " * 40, "four")) + "\n")
    rows = load_rows(with_(recipe, max_length=128), chat_tokenizer())
    assert rows.report.skipped == {"no supervised token after truncation to 128": 1}
    assert "max_length is 128" in rows.report.examples[0]
    assert rows.report.examples[0].startswith(f"{recipe.answers[0]}:8: ")
    with pytest.raises(SpecdraftError, match="no supervised token after truncation to 8") as caught:
        load_rows(with_(recipe, max_length=8), chat_tokenizer())
    assert "header" not in str(caught.value)


def test_d05_rows_of_another_family_alone_are_an_error(recipe):
    with open(recipe.answers[0], "w") as file:
        file.write(json.dumps({"text": "<role>USER</role>hi<role>ASSISTANT</role>hello"}))
    with pytest.raises(SpecdraftError) as caught:
        load_rows(recipe, chat_tokenizer())
    assert repr("<|im_start|>assistant\n") in str(caught.value)
    assert "<role>ASSISTANT</role>hello" in str(caught.value)


def test_prompts_without_answers_are_sent_to_respond(recipe):
    with open(recipe.answers[0], "w") as file:
        file.write(json.dumps({"prompt": "what is two and two?"}))
    with pytest.raises(SpecdraftError, match="respond"):
        load_rows(recipe, chat_tokenizer())


def test_collated_rows_are_padded_on_the_right(recipe):
    rows = load_rows(recipe, chat_tokenizer())
    batch = collate([rows[0], rows[6]], pad_id=9)
    length = int(rows.lengths[0])
    assert batch["row"].tolist() == [0, 6]
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert torch.equal(batch["input_ids"][0, :length], rows[0]["input_ids"])
    assert set(batch["input_ids"][0, length:].tolist()) == {9}
    assert set(batch["labels"][0, length:].tolist()) == {IGNORED}
    assert batch["attention_mask"].sum(1).tolist() == rows.lengths[[0, 6]].tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("rows", [3, 12, 101])
def test_every_rank_has_as_many_batches_and_every_row_comes_once(rows, size, world):
    lengths = torch.randint(1, 90, (rows,), generator=torch.Generator().manual_seed(rows))
    order = [batch_order(lengths, size, seed=1, epoch=2, rank=rank, world=world) for rank in range(world)]
    assert len({len(batches) for batches in order}) == 1
    sizes = [len(batch) for batches in order for batch in batches]
    assert min(sizes) >= max(1, max(sizes) - 1)
    assert max(sizes) <= size
    assert len(LengthBatches(lengths, size, seed=1, world=world)) == len(order[0])
    found = sorted(row for batches in order for batch in batches for row in batch)
    assert sorted(set(found)) == list(range(rows))
    assert len(found) - rows <= (world - 1 if size == 1 else 0)


def test_rows_of_a_batch_are_of_similar_length():
    lengths = torch.randint(1, 1000, (640,), generator=torch.Generator().manual_seed(0))
    order = batch_order(lengths, 8, seed=0, epoch=0)
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in order)
    assert padded < 1.1 * lengths.sum()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_t22_the_order_is_a_function_of_seed_and_epoch(recipe, workers, world):
    rows = load_rows(recipe, chat_tokenizer())

    def run(epochs, skip=0):
        seen = []
        for epoch in epochs:
            sampler = LengthBatches(rows.lengths, 2, seed=3, rank=world - 1, world=world)
            sampler.set_epoch(epoch)
            loader = torch.utils.data.DataLoader(rows, batch_sampler=sampler, collate_fn=collate, num_workers=workers)
            seen += [batch["row"].tolist() for batch in loader]
        return seen[skip:]

    whole = run(range(3))
    per_epoch = len(whole) // 3
    assert run([2], skip=1) == whole[2 * per_epoch + 1 :]
    assert whole[:per_epoch] != whole[per_epoch : 2 * per_epoch]


def _build_slowly(recipe, results):
    build = batches.build_rows

    def slow(*given):
        time.sleep(1)
        results.put("built")
        return build(*given)

    batches.build_rows = slow
    results.put(len(load_rows(recipe, chat_tokenizer())))


def test_t26_one_process_builds_and_the_others_wait_for_its_file(recipe):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_build_slowly, args=(recipe, results)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in range(3)]
    for rank in ranks:
        rank.join()
    assert sorted(map(str, found)) == ["7", "7", "built"]
    assert [rank.exitcode for rank in ranks] == [0, 0]


def test_strict_names_lines_from_the_cache_too(recipe):
    with open(recipe.answers[0], "a") as file:
        file.write("{\n")
    assert load_rows(recipe, chat_tokenizer()).report.skipped == {"not valid JSON": 1}
    with pytest.raises(SpecdraftError, match=r"strict, and .*\n.*:8: not valid JSON"):
        load_rows(with_(recipe, strict=True), chat_tokenizer())


def test_fewer_rows_than_ranks_is_an_error():
    with pytest.raises(SpecdraftError, match="2 training rows cannot be shared among 3 ranks"):
        batch_order(torch.tensor([4, 5]), 2, seed=0, epoch=0, world=3)

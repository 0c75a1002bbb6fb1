import json
import pickle

import pytest
import torch
from models import tiny_model
from tiny_chat import chat_tokenizer

from specdraft.config import SpecdraftError
from specdraft.data import store
from specdraft.data.batches import DataRecipe, LengthBatches, collate, load_rows
from specdraft.data.store import CaptureRecipe, FeatureStore, capture
from specdraft.target import FrozenTarget, TargetRecipe

TAPS = (1, 2, 0)


def tiny_target(seed=0):
    tokenizer = chat_tokenizer()
    return FrozenTarget(tiny_model(seed=seed, num_hidden_layers=2, vocab_size=len(tokenizer)), tokenizer, "tiny")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "chats.jsonl"
    chats = [[("user", "what is it?" * n), ("assistant", "four " * (7 - n))] for n in range(1, 7)]
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CaptureRecipe(
        target=TargetRecipe(name="tiny"),
        data=DataRecipe(answers=(str(path),), cache_dir=str(tmp_path / "cache")),
        taps=TAPS,
        output=str(tmp_path / "store"),
        shard_tokens=60,
        batch_tokens=100,
    )


def rows_of(recipe, target):
    return load_rows(recipe.data, target.tokenizer, target.end_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workers", [0, 2])
def test_stored_features_are_the_observed_ones(target, recipe, dtype, workers):
    summary = capture(recipe.model_copy(update={"dtype": dtype}), target)
    assert summary["shards"] == summary["written"] > 1
    rows = rows_of(recipe, target)
    features = FeatureStore(recipe.output, target, TAPS, rows)
    loader = torch.utils.data.DataLoader(
        rows,
        batch_sampler=LengthBatches(rows.lengths, 3, seed=0),
        collate_fn=features.collate,
        num_workers=workers,
    )
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-2}
    assert torch.equal(pickle.loads(pickle.dumps(features)).read(0)["hidden"], features.read(0)["hidden"])
    for batch in loader:
        mask = batch["attention_mask"].bool()
        want = target.observe(batch["input_ids"], mask, TAPS)
        found = batch["observation"]
        assert torch.equal(found.tokens, want.tokens)
        assert torch.equal(found.mask, mask)
        assert torch.equal(found.positions, want.positions)
        assert found.hidden.dtype == found.taps.dtype == target.dtype
        torch.testing.assert_close(found.hidden[mask], want.hidden[mask], **tolerance)
        torch.testing.assert_close(found.taps[mask], want.taps[mask], **tolerance)
        assert batch["log_partition"].dtype == torch.float32
        want = target.head(found.hidden).logsumexp(-1)
        torch.testing.assert_close(batch["log_partition"][mask], want[mask], rtol=1e-5, atol=1e-5)
        assert torch.equal(batch["labels"], collate([rows[int(row)] for row in batch["row"]])["labels"])


def test_a_stopped_capture_goes_on(target, recipe, monkeypatch):
    whole = store._features
    calls = []

    def stops(*given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(store, "_features", stops)
    with pytest.raises(KeyboardInterrupt):
        capture(recipe, target)
    with pytest.raises(SpecdraftError, match="is not complete"):
        FeatureStore(recipe.output, target, TAPS, rows_of(recipe, target))
    summary = capture(recipe, target)
    assert summary["written"] == summary["shards"] - 1
    assert capture(recipe, target)["written"] == 0
    FeatureStore(recipe.output, target, TAPS, rows_of(recipe, target))


def test_features_of_something_else_are_refused(target, recipe):
    capture(recipe, target)
    rows = rows_of(recipe, target)
    other = tiny_target(seed=1)
    with pytest.raises(SpecdraftError, match=r"target is '\w+', wanted '\w+'\. Capture again"):
        FeatureStore(recipe.output, other, TAPS, rows)
    with pytest.raises(SpecdraftError, match=r"taps is \[1, 2, 0\], wanted \[0, 1, 2\]"):
        FeatureStore(recipe.output, target, (0, 1, 2), rows)
    with pytest.raises(SpecdraftError, match=r"taps is \[1, 2, 0\], wanted \[1\]"):
        capture(recipe.model_copy(update={"taps": (1,)}), target)
    with open(recipe.data.answers[0], "a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    with pytest.raises(SpecdraftError, match="data is"):
        FeatureStore(recipe.output, target, TAPS, rows_of(recipe, target))
    with pytest.raises(SpecdraftError, match="holds no captured features"):
        FeatureStore(recipe.output + "-gone", target, TAPS, rows)


def test_a_store_to_read_has_no_effect_on_capture(target, recipe):
    data = recipe.data.model_copy(update={"store": "elsewhere"})
    with pytest.raises(SpecdraftError, match="has no effect"):
        capture(recipe.model_copy(update={"data": data}), target)

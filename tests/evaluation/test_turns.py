"""Conversations of several turns, and what a request asks for besides temperature, through the whole evaluation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation.markov import MarkovDrafter, law, markov_target
from models import tiny_model
from pydantic import ValidationError
from tiny_chat import CHATML, chat_tokenizer

from specdraft.config import SpecdraftError
from specdraft.controls import Controls
from specdraft.data.conversations import Faults
from specdraft.decoding import Generation, generate
from specdraft.evaluation import EvalRecipe, Prompt, Report, evaluate
from specdraft.evaluation.lossless import compare_greedy
from specdraft.evaluation.page import markdown
from specdraft.evaluation.prompts import read_prompts
from specdraft.evaluation.race import Run, decode_all
from specdraft.evaluation.statistics import Bootstrap
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

P, Q = law(0), 0.75 * law(0) + 0.25 * law(1)


def recipe(**changes: Any) -> EvalRecipe:
    given = {
        "systems": [{"kind": "chain", "gamma": 2}, {"kind": "chain", "gamma": 3}],
        "max_new_tokens": 6,
        "batch_size": 4,
        "bootstrap_samples": 100,
        **changes,
    }
    return EvalRecipe.model_validate(given)


def conversation(index: int, turns: int) -> Prompt:
    """Each turn's prompt holds all that was said before it."""

    def asked(said: list[int], left: int) -> Prompt:
        def then(answer: Sequence[int]) -> Prompt:
            return asked([*said, *answer, (index + left) % 8], left - 1)

        return Prompt(said, f"{index}: {left} left", "talk", then if left else None)

    return asked([index % 8, (3 * index) % 8], turns - 1)


CHATS = [conversation(index, 1 + index % 3) for index in range(10)]  # 1, 2 or 3 turns: 19 in all


def raced(settings: EvalRecipe, prompts: Sequence[Prompt] = CHATS) -> tuple[list[Prompt], list[int], list[Run]]:
    drafter = MarkovDrafter(Q)
    runs = [Run("plain"), *(Run(system.name, drafter, system.shape()) for system in settings.systems)]
    asked, owners = decode_all(markov_target(P), settings, prompts, runs, None)
    return asked, owners, runs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_later_turns_follow_the_plain_answers_in_every_run(temperature: float) -> None:
    asked, owners, runs = raced(recipe(temperature=temperature))
    assert sorted(owners) == sorted(index for index in range(10) for _ in range(1 + index % 3))
    assert all(len(run.generations) == len(asked) == 19 for run in runs)
    for index in range(10):
        turns = [place for place, owner in enumerate(owners) if owner == index]
        text = list(CHATS[index].ids)
        for left, place in zip(range(index % 3, -1, -1), turns, strict=True):
            assert asked[place].ids == text
            text += [*runs[0].generations[place].tokens, (index + left) % 8]
    answers = [[generation.tokens for generation in run.generations] for run in runs]
    assert (answers[1] == answers[0]) == (temperature == 0), "sampled answers differ, prompts do not"


def test_e36_turns_do_not_hang_on_the_batch_and_are_drawn_afresh() -> None:
    small, large = (raced(recipe(temperature=1.0, batch_size=size)) for size in (1, 4))
    for run, other in zip(small[2], large[2], strict=True):
        mine, theirs = (
            sorted((owner, p.ids, g.tokens) for owner, p, g in zip(owners, asked, each.generations, strict=True))
            for (asked, owners, _), each in ((small, run), (large, other))
        )
        assert mine == theirs
    same = Prompt([1, 2], "again", None, lambda _: Prompt([1, 2], "again"))
    _, _, (plain, *_) = raced(recipe(temperature=1.0, max_new_tokens=20), [same])
    assert plain.generations[0].tokens != plain.generations[1].tokens, "a stream of its own for every turn"


@pytest.mark.parametrize(("turns", "answers"), [(None, 19), (1, 10), (2, 16)])
def test_so_many_turns_are_answered_as_are_asked_for(turns: int | None, answers: int) -> None:
    seen: list[tuple[int, int]] = []
    found = evaluate(
        markov_target(P),
        MarkovDrafter(Q),
        recipe(turns=turns, systems=[{"kind": "chain", "gamma": 2}]),
        prompts=CHATS,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (found.setting.prompts, found.setting.answers) == (10, answers)
    assert found.plain is not None
    assert found.plain.new_tokens == 6 * answers == found.systems[0].time.new_tokens
    assert found.systems[0].losslessness.verdict == "identical"
    assert found.systems[0].losslessness.compared == answers
    assert seen[-1] == (2 * answers, 2 * answers)
    assert (f"{answers} turns answered" in markdown(found)) == (turns != 1)


def test_conversations_are_resampled_with_all_their_turns() -> None:
    values, owners = np.array([1.0, 5.0] * 3), [7, 3] * 3
    whole = Bootstrap(2, 400, seed=1).ratio(np.array([15.0, 3.0]), np.array([3.0, 3.0]))
    turned = Bootstrap(owners, 400, seed=1).ratio(values, np.ones(6))
    assert turned == whole, "as two conversations (in the order of their numbers)"
    assert Bootstrap(6, 400, seed=1).ratio(values, np.ones(6)) != whole
    alone = Bootstrap([5, 5], 400, seed=1)
    assert alone.ratio(values[:2], np.ones(2)).low is None, "one conversation has no interval, however long"
    assert alone.of(values[:2, None], lambda sums: sums[:, 0]).low is None


def talking() -> FrozenTarget:
    tokenizer = chat_tokenizer(CHATML)
    return FrozenTarget(tiny_model(vocab_size=len(tokenizer)), tokenizer)


def test_spec_benchs_second_turn_is_rendered_as_serving_would_send_it(tmp_path: Path) -> None:
    target = talking()
    rows = [
        {"turns": ["what is four", "and two", "is it?"], "category": "writing"},
        {"turns": ["what is four"]},
        {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}]},
    ]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, single, answered = read_prompts(target, [str(tmp_path / "some.jsonl")], None, {}, Faults())
    assert single.then is None
    assert answered.then is None
    tokenizer = target.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    target.model.generation_config.eos_token_id = end
    [first, *_] = read_prompts(target, [str(tmp_path / "some.jsonl")], None, {}, Faults())
    answer = tokenizer("it is the capital")["input_ids"]
    for ids in ([*answer, end], answer):
        second = first.after(ids)
        assert second is not None
        chat = [("user", "what is four"), ("assistant", "it is the capital"), ("user", "and two")]
        messages = [{"role": role, "content": content} for role, content in chat]
        want = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(second.ids) == want
        assert (second.text, second.category) == ("and two", "writing")
        third = second.after(answer)
        assert third is not None
        assert third.after(answer) is None


def test_a_turn_that_the_template_refuses_is_a_fault_and_ends_the_conversation(tmp_path: Path) -> None:
    target = talking()
    guard = "{% if messages|length > 2 %}{{ raise_exception('no history') }}{% endif %}"
    target.tokenizer.chat_template = guard + CHATML
    (tmp_path / "some.jsonl").write_text(json.dumps({"turns": ["two", "four"]}) + "\n")
    faults = Faults()
    [prompt] = read_prompts(target, [str(tmp_path / "some.jsonl")], None, {}, faults)
    assert prompt.after([30]) is None
    assert "no history" in str(faults)


def controlled(temperature: float, **controls: Any) -> Report:
    settings = recipe(controls=controls, temperature=temperature, max_new_tokens=24, batch_size=10)
    return evaluate(markov_target(P), MarkovDrafter(Q), settings, prompts=[p._replace(then=None) for p in CHATS])


def test_controlled_answers_are_lossless_and_the_report_says_what_was_asked() -> None:
    for temperature, verdict in ((0.0, "identical"), (1.0, "law holds")):
        found = controlled(temperature, repetition_penalty=1.4, frequency_penalty=0.3, no_repeat_ngram=4)
        assert [system.losslessness.verdict for system in found.systems] == [verdict, verdict]
        told = "repetition penalty 1.4; frequency penalty 0.3; no repeat ngram 4"
        assert found.setting.controls == told
        assert told in markdown(found)
        assert any("Predicted speeds leave out" in warning for warning in found.warnings)
    assert controlled(0.0).setting.controls == "none"


def test_a_verdict_on_sampled_answers_that_forgets_the_processors_of_drafted_tokens_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Verified against the law before processing, answers follow that law, not the one that was asked for."""
    target, asked = markov_target(P), Controls(frequency_penalty=1.5).processors([])
    prompts, settings = [prompt.ids for prompt in CHATS], {"warp": Warp(), "max_new_tokens": 24, "batch_size": 10}
    plain = generate(target, None, prompts, processors=asked, **settings).generations
    forgetful = generate(target, MarkovDrafter(Q), prompts, **settings).generations
    assert compare_greedy(target, prompts, plain, forgetful, processors=asked).verdict == "failed"


def test_the_margins_of_half_precision_are_those_of_processed_logits() -> None:
    """Without its processors, a divergence at a forbidden token would look like one between two good tokens."""
    target = FrozenTarget(tiny_model().bfloat16())
    logits = target.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1].float()
    best, other = logits.topk(2).indices.tolist()
    made = Controls(repetition_penalty=1000.0).processors([])
    prompt = [best, 5, 6]
    plain, fast = ([Generation(tokens=[token])] for token in (other, best))
    found = compare_greedy(target, [prompt], plain, fast, tie_factor=1e6, processors=made).divergences[0]
    bare = compare_greedy(target, [prompt], plain, fast, tie_factor=1e6).divergences[0]
    assert found.gap is not None
    assert bare.gap is not None
    assert found.gap != bare.gap


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="min_new_tokens is 9, beyond max_new_tokens, 6"):
        recipe(controls={"min_new_tokens": 9})
    with pytest.raises(SpecdraftError, match="need the target's tokenizer"):
        controlled(0.0, stop=["x"])

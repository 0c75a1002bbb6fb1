"""What a request may ask for besides temperature, in the real loop: processors, stop strings, caps, many rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import eagle3
from enumeration import EXACT
from joint_law import exact_target, joint
from models import tiny_model
from pydantic import ValidationError
from tiny_chat import chat_tokenizer
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

from specdraft.config import SpecdraftError
from specdraft.controls import Controls, CountPenalty, StopStrings
from specdraft.decoding import Decoding, generate
from specdraft.drafters.base import Drafter
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.lookup import LookupDrafter
from specdraft.drafters.shapes import Chain, DynamicTree, Shape, StaticTree
from specdraft.target import FrozenTarget
from specdraft.warping import Prefixes, Processors, Warp

SHAPES: dict[str, Shape] = {
    "chain": Chain(3),
    "tree": DynamicTree(3, 2, 6),
    "static": StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))),
}


def rows_of(lengths: Sequence[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 96, (length,), generator=draw).tolist() for length in lengths]


def shaped(drafter: Any, shape: Shape) -> Drafter:
    drafter.shape = shape
    return drafter


def own(target: FrozenTarget, shape: Shape = SHAPES["chain"]) -> Drafter:
    """The target as its own drafter: every greedy draft is right."""
    return shaped(LMDrafter.of(target, target), shape)


def eagle(target: FrozenTarget, shape: Shape, kept: Tensor | None = None) -> Drafter:
    return shaped(eagle3(target, kept).to(dtype=target.dtype).eval(), shape)


def decode(target: FrozenTarget, drafter: Drafter | None, rows: Sequence[Sequence[int]], **settings: Any) -> Decoding:
    return generate(
        target, drafter, rows, **{"warp": Warp(), "max_new_tokens": 16, "batch_size": len(rows), **settings}
    )


def ids(run: Decoding) -> list[list[int]]:
    return [generation.tokens for generation in run.generations]


def endless(**changes: Any) -> FrozenTarget:
    model = tiny_model(**changes)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return FrozenTarget(model)


def processors(target: FrozenTarget, **controls: Any) -> Processors:
    made = Controls(**controls).processors(target.end_ids)
    assert made is not None
    return made


# Processors: at every node the law is that of the text before it


def test_greedy_with_processors_is_transformers_generate_for_rows_of_different_lengths() -> None:
    model, rows = tiny_model(), rows_of((3, 11, 6))
    asked = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 5}
    want = [
        model.generate(torch.tensor([row]), max_new_tokens=16, do_sample=False, **asked)[0, len(row) :].tolist()
        for row in rows
    ]
    target = FrozenTarget(model)
    made = processors(target, repetition_penalty=1.7, no_repeat_ngram=2, min_new_tokens=5)
    assert ids(decode(target, None, rows)) != want, "processors that change nothing prove nothing"
    assert ids(decode(target, None, rows, processors=made)) == want
    for shape in SHAPES.values():
        run = decode(target, own(target, shape), rows, processors=made)
        assert ids(run) == want
        assert sum(r.accepted for g in run.generations for r in g.rounds) > 20, "drafts are processed too"


class Remembers(LogitsProcessor):
    """Harsh and asymmetric: what the text's last two tokens and its length say moves every logit."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        places = torch.arange(scores.shape[1], dtype=scores.dtype)
        said = input_ids[:, -2:].sum(1, keepdim=True) + input_ids.shape[1] - self.prompt
        return scores + torch.sin(3 * places + said) - 2 * (places == input_ids[:, -1:]).to(scores)


def remembering(prompt: int) -> list[LogitsProcessor]:
    return [Remembers(prompt), RepetitionPenaltyLogitsProcessor(1.5), CountPenalty(prompt, 0.4, 0.3)]


EXACT_DRAFTERS: dict[str, Callable[[FrozenTarget], Drafter]] = {
    "chain": lambda target: eagle(target, Chain(2)),
    "chain, reduced": lambda target: eagle(target, Chain(2), torch.tensor([0, 2])),
    "tree": lambda target: eagle(target, DynamicTree(2, 2, 3)),
    "lookup": lambda _: shaped(LookupDrafter(), Chain(2)),
}


@pytest.mark.parametrize("name", EXACT_DRAFTERS)
def test_the_joint_law_with_processors_is_the_targets_to_rounding(name: str) -> None:
    target = exact_target(3)
    drafter = EXACT_DRAFTERS[name](target)
    found = joint(target, drafter, 3, processors=remembering)
    assert found.error < EXACT
    assert found.accepted > 0.2


def test_a_law_processed_with_another_text_than_its_nodes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error to be feared: every node of the draft processed with the text up to the root alone."""
    target, right = exact_target(3), Prefixes.process

    def wrong(self: Prefixes, logits: Tensor, drafted: Tensor, below: Tensor, asked: Tensor | None = None) -> Tensor:
        return right(self, logits, drafted, torch.zeros_like(below), asked)

    monkeypatch.setattr(Prefixes, "process", wrong)
    assert joint(target, eagle(target, Chain(1)), 3, processors=remembering).error > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_processed_rows_do_not_hang_on_the_batch(temperature: float) -> None:
    target = FrozenTarget(tiny_model().double())
    rows, made = rows_of((3, 9, 5, 7)), processors(target, frequency_penalty=0.8, no_repeat_ngram=3)
    settings: dict[str, Any] = {"warp": Warp(temperature), "processors": made}
    alone = decode(target, own(target), rows, batch_size=1, **settings)
    together = decode(target, own(target), rows, batch_size=3, **settings)
    assert ids(together) == ids(alone)
    assert [[r.accepted for r in g.rounds] for g in together.generations] == [
        [r.accepted for r in g.rounds] for g in alone.generations
    ]


def test_a_drafters_law_is_processed_as_the_targets_so_that_nothing_of_it_is_lost() -> None:
    """The target as its own drafter: every draft is accepted, with processors as without; unprocessed, few."""
    target, rows = endless(), rows_of((4, 7))
    made = processors(target, repetition_penalty=3.0, no_repeat_ngram=1)
    for warp in (Warp(), Warp(1.0)):
        run = decode(target, own(target, Chain(3)), rows, processors=made, warp=warp, max_new_tokens=13)
        assert all(r.accepted == 3 for g in run.generations for r in g.rounds)


class Asked(LogitsProcessor):
    """Stands for a grammar: it keeps every text that it is asked about."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.texts += input_ids.tolist()
        return scores


@pytest.mark.parametrize("name", SHAPES)
def test_e36_processors_are_not_asked_beyond_an_end(name: str) -> None:
    """Drafts run on behind an end token; no processor hears of it, nor of a row that has ended."""
    target, rows = endless(), rows_of((4, 6, 9))
    plain = ids(decode(target, None, rows))
    end = next(token for token in plain[0][3:] if token not in plain[0][:3])
    target.model.generation_config.eos_token_id = [end, 1]
    asked = Asked()
    run = decode(target, own(target, SHAPES[name]), rows, processors=lambda _: [asked])
    answers = [text[len(row) :] for text in asked.texts for row in rows if text[: len(row)] == row]
    assert len(answers) == len(asked.texts) > 20
    assert not any(end in answer or 1 in answer for answer in answers)
    assert run.generations[0].ended == "end token"
    assert ids(run) == [row[: row.index(end) + 1] if end in row else row for row in plain]


@pytest.mark.parametrize("warp", [Warp(), Warp(1.0)], ids=["greedy", "sampled"])
def test_processors_that_leave_no_token_are_an_error(warp: Warp) -> None:
    target = endless()
    with pytest.raises(SpecdraftError, match=r"row 0 of a batch no token"):
        decode(target, None, [[4]], warp=warp, processors=lambda _: [SuppressTokensLogitsProcessor([*range(96)])])

    class Four(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
            return scores if input_ids.shape[1] < 6 else torch.full_like(scores, -torch.inf)

    for drafter in (None, own(target)):
        with pytest.raises((SpecdraftError, ValueError), match=r"row 0 .* no token|p is no distribution"):
            decode(target, drafter, [[4, 7]], warp=warp, processors=lambda _: [Four()])


def test_the_penalties_by_hand() -> None:
    text, logits = torch.tensor([[3, 3, 1, 2, 2]]), torch.zeros(1, 5)
    assert CountPenalty(2, 0.5, 0.25)(text, logits).tolist() == [[0, -0.75, -1, 0, 0]]
    made = Controls(repetition_penalty=2.0, presence_penalty=0.5, min_new_tokens=4).processors([0])
    assert made is not None
    scores = torch.tensor([[1.0, 2.0, -3.0, 4.0, 5.0]])
    for processor in made(2):
        scores = processor(text, scores)  # type: ignore[arg-type]
    assert scores.tolist() == [[-torch.inf, 0.5, -6.5, 2.0, 5.0]], "three new tokens: one more before an end"


def test_controls_that_say_nothing_are_none_and_what_cannot_be_is_refused() -> None:
    assert Controls().processors([2]) is None
    assert Controls(stop=("x",)).processors([2]) is None
    assert Controls().description == "none"
    assert Controls(repetition_penalty=1.1, stop=("\n\n",)).description == r"repetition penalty 1.1; stop '\n\n'"
    with pytest.raises(SpecdraftError, match="no end token"):
        Controls(min_new_tokens=2).processors([])
    with pytest.raises(ValidationError, match="empty stop string"):
        Controls(stop=("a", ""))
    with pytest.raises(SpecdraftError, match="need the target's tokenizer"):
        decode(endless(), None, [[4]], stop=["a"])


# Stop strings: the answer is cut at the token that completes one, wherever in an accepted block it stands


def talking() -> FrozenTarget:
    tokenizer = chat_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return FrozenTarget(model, tokenizer)


def cut(target: FrozenTarget, tokens: list[int], stop: Sequence[str]) -> tuple[list[int], bool]:
    """What a stop string leaves of an answer, by decoding every part of it from its start."""
    for count in range(1, len(tokens) + 1):
        text = target.tokenizer.decode(tokens[:count]).rstrip("\ufffd")  # the last character may not be whole
        if any(string in text for string in stop):
            return tokens[:count], True
    return tokens, False


@pytest.mark.parametrize("name", SHAPES)
def test_a_stop_string_cuts_plain_and_speculative_answers_alike(name: str) -> None:
    target = talking()
    rows = [[9, 30, 41], [120, 33], [80, 81, 82, 83, 84]]
    free = ids(decode(target, None, rows, max_new_tokens=24))
    said = [target.tokenizer.decode(answer) for answer in free]
    places = set()
    for first in (2, 3, 7, 11, 14):
        stop = [said[0][first : first + 4], said[1][first + 2 : first + 5], "not said"]
        want = [cut(target, answer, stop) for answer in free]
        plain = decode(target, None, rows, max_new_tokens=24, stop=stop)
        fast = decode(target, own(target, SHAPES[name]), rows, max_new_tokens=24, stop=stop)
        for run in (plain, fast):
            assert ids(run) == [tokens for tokens, _ in want]
            assert [g.ended for g in run.generations] == ["stop string" if at else "cap" for _, at in want]
        for generation in fast.generations:
            assert 1 + sum(r.emitted for r in generation.rounds) == len(generation.tokens)
            places |= {r.accepted + 1 - r.emitted for r in generation.rounds if generation.ended == "stop string"}
    assert len(places) > 1, "at the end of a block, and within it"


def test_stop_strings_are_read_in_whole_characters_over_any_split() -> None:
    tokenizer = chat_tokenizer()
    text = "naïve — “日本語” 🎉 <|im_end|>and more  of it"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(text) * 0.8
    for string in ("ï", "— “", "本語” 🎉", "🎉", "<|im_end|>", "d|>an", "e  o", text):
        stops = StopStrings([string, "never said"], tokenizer)
        heard = [stops.completed_by(token) for token in tokens]
        first = heard.index(True)
        assert string in tokenizer.decode(tokens[: first + 1])
        assert string not in tokenizer.decode(tokens[:first])
    assert not any(map(StopStrings(["日語", "\ufffd", "x"], tokenizer).completed_by, tokens))


def test_an_end_token_comes_before_a_stop_string_and_both_before_the_cap() -> None:
    target = talking()
    [free] = ids(decode(target, None, [[9, 30, 41]], max_new_tokens=6))
    last = target.tokenizer.decode(free).rstrip("\ufffd")[-1]
    place = len(cut(target, free, [last])[0])
    asked: dict[str, Any] = {"max_new_tokens": place, "stop": [last]}
    for drafter in (None, own(target)):
        assert decode(target, drafter, [[9, 30, 41]], **asked).generations[0].ended == "stop string"
    target.model.generation_config.eos_token_id = [1, free[place - 1]]
    for drafter in (None, own(target)):
        [found] = decode(target, drafter, [[9, 30, 41]], **asked).generations
        assert found.ended == "end token"


# Caps and batches


def test_each_prompt_has_a_cap_of_its_own() -> None:
    target, rows = endless(), rows_of((4, 6, 3, 5))
    free, caps = ids(decode(target, None, rows)), [1, 7, 16, 4]
    for drafter in (None, own(target), eagle(target, SHAPES["tree"])):
        for size in (1, 4):
            run = decode(target, drafter, rows, max_new_tokens=caps, batch_size=size)
            assert ids(run) == [row[:cap] for row, cap in zip(free, caps, strict=True)]
            assert all(generation.ended == "cap" for generation in run.generations)
    for wrong in ([3, 3], [1, 2, 3, 0], 0):
        with pytest.raises(SpecdraftError, match="max_new_tokens must be at least 1, one for all or one a prompt"):
            decode(target, None, rows, max_new_tokens=wrong)


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_e24_e25_thirty_two_rows_of_different_lengths_are_what_they_are_alone(name: str) -> None:
    """Greedy, with ends and caps scattered; rounds are compared too."""
    target = FrozenTarget(tiny_model())
    rows, caps = rows_of([1 + (7 * i) % 23 for i in range(32)]), [3 + (5 * i) % 9 for i in range(32)]
    settings: dict[str, Any] = {"max_new_tokens": caps}
    plain = ids(decode(target, None, rows, **settings))
    drafter = shaped(LMDrafter.of(FrozenTarget(tiny_model(seed=1)), target), SHAPES["chain"])
    drafter = eagle(target, SHAPES["tree"]) if name == "tree" else drafter
    whole = decode(target, drafter, rows, **settings)
    assert ids(whole) == plain
    assert len({len(answer) for answer in plain}) > 5
    for some in range(3, 32, 9):
        [alone] = decode(target, drafter, [rows[some]], max_new_tokens=caps[some]).generations
        assert alone == whole.generations[some]


def test_sampled_rows_of_a_batch_of_thirty_two_are_what_they_are_alone() -> None:
    target = FrozenTarget(tiny_model().double())
    rows, settings = rows_of([1 + (7 * i) % 23 for i in range(32)]), {"warp": Warp(1.2, top_p=0.9), "max_new_tokens": 5}
    whole = decode(target, own(target), rows, **settings)
    some = [3, 17, 31]
    for index in some:
        streams = {"streams": [index], "batch_size": 1}
        [alone] = decode(target, own(target), [rows[index]], **settings, **streams).generations
        assert alone.tokens == whole.generations[index].tokens


def test_a_warp_with_prefixes_is_the_same_warp() -> None:
    """What a row's text is does not change which settings a law was warped with."""
    empty = Prefixes([], [], torch.empty(0, dtype=torch.int64))
    assert replace(Warp(0.5, 3), prefixes=empty) == Warp(0.5, 3)

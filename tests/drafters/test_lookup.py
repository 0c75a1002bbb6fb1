"""Prompt lookup: the longest suffix that occurred before, its latest occurrence, and what followed it."""

from collections.abc import Sequence

import pytest
import torch
from models import tiny_model

from specdraft.causal import Observation
from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.dice import SeededDice
from specdraft.drafters.lookup import LookupDrafter, Text
from specdraft.drafters.shapes import Chain, DynamicTree
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp


def continuation(tokens: Sequence[int], count: int = 3, shortest: int = 1, longest: int = 3) -> list[int]:
    return Text(tokens, shortest, longest).continuation(count)


def test_e16_the_most_recent_of_equally_long_matches() -> None:
    assert continuation([1, 2, 3, 9, 1, 2, 3, 7, 5, 1, 2, 3]) == [7, 5, 1]


def test_e16_a_longer_match_goes_before_a_more_recent_one() -> None:
    assert continuation([1, 2, 3, 9, 8, 3, 7, 1, 2, 3]) == [9, 8, 3], "not the 7 that followed the last 3"
    assert continuation([1, 2, 3, 9, 8, 3, 7, 1, 2, 3], longest=1) == [7, 1, 2]


def test_e16_short_matches_below_the_shortest_are_none() -> None:
    assert continuation([2, 3, 9, 1, 3], shortest=2) == []
    assert continuation([2, 3, 9, 1, 2, 3], shortest=2) == [9, 1, 2]


def test_e16_a_suffix_is_not_its_own_occurrence() -> None:
    assert continuation([1, 2, 3]) == []
    assert continuation([4, 4]) == [4]


def test_text_read_bit_by_bit_is_text_read_at_once() -> None:
    tokens = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    grown = Text(tokens[:1], 1, 3)
    for end in range(2, len(tokens) + 1):
        grown.extend(tokens[end - 1 : end])
        assert grown.continuation(4) == continuation(tokens[:end], 4)


def lookup(rows: Sequence[Sequence[int]], roots: Sequence[int]) -> DraftTree:
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    empty = torch.empty(len(rows), width, 0)
    drafter = LookupDrafter()
    memory = drafter.begin(Observation(tokens, mask, tokens, empty, empty), torch.tensor(roots))
    return drafter.propose(memory, warp=Warp(1.0), dice=SeededDice([0] * len(rows)))


def test_e17_the_newest_token_is_part_of_the_query() -> None:
    tree = lookup([[1, 2, 3, 1, 5, 6], [7, 8]], [2, 9])
    assert tree.laws is None
    assert tree.tokens[0].tolist() == [3, 1, 5, 6]
    assert tree.present.tolist() == [[True] * 4, [False] * 4]
    assert lookup([[1], [2]], [3, 4]).nodes == 0


def test_e17_on_text_of_period_three_every_draft_is_right_after_one_period() -> None:
    """A verifier that goes on with abcabc..."""
    drafter = LookupDrafter()
    drafter.shape = Chain(3)
    period = [7, 8, 9]
    text = [7, 8, 9, 7]
    prompt = torch.tensor([text[:-1]])
    empty = torch.empty(1, 3, 0)
    memory = drafter.begin(
        Observation(prompt, torch.ones_like(prompt, dtype=torch.bool), prompt, empty, empty), torch.tensor(text[-1:])
    )
    for _ in range(5):
        tree = drafter.propose(memory, warp=Warp(), dice=SeededDice([0]))
        due = [period[(len(text) + step) % 3] for step in range(4)]
        assert tree.tokens[0].tolist() == due[:3]
        seen = torch.tensor([[text[-1], *due[:3]]])
        verdict = Verdict(torch.tensor([[0, 1, 2]]), torch.tensor([3]), torch.tensor(due[3:]), seen, seen)
        memory = drafter.remember(memory, verdict, Observation(seen, seen > 0, seen, empty, empty))
        text += due


def test_e17_a_target_without_an_end_id() -> None:
    model = tiny_model(eos_token_id=None)
    model.generation_config.eos_token_id = None
    target = FrozenTarget(model)
    assert target.end_ids == ()
    prompts = [[3, 4, 5, 3, 4, 5, 3]]
    plain, fast = (
        generate(target, drafter, prompts, warp=Warp(), max_new_tokens=20).generations[0]
        for drafter in (None, LookupDrafter())
    )
    assert fast.tokens == plain.tokens
    assert fast.ended == "cap"


def test_settings_that_say_nothing_are_refused() -> None:
    with pytest.raises(SpecdraftError, match="1 <= shortest <= longest"):
        LookupDrafter(shortest=3, longest=2)
    drafter = LookupDrafter()
    drafter.shape = DynamicTree()
    empty = torch.empty(1, 1, 0)
    seen = Observation(torch.ones(1, 1).long(), torch.ones(1, 1).bool(), torch.zeros(1, 1).long(), empty, empty)
    with pytest.raises(SpecdraftError, match="drafts chains"):
        drafter.propose(drafter.begin(seen, torch.tensor([1])), warp=Warp(), dice=SeededDice([0]))

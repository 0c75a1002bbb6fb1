"""Lookup where it matches and a learned drafter elsewhere, row by row; each remembers everything."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from drafting import eagle3
from enumeration import EXACT
from evaluation.markov import MarkovDrafter, law, markov_target
from joint_law import exact_target, joint
from models import tiny_model
from torch import Tensor

from specdraft.causal import Observation
from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.dice import Dice, SeededDice
from specdraft.drafters.base import Drafter
from specdraft.drafters.hybrid import HybridDrafter
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.lookahead import LookaheadDrafter
from specdraft.drafters.lookup import LookupDrafter
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.evaluation.stage import HybridSource
from specdraft.target import FrozenTarget
from specdraft.tree import CHOSEN, NO_NODE, DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

PROMPTS = [[5, 9, 3, 8, 1, 7], [4, 6], [11, 3, 12, 13, 11, 3]]


class Counted(MarkovDrafter):
    """Counts how often it is asked."""

    asked = 0

    def propose(self, memory: Tensor, *, warp: Warp, dice: Dice) -> DraftTree:
        self.asked += 1
        return super().propose(memory, warp=warp, dice=dice)


def observed(rows: Sequence[Sequence[int]]) -> Observation:
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    empty = torch.empty(len(rows), width, 0)
    return Observation(tokens, mask, tokens, empty, empty)


def own(tree: DraftTree, row: int) -> tuple[list[int], bool]:
    """The row's tokens, and whether they were chosen."""
    laws = tree.draws.law[row][tree.draws.node[row] != NO_NODE]
    return tree.tokens[row, tree.present[row]].tolist(), bool((laws == CHOSEN).all())


@pytest.mark.parametrize("shape", [Chain(3), DynamicTree(3, 2, 5)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["lm", "eagle3", "lookahead"])
def test_e01_greedy_output_is_the_targets_in_any_batch(kind: str, shape: Shape) -> None:
    target = FrozenTarget(tiny_model())
    seconds = {
        "lm": LMDrafter.of(FrozenTarget(tiny_model(seed=1)), target),
        "eagle3": eagle3(target).eval(),
        "lookahead": LookaheadDrafter(window=3, ngram=4),
    }
    hybrid = HybridDrafter(LookupDrafter(), cast(Drafter, seconds[kind]))
    hybrid.shape = shape
    settings: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 14}
    plain = [g.tokens for g in generate(target, None, PROMPTS, **settings).generations]
    for size in (1, 3):
        run = generate(target, hybrid, PROMPTS, batch_size=size, **settings)
        assert [g.tokens for g in run.generations] == plain


def test_a_sampled_row_does_not_depend_on_what_its_neighbours_need() -> None:
    target = FrozenTarget(tiny_model())
    hybrid = HybridDrafter(LookupDrafter(), cast(Drafter, LMDrafter.of(FrozenTarget(tiny_model(seed=1)), target)))
    one, three = (
        generate(target, hybrid, PROMPTS, warp=Warp(0.5), max_new_tokens=12, batch_size=size).generations
        for size in (1, 3)
    )
    assert [g.tokens for g in one] == [g.tokens for g in three]
    assert any(r.accepted for g in one for r in g.rounds)


@pytest.mark.parametrize("least", [1, 2])
def test_the_joint_law_is_the_targets_to_rounding(least: int) -> None:
    target = exact_target(3)
    second = LMDrafter.of(exact_target(3, seed=1), target).double()
    hybrid = HybridDrafter(LookupDrafter(shortest=2, longest=2), cast(Drafter, second), least)
    hybrid.shape = Chain(2)
    found = joint(target, hybrid, 3)
    assert found.error < EXACT
    assert found.accepted > 0.2


def test_each_row_is_drafted_by_who_has_something_to_offer() -> None:
    """Row 0 repeats itself, row 1 does not, row 2 offers one token only."""
    second = Counted(law(1))
    hybrid = HybridDrafter(LookupDrafter(), second, least=2)
    hybrid.shape = Chain(3)
    memory = hybrid.begin(observed([[1, 2, 3, 4, 1], [5, 6], [7, 7]]), torch.tensor([2, 7, 1]))
    rolled = hybrid.propose(memory, warp=Warp(1.0), dice=SeededDice([1, 2, 3]))
    alone = second.propose(memory.parts[1], warp=Warp(1.0), dice=SeededDice([1, 2, 3]))
    assert own(rolled, 0) == ([3, 4, 1], True)
    for row in (1, 2):
        assert own(rolled, row) == (alone.tokens[row].tolist(), False)
        assert rolled.laws is not None
        assert torch.equal(rolled.laws[row, rolled.draws.law[row, :3]], alone.laws[row])  # type: ignore[index]


def test_the_second_is_not_asked_where_no_row_needs_it_and_remembers_all_the_same() -> None:
    second = Counted(law(1))
    hybrid = HybridDrafter(LookupDrafter(), second)
    hybrid.shape = Chain(2)
    memory = hybrid.begin(observed([[1, 2, 3, 1], [5, 6, 7, 5]]), torch.tensor([2, 6]))
    tree = hybrid.propose(memory, warp=Warp(1.0), dice=SeededDice([1, 2]))
    assert second.asked == 0
    assert [own(tree, row)[0] for row in (0, 1)] == [[3, 1], [7, 5]]
    path, ones = torch.tensor([[0], [-1]]), torch.ones(2, 1)
    verdict = Verdict(path, torch.tensor([1, 0]), torch.tensor([4, 3]), ones.bool(), ones)
    memory = hybrid.remember(memory, verdict, observed([[2, 3], [6]]))
    assert memory.parts[0].texts[0].tokens == [1, 2, 3, 1, 2, 3, 4]
    assert memory.parts[1].tolist() == [4, 3], "the new roots"
    memory = hybrid.keep(memory, [1])
    tree = hybrid.propose(memory, warp=Warp(1.0), dice=SeededDice([2]))
    assert second.asked == 1
    assert memory.parts[0].texts[0].tokens == [5, 6, 7, 5, 6, 3]
    assert own(tree, 0)[1] is False


def test_each_is_shown_its_own_taps() -> None:
    target = FrozenTarget(tiny_model())
    seen: dict[str, Tensor] = {}

    class Reader(MarkovDrafter):
        def __init__(self, taps: tuple[int, ...]) -> None:
            super().__init__(law(1))
            self.taps = taps

        def begin(self, seen_: Observation, roots: Tensor, session: object = None) -> Tensor:
            seen[str(self.taps)] = seen_.taps
            return roots

    tokens, mask = torch.tensor([[3, 4, 5]]), torch.ones(1, 3).bool()
    for first, second in (((3, 1), (2, 1)), ((), (2,)), ((), ())):
        hybrid = HybridDrafter(Reader(first), Reader(second))
        assert hybrid.taps == tuple(sorted({*first, *second}))
        hybrid.begin(target.observe(tokens, mask, hybrid.taps), torch.tensor([1]))
        for taps in (first, second):
            assert torch.equal(seen[str(taps)], target.observe(tokens, mask, taps).taps)


def test_e17_on_text_of_period_three_lookup_drafts_and_all_is_accepted() -> None:
    """Also where the target has no end id; the learned drafter is asked in the first rounds alone."""
    p = torch.full((8, 8), 1e-6, dtype=torch.float64)
    p[torch.arange(8), (torch.arange(8) + 1) % 3] = 1
    second = Counted(law(1))
    hybrid = HybridDrafter(LookupDrafter(), second)
    hybrid.shape = Chain(3)
    [found] = generate(
        markov_target(p / p.sum(-1, keepdim=True)), hybrid, [[0]], warp=Warp(1.0), max_new_tokens=30
    ).generations
    assert all(r.accepted == r.offered == 3 for r in found.rounds[4:-1])
    assert 1 <= second.asked <= 4


def test_shapes_are_handed_on_and_what_cannot_be_is_refused() -> None:
    second = MarkovDrafter(law(1))
    hybrid = HybridDrafter(LookupDrafter(), second)
    assert hybrid.shape == second.shape
    hybrid.shape = DynamicTree(6, 2, 9)
    assert (hybrid.drafters[0].shape, second.shape) == (Chain(6), DynamicTree(6, 2, 9))
    with pytest.raises(SpecdraftError, match="at least 1 token"):
        HybridDrafter(LookupDrafter(), second, least=0)
    hybrid = HybridDrafter(LookaheadDrafter(), second)
    memory = hybrid.begin(observed([[1, 2]]), torch.tensor([3]))
    with pytest.raises(SpecdraftError, match="use an ensemble"):
        hybrid.propose(memory, warp=Warp(), dice=SeededDice([0]))


def test_a_recipe_makes_it() -> None:
    target = FrozenTarget(tiny_model())
    source = HybridSource.model_validate({"kind": "hybrid", "second": {"kind": "early_exit", "exit": 2}, "least": 2})
    made = source.load(target)
    assert isinstance(made, HybridDrafter)
    assert made.least == 2
    assert source.name == "prompt lookup (1 to 3 tokens), else the target's first 2 layers"
    settings: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 10, "batch_size": 3}
    plain, fast = (generate(target, drafter, PROMPTS, **settings).generations for drafter in (None, made))
    assert [g.tokens for g in fast] == [g.tokens for g in plain], "also on the target's own keys and values"

"""The rule that adapts the draft: exact whatever it picks, right where theory knows the answer, and forgetful."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, cast

import pytest
import torch
from drafting import eagle3
from enumeration import EXACT, ScriptedDice, law, outcomes
from evaluation.markov import MarkovDrafter, markov_target
from joint_law import exact_target, joint
from models import tiny_model
from torch import Tensor

from specdraft import theory
from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.dice import Dice
from specdraft.drafters.adaptive import AdaptiveDrafter, AdaptiveMemory, Evidence, best, learned, rates
from specdraft.drafters.base import Drafter
from specdraft.drafters.proposals import Words, propose
from specdraft.drafters.shapes import Chain, Choice, DynamicTree, Fixed, Shape
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

WARP = Warp(3.0)


class Table(MarkovDrafter):
    """A drafter of any shape that is a table: row x is its law after x."""

    def propose(self, memory: Tensor, *, warp: Warp, dice: Dice) -> DraftTree:
        words = Words(len(self.logits))
        return propose(self.shape, self.logits[memory], lambda f: self.logits[f.tokens], words, warp, dice)


class Watched(AdaptiveDrafter):
    """Notes what it drafted, round by round."""

    def __init__(self, drafter: Drafter, costs: Mapping[Fixed, float], **settings: float) -> None:
        super().__init__(drafter)
        self.shape, self.drafted = choice(costs, **settings), list[Fixed]()

    def _next(self, memory: AdaptiveMemory) -> Fixed:
        self.drafted.append(super()._next(memory))
        return self.drafted[-1]


def choice(costs: Mapping[Fixed, float], **settings: float) -> Choice:
    return Choice(tuple(costs), tuple(costs.values()), **settings)


def agreeing(alpha: float) -> tuple[Tensor, Tensor]:
    """Laws over 8 tokens of a target and a drafter that accepts `alpha` of its drafts after every token."""
    p, q = (torch.full((8, 8), 1e-9, dtype=torch.float64) for _ in range(2))
    after = torch.arange(8)
    p[after, (after + 1) % 8], p[after, (after + 3) % 8] = 0.97, 0.03
    q[after, (after + 1) % 8], q[after, (after + 2) % 8] = alpha, 1 - alpha
    return p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)


def chain_costs(longest: int, c: float, v: Callable[[int], float] = theory.flat) -> dict[Fixed, float]:
    return {Chain(gamma): v(1 + gamma) + gamma * c for gamma in range(longest + 1)}


@pytest.mark.parametrize("shape", [Chain(3, 0.4), DynamicTree(2, 2, 4, 0.2)], ids=["chain", "tree"])
def test_the_joint_law_of_a_draft_that_stops_is_the_targets_to_rounding(shape: Shape) -> None:
    target = exact_target(3)
    table = Table(torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.5, 0.4], [0.3, 0.3, 0.4]], dtype=torch.float64))
    table.shape = shape
    found = joint(target, table, 3)
    assert found.error < EXACT
    table.shape = type(shape)(**{**vars(shape), "stop_below": 0.0})
    assert 0 < found.accepted < joint(target, table, 3).accepted, "it drafts, and it stops"


@pytest.mark.parametrize("caps", [(4,), (2, 3)], ids=["one row", "two rows"])
def test_the_joint_law_of_several_adaptive_rounds_and_rows_is_the_targets_to_rounding(caps: tuple[int, ...]) -> None:
    """Each outcome is a batch of its own, whose rows share a script: what one row does changes the other's draft."""
    target, prompts = exact_target(2, num_hidden_layers=1), [[1, 0], [0, 1, 1]][: len(caps)]
    table = Table(torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.float64))
    costs: dict[Fixed, float] = {Chain(0): 1.0, Chain(1): 1.45, DynamicTree(1, 2, 2): 1.6}
    adaptive, followed = Watched(table, costs, half_life=1.0), set()

    def run(script: ScriptedDice, _: int) -> list[tuple[tuple[int, ...], ...]]:
        start, settings = len(adaptive.drafted), {"warp": WARP, "batch_size": len(caps)}
        dice = lambda _: Shared(script, range(len(caps)))  # noqa: E731
        made = generate(target, adaptive, prompts, max_new_tokens=caps, dice=dice, **settings).generations  # type: ignore[arg-type]
        followed.add(tuple(adaptive.drafted[start:]))
        return [tuple(tuple(generation.tokens) for generation in made)]

    emitted = law(outcomes(run, width=1))
    for texts in product(*(product(range(2), repeat=cap) for cap in caps)):
        want = 1.0
        for prompt, text in zip(prompts, texts, strict=True):
            ids = torch.tensor([[*prompt, *text]])
            laws = WARP(target.head(target.observe(ids, torch.ones_like(ids).bool(), ()).hidden))[0]
            want *= float(laws[range(len(prompt) - 1, ids.shape[1] - 1), list(text)].prod())
        assert abs(emitted[texts] - want) < EXACT
    assert len(followed) > 1, "what is drafted hangs on what was accepted"


class Shared:
    """One script thrown for all rows of a batch, one after the other."""

    def __init__(self, script: ScriptedDice, rows: Sequence[int]) -> None:
        self.script, self.rows = script, rows

    def accept(self, chance: Tensor, rows: Sequence[int]) -> Tensor:
        return self.script.accept(chance, [0] * len(rows))

    def draw(self, law: Tensor, rows: Sequence[int]) -> Tensor:
        return self.script.draw(law, [0] * len(rows))

    def keep(self, rows: Sequence[int]) -> "Shared":
        return Shared(self.script, rows)


@pytest.mark.parametrize(("alpha", "c", "slope"), [(0.8, 0.2, 0.0), (0.6, 0.2, 0.1), (0.3, 0.3, 0.1), (0.95, 0.1, 0.0)])
def test_the_choice_becomes_that_of_theory(alpha: float, c: float, slope: float) -> None:
    def v(tokens: int) -> float:
        return 1 + slope * (tokens - 1)

    p, q = agreeing(alpha)
    wanted, _ = theory.best_gamma([alpha] * 8, c, v)
    adaptive = Watched(Table(q), chain_costs(8, c, v), half_life=400)
    generate(markov_target(p), adaptive, [[i] for i in range(8)], warp=Warp(1.0), max_new_tokens=150, batch_size=8)
    late = adaptive.drafted[-20:]
    assert abs(sum(shape.depth for shape in late) / len(late) - wanted) <= 0.5
    assert alpha > 0.5 or wanted == 0, "one of the cases is not to speculate"


def test_a_tree_is_chosen_where_it_is_worth_its_nodes() -> None:
    """The drafter's second guess is right whenever the first is not."""
    p, q = torch.full((8, 8), 1e-9), torch.full((8, 8), 1e-9)
    after = torch.arange(8)
    p[after, (after + 1) % 8] = 1.0
    q[after, (after + 2) % 8], q[after, (after + 1) % 8] = 0.6, 0.4
    tree = DynamicTree(2, 2, 6)
    costs: dict[Fixed, float] = {Chain(0): 1.0, Chain(2): 1.2, tree: 1.3, DynamicTree(1, 1, 1): 1.1}
    adaptive = Watched(Table(q / q.sum(1, keepdim=True)), costs)
    generate(markov_target(p / p.sum(1, keepdim=True)), adaptive, [[0]], warp=Warp(), max_new_tokens=120)
    assert adaptive.drafted[-10:] == [tree] * 10


def after_round(shape: Fixed, accepted: int) -> Verdict:
    """Of one row that was drafted a chain."""
    depths = torch.arange(max(shape.depth, 1))
    path = depths.where(depths < accepted, -1)[None]
    offered = (depths <= accepted)[None] & (shape.depth > 0)
    return Verdict(path, torch.tensor([accepted]), torch.tensor([0]), offered, (path >= 0).float())


def test_plain_decoding_is_left_again_once_what_was_learned_has_faded() -> None:
    """Through a stretch in which the drafter is always wrong, and out of it."""
    chains, evidence, drafted = choice(chain_costs(4, 0.25)), cast(Evidence, {}), []
    for step in range(400):
        drafted.append(shape := best(chains, evidence))
        verdict = after_round(shape, 0 if step < 200 else shape.depth)
        evidence = learned(evidence, shape, verdict, chains.half_life)
    wrong = drafted[20:200]
    assert 0.7 * len(wrong) < wrong.count(Chain(0)) < len(wrong), "mostly plain, and tried again now and then"
    assert set(drafted[260:]) == {Chain(4)}, "and taken up for good"


def test_rates_are_faded_means_that_start_from_the_depth_above() -> None:
    tree = DynamicTree(2, 2, 4)
    evidence = learned(learned({}, Chain(3), after_round(Chain(3), 2), 1.0), Chain(1), after_round(Chain(1), 0), 1.0)
    assert evidence == {Chain(0): [(0.5, 1.5), (0.5, 0.5), (0.0, 0.5)]}
    assert rates(evidence, Chain(2), 0.8) == pytest.approx([(0.5 + 1.6) / 3.5, (0.5 + 1.2) / 2.5])
    assert rates(evidence, Chain(1), 0.8) == pytest.approx([(0.5 + 1.6) / 3.5])
    assert rates(evidence, tree, 0.8) == pytest.approx([0.8, 0.8]), "a tree has rates of its own"
    assert rates(learned(evidence, tree, after_round(tree, 1), 1.0), tree, 0.8)[0] == pytest.approx(2.6 / 3)


@pytest.mark.parametrize("size", [1, 3])
def test_e01_greedy_output_is_the_targets_in_any_batch(size: int) -> None:
    target, prompts = FrozenTarget(tiny_model()), [[5, 9, 3, 8, 1, 7], [4, 6], [11, 3, 12, 13]]
    costs: dict[Fixed, float] = {Chain(0): 1.0, Chain(1): 1.3, Chain(3): 1.9, DynamicTree(2, 2, 4): 1.5}
    adaptive = Watched(cast(Drafter, eagle3(target).eval()), costs, half_life=4)
    settings: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 24, "batch_size": size}
    plain = [g.tokens for g in generate(target, None, prompts, **settings).generations]
    assert [g.tokens for g in generate(target, adaptive, prompts, **settings).generations] == plain
    assert len({*adaptive.drafted}) > 1


def test_e27_what_was_decoded_before_changes_nothing() -> None:
    p, q = agreeing(0.6)
    adaptive = Watched(Table(q), chain_costs(6, 0.2))
    settings: dict[str, Any] = {"warp": Warp(1.0), "max_new_tokens": 40}
    first, again = (generate(markov_target(p), adaptive, [[1], [1]], streams=[5, 5], **settings) for _ in range(2))
    one, other = first.generations
    assert one.rounds == other.rounds, "the same prompt twice in one call"
    assert [g.rounds for g in again.generations] == [one.rounds] * 2, "and in two"
    assert len({r.proposed for r in one.rounds}) > 1


def test_a_fixed_shape_is_drafted_as_the_drafter_alone_would() -> None:
    p, q = agreeing(0.6)
    table = Table(q)
    adaptive = AdaptiveDrafter(table)
    settings: dict[str, Any] = {"warp": Warp(1.0), "max_new_tokens": 20, "batch_size": 2}
    for shape in (Chain(3), DynamicTree(2, 2, 4)):
        table.shape = adaptive.shape = shape
        made = [generate(markov_target(p), one, [[1], [2]], **settings).generations for one in (table, adaptive)]
        assert [g.rounds for g in made[0]] == [g.rounds for g in made[1]]


def test_what_cannot_be_chosen_among_is_refused() -> None:
    with pytest.raises(SpecdraftError, match="0 shapes"):
        Choice((), ())
    with pytest.raises(SpecdraftError, match="above 0"):
        Choice((Chain(1),), (0.0,))
    with pytest.raises(SpecdraftError, match="prior must lie"):
        Choice((Chain(1),), (1.0,), prior=1.0)
    p, q = agreeing(0.6)
    table = Table(q)
    table.shape = Choice((Chain(1),), (1.0,))
    with pytest.raises(SpecdraftError, match="AdaptiveDrafter"):
        generate(markov_target(p), table, [[1]], warp=Warp(), max_new_tokens=4)

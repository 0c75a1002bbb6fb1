"""Lookahead decoding: its window is a Jacobi iteration, its pool what that found, its answers the target's own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from enumeration import EXACT
from evaluation.markov import VOCABULARY, markov_target
from joint_law import exact_target, joint
from models import tiny_model

from specdraft.causal import Observation
from specdraft.config import SpecdraftError
from specdraft.decoding import Decoding, Generation, _Batch, _Row, generate
from specdraft.dice import SeededDice
from specdraft.drafters.lookahead import LookaheadDrafter, LookaheadMemory, Pool
from specdraft.drafters.shapes import Chain, DynamicTree, Shape, StaticTree
from specdraft.evaluation.stage import LookaheadSource
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Thresholds
from specdraft.warping import Warp

PROMPTS = [[5, 9, 3, 8, 1, 7], [4], [11, 3, 12, 13, 11, 3]]


def drafter(shape: Shape | None = None, **settings: int) -> LookaheadDrafter:
    made = LookaheadDrafter(**{"window": 4, "ngram": 3, "guesses": 3, **settings})
    made.shape = shape or made.shape
    return made


def begun(one: LookaheadDrafter, rows: Sequence[Sequence[int]], roots: Sequence[int]) -> LookaheadMemory:
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    empty = torch.empty(len(rows), width, 0)
    return one.begin(Observation(tokens, mask, tokens, empty, empty), torch.tensor(roots))


def proposed(one: LookaheadDrafter, memory: LookaheadMemory) -> DraftTree:
    return one.propose(memory, warp=Warp(), dice=SeededDice([0] * len(memory.rows)))


def paths(tree: DraftTree, row: int, candidates: bool) -> list[list[int]]:
    """The tokens from the root to each candidate or probe."""
    found = []
    for node in (tree.present & (tree.candidate == candidates))[row].nonzero().flatten().tolist():
        path = []
        while node >= 0:
            path.insert(0, int(tree.tokens[row, node]))
            node = int(tree.parents[row, node])
        found.append(path)
    return found


@pytest.mark.parametrize("shape", [None, Chain(3), DynamicTree(2, 2, 3)], ids=["own", "chain", "tree"])
def test_e01_greedy_output_is_the_targets_in_any_batch(shape: Shape | None) -> None:
    target = FrozenTarget(tiny_model())
    settings: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 14}
    plain = [g.tokens for g in generate(target, None, PROMPTS, **settings).generations]
    for size in (1, 3):
        run = generate(target, drafter(shape), PROMPTS, batch_size=size, **settings)
        assert [g.tokens for g in run.generations] == plain
        assert any(r.accepted for g in run.generations for r in g.rounds)


def test_a_sampled_row_does_not_depend_on_its_neighbours() -> None:
    target = FrozenTarget(tiny_model())
    one, three = (
        [
            g.tokens
            for g in generate(
                target, drafter(), PROMPTS, warp=Warp(0.7), max_new_tokens=12, batch_size=size
            ).generations
        ]
        for size in (1, 3)
    )
    assert one == three


def test_typical_acceptance_passes_over_probes_as_well() -> None:
    """A lossy rule under which every candidate stands, so that each round accepts a whole n-gram where one is known."""
    target = FrozenTarget(tiny_model())
    given: dict[str, Any] = {"warp": Warp(1.0), "max_new_tokens": 20, "lossy": Thresholds(1e-9, 1e-9), "batch_size": 3}
    found = generate(target, drafter(), PROMPTS, **given).generations
    assert {r.accepted for g in found for r in g.rounds} == {0, 2}


@pytest.mark.parametrize("shape", [Chain(2), DynamicTree(2, 3, 6)], ids=["chain", "tree"])
def test_the_joint_law_is_the_targets_to_rounding(shape: Shape) -> None:
    found = joint(exact_target(3), drafter(shape), 5)
    assert found.error < EXACT
    assert found.accepted > 0.2, "something was drafted"


class Plain:
    """The iteration in plain Python, one forward pass a guess: columns of tokens that are read after text + root."""

    def __init__(self, target: FrozenTarget, text: list[int], window: int, ngram: int) -> None:
        self.target, self.text, self.window = target, text, window
        span = text[-(window + ngram - 2) :]
        while len(span) < window + ngram - 2:
            span = [*span, *span]
        self.columns = [span[j : j + ngram - 1] for j in range(window)]
        self.grams: list[tuple[int, ...]] = []

    def says(self, tokens: list[int]) -> int:
        row = torch.tensor([tokens])
        return int(self.target.head(self.target.observe(row, torch.ones_like(row).bool(), ()).hidden[0, -1]).argmax())

    def round(self, emitted: list[int]) -> None:
        """The pass that emitted these tokens, the last of them the new root."""
        trunk = [column[0] for column in self.columns]
        answers = [self.says([*self.text, *trunk[: j + 1], *self.columns[j][1:]]) for j in range(self.window)]
        self.grams = [(*column, answer) for column, answer in zip(self.columns, answers, strict=True)]
        younger = [[*column[1:], answer] for column, answer in zip(self.columns, answers, strict=True)]
        passed = (len(emitted) - 1) % self.window
        self.columns = younger[passed:] + younger[:passed]
        self.text = [*self.text, *emitted]


@pytest.mark.parametrize("ngram", [2, 4])
def test_the_window_is_a_jacobi_iteration_and_the_pool_is_what_it_found(ngram: int) -> None:
    """Of each of three rows, whatever the others accept, against one forward pass for every guess."""
    target = FrozenTarget(tiny_model())
    one = drafter(window=4, ngram=ngram, guesses=100)
    generations = [Generation() for _ in PROMPTS]
    asked = [_Row(generation, prompt, 15, frozenset()) for generation, prompt in zip(generations, PROMPTS, strict=True)]
    work = _Batch(target, one, Warp(), Decoding(generations), asked, SeededDice(range(3)))
    with torch.no_grad():
        work.prefill()
    rows = list(work.memory.rows)
    plain = [Plain(target, [*prompt, row.root], 4, ngram) for prompt, row in zip(PROMPTS, rows, strict=True)]
    grams: list[list[tuple[int, ...]]] = [[], [], []]
    for _ in range(8):
        if len(work.rows) < 3:
            break
        before = [len(g.tokens) for g in generations]
        with torch.no_grad():
            work.round()
        for row, (own, generation) in enumerate(zip(plain, generations, strict=True)):
            if generation.ended is None:
                own.round(generation.tokens[before[row] :])
                grams[row] = [*own.grams, *(gram for gram in grams[row] if gram not in own.grams)]
                assert [list(column) for column in rows[row].columns()] == own.columns
                for first in range(96):
                    mine = [gram[1:] for gram in dict.fromkeys(grams[row]) if gram[0] == first]
                    assert rows[row].pool.after(first) == mine
    assert all(grams)
    assert any(r.accepted for g in generations for r in g.rounds), "a window that was moved by more than one"


def cycle(period: int) -> torch.Tensor:
    """A law that goes round a..., with next to nothing for other tokens."""
    p = torch.full((VOCABULARY, VOCABULARY), 1e-6, dtype=torch.float64)
    p[torch.arange(VOCABULARY), (torch.arange(VOCABULARY) + 1) % period] = 1
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("warp", [Warp(), Warp(1.0)], ids=["greedy", "sampled"])
def test_e17_on_text_of_period_three_every_draft_is_right_after_one_period(warp: Warp) -> None:
    """Also without an end id, and after a prompt that says nothing of the period."""
    target = markov_target(cycle(3))
    assert target.end_ids == ()
    one = drafter(Chain(3), window=3, ngram=4)
    for prompt in ([0, 1, 2, 0], [5]):
        [found] = generate(target, one, [prompt], warp=warp, max_new_tokens=40).generations
        late = found.rounds[4:-1]
        assert all(r.offered == r.accepted == 3 for r in late), [r.accepted for r in found.rounds]
        assert len(late) >= 5


def test_probes_are_a_trunk_with_columns_below_and_are_never_offered() -> None:
    one = drafter(window=3, ngram=3)
    memory = begun(one, [[9, 1, 2, 3], [7]], [4, 8])
    tree = proposed(one, memory)
    assert not tree.candidate.any()
    assert (tree.draws.node < 0).all()
    # the last 4 tokens are 1 2 3 4: trunk 1 2 3, and below its nodes the younger guesses 2 3 4; a token is shared
    assert paths(tree, 0, candidates=False) == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert paths(tree, 1, candidates=False) == [[7], [7, 8], [7, 8, 7], [7, 8, 7, 8]]


def test_shapes_cut_what_is_drafted_and_a_static_tree_is_refused() -> None:
    one = drafter(ngram=4, guesses=3)
    memory = begun(one, [[1]], [5])
    for gram in ((5, 8, 8, 8), (6, 1, 1, 1), (5, 6, 9, 1), (5, 6, 7, 1)):
        memory.rows[0].pool.add(gram)
    whole = [[6], [6, 7], [6, 7, 1], [6, 9], [6, 9, 1], [8], [8, 8], [8, 8, 8]]
    assert paths(proposed(one, memory), 0, True) == whole
    for shape, kept in (
        (Chain(4), whole[:3]),
        (Chain(2), whole[:2]),
        (DynamicTree(2, 9, 99), [[6], [6, 7], [6, 9], [8], [8, 8]]),
        (DynamicTree(9, 1, 99), whole[:3]),
        (DynamicTree(9, 9, 4), whole[:4]),
    ):
        one.shape = shape
        assert paths(proposed(one, memory), 0, True) == kept
    one.shape = StaticTree(((0,),))
    with pytest.raises(SpecdraftError, match="chains and dynamic trees"):
        proposed(one, memory)
    with pytest.raises(SpecdraftError, match="ngram of at least 2"):
        LookaheadDrafter(ngram=1)


def test_a_pool_is_bounded_and_the_most_recent_come_first() -> None:
    pool = Pool(2)
    for gram in ((1, 2, 3), (1, 4, 5), (1, 2, 3), (7, 7, 7), (1, 6, 6)):
        pool.add(gram)
    assert pool.after(1) == [(6, 6), (2, 3)]
    assert pool.after(7) == [(7, 7)]
    assert pool.after(2) == []


def test_a_recipe_makes_it() -> None:
    source = LookaheadSource.model_validate({"kind": "lookahead", "window": 5, "ngram": 3})
    made = source.load(markov_target(cycle(3)))
    assert isinstance(made, LookaheadDrafter)
    assert (made.window, made.ngram, made.guesses) == (5, 3, 7)
    assert source.name == "lookahead (window 5, 3-grams)"

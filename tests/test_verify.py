"""The emitted tokens follow p, exactly: every outcome of drafting and verification is enumerated."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from enumeration import (
    EXACT,
    Drafting,
    ScriptedDice,
    Trial,
    acceptance,
    constant,
    context,
    draft,
    drawn,
    enumerate_round,
    joint_error,
    law,
    markov,
    outcomes,
    results,
)
from torch import Tensor

from specdraft.dice import SeededDice
from specdraft.tree import NO_NODE, ROOT, DraftTree, Draws, merge
from specdraft.verify import Verdict, verify
from specdraft.warping import Warp

CHAIN = [Trial(), Trial(0), Trial(1)]
INDEPENDENT = [Trial(), Trial(), Trial(0), Trial(0), Trial(1)]
WITHOUT_REPLACEMENT = [Trial(ROOT, 0), Trial(ROOT, 0), Trial(0, 0), Trial(0, 0), Trial(1, 0)]
EXHAUSTED = [Trial(ROOT, 0), Trial(ROOT, 0), Trial(ROOT, 0)]
TWO_GROUPS = [Trial(ROOT, 0), Trial(ROOT, 1), Trial(ROOT, 0), Trial(ROOT, 1)]
CHOSEN_TREE = [Trial(token=1), Trial(token=0), Trial(0, token=2), Trial(0, token=0), Trial(2, token=1)]
MIXED = [Trial(ROOT, 0), Trial(token=2), Trial(ROOT, 0), Trial(), Trial(0, token=1), Trial(1), Trial(1, token=1)]
SHAPES = {
    "empty": [],
    "chain": CHAIN,
    "independent": INDEPENDENT,
    "without replacement": WITHOUT_REPLACEMENT,
    "the whole vocabulary": EXHAUSTED,
    "two groups": TWO_GROUPS,
    "chosen": CHOSEN_TREE,
    "chosen twice": [Trial(token=1), Trial(token=1), Trial(token=1)],
    "mixed": MIXED,
}
P3, Q3, R3 = markov(3, 1), markov(3, 2), markov(3, 3)


def merged(*parts: tuple[Sequence[Trial], Tensor]) -> Drafting:
    return lambda dice, batch: merge([draft(shape, q, dice, batch) for shape, q in parts])


MERGED = {
    "two chains": merged((CHAIN[:2], Q3), (CHAIN[:2], R3)),
    "a chain and a tree": merged((CHAIN[:2], Q3), (WITHOUT_REPLACEMENT[:3], R3)),
    "a chosen tree and a chain": merged((CHOSEN_TREE, Q3), (CHAIN[:2], R3)),
    "equal siblings": merged((INDEPENDENT, Q3)),
    "equal siblings with groups below": merged(
        ([Trial(), Trial(), Trial(0, 0), Trial(0, 0), Trial(1, 0), Trial(1, 0)], Q3)
    ),
}
DRAFTINGS: dict[str, Drafting] = {name: drawn(shape, Q3) for name, shape in SHAPES.items()} | MERGED


@pytest.mark.parametrize("name", DRAFTINGS)
def test_emitted_law_is_p_and_chance_is_unbiased(name: str) -> None:
    """The joint law of three tokens, and at each depth the mean chance against the enumerated acceptance."""
    found = enumerate_round(P3, DRAFTINGS[name])
    assert joint_error(P3, found, 3) < EXACT
    for d in range(len(found[0][1].chance)):
        mean = sum(probability * result.chance[d] for probability, result in found)
        assert mean == pytest.approx(acceptance(found, d + 1), abs=EXACT)
        for _, result in found:
            assert result.offered[d] or (result.chance[d] == 0 and result.accepted <= d)


def test_on_a_chain_chance_is_the_overlap_of_p_and_q() -> None:
    def run(dice: ScriptedDice, batch: int) -> list[bool]:
        tree = draft(CHAIN, Q3, dice, batch)
        verdict = verify(tree, P3[context(tree.tokens)], dice)
        overlap = torch.minimum(P3, Q3).sum(-1)[context(tree.tokens)[:, :3]]
        expected = overlap * (torch.arange(3) <= verdict.accepted[:, None])
        return ((verdict.chance - expected).abs() < EXACT).all(1).tolist()

    assert law(outcomes(run)).keys() == {True}


def test_textbook_case() -> None:
    q, p = constant(0.5, 0.2, 0.2, 0.1, 0), constant(0.4, 0.1, 0.3, 0.15, 0.05)
    found = enumerate_round(p, drawn([Trial()], q))
    emitted = law([(probability, result.emitted[0]) for probability, result in found])
    rejected = law([(probability, result.emitted[0]) for probability, result in found if not result.accepted])
    assert acceptance(found) == pytest.approx(0.8, abs=EXACT)
    assert [rejected.get(x, 0) / 0.2 for x in range(5)] == pytest.approx([0, 0, 0.5, 0.25, 0.25], abs=EXACT)
    assert [emitted[x] for x in range(5)] == pytest.approx([0.4, 0.1, 0.3, 0.15, 0.05], abs=EXACT)
    assert all(result.chance == pytest.approx((0.8,), abs=EXACT) for _, result in found)


@pytest.mark.parametrize("ids", [True, False])
def test_e03_greedy_accepts_only_the_targets_argmax(ids: bool) -> None:
    warp = Warp(0.0)
    p = warp(torch.tensor([0.3, 0.5, 0.1, 0.1, 0, 0], dtype=torch.float64).log())
    q = warp(torch.tensor([0.2, 0.16, 0.16, 0.16, 0.16, 0.16], dtype=torch.float64).log())
    tree = DraftTree.chain(torch.tensor([[0]]), q[None, None])
    laws = p.expand(1, 2, -1)
    verdict = verify(tree, laws.argmax(-1) if ids else laws, SeededDice([0]))
    assert verdict.accepted.tolist() == [0]
    assert verdict.token.tolist() == [1]


P4, Q4 = constant(0.5, 0.3, 0.2), constant(0.2, 0.5, 0.3)


def test_e04_residual_is_normalised() -> None:
    found = enumerate_round(P4, drawn([Trial()], Q4))
    assert acceptance(found) == pytest.approx(0.7, abs=EXACT)
    assert {result.emitted for _, result in found if not result.accepted} == {(0,)}
    assert joint_error(P4, found, 1) < EXACT


def test_e05_q_is_the_law_that_was_drawn_from() -> None:
    warp = Warp(1.0, top_k=2)
    p, q = (warp(torch.tensor(law, dtype=torch.float64).log()) for law in ([0.5, 0.3, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1]))
    found = enumerate_round(p.expand(4, -1), drawn([Trial()], q.expand(4, -1)))
    assert acceptance(found) == pytest.approx(0.875, abs=EXACT)
    assert joint_error(p.expand(4, -1), found, 1) < EXACT


def test_e08_a_drafter_that_proposes_its_argmax_has_chosen() -> None:
    found = enumerate_round(P4, drawn([Trial(token=1)], Q4))
    assert acceptance(found) == pytest.approx(0.3, abs=EXACT)
    assert joint_error(P4, found, 1) < EXACT


@pytest.mark.parametrize(
    ("shape", "rate"),
    [
        ([Trial(ROOT, 0), Trial(ROOT, 0)], 0.8086),
        ([Trial(), Trial()], 0.76),
        ([Trial(token=1), Trial(token=2)], 0.5),
    ],
)
def test_e10_siblings_see_the_residual(shape: list[Trial], rate: float) -> None:
    found = enumerate_round(P4, drawn(shape, Q4))
    assert acceptance(found) == pytest.approx(rate, abs=5e-5)
    assert joint_error(P4, found, 1) < EXACT


class Refusing(SeededDice):
    """Every coin says no, whatever its chance."""

    def accept(self, chance: Tensor, rows: Sequence[int]) -> Tensor:
        return torch.zeros_like(chance, dtype=torch.bool)


def test_e11_equal_laws_always_accept() -> None:
    p = torch.randn(64, 4, 1000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    dice = SeededDice(range(64))
    tokens = torch.stack([dice.draw(p[:, i], range(64)) for i in range(3)], 1)
    verdict = verify(DraftTree.chain(tokens, p[:, :3]), p, dice)
    assert verdict.accepted.tolist() == [3] * 64
    assert verdict.chance == pytest.approx(torch.ones(64, 3), abs=1e-5)


def test_e11_without_residual_p_is_sampled() -> None:
    p = torch.tensor([0.25, 0.75, 0, 0]).expand(200, 2, -1)
    verdict = verify(DraftTree.chain(torch.ones(200, 1, dtype=torch.int64), p[:, :1]), p, Refusing(range(200)))
    assert verdict.accepted.tolist() == [0] * 200
    assert set(verdict.token.tolist()) == {0, 1}


@pytest.mark.parametrize(("column", "place"), [(0, "the root"), (1, "node 0")])
def test_e11_a_nan_in_p_is_located(column: int, place: str) -> None:
    p = torch.full((2, 2, 4), 0.25)
    tree = DraftTree.chain(torch.tensor([[1], [1]]), p[:, :1].clone())
    p[1, column, 2] = float("nan")
    with pytest.raises(ValueError, match=f"row 1, {place}: p"):
        verify(tree, p, SeededDice([0, 1]))


def test_e11_a_nan_in_q_and_impossible_draws_are_located() -> None:
    p, q = torch.full((2, 2, 4), 0.25), torch.tensor([0.5, 0.5, 0, 0]).repeat(2, 1, 1)
    with pytest.raises(ValueError, match="row 0, node 0: token 2 cannot have been drawn"):
        verify(DraftTree.chain(torch.tensor([[2], [1]]), q), p, SeededDice([0, 1]))
    q[1, 0, 3] = float("nan")
    with pytest.raises(ValueError, match="row 1, node 0: q"):
        verify(DraftTree.chain(torch.tensor([[0], [1]]), q), p, SeededDice([0, 1]))
    with pytest.raises(ValueError, match="p must begin with"):
        verify(DraftTree.empty(3), p, SeededDice([0, 1, 2]))


def test_probes_are_passed_over() -> None:
    """Probes beside, above and below candidates change neither law nor acceptance."""

    def drafting(dice: ScriptedDice, batch: int) -> DraftTree:
        probes = draft([Trial(token=1), Trial(0, token=2), Trial(token=2)], Q3, dice, batch)
        nothing = torch.full((batch, 0), NO_NODE)
        probes = replace(probes, candidate=~probes.candidate, draws=Draws(nothing, nothing, nothing))
        return merge([probes, draft(CHAIN[:2], Q3, dice, batch)])

    plain, probed = (enumerate_round(P3, each) for each in (drawn(CHAIN[:2], Q3), drafting))
    assert joint_error(P3, probed, 3) < EXACT
    assert acceptance(probed) == pytest.approx(acceptance(plain), abs=EXACT)
    assert acceptance(probed, 2) == pytest.approx(acceptance(plain, 2), abs=EXACT)


def test_a_probe_drawn_in_a_group_is_gone_for_its_siblings() -> None:
    def drafting(dice: ScriptedDice, batch: int) -> DraftTree:
        tree = draft(EXHAUSTED[:2], Q3, dice, batch)
        return replace(tree, candidate=torch.tensor([False, True]).expand(batch, -1))

    assert joint_error(P3, enumerate_round(P3, drafting), 2) < EXACT


def test_padding_among_the_trials_is_nobodys_sibling() -> None:
    def drafting(dice: ScriptedDice, batch: int) -> DraftTree:
        tree = draft(EXHAUSTED[:2], Q3, dice, batch)
        padding = torch.full((batch, 1), NO_NODE)
        columns = zip(tree.draws, (padding, padding + 1, padding + 1), strict=True)
        return replace(tree, draws=Draws(*(torch.cat([pad, c], 1) for c, pad in columns)))

    plain, padded = (law(enumerate_round(P3, each)) for each in (drawn(EXHAUSTED[:2], Q3), drafting))
    assert plain == padded


def test_drawn_trials_need_their_laws() -> None:
    tree = replace(DraftTree.chain(torch.tensor([[1]]), P3[None, :1]), laws=None)
    with pytest.raises(ValueError, match="laws that the tree does not have"):
        verify(tree, P3[None, :2], SeededDice([0]))


@pytest.mark.parametrize("greedy", [True, False])
def test_nothing_but_probes_is_plain_decoding(greedy: bool) -> None:
    tree = DraftTree.chosen(torch.tensor([[1, 2]]), torch.tensor([[ROOT, 0]]), torch.ones(1, 2, dtype=torch.bool))
    tree = replace(tree, candidate=~tree.candidate)
    none = torch.full((1, 0), NO_NODE)
    for probes in (tree, replace(tree, draws=Draws(none, none, none))):
        p = torch.eye(3)[torch.tensor([[1, 2, 0]])]
        verdict = verify(probes, p.argmax(-1) if greedy else p, SeededDice([0]))
        assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([0], [1])
        assert not verdict.offered.any()


def stack(trees: Sequence[DraftTree], p: Tensor) -> DraftTree:
    """Trees of one row each as one batch, padded."""

    def pad(rows: list[Tensor], value: float) -> Tensor:
        width = max(row.shape[1] for row in rows)
        padded = [
            torch.nn.functional.pad(row, (0, 0) * (row.dim() - 2) + (0, width - row.shape[1]), value=value)
            for row in rows
        ]
        return torch.cat(padded)

    nodes = [pad([getattr(t, name) for t in trees], 0) for name in ("tokens", "parents", "present", "candidate")]
    draws = Draws(*(pad([t.draws[k] for t in trees], -1) for k in range(3)))
    laws = [t.laws if t.laws is not None else p.new_zeros(1, 0, len(p)) for t in trees]
    return DraftTree(*nodes, draws, pad(laws, 0))


def test_rows_of_different_shape_are_jointly_exact_and_independent() -> None:
    """A chain beside a tree, both rows on one script: their first tokens follow p times p."""

    def run(dice: ScriptedDice, batch: int) -> list[tuple[int, int]]:
        left, right = draft(CHAIN[:2], Q3, dice, batch), draft(WITHOUT_REPLACEMENT[:2], R3, dice, batch)
        trees = stack([each.keep([row]) for row in range(batch) for each in (left, right)], P3)
        verdict = verify(trees, P3[context(trees.tokens)], dice.keep([row for row in range(batch) for _ in range(2)]))
        first = [result.emitted[0] for result in results(trees, verdict)]
        return list(zip(first[::2], first[1::2], strict=True))

    found = law(outcomes(run))
    assert max(abs(found[a, b] - float(P3[0, a] * P3[0, b])) for a in range(3) for b in range(3)) < EXACT


@pytest.mark.parametrize("seed", range(20))
def test_e25_a_row_is_decided_as_if_it_were_alone(seed: int) -> None:
    """Chains, trees, nothing at all and padding side by side: each row's verdict is its own."""
    shapes = list(SHAPES.values())
    dice = SeededDice([100 * seed + i for i in range(len(shapes))])
    trees = [draft(shape, Q3, dice.keep([i]), 1) for i, shape in enumerate(shapes)]
    trees.append(DraftTree.chain(torch.tensor([[1, 2]])))

    def verdict(tree: DraftTree, rows: Sequence[int]) -> list[tuple[tuple[int, ...], int, float]]:
        found = verify(tree, P3[context(tree.tokens)], SeededDice([seed + 7 * row for row in rows]))
        return [(r.emitted, r.accepted, round(sum(r.chance), 12)) for r in results(tree, found)]

    assert verdict(stack(trees, P3), range(len(trees))) == [verdict(t, [i])[0] for i, t in enumerate(trees)]


def test_greedy_ids_and_one_hot_laws_agree() -> None:
    """Random trees, padded, with equal siblings, probes and trials in any order."""
    seed = torch.Generator().manual_seed(0)
    parents = torch.stack([torch.randint(ROOT, (i + 1) // 2, (200,), generator=seed) for i in range(12)], 1)
    tokens = torch.randint(0, 3, (200, 12), generator=seed)
    present = torch.arange(12) < torch.randint(0, 13, (200, 1), generator=seed)
    tree = DraftTree.chosen(tokens, parents, present)
    order = torch.rand(200, 12, generator=seed).argsort(1)
    draws = Draws(tree.draws.node.gather(1, order), *tree.draws[1:])
    tree = replace(tree, candidate=present & (torch.rand(200, 12, generator=seed) < 0.9), draws=draws)
    ids = torch.randint(0, 3, (200, 13), generator=seed)
    fast, full = (verify(tree, p, SeededDice(range(200))) for p in (ids, torch.eye(3)[ids]))
    assert fast.accepted.max() >= 3
    for name, mine, other in zip(Verdict._fields[:-1], fast[:-1], full[:-1], strict=True):  # all but `probed`
        assert torch.equal(mine, other), name


def test_greedy_treats_a_drawn_trial_like_a_chosen_one() -> None:
    laws = torch.eye(3)[torch.tensor([[1, 2]])]
    for tree in (DraftTree.chain(torch.tensor([[1, 2]]), laws), DraftTree.chain(torch.tensor([[1, 2]]))):
        verdict = verify(tree, torch.tensor([[1, 0, 2]]), SeededDice([0]))
        assert verdict.path.tolist() == [[0, -1]]
        assert verdict.token.tolist() == [0]
        assert verdict.offered.tolist() == [[True, True]]
        assert verdict.chance.tolist() == [[1, 0]]

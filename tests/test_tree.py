"""Shapes of drafts: who sees whom, how deep, merged, kept and padded."""

from dataclasses import replace

import pytest
import torch

from specdraft.tree import ALONE, CHOSEN, NO_NODE, ROOT, DraftTree, Draws, merge


def bushy() -> DraftTree:
    """Row 0: 0 -> (1, 2), 2 -> 3; row 1: a lone node and padding."""
    parents = torch.tensor([[ROOT, 0, 0, 2], [ROOT, ROOT, ROOT, ROOT]])
    present = torch.tensor([[True] * 4, [True, False, False, False]])
    return DraftTree.chosen(torch.tensor([[5, 6, 7, 8], [9, 0, 0, 0]]), parents, present)


def test_every_node_sees_itself_its_ancestors_and_the_root() -> None:
    row, padded = bushy().attends().int().tolist()
    assert row == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    assert padded == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]


def test_depths_count_from_the_root_and_are_zero_for_padding() -> None:
    assert bushy().depths.tolist() == [[1, 2, 2, 3], [1, 0, 0, 0]]
    assert bushy().depth == 3


def test_attends_equals_a_walk_up_the_parents() -> None:
    seed = torch.Generator().manual_seed(0)
    parents = torch.stack([torch.randint(ROOT, i, (7,), generator=seed) for i in range(20)], 1)
    present = torch.arange(20) < torch.randint(0, 21, (7, 1), generator=seed)
    tree = DraftTree.chosen(torch.zeros_like(parents), parents, present)
    for row in range(7):
        for node in range(20):
            seen, at = {1 + node}, node
            while present[row, node] and at != ROOT:
                at = int(parents[row, at])
                seen.add(1 + at)
            assert set(tree.attends()[row, 1 + node].nonzero().flatten().tolist()) == seen


def test_chain_with_lengths_pads_nodes_and_trials() -> None:
    laws = torch.full((2, 3, 4), 0.25)
    tree = DraftTree.chain(torch.tensor([[1, 2, 3], [1, 2, 3]]), laws, torch.tensor([3, 1]))
    assert tree.depths.tolist() == [[1, 2, 3], [1, 0, 0]]
    assert tree.draws.node.tolist() == [[0, 1, 2], [0, NO_NODE, NO_NODE]]
    assert tree.draws.law[0].tolist() == [0, 1, 2]


def test_trees_of_chosen_nodes_have_no_laws() -> None:
    tree = DraftTree.chain(torch.tensor([[1, 2]]))
    assert tree.laws is None
    assert tree.draws.law.tolist() == [[CHOSEN, CHOSEN]]
    assert bushy().draws.node.tolist() == [[0, 1, 2, 3], [0, NO_NODE, NO_NODE, NO_NODE]]


def test_the_empty_tree_has_only_roots() -> None:
    tree = DraftTree.empty(3)
    assert (tree.batch, tree.nodes, tree.depth) == (3, 0, 0)
    assert tree.attends().shape == (3, 1, 1)
    assert tree.attends().all()
    assert tree.depths.shape == (3, 0)


def test_keep_takes_rows_in_the_order_given() -> None:
    tree = DraftTree.chain(torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.rand(3, 2, 7), torch.tensor([2, 1, 0]))
    kept = tree.keep([2, 0])
    assert kept.tokens.tolist() == [[5, 6], [1, 2]]
    assert kept.present.tolist() == [[False, False], [True, True]]
    assert kept.draws.node.tolist() == [[NO_NODE, NO_NODE], [0, 1]]
    assert tree.laws is not None
    assert kept.laws is not None
    assert torch.equal(kept.laws, tree.laws[[2, 0]])
    assert tree.keep([]).batch == 0


def test_merge_shares_nodes_and_keeps_trials() -> None:
    first = DraftTree.chain(torch.tensor([[1, 2], [1, 2]]), torch.rand(2, 2, 4))
    second = DraftTree.chain(torch.tensor([[1, 3, 1], [2, 3, 0]]), torch.rand(2, 3, 4), torch.tensor([3, 2]))
    tree = merge([first, second, DraftTree.chain(torch.tensor([[2], [2]]))])
    assert tree.tokens.tolist() == [[1, 2, 3, 1, 2], [1, 2, 2, 3, 0]]
    assert tree.parents.tolist() == [[ROOT, 0, 0, 2, ROOT], [ROOT, 0, ROOT, 2, ROOT]]
    assert tree.present.tolist() == [[True] * 5, [True] * 4 + [False]]
    assert tree.draws.node.tolist() == [[0, 1, 0, 2, 3, 4], [0, 1, 2, 3, 2, NO_NODE]]
    assert tree.draws.law.tolist() == [[0, 1, 2, 3, 4, CHOSEN], [0, 1, 2, 3, CHOSEN, CHOSEN]]
    assert tree.laws is not None
    assert tree.laws.shape == (2, 5, 4)


def test_merge_keeps_groups_of_different_origin_apart() -> None:
    """Two equal siblings, each with children drawn without replacement: one node, two groups."""
    tokens, parents = torch.tensor([[1, 1, 2, 3, 2, 3]]), torch.tensor([[ROOT, ROOT, 0, 0, 1, 1]])
    draws = Draws(torch.arange(6)[None], torch.tensor([[0, 0, 1, 1, 2, 2]]), torch.tensor([[ALONE] * 2 + [0] * 4]))
    present = torch.ones(1, 6, dtype=torch.bool)
    tree = merge([DraftTree(tokens, parents, present, present, draws, torch.rand(1, 3, 4))])
    assert tree.tokens.tolist() == [[1, 2, 3]]
    assert tree.draws.node.tolist() == [[0, 0, 1, 2, 1, 2]]
    assert tree.draws.group.tolist() == [[ALONE, ALONE, 0, 0, 1, 1]]


def test_a_node_shared_by_a_probe_and_a_candidate_is_a_candidate() -> None:
    candidate = DraftTree.chain(torch.tensor([[1]]))
    probes = DraftTree.chain(torch.tensor([[1, 2]]))
    nothing = torch.full((1, 0), NO_NODE)
    probes = replace(probes, candidate=torch.zeros(1, 2, dtype=torch.bool), draws=Draws(nothing, nothing, nothing))
    for trees in ([candidate, probes], [probes, candidate]):
        merged = merge(trees)
        assert merged.candidate.tolist() == [[True, False]]
        assert merged.present.tolist() == [[True, True]]
        assert merged.draws.node.tolist() == [[0]]


def test_confidence_stays_with_its_node() -> None:
    first = DraftTree.chain(torch.tensor([[1, 2], [1, 2]]), confidence=torch.tensor([[0.9, 0.8], [0.7, 0.6]]))
    second = DraftTree.chain(torch.tensor([[1, 3], [2, 3]]), None, torch.tensor([2, 1]), torch.full((2, 2), 0.5))
    merged = merge([first, second])
    assert merged.tokens.tolist() == [[1, 2, 3], [1, 2, 2]]
    assert merged.confidence is not None
    torch.testing.assert_close(merged.confidence, torch.tensor([[0.9, 0.8, 0.5], [0.7, 0.6, 0.5]]))
    kept = merged.keep([1])
    assert kept.confidence is not None
    assert torch.equal(kept.confidence, merged.confidence[1:])
    assert merged.only(torch.tensor([True, False])).confidence is merged.confidence
    assert merge([first, DraftTree.chain(torch.tensor([[1], [1]]))]).confidence is None
    with pytest.raises(ValueError, match="shape of tokens"):
        DraftTree.chain(torch.tensor([[1, 2]]), confidence=torch.ones(1, 1))


def test_merge_of_empty_trees_is_empty() -> None:
    assert merge([DraftTree.empty(2), DraftTree.empty(2)]).tokens.shape == (2, 0)
    with pytest.raises(ValueError, match="at least one"):
        merge([])


def test_impossible_trees_are_refused() -> None:
    one = torch.tensor([[1]])
    with pytest.raises(ValueError, match="stand before"):
        DraftTree.chosen(one, torch.tensor([[0]]), one.bool())
    with pytest.raises(ValueError, match="shape of tokens"):
        DraftTree.chosen(one, torch.tensor([[ROOT, ROOT]]), one.bool())
    with pytest.raises(ValueError, match="differ in shape"):
        DraftTree(one, -one, one.bool(), one.bool(), Draws(one, one, one[:, :0]), None)

"""From laws to trees, over a drafter that is a table: row x of the logits is what it says after token x."""

import pytest
import torch
from torch import Tensor

from specdraft.dice import SeededDice
from specdraft.drafters.proposals import Frontier, Words, propose
from specdraft.drafters.shapes import Chain, DynamicTree, Shape, StaticTree
from specdraft.tree import ROOT, DraftTree
from specdraft.warping import Warp

V = 7
LOGITS = torch.randn(V, V, generator=torch.Generator().manual_seed(0)) * 2
ROOTS = torch.tensor([0, 3, 5])
TREES = (DynamicTree(3, 3, 9), StaticTree(((0,), (1,), (0, 0), (0, 2), (0, 0, 1))))


def drafted(shape: Shape, warp: Warp, roots: Tensor = ROOTS, kept: Tensor | None = None) -> DraftTree:
    def grow(frontier: Frontier) -> Tensor:
        return LOGITS[frontier.tokens][..., columns]

    columns = torch.arange(V) if kept is None else kept
    return propose(shape, LOGITS[roots][:, columns], grow, Words(V, kept), warp, SeededDice(range(len(roots))))


def parent_tokens(tree: DraftTree, roots: Tensor = ROOTS) -> Tensor:
    return torch.where(tree.parents == ROOT, roots[:, None], tree.tokens.gather(1, tree.parents.clamp(min=0)))


@pytest.mark.parametrize("shape", [Chain(4), *TREES], ids=lambda shape: type(shape).__name__)
@pytest.mark.parametrize("kept", [None, torch.tensor([1, 2, 4, 6])], ids=["all", "reduced"])
def test_confidence_is_what_the_drafter_says_of_a_chosen_token_whatever_the_warp(
    shape: Shape, kept: Tensor | None
) -> None:
    tree = drafted(shape, Warp(), kept=kept)
    laws = torch.zeros(V, V)
    columns = torch.arange(V) if kept is None else kept
    laws[:, columns] = LOGITS[:, columns].softmax(-1)
    assert tree.confidence is not None
    torch.testing.assert_close(tree.confidence, laws[parent_tokens(tree), tree.tokens])
    if not isinstance(shape, Chain):
        warped = drafted(shape, Warp(2.0, top_k=2), kept=kept)
        assert warped.confidence is not None
        torch.testing.assert_close(warped.confidence, tree.confidence)


def test_confidence_of_a_drawn_token_is_the_law_that_it_was_drawn_from() -> None:
    tree = drafted(Chain(4), warp := Warp(1.5, top_k=4))
    assert tree.confidence is not None
    torch.testing.assert_close(tree.confidence, warp(LOGITS)[parent_tokens(tree), tree.tokens])


def paths_of(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """Each node's tokens from the root on, and the product of the confidences along them."""
    assert tree.confidence is not None
    found: dict[int, tuple[tuple[int, ...], float]] = {ROOT: ((), 1.0)}
    columns = (tree.tokens, tree.parents, tree.present, tree.confidence)
    for node, (token, parent, present, trust) in enumerate(zip(*(c[row].tolist() for c in columns), strict=True)):
        if present:
            above, score = found[parent]
            found[node] = (*above, token), score * trust
    return dict(path for node, path in found.items() if node != ROOT)


@pytest.mark.parametrize("stop", [0.12, 0.3, 0.5])
def test_a_greedy_chain_keeps_what_is_above_the_threshold_row_by_row(stop: float) -> None:
    roots = torch.arange(V)
    whole, stopped = drafted(Chain(4), Warp(), roots), drafted(Chain(4, stop), Warp(), roots)
    lengths = set()
    for row in range(V):
        want = {path: score for path, score in paths_of(whole, row).items() if score >= stop}
        assert paths_of(stopped, row) == pytest.approx(want)
        alone = drafted(Chain(4, stop), Warp(), roots[row : row + 1])
        assert paths_of(alone, 0) == pytest.approx(want), "beside other rows as alone"
        lengths.add(len(want))
    assert len(lengths) > 1, "rows stop at different depths"


@pytest.mark.parametrize("stop", [0.05, 0.12, 0.5])
def test_a_tree_keeps_the_nodes_above_the_threshold_row_by_row(stop: float) -> None:
    roots = torch.arange(V)
    whole, stopped = drafted(TREES[0], Warp(), roots), drafted(DynamicTree(3, 3, 9, stop), Warp(), roots)
    counts = set()
    for row in range(V):
        want = {path: score for path, score in paths_of(whole, row).items() if score >= stop}
        assert paths_of(stopped, row) == pytest.approx(want)
        alone = drafted(DynamicTree(3, 3, 9, stop), Warp(), roots[row : row + 1])
        assert paths_of(alone, 0) == pytest.approx(want), "beside other rows as alone"
        counts.add(len(want))
    assert len(counts) > 1
    assert stopped.nodes == max(counts), "nothing is scored that no row has"


@pytest.mark.parametrize("shape", [Chain(5, 0.3), DynamicTree(5, 3, 9, 0.3)], ids=["chain", "tree"])
def test_nothing_is_read_once_every_row_has_stopped(shape: Shape) -> None:
    read: list[int] = []

    def grow(frontier: Frontier) -> Tensor:
        read.append(frontier.depth)
        return LOGITS[frontier.tokens]

    first = torch.log(torch.tensor([[0.6, 0.4 - 1e-6, 0, 0, 0, 0, 1e-6], [0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]]) + 1e-9)
    tree = propose(shape, first, grow, Words(V), Warp(), SeededDice([0, 0]))
    assert tree.present.sum(1).tolist() == [tree.nodes, 0]
    assert read == list(range(1, tree.depth + 1)), "one frontier below the last tokens, and no more"
    nothing = propose(shape, first[1:], grow, Words(V), Warp(), SeededDice([0]))
    assert (nothing.nodes, len(read)) == (0, tree.depth)


def test_a_sampled_chain_stops_by_the_law_and_never_by_the_token_that_was_drawn() -> None:
    """Two rows of one root have laws of equal confidence at depth 1: whatever they draw there, they draw it."""
    roots, stop = torch.zeros(64, dtype=torch.int64), float(LOGITS[0].softmax(-1).max()) - 0.01
    tree = drafted(Chain(3, stop), Warp(1.0), roots)
    assert tree.present[:, 0].all()
    assert len(set(tree.tokens[:, 0].tolist())) > 2, "unlikely tokens are drawn, and kept"
    surest = LOGITS.softmax(-1).amax(-1)
    for row in range(64):
        trust, root = float(surest[0]), 0
        for depth in range(3):
            drafts = depth < tree.nodes and bool(tree.present[row, depth])
            assert drafts == (trust >= stop)
            root = int(tree.tokens[row, depth]) if drafts else root
            trust *= float(surest[root]) if drafts else 0
    assert not drafted(Chain(3, stop + 0.02), Warp(1.0), roots).nodes


def test_a_sampled_row_that_stops_throws_no_dice_for_what_it_does_not_draft() -> None:
    together = drafted(Chain(4, 0.2), warp := Warp(1.0), roots := torch.arange(V))
    assert len(set(together.present.sum(1).tolist())) > 1
    for row in range(V):
        dice = SeededDice([row])
        alone = propose(Chain(4, 0.2), LOGITS[roots[row : row + 1]], lambda f: LOGITS[f.tokens], Words(V), warp, dice)
        assert together.tokens[row][together.present[row]].tolist() == alone.tokens[0].tolist()


def test_a_chain_of_no_token_is_plain_decoding() -> None:
    assert drafted(Chain(0), Warp(1.0)).tokens.shape == (len(ROOTS), 0)

"""What a round tells of a drafter's confidence: only tokens whose turn had come count, and what became of them."""

import pytest
import torch
from torch import Tensor

from specdraft.dice import SeededDice
from specdraft.reliability import BINS, reliability
from specdraft.tree import ROOT, DraftTree
from specdraft.verify import verify


def filled(sums: Tensor) -> dict[int, list[float]]:
    """Bins of one row that hold something."""
    return {place: sums[place].tolist() for place in range(BINS) if sums[place].any()}


def test_tokens_below_accepted_parents_count_and_no_others() -> None:
    parents = torch.tensor([[ROOT, ROOT, 1, 0, ROOT]])
    present = torch.tensor([[True, True, True, True, False]])
    confidence = torch.tensor([[0.35, 0.2, 1.0, 0.5, float("nan")]])
    tree = DraftTree.chosen(torch.tensor([[5, 6, 7, 8, 0]]), parents, present, confidence)
    ids = torch.tensor([[6, 1, 9, 1, 1, 1]])  # the target: 6 below the root, and 9 below that
    found = filled(reliability(tree, ids, verify(tree, ids, SeededDice([0])))[0])
    assert set(found) == {2, 3, 9}, "not 8, whose parent was rejected, nor padding"
    assert found[2] == pytest.approx([1, 0.2, 1, 1])
    assert found[3] == pytest.approx([1, 0.35, 0, 0])
    assert found[9] == pytest.approx([1, 1, 0, 0]), "certain, and wrong: the last bin holds 1"


def test_what_is_drawn_is_set_against_the_targets_own_probability() -> None:
    """Drawn tokens are accepted with min(1, p / q): of a drafter that is the target every one, however unlikely."""
    law = torch.tensor([[[0.7, 0.3], [0.6, 0.4]]])
    tokens = torch.tensor([[1, 0]])
    tree = DraftTree.chain(tokens, law, confidence=torch.tensor([[0.3, 0.6]]))
    p = torch.cat([law, torch.tensor([[[0.5, 0.5]]])], 1)
    found = filled(reliability(tree, p, verify(tree, p, SeededDice([0])))[0])
    assert sum(sums[0] for sums in found.values()) == 2
    assert sum(sums[2] for sums in found.values()) == 2, "both accepted"
    assert sum(sums[1] for sums in found.values()) == pytest.approx(sum(sums[3] for sums in found.values()))


def test_probes_are_never_tried_and_rows_stay_apart() -> None:
    tree = DraftTree.chosen(
        torch.tensor([[3], [3]]), torch.tensor([[ROOT], [ROOT]]), torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 1)
    )
    ids = torch.tensor([[3, 0], [4, 0]])
    verdict = verify(tree, ids, SeededDice([0, 1]))
    sums = reliability(tree, ids, verdict)
    assert sums[:, BINS - 1].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    probes = DraftTree(tree.tokens, tree.parents, tree.present, ~tree.present, tree.draws, None, tree.confidence)
    assert not reliability(probes, ids, verify(probes, ids, SeededDice([0, 1]))).any()

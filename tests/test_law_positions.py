"""Which laws a prediction is held to: the alignment that every method shares."""

import torch

from specdraft.reduction import IGNORED, law_positions


def test_d01_d02_which_positions_count() -> None:
    """x0..x9 with x4..x7 supervised; the law that shift s is held to at t is the law of token t + s + 1."""
    labels = torch.full((1, 10), IGNORED)
    labels[0, 4:8] = torch.arange(4, 8)

    def positions(shift: int) -> list[int]:
        return (law_positions(labels, shift)[0].nonzero().squeeze(-1) - shift).tolist()

    assert positions(0) == [3, 4, 5, 6]  # labels x4..x7: the prompt's last position predicts the answer's first token
    assert positions(1) == [3, 4, 5]  # labels x5..x7: position 3 reads the embedding of x4
    assert positions(2) == [3, 4]
    assert positions(3) == [3]  # x4 is the root there, x5 and x6 are the drafter's own
    assert positions(4) == []


def test_d02_plain_and_medusa_labels_at_an_answer_of_three() -> None:
    labels = torch.tensor([[IGNORED, IGNORED, IGNORED, 11, 12]])  # P1 P2 P3 R1 R2
    assert law_positions(labels, 0).nonzero().tolist() == [[0, 2], [0, 3]]
    assert law_positions(labels, 1).nonzero().tolist() == [[0, 3]]


def test_law_positions_at_the_edges_of_a_fully_supervised_row() -> None:
    labels = torch.zeros(2, 4, dtype=torch.long)
    assert law_positions(labels, 0).tolist() == [[True, True, True, False]] * 2
    assert law_positions(labels, 2).tolist() == [[False, False, True, False]] * 2
    assert not law_positions(labels, 5).any()


def test_a_gap_between_two_answers_ends_the_run() -> None:
    labels = torch.tensor([[IGNORED, 1, 2, IGNORED, 4, 5, 6]])
    assert (law_positions(labels, 2)[0].nonzero().squeeze(-1) - 2).tolist() == [3]


def test_a_row_shorter_than_the_shift_holds_no_law() -> None:
    labels = torch.tensor([[5, 6, 7]])
    for shift in (2, 3, 6):
        assert not law_positions(labels, shift).any()

import pytest
import torch

from specdraft.config import SpecdraftError
from specdraft.drafters.vocabulary import (
    check_same_vocabulary,
    choose_vocabulary,
    coverage,
    from_tables,
    to_tables,
)

KEPT = torch.tensor([2, 5, 6, 9])


def test_the_commonest_ids_and_the_end_ids_ascending():
    counts = torch.tensor([0, 7, 3, 9, 3, 0, 1, 8])
    assert choose_vocabulary(counts, 4, [5]).tolist() == [1, 3, 5, 7]
    assert choose_vocabulary(counts, 5, [5]).tolist() == [1, 2, 3, 5, 7]
    assert choose_vocabulary(counts, 8, [5]).tolist() == list(range(8))
    assert choose_vocabulary(counts, 7, [0]).tolist() == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("size", [1, 9])
def test_sizes_out_of_range(size):
    with pytest.raises(SpecdraftError, match="allowed are 2 to 8"):
        choose_vocabulary(torch.ones(8, dtype=torch.int64), size, [5])


def test_nothing_counted_is_an_error():
    with pytest.raises(SpecdraftError, match="no token was counted"):
        choose_vocabulary(torch.zeros(8, dtype=torch.int64), 4, [5])


def test_v02_d2t_holds_offsets():
    d2t, t2d = to_tables(KEPT, 12)
    assert d2t.tolist() == [2, 4, 4, 6]
    assert d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool
    assert t2d.shape == (12,)
    assert t2d.nonzero()[:, 0].tolist() == (torch.arange(4) + d2t).tolist() == KEPT.tolist()
    assert torch.equal(from_tables(d2t, 4, 12, t2d), KEPT)
    whole, marks = to_tables(torch.arange(12), 12)
    assert not whole.any()
    assert marks.all()
    assert from_tables(whole, 12, 12).tolist() == from_tables(None, 12, 12).tolist() == list(range(12))


@pytest.mark.parametrize(
    ("d2t", "marks", "message"),
    [
        (KEPT * 3, None, "are not ascending ids below 12"),
        (torch.tensor([3, 1, 1, 1]), None, "are not ascending ids below 12"),
        (torch.tensor([-1, 0, 0, 0]), None, "are not ascending ids below 12"),
        (torch.zeros(4, dtype=torch.int64), None, "d2t is all zero"),
        (torch.tensor([2, 4, 4]), None, r"d2t has shape \[3\]"),
        (torch.tensor([2, 4, 4, 6]), torch.arange(12) < 4, "does not mark the 4 ids"),
    ],
)
def test_v02_tables_that_cannot_be_right(d2t, marks, message):
    with pytest.raises(SpecdraftError, match=message):
        from_tables(d2t, 4, 12, marks)


def test_v02_the_first_ids_are_legal_if_both_tables_say_so():
    d2t, t2d = to_tables(torch.arange(4), 12)
    assert from_tables(d2t, 4, 12, t2d).tolist() == [0, 1, 2, 3]


def test_v03_a_reduced_vocabulary_without_a_table_is_an_error():
    with pytest.raises(SpecdraftError, match="without a d2t table"):
        from_tables(None, 8, 16)


def test_v01_another_vocabulary_than_the_checkpoints_is_an_error():
    check_same_vocabulary(KEPT, KEPT.clone())
    with pytest.raises(SpecdraftError, match="4 ids, 3 in common"):
        check_same_vocabulary(torch.tensor([2, 5, 6, 10]), KEPT)


def test_v06_coverage_counts_what_is_not_kept_as_missed():
    counts = torch.tensor([10, 10, 70, 10])
    found = coverage(counts, torch.tensor([0, 1]))
    assert found.size == 2
    assert found.tokens == pytest.approx(0.2)
    assert found.ids == pytest.approx(0.5)
    assert found.largest_missing == [(2, 70), (3, 10)]
    assert coverage(counts, torch.arange(4)).tokens == 1


def test_v07_padding_columns_are_kept_last():
    counts = torch.zeros(16, dtype=torch.int64)
    counts[:3] = 5
    assert choose_vocabulary(counts, 12, [1]).tolist() == list(range(12))

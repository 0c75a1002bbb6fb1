"""Streams of coins and draws, one a row."""

import pytest
import torch

from specdraft.dice import SeededDice


def test_a_rows_outcomes_do_not_depend_on_its_neighbours() -> None:
    law = torch.full((1, 50), 0.02)
    alone = SeededDice([7])
    want = [int(alone.draw(law, [0])) for _ in range(20)]
    crowd = SeededDice([3, 7, 5])
    got = []
    for i in range(20):
        crowd.accept(torch.tensor([0.5]), [0])
        rows = [1] if i % 2 else [2, 1]
        got.append(int(crowd.draw(law.expand(len(rows), -1), rows)[-1]))
    assert got == want
    assert len(set(want)) > 5


def test_keep_goes_on_with_the_same_streams() -> None:
    law, dice, twin = torch.full((1, 50), 0.02), SeededDice([1, 2, 3]), SeededDice([3])
    assert int(dice.draw(law, [2])) == int(twin.draw(law, [0]))
    kept = dice.keep([2, 0])
    assert [int(kept.draw(law, [0])) for _ in range(9)] == [int(twin.draw(law, [0])) for _ in range(9)]


def test_sure_things() -> None:
    dice = SeededDice(range(200))
    rows = range(200)
    assert dice.accept(torch.ones(200), rows).all()
    assert not dice.accept(torch.zeros(200), rows).any()
    assert dice.accept(torch.empty(0), []).shape == (0,)
    assert dice.draw(torch.empty(0, 5), []).shape == (0,)


@pytest.mark.parametrize("law", [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]])
def test_a_token_without_probability_is_never_drawn(law: list[float]) -> None:
    drawn = SeededDice(range(300)).draw(torch.tensor(law).expand(300, -1), range(300))
    assert set(drawn.tolist()) == {i for i, probability in enumerate(law) if probability > 0}


def test_draws_and_coins_follow_their_law() -> None:
    law = torch.tensor([0.5, 0.2, 0.0, 0.3])
    drawn = SeededDice(range(4000)).draw(law.expand(4000, -1), range(4000))
    assert torch.bincount(drawn, minlength=4) / 4000 == pytest.approx(law.numpy(), abs=0.03)
    heads = SeededDice(range(4000)).accept(torch.full((4000,), 0.3), range(4000))
    assert heads.float().mean().item() == pytest.approx(0.3, abs=0.03)

"""All the randomness of drafting and verification: coins and draws, a stream of its own for every row.

A row's outcomes depend on its seed alone, not on the rows beside it. The exact-law tests put an enumerating object
in the place of `SeededDice` and so run the real drafting and verification code over every outcome.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Dice(Protocol):
    def accept(self, chance: Tensor, rows: Sequence[int]) -> Tensor:
        """Toss a coin for each of `rows`: chance [len(rows)] in [0, 1] to bool [len(rows)]."""
        ...

    def draw(self, law: Tensor, rows: Sequence[int]) -> Tensor:
        """Draw a token for each of `rows`: law [len(rows), V], each row sums to 1, to int64 [len(rows)]."""
        ...

    def keep(self, rows: Sequence[int]) -> "Dice":
        """The dice of a batch that holds only `rows` of this one, in that order; the streams go on."""
        ...


class SeededDice:
    """One `torch.Generator` a row, on the CPU, so that CPU and GPU runs toss the same coins."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds]

    def uniform(self, rows: Sequence[int]) -> Tensor:
        draws = [torch.rand((), generator=self._streams[row], dtype=torch.float64) for row in rows]
        return torch.stack(draws) if draws else torch.empty(0, dtype=torch.float64)

    def accept(self, chance: Tensor, rows: Sequence[int]) -> Tensor:
        return self.uniform(rows).to(chance.device) < chance

    def draw(self, law: Tensor, rows: Sequence[int]) -> Tensor:
        """By the inverse of the cumulative law, in float64; a token of probability 0 is never drawn."""
        total = law.double().cumsum(-1)
        threshold = self.uniform(rows).to(law.device)[:, None] * total[:, -1:]
        token = torch.searchsorted(total, threshold, right=True).squeeze(-1)
        last = law.shape[-1] - 1 - (law.flip(-1) > 0).int().argmax(-1)
        return torch.minimum(token, last)

    def keep(self, rows: Sequence[int]) -> "SeededDice":
        kept = SeededDice([])
        kept._streams = [self._streams[row] for row in rows]
        return kept

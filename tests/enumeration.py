"""Every outcome of code that throws dice, with its probability: the law of the real code, to rounding.

`outcomes(run)` calls `run` with dice whose rows follow scripts. Where a script ends, the row takes the first outcome
that is possible and the others become scripts of their own, until none is left. Each row of a batch is one outcome, so
one call of `run` settles many.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Hashable)


@dataclass
class Script:
    """One row's outcomes, each the index of one possible answer: those prescribed, then those taken."""

    prescribed: tuple[int, ...]
    taken: list[int] = field(default_factory=list)
    probability: float = 1.0
    forks: list[tuple[int, ...]] = field(default_factory=list)

    def choose(self, chances: Sequence[float]) -> int:
        if len(self.taken) < len(self.prescribed):
            pick = self.prescribed[len(self.taken)]
        else:
            pick, *others = (i for i, chance in enumerate(chances) if chance > 0)
            self.forks += [(*self.taken, other) for other in others]
        self.taken.append(pick)
        self.probability *= chances[pick]
        return pick


class ScriptedDice:
    """Dice that follow one script a row."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts

    def accept(self, chance: Tensor, rows: Sequence[int]) -> Tensor:
        heads = [self.scripts[r].choose((1 - c, c)) == 1 for r, c in zip(rows, chance.tolist(), strict=True)]
        return torch.tensor(heads, dtype=torch.bool)

    def draw(self, law: Tensor, rows: Sequence[int]) -> Tensor:
        laws = (law / law.sum(-1, keepdim=True)).tolist()
        return torch.tensor([self.scripts[r].choose(q) for r, q in zip(rows, laws, strict=True)], dtype=torch.int64)

    def keep(self, rows: Sequence[int]) -> "ScriptedDice":
        return ScriptedDice([self.scripts[r] for r in rows])


def outcomes(run: Callable[[ScriptedDice, int], Sequence[T]], width: int = 4096) -> list[tuple[float, T]]:
    """(probability, result) of every outcome of `run(dice, batch)`, which returns one result for each of `batch` rows.

    Rows must be copies of one experiment. `width` is the largest batch.
    """
    found: list[tuple[float, T]] = []
    open_: list[tuple[int, ...]] = [()]
    while open_:
        scripts = [Script(prescribed) for prescribed in open_[-width:]]
        del open_[-width:]
        results = run(ScriptedDice(scripts), len(scripts))
        found += [(script.probability, result) for script, result in zip(scripts, results, strict=True)]
        open_ += [fork for script in scripts for fork in script.forks]
    assert abs(sum(probability for probability, _ in found) - 1) < 1e-12
    return found


def law(found: Sequence[tuple[float, T]]) -> dict[T, float]:
    """The probability of each result."""
    total: dict[T, float] = {}
    for probability, result in found:
        total[result] = total.get(result, 0.0) + probability
    return total

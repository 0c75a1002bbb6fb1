"""Every outcome of code that throws dice, with its probability: the law of the real code, to rounding.

`outcomes(run)` calls `run` with dice whose rows follow scripts. Where a script ends, the row takes the first outcome
that is possible and the others become scripts of their own, until none is left. Each row of a batch is one outcome, so
one call of `run` settles many.

The worlds to be enumerated are Markov chains over a few tokens, for targets and drafters alike: row x of a matrix is
the law of the token after x. The root is token 0.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from specdraft.tree import ALONE, CHOSEN, ROOT, DraftTree, Draws
from specdraft.verify import Verdict, verify

EXACT = 1e-12

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


class Trial(NamedTuple):
    """One trial of a drafted shape, which also makes its node."""

    parent: int = ROOT
    group: int = ALONE
    token: int | None = None
    """The chosen token; None: drawn."""


class Result(NamedTuple):
    """One outcome; alike outcomes count together."""

    emitted: tuple[int, ...]
    accepted: int
    offered: tuple[bool, ...]
    chance: tuple[float, ...]


def markov(vocabulary: int, seed: int, sharpness: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)).softmax(-1)


def constant(*probabilities: float) -> Tensor:
    """A chain that forgets: every row is the same law."""
    return torch.tensor(probabilities, dtype=torch.float64).expand(len(probabilities), -1)


def draft(shape: Sequence[Trial], q: Tensor, dice: ScriptedDice, batch: int) -> DraftTree:
    """Draw a tree of a shape that was settled before; the root is token 0."""
    tokens = torch.empty(batch, 0, dtype=torch.int64)
    for i, trial in enumerate(shape):
        if trial.token is not None:
            token = torch.full((batch,), trial.token)
        else:
            rule = q[tokens[:, trial.parent] if trial.parent != ROOT else torch.zeros(batch, dtype=torch.int64)].clone()
            for j, other in enumerate(shape[:i]):
                if trial.group != ALONE and other[:2] == trial[:2]:
                    rule.scatter_(1, tokens[:, j, None], 0)
            token = dice.draw(rule / rule.sum(-1, keepdim=True), range(batch))
        tokens = torch.cat([tokens, token[:, None]], 1)
    present = torch.ones_like(tokens, dtype=torch.bool)
    parents, group = (torch.tensor([trial[k] for trial in shape], dtype=torch.int64).expand(batch, -1) for k in (0, 1))
    chosen = torch.tensor([trial.token is not None for trial in shape], dtype=torch.bool)
    draws = Draws(torch.arange(len(shape)).expand(batch, -1), (parents + 1).where(~chosen, CHOSEN), group)
    return DraftTree(tokens, parents, present, present, draws, q[context(tokens)])


def context(tokens: Tensor) -> Tensor:
    """The root and the nodes: what each law of a Markov chain follows."""
    return torch.cat([tokens.new_zeros(len(tokens), 1), tokens], 1)


def results(tree: DraftTree, verdict: Verdict) -> list[Result]:
    kept = []
    for row, count in enumerate(verdict.accepted.tolist()):
        path = verdict.path[row]
        assert (path[count:] == -1).all()
        emitted = (*tree.tokens[row, path[:count]].tolist(), int(verdict.token[row]))
        kept.append(Result(emitted, count, tuple(verdict.offered[row].tolist()), tuple(verdict.chance[row].tolist())))
    return kept


Drafting = Callable[[ScriptedDice, int], DraftTree]


def enumerate_round(p: Tensor, drafting: Drafting) -> list[tuple[float, Result]]:
    """Every outcome of drafting and verifying once."""

    def run(dice: ScriptedDice, batch: int) -> list[Result]:
        tree = drafting(dice, batch)
        return results(tree, verify(tree, p[context(tree.tokens)], dice))

    return [(probability, result) for result, probability in law(outcomes(run)).items()]


def drawn(shape: Sequence[Trial], q: Tensor) -> Drafting:
    return lambda dice, batch: draft(shape, q, dice, batch)


def joint_error(p: Tensor, found: list[tuple[float, Result]], length: int) -> float:
    """Greatest error of the law of the first `length` tokens, a round that emits fewer being continued by p."""
    size = len(p)
    emitted = law([(probability, result.emitted[:length]) for probability, result in found])
    got = torch.zeros((size,) * length, dtype=torch.float64)
    want = torch.zeros_like(got)
    for sequence in product(range(size), repeat=length):
        steps = [float(p[before, after]) for before, after in zip((0, *sequence), sequence, strict=False)]
        want[sequence] = torch.tensor(steps, dtype=torch.float64).prod()
        for known in range(1, length + 1):
            rest = torch.tensor(steps[known:], dtype=torch.float64).prod()
            got[sequence] += emitted.get(sequence[:known], 0.0) * rest
    return float((got - want).abs().max())


def acceptance(found: list[tuple[float, Result]], depth: int = 1) -> float:
    return sum(probability for probability, result in found if result.accepted >= depth)

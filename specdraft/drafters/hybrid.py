"""A drafter that costs nothing where it has something to say, and a learned one everywhere else.

Prompt lookup drafts for nothing what the text has said before (code that is edited, documents that are quoted, records
that are filled in) and nothing at all elsewhere; a learned drafter is good everywhere, and is paid for in every step.
Row by row and round by round, the first one drafts where it offers enough and the second one where it does not.

What a user gains: the longer the stretches that are copied, the more; the learned drafter is not even asked in a round
in which no row needs it. In a large batch some row nearly always does, and then it drafts for all of them. Where the
lookup is often wrong it stands in the way of a better draft: raise `least`, or lookup's own shortest suffix, so that
only longer matches count; where the target has room for a wider pass, `ensemble` verifies both.

Which drafter is used is settled by committed tokens alone, before anything is drawn, so the emitted law is p.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdraft.config import SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.base import Drafter
from specdraft.drafters.several import Memories, SeveralDrafters
from specdraft.drafters.shapes import Chain, Shape
from specdraft.tree import DraftTree, merge
from specdraft.warping import Warp


class HybridDrafter(SeveralDrafters):
    """`first` drafts in the rows in which it offers at least `least` tokens, `second` in the others.

    How much `first` offers must not depend on what it draws: true of prompt lookup, which draws nothing. `second`
    drafts the hybrid's shape, and `first` a chain that is as long as that shape is deep.
    """

    def __init__(self, first: Drafter, second: Drafter, least: int = 1) -> None:
        if least < 1:
            raise SpecdraftError(f"a hybrid's first drafter is to offer at least 1 token to be used, not {least}")
        super().__init__((first, second))
        self.least = least
        self.shape = second.shape

    @property
    def shape(self) -> Shape:
        return self._shape

    @shape.setter
    def shape(self, shape: Shape) -> None:
        first, second = self.drafters
        length = shape.gamma if isinstance(shape, Chain) else shape.depth
        self._shape, first.shape, second.shape = shape, Chain(length), shape

    def propose(self, memory: Memories, *, warp: Warp, dice: Dice) -> DraftTree:
        """Raises SpecdraftError if `first` plants probes, which a row that it does not draft for would lose."""
        first, second = self.drafters
        found = first.propose(memory.parts[0], warp=warp, dice=dice)
        if not torch.equal(found.candidate, found.present):
            raise SpecdraftError("a hybrid's first drafter has probes to be scored in every round: use an ensemble")
        wanting = found.present.sum(1) < self.least
        if not wanting.any():
            return found
        rows = wanting.nonzero().flatten().tolist()
        other = second.propose(memory.parts[1], warp=warp, dice=_DiceOfSome(dice, rows))
        return other if len(rows) == len(wanting) else merge([found.only(~wanting), other.only(wanting)])


class _DiceOfSome:
    """Dice that are thrown for `mine` alone, so that no row's stream depends on its neighbours' needs.

    In the other rows, whose draft is thrown away, the likeliest token stands for a drawn one.
    """

    def __init__(self, dice: Dice, mine: Sequence[int]) -> None:
        self.dice, self.mine = dice, frozenset(mine)

    def accept(self, chance: Tensor, rows: Sequence[int]) -> Tensor:
        heads = chance > 0.5
        places = self._places(rows)
        heads[places] = self.dice.accept(chance[places], [rows[place] for place in places])
        return heads

    def draw(self, law: Tensor, rows: Sequence[int]) -> Tensor:
        tokens = law.argmax(-1)
        places = self._places(rows)
        tokens[places] = self.dice.draw(law[places], [rows[place] for place in places])
        return tokens

    def keep(self, rows: Sequence[int]) -> "_DiceOfSome":
        return _DiceOfSome(self.dice.keep(rows), self._places(rows))

    def _places(self, rows: Sequence[int]) -> list[int]:
        return [place for place, row in enumerate(rows) if row in self.mine]

"""Several drafters at once, their drafts merged into one tree (SpecInfer, Miao et al. 2023, arXiv 2305.09781).

Each drafts below the root as it would alone. Equal tokens below one parent share a node, so that the target scores
them once, and keep a trial each: the first drafter's token is tried, where it is rejected the second's is tried against
what of p is left, and so on. Whatever the drafters are, what is emitted follows p.

What a user gains: a second chance where the first drafter fails, so it pays where drafters fail at *different* places
(prompt lookup for what is copied beside a learned drafter for what is new; drafters trained on different traffic) and
where the target has room for a wider pass. It costs every drafter's time in every round: where one of them is often
enough, `hybrid` is cheaper, and two drafters that agree gain little. The best one stands first: what comes first is
accepted as often as alone, and those behind it only add to that.
"""

from collections.abc import Sequence

from specdraft.dice import Dice
from specdraft.drafters.base import Drafter
from specdraft.drafters.several import Memories, SeveralDrafters
from specdraft.drafters.shapes import Shape
from specdraft.tree import DraftTree, merge
from specdraft.warping import Warp


class EnsembleDrafter(SeveralDrafters):
    """`drafters`, tried in their order; all draft the same shape. Raises SpecdraftError for fewer than two.

    A drafter that does not know the shape raises SpecdraftError, as it does alone.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.shape = self.drafters[0].shape

    @property
    def shape(self) -> Shape:
        return self._shape

    @shape.setter
    def shape(self, shape: Shape) -> None:
        self._shape = shape
        for drafter in self.drafters:
            drafter.shape = shape

    def propose(self, memory: Memories, *, warp: Warp, dice: Dice) -> DraftTree:
        pairs = zip(self.drafters, memory.parts, strict=True)
        return merge([drafter.propose(part, warp=warp, dice=dice) for drafter, part in pairs])

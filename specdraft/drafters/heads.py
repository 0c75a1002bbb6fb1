"""What Medusa and Hydra have in common: one head a depth over the target's last hidden state, and no attention.

Head d reads the hidden state at t, the last committed token before the root x[t+1], and predicts the law of x[t+d+1].
All that a drafter has to remember of a row is therefore one vector and the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import silu

from specdraft.causal import Observation, Session
from specdraft.config import SpecdraftError
from specdraft.drafters.base import DrafterConfig, DrafterRecipe, TrainableDrafter
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.target import FrozenTarget
from specdraft.verify import Verdict


class HeadsRecipe(DrafterRecipe):
    heads: int = Field(default=4, ge=1)
    """Depths that it drafts, each by a head of its own."""
    layers: int = Field(default=1, ge=1)
    """Residual blocks x + SiLU(W x) of each head."""


class HeadsConfig(DrafterConfig):
    """How many heads, and of how many residual blocks each. Their width is the target's."""

    heads: int = 0
    layers: int = 0

    @classmethod
    def like(cls, target: FrozenTarget, recipe: HeadsRecipe, **more: Any) -> Self:
        return cls(
            vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            heads=recipe.heads,
            layers=recipe.layers,
            **more,
        )

    def servable(self) -> dict[str, Any]:
        """The sizes in the words of a Medusa config.json."""
        return {
            "hidden_size": self.target_hidden_size,
            "vocab_size": self.vocab_size,
            "num_heads": self.heads,
            "num_hidden_layers": self.layers,
        }

    @classmethod
    def from_servable(cls, written: dict[str, Any], **more: Any) -> Self:
        """The config that `servable` described; `more`: what it left out."""
        return cls(
            vocab_size=written["vocab_size"],
            target_hidden_size=written["hidden_size"],
            heads=written["num_heads"],
            layers=written["num_hidden_layers"],
            trained_length=written["specdraft"]["trained_length"],
            **more,
        )


class ResidualBlocks(nn.Module):
    """x + SiLU(W x), `layers` times over, W with a bias if asked: where all is zero, the identity."""

    def __init__(self, width: int, layers: int, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden


@dataclass(frozen=True)
class HeadsMemory:
    hidden: Tensor
    """[batch, H]: the target's last hidden state at each row's last committed token, the one before the root."""
    roots: Tensor
    """int64 [batch]"""


class HeadsDrafter(TrainableDrafter):
    """The memory of a drafter of heads. A method says what its heads read besides, and drafts with them."""

    config: HeadsConfig

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> HeadsMemory:
        return self._read(seen, roots)

    def remember(self, memory: HeadsMemory, verdict: Verdict, seen: Observation) -> HeadsMemory:
        return self._read(seen, verdict.token)

    def keep(self, memory: HeadsMemory, rows: Sequence[int]) -> HeadsMemory:
        return HeadsMemory(memory.hidden[list(rows)], memory.roots[list(rows)])

    def _read(self, seen: Observation, roots: Tensor) -> HeadsMemory:
        rows = torch.arange(len(roots), device=seen.hidden.device)
        return HeadsMemory(seen.hidden[rows, seen.mask.sum(1) - 1].to(self.device, self.dtype), roots)

    def drafted(self) -> Shape:
        """The shape to draft: `self.shape`, a dynamic tree, whose depth is a greatest one, no deeper than there are
        heads. Raises SpecdraftError for another shape that is deeper."""
        shape, heads = self.shape, self.config.heads
        if isinstance(shape, DynamicTree):
            return replace(shape, depth=min(shape.depth, heads))
        if (depth := shape.gamma if isinstance(shape, Chain) else shape.depth) > heads:
            raise SpecdraftError(
                f"a drafter of {heads} heads cannot draft {depth} tokens deep: ask for at most {heads}, "
                "or train it with more heads"
            )
        return shape

    def target_logits(self, hidden: Tensor) -> Tensor:
        """The target's own head over [..., H], on the ids that the drafter was made for: [..., vocab_size]."""
        return self.target.head(hidden)[..., : self.config.vocab_size]

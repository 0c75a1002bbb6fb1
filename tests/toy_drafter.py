"""A complete drafter in a few lines, a bigram model: what adding a method asks for. As a plugin of pytest, it is in
DRAFTERS before the conformance suite looks."""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from specdraft.causal import Observation, Session
from specdraft.dice import Dice
from specdraft.drafters import DRAFTERS
from specdraft.drafters.base import DrafterConfig, DrafterRecipe, TrainableDrafter
from specdraft.drafters.proposals import Words, propose
from specdraft.objectives import Prediction
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp


class ToyRecipe(DrafterRecipe):
    kind: Literal["toy"] = "toy"
    """The drafting method."""


class ToyConfig(DrafterConfig):
    model_type = "specdraft_toy"


class ToyDrafter(TrainableDrafter):
    """q(y | x) = softmax(head(W embed(x))): an independent model, so of shift 0."""

    recipe_class = ToyRecipe
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.turn = nn.Linear(config.target_hidden_size, config.target_hidden_size, bias=False)
        self.lm_head = nn.Linear(config.target_hidden_size, config.vocab_size, bias=False)

    @classmethod
    def for_target(cls, target: FrozenTarget, recipe: ToyRecipe, counts: Tensor) -> Self:
        drafter = cls(ToyConfig(vocab_size=target.vocab_size, target_hidden_size=target.hidden_size))
        drafter.attach(target)
        return drafter

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        return [Prediction(1, 0, self.turn(self.embed(tokens)), self.lm_head, None)]

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> Tensor:
        return roots

    def remember(self, memory: Tensor, verdict: Verdict, seen: Observation) -> Tensor:
        return verdict.token

    def keep(self, memory: Tensor, rows: Sequence[int]) -> Tensor:
        return memory[list(rows)]

    @torch.no_grad()
    def propose(self, memory: Tensor, *, warp: Warp, dice: Dice) -> DraftTree:
        def logits(tokens: Tensor) -> Tensor:
            return self.lm_head(self.turn(self.embed(tokens)))

        words = Words(self.target.vocab_size)
        return propose(self.shape, logits(memory), lambda frontier: logits(frontier.tokens), words, warp, dice)

    def servable_config(self) -> dict[str, Any]:
        sizes = {"vocab_size": self.config.vocab_size, "target_hidden_size": self.config.target_hidden_size}
        return {"specdraft": {"drafter": "toy", **sizes}}

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> ToyConfig:
        return ToyConfig(**{name: value for name, value in written["specdraft"].items() if name != "drafter"})


DRAFTERS["toy"] = ToyDrafter  # the one line

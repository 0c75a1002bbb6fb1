"""Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, made to depend on what was drafted before them.

Head d reads the target's last hidden state at t and the embeddings of x[t+1] ... x[t+d], the root and the drafted
tokens above its own, side by side; a projection to the hidden size, residual blocks, and the target's own output head.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specdraft.causal import Observation
from specdraft.dice import Dice
from specdraft.drafters.heads import HeadsConfig, HeadsDrafter, HeadsMemory, HeadsRecipe, ResidualBlocks
from specdraft.drafters.proposals import Frontier, Words, propose
from specdraft.objectives import Prediction
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.warping import Warp


class HydraRecipe(HeadsRecipe):
    kind: Literal["hydra"] = "hydra"
    """The drafting method."""


class HydraConfig(HeadsConfig):
    model_type = "specdraft_hydra"


class HydraHead(nn.Module):
    def __init__(self, config: HydraConfig, depth: int) -> None:
        super().__init__()
        width = config.target_hidden_size
        self.fc = nn.Linear((1 + depth) * width, width, bias=False)
        self.block = ResidualBlocks(width, config.layers)

    def forward(self, hidden: Tensor, path: list[Tensor]) -> Tensor:
        """The hidden state and the embeddings of the tokens after it, each [..., H], to what the output head reads."""
        return self.block(self.fc(torch.cat([hidden, *path], -1)))


class HydraDrafter(HeadsDrafter):
    recipe_class = HydraRecipe
    config_class = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(HydraHead(config, depth) for depth in range(1, config.heads + 1))
        self.post_init()

    @classmethod
    @torch.no_grad()
    def for_target(cls, target: FrozenTarget, recipe: HydraRecipe, counts: Tensor) -> "HydraDrafter":
        """Every head starts as the target's own, what the target says of the next token: it hands the hidden state on,
        and what it reads of the tokens begins at zero."""
        drafter = cls(HydraConfig.like(target, recipe))
        for name, weight in drafter.heads.named_parameters():
            weight.zero_()
            if name.endswith("fc.weight"):
                weight[:, : target.hidden_size] = torch.eye(target.hidden_size)
        drafter.attach(target)
        nn.Module.to(drafter, target.device)
        return drafter

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        hidden, time, head = seen.hidden.to(self.dtype), tokens.shape[1], self.target.output_head()
        embedded = self.embed(pad(tokens, (0, self.config.heads)))
        ahead = [embedded[:, depth : depth + time] for depth in range(1, self.config.heads + 1)]
        return [
            Prediction(depth, depth, part(hidden, ahead[:depth]), head, None)
            for depth, part in enumerate(self.heads, 1)
        ]

    @torch.no_grad()
    def propose(self, memory: HeadsMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        shape = self.drafted()
        rows = torch.arange(len(memory.roots), device=memory.roots.device)[:, None]
        path = [self.embed(memory.roots)[:, None]]  # of each token of the frontier, from the root on: [batch, n, H]

        def score(depth: int) -> Tensor:
            hidden = memory.hidden[:, None].expand_as(path[0])
            return self.target_logits(self.heads[depth - 1](hidden, path))

        def grow(frontier: Frontier) -> Tensor:
            nonlocal path
            path = [*(above[rows, frontier.parents] for above in path), self.embed(frontier.tokens)]
            return score(frontier.depth + 1)

        return propose(shape, score(1)[:, 0], grow, Words(self.target.vocab_size), warp, dice)

    def servable_config(self) -> dict[str, Any]:
        """config.json in a Medusa's words; no engine that we know of loads Hydra's heads."""
        return {
            "architectures": ["HydraModel"],
            "model_type": "hydra",
            **self.config.servable(),
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            "specdraft": {"drafter": "hydra", "trained_length": self.config.trained_length},
        }

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> HydraConfig:
        return HydraConfig.from_servable(written)

"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads beside the target's own, each for one token further ahead.

Head d is a few residual blocks over the target's last hidden state and an output layer. It does not know which tokens
were drafted before its own, so the law at a depth is the same in the whole tree. Names and config are vLLM's.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from specdraft.causal import Observation
from specdraft.dice import Dice
from specdraft.drafters.heads import HeadsConfig, HeadsDrafter, HeadsMemory, HeadsRecipe, ResidualBlocks
from specdraft.drafters.proposals import Frontier, Words, propose
from specdraft.objectives import Prediction
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.warping import Warp


class MedusaRecipe(HeadsRecipe):
    kind: Literal["medusa"] = "medusa"
    """The drafting method."""
    head: Literal["target", "own"] = "target"
    """What turns a head's output into logits: the target's own output head, frozen and shared by all, or one output
    layer for each head, that starts from the target's (heads * vocabulary * width weights)."""


class MedusaConfig(HeadsConfig):
    model_type = "specdraft_medusa"

    head: Literal["target", "own"] = "target"
    bias: bool = False
    """Of the residual blocks, as in heads that others train; ours have none."""


class MedusaDrafter(HeadsDrafter):
    recipe_class = MedusaRecipe
    config_class = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        width = config.target_hidden_size
        self.blocks = nn.ModuleList(ResidualBlocks(width, config.layers, config.bias) for _ in range(config.heads))
        if config.head == "own":
            own = (nn.Linear(width, config.vocab_size, bias=False) for _ in range(config.heads))
            self.lm_heads = nn.ModuleList(own)
        self.post_init()

    @classmethod
    @torch.no_grad()
    def for_target(cls, target: FrozenTarget, recipe: MedusaRecipe, counts: Tensor) -> "MedusaDrafter":
        """Every head starts as the target's own: what the target says of the next token."""
        drafter = cls(MedusaConfig.like(target, recipe, head=recipe.head))
        for weight in drafter.blocks.parameters():
            weight.zero_()
        if recipe.head == "own":
            rows = target.head_rows(torch.arange(target.vocab_size, device=target.device))
            for weight in drafter.lm_heads.parameters():
                weight.copy_(rows)
        drafter.attach(target)
        nn.Module.to(drafter, target.device)
        return drafter

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        hidden, count = seen.hidden.to(self.dtype), self.config.heads
        heads = self.lm_heads if self.config.head == "own" else [self.target.output_head()] * count
        return [
            Prediction(depth, depth, block(hidden), head, None)
            for depth, (block, head) in enumerate(zip(self.blocks, heads, strict=True), 1)
        ]

    @torch.no_grad()
    def propose(self, memory: HeadsMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        shape = self.drafted()
        laws = self._logits(memory.hidden)

        def grow(frontier: Frontier) -> Tensor:
            return laws[:, frontier.depth, None]

        return propose(shape, laws[:, 0], grow, Words(self.target.vocab_size), warp, dice)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits of every head, [batch, heads, vocab_size], after hidden states [batch, H]."""
        outputs = [block(hidden) for block in self.blocks]
        if self.config.head == "target":
            return self.target_logits(torch.stack(outputs, 1))  # one pass over its weight for all heads
        return torch.stack([head(output) for head, output in zip(self.lm_heads, outputs, strict=True)], 1)

    def borrowed(self) -> dict[str, Tensor]:
        """vLLM reads the one output head of all from the checkpoint, never from the target."""
        if self.config.head == "own":
            return {}
        shape = self.config.vocab_size, self.config.target_hidden_size
        if not self._target:
            return {"lm_head.weight": torch.empty(shape, device="meta")}
        ids = torch.arange(self.config.vocab_size, device=self.target.device)
        return {"lm_head.weight": self.target.head_rows(ids)}

    def servable_config(self) -> dict[str, Any]:
        """config.json as vLLM reads it."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            **self.config.servable(),
            "medusa_fc_bias": self.config.bias,
            "original_lm_head": self.config.head == "target",
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            "specdraft": {"drafter": "medusa", "trained_length": self.config.trained_length},
        }

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> MedusaConfig:
        head = "target" if written["original_lm_head"] else "own"
        return MedusaConfig.from_servable(written, head=head, bias=written["medusa_fc_bias"])

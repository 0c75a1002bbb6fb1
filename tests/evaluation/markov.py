"""A target and a drafter whose next-token law depends on the last token alone: every figure has a closed form."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.causal import Observation, Session
from specdraft.dice import Dice
from specdraft.drafters.shapes import Chain, Shape
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

VOCABULARY = 8


def law(seed: int, sharpness: float = 1.5) -> Tensor:
    """float64 [V, V]: row x is the law of the token after x."""
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)).softmax(-1)


def markov_target(p: Tensor, dtype: torch.dtype = torch.float32) -> FrozenTarget:
    """A Llama whose layers add nothing: one-hot embeddings, and a head that turns them into log p."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=VOCABULARY,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY))
        model.lm_head.weight.copy_(p.log().T / VOCABULARY**0.5)  # the final norm makes a one-hot sqrt(V) long
    return FrozenTarget(model.to(dtype), name="markov")


class MarkovDrafter:
    """Drafts a chain from `q`; `drawn` is the law that it really draws from, where it lies about it."""

    taps: tuple[int, ...] = ()

    def __init__(self, q: Tensor, drawn: Tensor | None = None) -> None:
        self.logits = q.log()
        self.drawn = self.logits if drawn is None else drawn.log()
        self.shape: Shape = Chain(3)

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> Tensor:
        return roots

    def propose(self, memory: Tensor, *, warp: Warp, dice: Dice) -> DraftTree:
        assert isinstance(self.shape, Chain)
        last, tokens, laws = memory, [], []
        for _ in range(self.shape.gamma):
            laws.append(warp(self.logits[last]))
            last = dice.draw(warp(self.drawn[last]), range(len(memory)))
            tokens.append(last)
        made, q = torch.stack(tokens, 1), torch.stack(laws, 1)
        return DraftTree.chain(made, q, confidence=q.gather(2, made[..., None])[..., 0].float())

    def remember(self, memory: Tensor, verdict: Verdict, seen: Observation) -> Tensor:
        return verdict.token

    def keep(self, memory: Tensor, rows: Sequence[int]) -> Tensor:
        return memory[list(rows)]


class KnownAnswer(NamedTuple):
    alpha: float
    tau: float
    reaches: list[float]


def known_answer(p: Tensor, q: Tensor, gamma: int) -> KnownAnswer:
    """In the long run: roots follow the stationary law of the chain that takes one root to the next.

    Below a root, a draft survives as y with min(p, q)[x, y], and is corrected to y with (p - min(p, q))[x, y].
    """
    survives = np.minimum(p.numpy(), q.numpy())
    corrected = p.numpy() - survives
    powers = [np.linalg.matrix_power(survives, k) for k in range(gamma + 1)]
    step = sum(power @ corrected for power in powers[:gamma]) + powers[gamma] @ p.numpy()
    values, vectors = np.linalg.eig(step.T)
    roots = np.real(vectors[:, np.argmax(np.real(values))])
    roots /= roots.sum()
    reaches = [float(roots @ power @ np.ones(VOCABULARY)) for power in powers]
    return KnownAnswer(sum(reaches[1:]) / sum(reaches[:-1]), sum(reaches), reaches[1:])

"""What EAGLE and a reused MTP module have in common: one layer that reads the target's features and recurs on its own.

Slot i reads the token x[i+1] and the target's feature at i (later in a draft: the layer's own last output in its
place), and predicts the law of x[i+2]. It is trained unrolled as it is used at decode time: tokens are the data's,
features are its own.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from specdraft.attention import unrolled_attention
from specdraft.causal import Observation, Session
from specdraft.dice import Dice
from specdraft.drafters.base import TrainableDrafter
from specdraft.drafters.blocks import DecoderConfig, Rotary
from specdraft.drafters.proposals import Frontier, Words, propose
from specdraft.kvcache import RowCache
from specdraft.objectives import Prediction
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp


class Slots(NamedTuple):
    """The layer's input at some slots."""

    residual: Tensor
    """[batch, time, H]: what attention's output is added to"""
    query: Tensor
    """[batch, heads, time, head_dim], not yet rotated; so are keys and values, with their own number of heads"""
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class RecurrentMemory:
    cache: RowCache
    """Keys and values of the committed slots; slot t of a row reads the token at t + 1."""
    feature: Tensor
    """[batch, H]: the layer's output at each row's last slot, which reads the root."""


class RecurrentDrafter(TrainableDrafter):
    """The unroll, the chain and the trees of a recurrent layer. A method says what the layer is."""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.rotary = Rotary(config)

    @abstractmethod
    def enter(self, seen: Observation) -> Tensor:
        """The target's feature at each slot, [batch, time, H]."""

    def embed_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The embeddings that the layer reads, [batch, time, H]: of int64 tokens in slots at int64 `positions`."""
        return self.embed(tokens)

    @abstractmethod
    def project(self, embedded: Tensor, feature: Tensor) -> Slots:
        """Embeddings and features, each [batch, time, H], to the layer's attention."""

    @abstractmethod
    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """attended [batch, heads, time, head_dim] to the layer's output [batch, time, H], which it recurs on."""

    @abstractmethod
    def read_out(self, feature: Tensor) -> Tensor:
        """The layer's output to what the head reads, [..., H]."""

    @abstractmethod
    def head(self) -> nn.Module:
        """What turns that into logits [..., kept]."""

    def score(self, feature: Tensor) -> Tensor:
        """The layer's output [..., H] to logits at decode time, [..., kept]."""
        return self.head()(self.read_out(feature))

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        """The unroll: depth d's hidden states, with the tokens x[i+d] of the data and the features of depth d - 1."""
        feature, kept_ids, head = self.enter(seen), self.kept_ids(), self.head()
        predictions: list[Prediction] = []
        first: tuple[Tensor, Tensor] | None = None
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for depth in range(1, self.config.unroll + 1):
            ahead = torch.cat([tokens[:, depth:], torch.zeros_like(tokens[:, :depth])], 1)
            positions = seen.positions + depth - 1
            residual, query, key, value = self.project(self.embed_at(ahead, positions), feature)
            query, key = self.rotary(query, positions), self.rotary(key, positions)
            if first is None:
                first = key, value
            else:
                own_keys.append(key)
                own_values.append(value)
            attended = unrolled_attention(query, *first, _stack(own_keys, key), _stack(own_values, value))
            feature = self.finish(residual, attended)
            predictions.append(Prediction(depth, depth, self.read_out(feature), head, kept_ids))
        return predictions

    @torch.no_grad()
    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> RecurrentMemory:
        return self._read(RowCache(len(roots), roots.device), seen, roots)

    @torch.no_grad()
    def remember(self, memory: RecurrentMemory, verdict: Verdict, seen: Observation) -> RecurrentMemory:
        return self._read(memory.cache, seen, verdict.token)

    def keep(self, memory: RecurrentMemory, rows: Sequence[int]) -> RecurrentMemory:
        memory.cache.keep(rows)
        return RecurrentMemory(memory.cache, memory.feature[list(rows)])

    @torch.no_grad()
    def propose(self, memory: RecurrentMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        feature = memory.feature[:, None]
        rows = torch.arange(len(feature), device=feature.device)[:, None]

        def grow(frontier: Frontier) -> Tensor:
            nonlocal feature
            depths = torch.full_like(frontier.tokens, frontier.depth - 1)
            above = feature[rows, frontier.parents]
            feature = self._step(memory.cache, frontier.tokens, above, depths, frontier.attends)
            return self.score(feature)

        words = Words(self.target.vocab_size, self.kept_ids())
        tree = propose(self.shape, self.score(memory.feature), grow, words, warp, dice)
        memory.cache.discard()
        return tree

    def _read(self, cache: RowCache, seen: Observation, roots: Tensor) -> RecurrentMemory:
        """Commit the slots of newly committed tokens; the last one reads the root."""
        rows, last = torch.arange(len(roots), device=roots.device), seen.mask.sum(1) - 1
        ahead = torch.cat([seen.tokens[:, 1:], seen.tokens[:, :1]], 1)
        ahead[rows, last] = roots
        steps = torch.arange(ahead.shape[1], device=roots.device)
        attends = (steps[:, None] >= steps).expand(len(roots), -1, -1)
        feature = self._step(cache, ahead, self.enter(seen), steps.expand_as(ahead), attends)
        cache.commit(steps.expand_as(ahead), last + 1)
        return RecurrentMemory(cache, feature[rows, last])

    def _step(self, cache: RowCache, tokens: Tensor, feature: Tensor, depths: Tensor, attends: Tensor) -> Tensor:
        """The layer over new slots behind the committed ones: tokens int64 [batch, new], feature [batch, new, H]."""
        positions = cache.lengths[:, None] + depths
        residual, query, key, value = self.project(self.embed_at(tokens, positions), feature)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        mask = cache.mask(positions, attends, query.dtype)
        keys, values = cache.update(key, value, 0)
        attended = scaled_dot_product_attention(query, keys, values, mask, enable_gqa=keys.shape[1] < query.shape[1])
        return self.finish(residual, attended)


class SharedHeadDrafter(RecurrentDrafter):
    """One whose laws are the target's own output head over what the layer computes: its whole vocabulary, less what the
    target has gained since."""

    def head(self) -> nn.Module:
        return self.target.output_head()

    def score(self, feature: Tensor) -> Tensor:
        return self.target.head(self.read_out(feature))[..., : self.config.vocab_size]


def _stack(own: Sequence[Tensor], like: Tensor) -> Tensor:
    """[batch, heads, T, D] of each later step to [batch, heads, T, steps, D], also for no step."""
    return torch.stack(list(own), 3) if own else like[:, :, :, None][:, :, :, :0]

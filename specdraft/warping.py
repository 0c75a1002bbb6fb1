"""From logits to a law: processors that read the text before a token, then temperature, top-k and top-p.

Verification is exact only when q is the very law that a token was drawn from, and alpha means something only when
p and q were warped alike, so both sides call the same `Warp` and process logits by the same `Prefixes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

Processors = Callable[[int], Sequence[LogitsProcessor]]
"""From the number of tokens in a row's prompt to its processors, in the order in which they are applied. What one makes
of (ids [n, time], logits [n, V]) may hang on these two alone: it is asked about drafted texts too, in any order, most
of which come to nothing."""


@dataclass(frozen=True)
class Prefixes:
    """The text of each row so far, and the processors that read it."""

    ids: Sequence[Tensor]
    """int64 [time] a row: the prompt and what was emitted, the root last."""
    processors: Sequence[Sequence[LogitsProcessor]]
    """A row's own."""
    ends: Tensor
    """int64 [n]: the ids that end a text. What would follow one is never asked for (E-36)."""

    def process(self, logits: Tensor, drafted: Tensor, below: Tensor, asked: Tensor | None = None) -> Tensor:
        """Logits [batch, n, V] of laws below drafted tokens, each processed with exactly the text before it, in float32
        (float64 for float64 logits).

        drafted int64 [batch, m]; below bool [batch, n, m]: which of them, in this order, stand between a law and the
        row's prefix. asked bool [batch, n]: where False, logits stay as they are; None: asked everywhere.
        """
        done = logits.clone() if logits.dtype == torch.float64 else logits.float().clone()
        lengths = below.sum(-1)
        goes_on = ~(below & torch.isin(drafted, self.ends)[:, None]).any(-1)
        if asked is not None:
            goes_on = goes_on & asked
        for row, (ids, processors) in enumerate(zip(self.ids, self.processors, strict=True)):
            for length in lengths[row][goes_on[row]].unique().tolist():  # texts of one length are processed together
                laws = (goes_on[row] & (lengths[row] == length)).nonzero().squeeze(1)
                path = drafted[row].expand(len(laws), -1)[below[row, laws]].view(len(laws), length)
                text, scores = torch.cat([ids.expand(len(laws), -1), path], 1), done[row, laws]
                for processor in processors:
                    scores = processor(text, scores)
                done[row, laws] = scores
        return done


@dataclass(frozen=True)
class Warp:
    """How logits become the law that tokens are drawn from, in transformers' order: temperature, top-k, top-p.

    temperature 0 is greedy decoding: the law is one-hot at the argmax (the lowest id of equal ones), and top-k and
    top-p say nothing. Raises ValueError for a setting out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    prefixes: Prefixes | None = field(default=None, compare=False, repr=False)
    """For a drafter: the rows' texts, where processors read them. `warp(logits)` takes logits that are processed."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [..., V] to probabilities [..., V], in float32 (float64 for float64 logits)."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.greedy:
            law = torch.zeros_like(logits)
            return law.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        flat = logits.reshape(-1, logits.shape[-1])
        for warper in self._warpers():
            flat = warper(None, flat)
        return flat.softmax(-1).view_as(logits)

    def _warpers(self) -> list:
        warpers: list = []
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers

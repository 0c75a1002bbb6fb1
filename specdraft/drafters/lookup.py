"""Prompt lookup (Saxena 2023): draft what followed the last tokens when they last occurred in the text so far.

No model at all: the drafter is an index of the row's own n-grams, so what it costs is a few dictionary look-ups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdraft.causal import Observation, Session
from specdraft.config import SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.shapes import Chain, Shape
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

Occurrence = Literal["latest", "earliest"]


class Text:
    """One row's tokens, and where each n-gram last (or first) ended; the suffix itself is not among its own
    occurrences."""

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int, occurrence: Occurrence = "latest") -> None:
        self.tokens: list[int] = []
        self._latest = occurrence == "latest"
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._match: int | None = None
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end, self._match = len(self.tokens), None
            for size in self._sizes:
                if size > end:
                    continue
                gram = tuple(self.tokens[end - size :])
                if self._match is None:
                    self._match = self._ends.get(gram)
                if self._latest or gram not in self._ends:
                    self._ends[gram] = end

    def continuation(self, count: int) -> list[int]:
        """What followed the longest suffix seen before, where it occurred: up to `count` tokens."""
        return [] if self._match is None else self.tokens[self._match : self._match + count]


@dataclass(frozen=True)
class LookupMemory:
    texts: list[Text]
    device: torch.device


class LookupDrafter:
    """Matches suffixes of `longest` down to `shortest` tokens, the longest first, then the latest occurrence (E-16), or
    the earliest, which is vLLM's rule."""

    taps: tuple[int, ...] = ()

    def __init__(self, shortest: int = 1, longest: int = 3, occurrence: Occurrence = "latest") -> None:
        if not 1 <= shortest <= longest:
            raise SpecdraftError(f"n-gram lengths must satisfy 1 <= shortest <= longest, got {shortest} and {longest}")
        self.shortest, self.longest, self.occurrence = shortest, longest, occurrence
        self.shape: Shape = Chain()

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> LookupMemory:
        rows = zip(seen.tokens.tolist(), seen.mask.sum(1).tolist(), roots.tolist(), strict=True)
        texts = [
            Text([*tokens[:length], root], self.shortest, self.longest, self.occurrence)
            for tokens, length, root in rows
        ]
        return LookupMemory(texts, roots.device)

    def remember(self, memory: LookupMemory, verdict: Verdict, seen: Observation) -> LookupMemory:
        rows = zip(memory.texts, seen.tokens.tolist(), verdict.accepted.tolist(), verdict.token.tolist(), strict=True)
        for text, tokens, accepted, root in rows:
            text.extend([*tokens[1 : accepted + 1], root])
        return memory

    def keep(self, memory: LookupMemory, rows: Sequence[int]) -> LookupMemory:
        return LookupMemory([memory.texts[row] for row in rows], memory.device)

    def propose(self, memory: LookupMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        if not isinstance(self.shape, Chain):
            raise SpecdraftError(f"prompt lookup drafts chains, and was asked for {self.shape}")
        if self.shape.stop_below > 0:
            raise SpecdraftError("prompt lookup has no confidence in what it finds: leave stop_below at 0")
        drafts = [text.continuation(self.shape.gamma) for text in memory.texts]
        longest = max(map(len, drafts))
        tokens = torch.tensor([draft + [0] * (longest - len(draft)) for draft in drafts], dtype=torch.int64)
        lengths = torch.tensor([len(draft) for draft in drafts], device=memory.device)
        return DraftTree.chain(tokens.view(len(drafts), longest).to(memory.device), None, lengths)

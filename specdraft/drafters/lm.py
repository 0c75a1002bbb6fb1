"""Two-model speculative sampling (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Any small causal LM with the target's tokenizer drafts, a chain or a tree. It reads committed tokens once; what it
drafts is scratch in its own keys and values, forgotten when it has proposed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdraft.causal import Observation, Session
from specdraft.config import SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.base import Chain, Shape
from specdraft.drafters.proposals import Frontier, Words, propose
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LMMemory:
    session: Session
    hidden: Tensor
    """[batch, H]: the drafter's own last hidden state at each row's root."""


class LMDrafter:
    """Drafts with `model`, a causal LM held like a target. Raises SpecdraftError if the vocabularies do not match."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: FrozenTarget, target: FrozenTarget) -> None:
        self.model = model
        self.vocab_size = target.vocab_size
        self.shared = check_tokenizers(model, target)
        """Ids below it are drafted; those above are one side's alone, or padding."""
        self.shape: Shape = Chain()

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> LMMemory:
        session = self.model.session((), len(roots))
        lengths = seen.mask.sum(1, keepdim=True)
        tokens = torch.cat([seen.tokens, roots[:, None]], 1).scatter_(1, lengths, roots[:, None])
        return self._read(session, tokens, torch.arange(tokens.shape[1], device=roots.device) <= lengths)

    def remember(self, memory: LMMemory, verdict: Verdict, seen: Observation) -> LMMemory:
        """The old root has been read already: what is new are the accepted tokens and the new root behind them."""
        tokens = torch.cat([seen.tokens[:, 1:], verdict.token[:, None]], 1)
        tokens.scatter_(1, verdict.accepted[:, None], verdict.token[:, None])
        return self._read(memory.session, tokens, seen.mask)

    def keep(self, memory: LMMemory, rows: Sequence[int]) -> LMMemory:
        memory.session.keep(rows)
        return LMMemory(memory.session, memory.hidden[list(rows)])

    def _read(self, session: Session, tokens: Tensor, mask: Tensor) -> LMMemory:
        known = tokens.clamp(max=self.model.vocab_size - 1)  # an id that the drafter lacks is read as its last
        hidden = session.read(known, mask).hidden
        return LMMemory(session, hidden[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1])

    def propose(self, memory: LMMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        session = memory.session

        def grow(frontier: Frontier) -> Tensor:
            depths = torch.full_like(frontier.tokens, frontier.depth - 1)
            return self._logits(session.grow(frontier.tokens, depths, frontier.attends).hidden)

        tree = propose(self.shape, self._logits(memory.hidden), grow, Words(self.vocab_size), warp, dice)
        session.discard()
        return tree

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.head(hidden)[..., : self.shared]


def check_tokenizers(model: FrozenTarget, target: FrozenTarget) -> int:
    """How many ids, from 0 on, the drafter may draft: those that both have.

    Raises SpecdraftError, with the first that differ, if an id means different tokens; an added token that is no end of
    the target's, and ids that only one of them has, are logged as a warning.
    """
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size != target.vocab_size:
            raise SpecdraftError(
                f"the drafter {model.name} has {model.vocab_size} ids, the target {target.name} {target.vocab_size}; "
                "without tokenizers to compare they must be as many"
            )
        return target.vocab_size
    mine, theirs = (_by_id(held.tokenizer) for held in (model, target))
    added = model.tokenizer.added_tokens_decoder.keys() & target.tokenizer.added_tokens_decoder.keys()
    tolerated = (added - set(target.end_ids)) | (mine.keys() ^ theirs.keys())
    differing = sorted(index for index in mine.keys() | theirs.keys() if mine.get(index) != theirs.get(index))
    if faults := [index for index in differing if index not in tolerated]:
        raise SpecdraftError(
            f"the drafter {model.name} and the target {target.name} give {len(faults)} ids to different tokens "
            f"({_shown(faults, mine, theirs)}); a draft LM must share the target's tokenizer"
        )
    if differing:
        shown = _shown(differing, mine, theirs)
        logger.warning("%s and %s differ in %d added tokens: %s", model.name, target.name, len(differing), shown)
    return min(model.vocab_size, target.vocab_size, 1 + max(mine), 1 + max(theirs))


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _shown(ids: Sequence[int], mine: dict[int, str], theirs: dict[int, str]) -> str:
    return ", ".join(f"{index}: {mine.get(index)!r} and {theirs.get(index)!r}" for index in ids[:5])

"""The reduced draft vocabulary: which target ids a drafter's head predicts, and the tables that engines read.

`kept_ids` int64 [N], ascending, is the one thing that a drafter holds: row i of its head predicts target id
kept_ids[i]. On disk it is `d2t` int64 [N], an OFFSET table (kept_ids[i] = i + d2t[i]), and `t2d` bool [V] (True for
kept ids). The target's law is normalised over its whole vocabulary and then restricted, never renormalised: ids that
are not kept count as misses, and the kept mass bounds alpha.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdraft.causal import CausalLM
from specdraft.config import SpecdraftError
from specdraft.target import FrozenTarget

logger = logging.getLogger(__name__)


class Coverage(NamedTuple):
    """How much of the supervised tokens a reduced vocabulary can draft at all: a bound on what greedy alpha can be."""

    size: int
    tokens: float
    """Share of the supervised tokens that are kept."""
    ids: float
    """Share of the distinct supervised ids that are kept."""
    largest_missing: list[tuple[int, int]]
    """The commonest ids that are not kept, with their counts."""


def choose_vocabulary(counts: Tensor, size: int, end_ids: Sequence[int]) -> Tensor:
    """The `size` commonest ids, the end ids always among them: int64 [size], ascending.

    counts int64 [V]: how often each id is supervised (`TokenRows.token_counts`); equal counts keep the smaller ids, so
    a target's padding columns come last. Raises SpecdraftError if size is not in len(end_ids) + 1 .. V.
    """
    ends = sorted(set(end_ids))
    if not len(ends) < size <= len(counts):
        raise SpecdraftError(
            f"a draft vocabulary of {size} ids: allowed are {len(ends) + 1} to {len(counts)}, the target's vocabulary"
        )
    if not counts.any():
        raise SpecdraftError("a draft vocabulary is chosen by counts, and no token was counted: give training answers")
    ranked = counts.clone()
    ranked[ends] = counts.max() + 1
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def draft_vocabulary(counts: Tensor, size: int | None, end_ids: Sequence[int]) -> Tensor | None:
    """The kept ids of a fresh drafter, and in the log what they cover; None, the whole vocabulary, without a size."""
    if size is None:
        return None
    kept_ids = choose_vocabulary(counts, size, end_ids)
    logger.info("draft vocabulary: %s", coverage(counts, kept_ids))
    return kept_ids


def to_tables(kept_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """d2t int64 [N], offsets (all zero for the whole vocabulary), and t2d bool [vocab_size]. Raises SpecdraftError."""
    _check(kept_ids, vocab_size)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[kept_ids.cpu()] = True
    return kept_ids.cpu() - torch.arange(len(kept_ids)), t2d


def from_tables(d2t: Tensor | None, draft_size: int, vocab_size: int, t2d: Tensor | None = None) -> Tensor:
    """The kept ids int64 [draft_size] of a checkpoint's tables; without any, all ids of an unreduced vocabulary.

    Raises SpecdraftError if a reduced vocabulary has no d2t, or if d2t holds ids in the place of offsets, leaves the
    vocabulary or disagrees with t2d.
    """
    if d2t is None:
        if draft_size != vocab_size:
            raise SpecdraftError(
                f"a draft vocabulary of {draft_size} of the target's {vocab_size} ids, without a d2t table that says "
                "which: the checkpoint is incomplete, and the first ids are not to be guessed"
            )
        return torch.arange(vocab_size)
    if d2t.shape != (draft_size,):
        raise SpecdraftError(
            f"d2t has shape {list(d2t.shape)}; a draft vocabulary of {draft_size} needs [{draft_size}]"
        )
    if t2d is None and not d2t.any() and draft_size != vocab_size:
        raise SpecdraftError(
            f"d2t is all zero, which keeps the first {draft_size} of {vocab_size} ids, and no t2d table confirms that"
        )
    kept_ids = d2t.long().cpu() + torch.arange(draft_size)
    _check(kept_ids, vocab_size)
    if t2d is not None and not torch.equal(to_tables(kept_ids, vocab_size)[1], t2d.bool().cpu()):
        raise SpecdraftError(f"t2d (True for {int(t2d.sum())} ids) does not mark the {draft_size} ids that d2t keeps")
    return kept_ids


def coverage(counts: Tensor, kept_ids: Tensor) -> Coverage:
    """What share of the counted tokens is kept. counts int64 [V] as in `choose_vocabulary`."""
    missing = counts.clone()
    missing[kept_ids] = 0
    most = missing.topk(min(10, len(missing)))
    return Coverage(
        size=len(kept_ids),
        tokens=1 - float(missing.sum() / counts.sum()),
        ids=1 - float((missing > 0).sum() / (counts > 0).sum()),
        largest_missing=[(i, n) for i, n in zip(most.indices.tolist(), most.values.tolist(), strict=True) if n > 0],
    )


def check_same_vocabulary(kept_ids: Tensor, trained_ids: Tensor) -> None:
    """Raises SpecdraftError unless the vocabulary is the one that the weights were trained with, id for id."""
    if torch.equal(kept_ids.cpu(), trained_ids.cpu()):
        return
    common = int(torch.isin(kept_ids.cpu(), trained_ids.cpu()).sum())
    raise SpecdraftError(
        f"the draft vocabulary ({len(kept_ids)} ids) is not the checkpoint's ({len(trained_ids)} ids, {common} in "
        "common): every row of the trained head would mean another token. Keep the checkpoint's, or start afresh"
    )


def check_tokenizers(model: CausalLM, target: FrozenTarget) -> int:
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


def _check(kept_ids: Tensor, vocab_size: int) -> None:
    if len(kept_ids) and int(kept_ids[0]) >= 0 and int(kept_ids[-1]) < vocab_size and bool((kept_ids.diff() > 0).all()):
        return
    raise SpecdraftError(
        f"the kept ids {kept_ids[:4].tolist()}..{kept_ids[-2:].tolist()} are not ascending ids below {vocab_size}; "
        "a d2t table holds offsets: target id = row + d2t[row]"
    )

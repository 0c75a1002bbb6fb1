"""Static trees as Medusa makes them (Cai et al. 2024, arXiv 2401.10774): where the target's token stands among a
drafter's guesses, measured on answers, says which nodes are worth the target's pass."""

from collections.abc import Iterator

import torch
from torch import Tensor

from specdraft.causal import Observation
from specdraft.config import SpecdraftError
from specdraft.data.batches import TokenRows, collate
from specdraft.drafters.base import TrainableDrafter
from specdraft.objectives import Prediction
from specdraft.reduction import law_positions
from specdraft.target import FrozenTarget

_ROWS = 4  # answers read at once


@torch.no_grad()
def rank_accuracies(
    drafter: TrainableDrafter, target: FrozenTarget, rows: TokenRows, ranks: int, *, chunk: int = 512
) -> list[list[float]]:
    """accuracies[d - 1][r]: the share of the supervised positions at which the target's own greedy token is the one of
    rank r (0: the likeliest) under the drafter's law at depth d, teacher-forced; r < `ranks`.

    Positions are those that training supervises; at most `chunk` of them have their logits held at once. Raises
    SpecdraftError if some depth has none.
    """
    hits: list[Tensor] = []
    counts: list[int] = []
    for tokens, labels, seen in _batches(drafter, target, rows):
        predictions = drafter.predict(tokens, seen)
        hits = hits or [torch.zeros(ranks, dtype=torch.int64, device=target.device) for _ in predictions]
        counts = counts or [0 for _ in predictions]
        for depth, prediction in enumerate(predictions):
            positions = law_positions(labels, prediction.shift).flatten().nonzero().squeeze(-1)
            counts[depth] += len(positions)
            for part in positions.split(chunk):
                greedy = target.head(seen.hidden.flatten(0, 1)[part]).argmax(-1)
                found = _guesses(prediction, part - prediction.shift, ranks)
                hits[depth][: found.shape[1]] += (found == greedy[:, None]).sum(0)
    if not counts or not all(counts):
        raise SpecdraftError(f"the answers are too short to calibrate on: positions by depth are {counts}")
    return [(found / count).tolist() for found, count in zip(hits, counts, strict=True)]


def _guesses(prediction: Prediction, times: Tensor, ranks: int) -> Tensor:
    """The likeliest ids of a prediction, int64 [n, at most ranks], at flat positions int64 [n]."""
    logits = prediction.logits(prediction.hidden.flatten(0, 1)[times])
    columns = logits.topk(min(ranks, logits.shape[-1])).indices
    return columns if prediction.kept_ids is None else prediction.kept_ids[columns]


def _batches(
    drafter: TrainableDrafter, target: FrozenTarget, rows: TokenRows
) -> Iterator[tuple[Tensor, Tensor, Observation]]:
    """The rows' tokens and labels, and what the target sees in them."""
    order = rows.lengths.argsort(descending=True).tolist()
    for start in range(0, len(order), _ROWS):
        batch = collate([rows[row] for row in order[start : start + _ROWS]])
        seen = target.observe(batch["input_ids"], batch["attention_mask"].bool(), drafter.taps)
        yield seen.tokens, batch["labels"].to(target.device), seen

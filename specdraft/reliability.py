"""How sure a drafter was of its tokens against how often it was right: a few sums a bin, which decoding adds up.

The drafter's probability of a token below its parent is set against what became of it wherever the parent was accepted,
so that the token's turn had come. Where the drafter is calibrated, the target writes of the tokens to which the drafter
gives 0.3 just 30 %: guesses can then be dropped, or trees shaped, by what the drafter says of itself.
"""

import torch
from torch import Tensor

from specdraft.tree import DraftTree
from specdraft.verify import Verdict

BINS = 10
"""Equal parts of [0, 1] by the drafter's probability."""
NODES, CONFIDENCE, ACCEPTED, TARGET = range(4)
"""Columns: how many tokens, and the sums of the drafter's probability, of the accepted and of the target's own
probability (warped; greedy decoding: 1 for its likeliest token)."""


def reliability(tree: DraftTree, p: Tensor, verdict: Verdict) -> Tensor:
    """float64 [batch, BINS, 4] of one round: candidates whose parent is the root or was accepted.

    p: float [batch, 1 + nodes, V] or int64 [batch, 1 + nodes], as `verify` reads it. The tree has confidences.
    """
    assert tree.confidence is not None
    parent = tree.parents + 1
    accepted = tree.tokens.new_zeros(tree.batch, 2 + tree.nodes)  # the last: nobody
    accepted[:, 0] = 1
    accepted.scatter_(1, torch.where(verdict.path < 0, 1 + tree.nodes, verdict.path + 1), 1)
    accepted = accepted[:, : 1 + tree.nodes]
    counted = tree.candidate & tree.present & (accepted.gather(1, parent) > 0)
    if p.is_floating_point():
        own = p[torch.arange(len(p), device=p.device)[:, None], parent, tree.tokens]
    else:
        own = p.gather(1, parent) == tree.tokens
    sure = tree.confidence.where(counted, 0).double()
    values = torch.stack([torch.ones_like(sure), sure, accepted[:, 1:].double(), own.double()], -1)
    place = (sure * BINS).long().clamp(max=BINS - 1)
    found = values.new_zeros(tree.batch, BINS, 4)
    return found.scatter_add_(1, place[..., None].expand_as(values), values * counted[..., None])

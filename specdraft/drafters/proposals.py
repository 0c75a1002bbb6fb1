"""From laws to a tree: how a drafter that gives a law below each drafted token proposes, whatever its shape.

A drafter says what its law is below the root and, frontier by frontier, below the tokens that it has drafted. Whether
these become a chain, EAGLE-2's dynamic tree or a static one is decided here, for every method alike.
"""

from collections.abc import Callable, Sequence
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from specdraft.config import SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.shapes import Chain, DynamicTree, Shape, StaticTree
from specdraft.tree import ROOT, DraftTree
from specdraft.warping import Prefixes, Warp


class Frontier(NamedTuple):
    """Drafted tokens of one depth that are to be read, so that something can be drafted below them."""

    tokens: Tensor
    """int64 [batch, n], the target's ids"""
    parents: Tensor
    """int64 [batch, n]: which of the frontier before each hangs below; 0, the root, at depth 1"""
    depth: int
    """How far below the root they stand, from 1 on."""
    attends: Tensor
    """bool [batch, n, read]: which of the tokens read so far (all frontiers', in order) each descends from, itself
    included"""


Grow = Callable[[Frontier], Tensor]
"""Logits of the drafter's law below each token of a frontier: [batch, n, kept]; [batch, 1, kept] where it is the same
below all."""


class Words(NamedTuple):
    """Which target ids the columns of a drafter's logits stand for."""

    vocab_size: int
    """The target's."""
    kept_ids: Tensor | None = None
    """int64 [kept], ascending; None: the first ids, in order."""

    def ids(self, columns: Tensor) -> Tensor:
        return columns if self.kept_ids is None else self.kept_ids[columns]

    def widened(self, law: Tensor) -> Tensor:
        """A law over the columns [batch, kept] as one over the target's ids [batch, V]."""
        if law.shape[1] == self.vocab_size:
            return law
        wide = law.new_zeros(len(law), self.vocab_size)
        wide[:, slice(law.shape[1]) if self.kept_ids is None else self.kept_ids] = law
        return wide


def propose(shape: Shape, first: Tensor, grow: Grow, words: Words, warp: Warp, dice: Dice) -> DraftTree:
    """A tree of `shape` below each root. `first` [batch, kept]: the logits below the root.

    A chain is drawn from the warped law, or greedy; the nodes of a tree are chosen, at any temperature. Raises
    SpecdraftError for a choice, which a drafter does not make itself.
    """
    if warp.prefixes is not None:
        first, grow = _processed(first, grow, words, warp.prefixes)
    if isinstance(shape, Chain):
        return _chain(shape, first, grow, words, warp, dice)
    if isinstance(shape, DynamicTree):
        return _dynamic(shape, first, grow, words)
    if isinstance(shape, StaticTree):
        return _static(shape, first, grow, words)
    raise SpecdraftError("a choice among shapes is made by an AdaptiveDrafter around the drafter")


def _processed(first: Tensor, grow: Grow, words: Words, prefixes: Prefixes) -> tuple[Tensor, Grow]:
    """Laws as the target's processors make them below the same tokens, so that drafts are nearer to what it will say. A
    law of which they leave nothing stays as it was: drafted words may all be forbidden, the target's are not."""
    kept = slice(first.shape[1]) if words.kept_ids is None else words.kept_ids
    read = [torch.empty(len(first), 0, dtype=torch.int64, device=first.device)]

    def process(logits: Tensor, below: Tensor) -> Tensor:
        wide = logits.new_full((*logits.shape[:2], words.vocab_size), -inf)
        wide[..., kept] = logits
        done = prefixes.process(wide, torch.cat(read, 1), below)[..., kept]
        return torch.where((done > -inf).any(-1, keepdim=True), done, logits)

    def grown(frontier: Frontier) -> Tensor:
        read.append(frontier.tokens)
        return process(grow(frontier).expand(-1, frontier.tokens.shape[1], -1), frontier.attends)

    nothing = torch.empty(len(first), 1, 0, dtype=torch.bool, device=first.device)
    return process(first[:, None], nothing)[:, 0], grown


def _chain(shape: Chain, first: Tensor, grow: Grow, words: Words, warp: Warp, dice: Dice) -> DraftTree:
    """Whether a row has a token at a depth is settled by its law there, before the token is drawn."""
    logits, nobody = first, torch.zeros(len(first), dtype=torch.int64, device=first.device)
    lengths, trust = nobody, torch.ones(len(first), device=first.device)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    confidences: list[Tensor] = []
    for depth in range(shape.gamma):
        if depth > 0:
            below = tokens[-1][:, None]
            attends = torch.ones(len(first), 1, depth, dtype=torch.bool, device=first.device)
            logits = grow(Frontier(below, torch.zeros_like(below), depth, attends))[:, 0]
        surest = log_softmax(logits.float(), -1).amax(-1).exp()
        trust = trust * surest
        drafts = trust >= shape.stop_below
        if shape.stop_below > 0 and not drafts.any():
            break
        lengths = lengths + drafts
        if warp.greedy:
            tokens.append(words.ids(logits.argmax(-1)))
            confidences.append(surest)
        else:
            rows = drafts.nonzero().flatten()
            laws.append(words.widened(warp(logits)))
            tokens.append(nobody.index_copy(0, rows, dice.draw(laws[-1][rows], rows.tolist())))
            confidences.append(laws[-1].gather(1, tokens[-1][:, None])[:, 0].float())
    if not tokens:
        return DraftTree.chain(nobody[:, None][:, :0], confidence=trust[:, None][:, :0])
    confidence = torch.stack(confidences, 1)
    return DraftTree.chain(torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None, lengths, confidence)


def _dynamic(shape: DynamicTree, first: Tensor, grow: Grow, words: Words) -> DraftTree:
    """Nodes are collected depth by depth; `frontier` holds those of the last depth that are expanded next."""
    batch, width, device = len(first), shape.width, first.device
    likelihood, token = _likeliest(first[:, None], 1, width, words)  # [batch, 1, width]
    scores, likelihoods, tokens = [likelihood.flatten(1)], [likelihood.flatten(1)], [token.flatten(1)]
    parents = [torch.full_like(tokens[0], ROOT)]
    frontier = torch.arange(width, device=device).expand(batch, -1)
    slot = torch.zeros_like(frontier)  # of a frontier node's parent in the frontier before
    attends = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
    own = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
    rows = torch.arange(batch, device=device)[:, None]
    collected = width
    least = log(shape.stop_below) if shape.stop_below > 0 else -inf  # of a kept node's score
    for depth in range(1, shape.depth):
        if shape.stop_below > 0 and (scores[-1] < least).all():
            break
        attends = torch.cat([attends[rows, slot], own], 2)
        logits = grow(Frontier(torch.cat(tokens, 1)[rows, frontier], slot, depth, attends))
        likelihood, token = _likeliest(logits, width, width, words)  # [batch, width, width]
        score = likelihood + torch.cat(scores, 1)[rows, frontier][..., None]
        scores.append(score.flatten(1))
        likelihoods.append(likelihood.flatten(1))
        tokens.append(token.flatten(1))
        parents.append(frontier.repeat_interleave(width, 1))
        best = score.flatten(1).topk(width).indices
        frontier, slot = collected + best, best // width
        collected += width * width
    every = torch.cat(scores, 1)
    # stable: of equal scores the parent, which stands first, is kept before its child
    kept = every.sort(dim=1, descending=True, stable=True).indices[:, : shape.nodes]
    kept = kept.masked_fill(every.gather(1, kept) < least, collected).sort(dim=1).values
    present = kept < collected
    if shape.stop_below > 0:
        most = int(present.sum(1).max())
        kept, present = kept[:, :most], present[:, :most]
    place = torch.full((batch, collected + 1), ROOT, device=device)
    place.scatter_(1, kept, torch.arange(kept.shape[1], device=device).expand_as(kept))
    place[:, collected] = ROOT  # the root's own, and that of nodes that are not kept
    kept = kept.clamp(max=collected - 1)
    parent = place.gather(1, torch.cat(parents, 1).gather(1, kept) % (collected + 1))
    token, confidence = torch.cat(tokens, 1).gather(1, kept), torch.cat(likelihoods, 1).gather(1, kept).exp()
    return DraftTree.chosen(token, parent, present, confidence)


def _static(shape: StaticTree, first: Tensor, grow: Grow, words: Words) -> DraftTree:
    """Depth by depth; of a depth, only the nodes that have children are read."""
    batch, device = len(first), first.device
    place = {path: index for index, path in enumerate(shape.paths)}
    inner = {path[:-1] for path in shape.paths}
    read: list[tuple[int, ...]] = []  # nodes in the order in which they were read
    before: list[tuple[int, ...]] = [()]  # the frontier whose laws are known
    tokens: list[Tensor] = []
    likelihoods: list[Tensor] = []
    logits = first[:, None]
    for depth in range(1, shape.depth + 1):
        level = [path for path in shape.paths if len(path) == depth]
        likelihood, token = _likeliest(logits, len(before), 1 + max(path[-1] for path in level), words)
        slots, ranks = [before.index(path[:-1]) for path in level], [path[-1] for path in level]
        tokens.append(token[:, slots, ranks])
        likelihoods.append(likelihood[:, slots, ranks])
        frontier = [path for path in level if path in inner]
        if not frontier:
            break
        read += frontier
        sees = torch.tensor([[path[: len(node)] == node for node in read] for path in frontier], device=device)
        chosen = tokens[-1][:, [level.index(path) for path in frontier]]
        hangs = torch.tensor([before.index(path[:-1]) for path in frontier], device=device)
        logits = grow(Frontier(chosen, hangs.expand(batch, -1), depth, sees.expand(batch, -1, -1)))
        before = frontier
    parents = torch.tensor([place.get(path[:-1], ROOT) for path in shape.paths], device=device).expand(batch, -1)
    present = torch.ones_like(parents, dtype=torch.bool)
    return DraftTree.chosen(torch.cat(tokens, 1), parents, present, torch.cat(likelihoods, 1).exp())


def best_paths(accuracies: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The static tree of `nodes` nodes that accepts most, from the share of positions at which the token of each rank
    is the target's: accuracies[depth][rank]. Depths count as independent (Medusa, Cai et al. 2024, arXiv 2401.10774).
    """
    found: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(rank,): accuracy for rank, accuracy in enumerate(accuracies[0])}
    while open_ and len(found) < nodes:
        path = max(open_, key=open_.__getitem__)
        found[path] = open_.pop(path)
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                open_[*path, rank] = found[path] * accuracy
    return StaticTree(tuple(sorted(found, key=lambda path: (len(path), path))))


def _likeliest(logits: Tensor, count: int, width: int, words: Words) -> tuple[Tensor, Tensor]:
    """The `width` likeliest successors of each of `count` tokens: log q and target ids, each [batch, count, width]."""
    top = log_softmax(logits.float(), -1).topk(width)
    return top.values.expand(-1, count, -1), words.ids(top.indices).expand(-1, count, -1)

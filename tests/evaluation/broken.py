"""Deliberately broken verifiers and drafters, as toolkits have had them, to be caught by the evaluator's verdict."""

from collections.abc import Callable
from dataclasses import replace

import torch
from evaluation.markov import VOCABULARY, MarkovDrafter
from torch import Tensor

from specdraft.dice import Dice
from specdraft.drafters.proposals import Words, propose
from specdraft.drafters.shapes import Chain
from specdraft.tree import ALONE, NO_NODE, ROOT, DraftTree, Draws
from specdraft.warping import Warp


class ShapedDrafter(MarkovDrafter):
    """Drafts whatever shape a system asks for, as every trained drafter does."""

    def propose(self, memory: Tensor, *, warp: Warp, dice: Dice) -> DraftTree:
        words = Words(VOCABULARY)
        return propose(self.shape, self.logits[memory], lambda f: self.logits[f.tokens], words, warp, dice)


class SiblingsDrafter(MarkovDrafter):
    """Draws `gamma` siblings below the root, and one token below each: independently, or without replacement."""

    def __init__(self, q: Tensor, group: int = ALONE) -> None:
        super().__init__(q)
        self.group = group

    def propose(self, memory: Tensor, *, warp: Warp, dice: Dice) -> DraftTree:
        assert isinstance(self.shape, Chain)
        batch, count, rows = len(memory), self.shape.gamma, range(len(memory))
        laws, tokens = [warp(self.logits[memory])], []
        left = laws[0].clone()
        for _ in range(count):
            tokens.append(dice.draw(left / left.sum(-1, keepdim=True), rows))
            if self.group != ALONE:
                left = left.scatter(1, tokens[-1][:, None], 0)
        for parent in range(count):
            laws.append(warp(self.logits[tokens[parent]]))
            tokens.append(dice.draw(laws[-1], rows))
        node = torch.arange(2 * count)
        parents = torch.where(node < count, ROOT, node - count)
        law = torch.where(node < count, 0, node - count + 1)
        group = torch.where(node < count, self.group, ALONE)
        nodes = torch.stack(tokens, 1)
        present = torch.ones_like(nodes, dtype=torch.bool)
        draws = Draws(*(column.expand(batch, -1) for column in (node, law, group)))
        return DraftTree(nodes, parents.expand(batch, -1), present, present, draws, torch.stack(laws, 1))


Spoil = Callable[[DraftTree], DraftTree]


def spoiled(drafter: MarkovDrafter, spoil: Spoil) -> MarkovDrafter:
    """The drafter, its trees spoiled after they were drawn."""
    honest = drafter.propose
    drafter.propose = lambda memory, *, warp, dice: spoil(honest(memory, warp=warp, dice=dice))  # type: ignore[method-assign]
    return drafter


def confidence(tree: DraftTree) -> Tensor:
    """q of each trial's token [batch, trials]; trials are nodes, in order."""
    assert tree.laws is not None
    return tree.laws[torch.arange(tree.batch)[:, None], tree.draws.law, tree.tokens]


def without(tree: DraftTree, doomed: Tensor) -> DraftTree:
    return replace(tree, draws=tree.draws._replace(node=tree.draws.node.masked_fill(doomed, NO_NODE)))


def merged(tree: DraftTree) -> DraftTree:
    """Of equal drawn siblings one trial is kept."""
    same = (tree.tokens[:, :, None] == tree.tokens[:, None]) & (tree.parents[:, :, None] == tree.parents[:, None])
    return without(tree, same.tril(-1).any(-1))


def best_kept(tree: DraftTree) -> DraftTree:
    """Of all siblings the most confident is kept."""
    q, beside = confidence(tree), tree.parents[:, :, None] == tree.parents[:, None]
    better = beside & (q[:, None] > q[:, :, None])
    ties = beside & (q[:, None] == q[:, :, None])
    return without(tree, better.any(-1) | ties.tril(-1).any(-1))


def unlikely_dropped(tree: DraftTree) -> DraftTree:
    """A chain ends before its first token of q < 0.2."""
    return without(tree, (confidence(tree) < 0.2).cumsum(1) > 0)


def sorted_by_value(tree: DraftTree) -> DraftTree:
    order = confidence(tree).argsort(dim=1, descending=True, stable=True)
    return replace(tree, draws=Draws(*(column.gather(1, order) for column in tree.draws)))


def ungrouped(tree: DraftTree) -> DraftTree:
    """Drawn without replacement, but every sibling claims the law of the first."""
    return replace(tree, draws=tree.draws._replace(group=torch.full_like(tree.draws.group, ALONE)))

"""What is verified: a tree of drafted tokens in every row, and how each of them came to be proposed.

A chain is a tree, a batch is a padded stack, plain decoding is a tree without nodes. The tokens and parents say what
the target scores; the draws say, in the order in which they were made, which node each trial proposes and from which
law it was drawn, which is all that `verify` needs to keep the target's law.

What keeps verification exact is on the side of whoever builds a tree: the number of trials at a node is settled
before any of them is drawn, and a drawn trial is never dropped, merged away or moved because of its value. A tree that
is pruned by its tokens' values has *chosen* its nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

ROOT = -1
"""Parent of the nodes of depth 1."""
CHOSEN = -1
"""Law of a trial that was chosen, not drawn."""
ALONE = -1
"""Group of a trial that was drawn independently of the others."""
NO_NODE = -1
"""Node of a trial that is padding."""


class Draws(NamedTuple):
    """Trials in the order in which they were made, each int64 [batch, draws]; padding has node NO_NODE."""

    node: Tensor
    """The node that the trial proposes; the trial took place at its parent."""
    law: Tensor
    """Index into the tree's laws, or CHOSEN."""
    group: Tensor
    """Trials at one parent with the same group >= 0 were drawn without replacement from one law; ALONE: drawn
    independently."""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """One tree of drafted tokens a row. Raises ValueError where shapes disagree or a parent follows its child."""

    tokens: Tensor
    """int64 [batch, nodes], in the target's vocabulary; rows are padded at the end."""
    parents: Tensor
    """int64 [batch, nodes]: index of the parent, smaller than the node's own, or ROOT."""
    present: Tensor
    """bool [batch, nodes]: False for padding."""
    candidate: Tensor
    """bool [batch, nodes]: False for probes, which the target scores and `verify` passes over."""
    draws: Draws
    laws: Tensor | None
    """float [batch, laws, V]: each law that some trial was drawn from, after warping; None: every trial is chosen."""
    confidence: Tensor | None = None
    """float32 [batch, nodes]: how likely the drafter found each node's token below its parent. Of a token that was
    drawn, q(x) of the law that it was drawn from; of one that was chosen, its unwarped probability. Anything for
    padding. None: the drafter gives no law. Verification reads none of it."""

    def __post_init__(self) -> None:
        columns = {"parents": self.parents, "present": self.present, "candidate": self.candidate}
        if self.confidence is not None:
            columns["confidence"] = self.confidence
        for name, column in columns.items():
            if column.shape != self.tokens.shape:
                found, due = tuple(column.shape), tuple(self.tokens.shape)
                raise ValueError(f"{name} must have the shape of tokens, {due}, and has {found}")
        if not self.draws.node.shape == self.draws.law.shape == self.draws.group.shape:
            raise ValueError(
                f"node, law and group of the draws differ in shape: {[tuple(d.shape) for d in self.draws]}"
            )
        if (self.present & (self.parents >= torch.arange(self.nodes, device=self.tokens.device))).any():
            raise ValueError("a node's parent must stand before it")

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        laws: Tensor | None = None,
        lengths: Tensor | None = None,
        confidence: Tensor | None = None,
    ) -> Self:
        """tokens int64 [batch, n], one below the other; laws [batch, n, V]: law i drew token i; None: all chosen.

        lengths int64 [batch]: how many of the n tokens each row has, settled before they were drawn; None: all.
        """
        steps = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        present = torch.ones_like(tokens, dtype=torch.bool) if lengths is None else steps < lengths[:, None]
        law = torch.full_like(tokens, CHOSEN) if laws is None else steps
        draws = Draws(steps.masked_fill(~present, NO_NODE), law, torch.full_like(tokens, ALONE))
        return cls(tokens, steps - 1, present, present, draws, laws, confidence)

    @classmethod
    def chosen(cls, tokens: Tensor, parents: Tensor, present: Tensor, confidence: Tensor | None = None) -> Self:
        """A tree whose every node was chosen, tried in the order of the nodes; all [batch, nodes]."""
        node = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).masked_fill(~present, NO_NODE)
        draws = Draws(node, torch.full_like(tokens, CHOSEN), torch.full_like(tokens, ALONE))
        return cls(tokens, parents, present, present, draws, None, confidence)

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> Self:
        """Plain decoding: `batch` rows without a node."""
        return cls.chain(torch.empty(batch, 0, dtype=torch.int64, device=device))

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def _attends(self) -> Tensor:
        spots = torch.arange(1 + self.nodes, device=self.tokens.device)
        up = torch.where(self.present, self.parents + 1, spots[1:])
        up = torch.cat([up.new_zeros(self.batch, 1), up], 1)
        at = spots.expand_as(up)
        seen = torch.eye(1 + self.nodes, dtype=torch.bool, device=up.device).repeat(self.batch, 1, 1)
        while not torch.equal(above := up.gather(1, at), at):
            at = above
            seen.scatter_(2, at[..., None], True)
        return seen

    def attends(self) -> Tensor:
        """bool [batch, 1 + nodes, 1 + nodes]: row i sees column j. Index 0 is the root, 1 + i is node i.

        Every node sees itself, its ancestors and the root; padding sees itself alone and is seen by nobody else.
        """
        return self._attends

    @property
    def depths(self) -> Tensor:
        """int64 [batch, nodes]: 1 for children of the root; 0 for padding."""
        return self._attends[:, 1:].sum(-1) - 1

    @cached_property
    def depth(self) -> int:
        """The greatest depth of any row; 0 without a node."""
        return int(self._attends.sum(-1).max()) - 1 if self.batch else 0

    def keep(self, rows: Sequence[int]) -> "DraftTree":
        """The trees of `rows` alone, in that order."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.tokens.device)
        nodes = (self.tokens[index], self.parents[index], self.present[index], self.candidate[index])
        laws = None if self.laws is None else self.laws[index]
        confidence = None if self.confidence is None else self.confidence[index]
        return DraftTree(*nodes, Draws(*(d[index] for d in self.draws)), laws, confidence)

    def only(self, rows: Tensor) -> "DraftTree":
        """The same batch with the trees of `rows` (bool [batch]) alone; the others are left without a node."""
        mine = rows[:, None]
        draws = self.draws._replace(node=self.draws.node.masked_fill(~mine, NO_NODE))
        nodes = (self.tokens, self.parents, self.present & mine, self.candidate & mine)
        return DraftTree(*nodes, draws, self.laws, self.confidence)


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """Several drafters' trees for the same rows as one (SpecInfer, arXiv:2305.09781); one tree alone is deduplicated.

    Equal tokens under one parent share a node and keep each trial. Trials are made tree after tree; trials that were
    drawn without replacement stay a group of their own. A shared node has the confidence of the first that proposes
    it; where one tree has none, the merged one has none. Trees of one vocabulary; raises ValueError without a tree.
    """
    if not trees:
        raise ValueError("merge needs at least one tree")
    rows = [_merge_row(trees, row) for row in range(trees[0].batch)]
    device = trees[0].tokens.device
    tokens, parents, kind, origin = _stack([nodes for nodes, _ in rows], (0, ROOT, -1, 0), device)
    node, law, group = _stack([trials for _, trials in rows], (NO_NODE, CHOSEN, ALONE), device)
    laws = [tree.laws for tree in trees if tree.laws is not None]
    known = [tree.confidence for tree in trees if tree.confidence is not None]
    return DraftTree(
        tokens,
        parents,
        kind >= 0,
        kind > 0,
        Draws(node, law, group),
        torch.cat(laws, 1) if laws else None,
        torch.cat(known, 1).gather(1, origin) if len(known) == len(trees) else None,
    )


_Rows = list[list[int]]


def _merge_row(trees: Sequence[DraftTree], row: int) -> tuple[_Rows, _Rows]:
    """One row's nodes (token, parent, candidate 0/1, place among all trees' nodes) and trials (node, law, group)."""
    nodes: _Rows = []
    trials: _Rows = []
    spots: dict[tuple[int, int], int] = {}
    groups: dict[tuple[int, int, int], int] = {}
    laws = start = 0
    for source, tree in enumerate(trees):
        spot = {ROOT: ROOT}
        parents, present = tree.parents[row].tolist(), tree.present[row].tolist()
        columns = zip(tree.tokens[row].tolist(), parents, tree.candidate[row].tolist(), strict=True)
        for i, (token, parent, real) in enumerate(columns):
            if not present[i]:
                continue
            spot[i] = spots.setdefault((spot[parent], token), len(nodes))
            if spot[i] == len(nodes):
                nodes.append([token, spot[parent], 0, start + i])
            nodes[spot[i]][2] |= real
        for node, law, group in zip(*(d[row].tolist() for d in tree.draws), strict=True):
            if node == NO_NODE:
                continue
            shared = ALONE if group == ALONE else groups.setdefault((source, parents[node], group), len(groups))
            trials.append([spot[node], CHOSEN if law == CHOSEN else laws + law, shared])
        laws += 0 if tree.laws is None else tree.laws.shape[1]
        start += tree.nodes
    return nodes, trials


def _stack(rows: Sequence[_Rows], padding: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """One tensor int64 [rows, the longest row] for each column."""
    width = max(map(len, rows), default=0)
    padded = [row + [list(padding)] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(rows), width, len(padding)).unbind(-1)

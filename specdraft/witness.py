"""What sampled decoding leaves behind for the verdict on its law: randomised probability integral transforms.

A transform is uniform on [0, 1], given all before it, if its token follows the law that it should. The draws that
randomise it come from streams of their own, so that a witness changes nothing of what is decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdraft.dice import SeededDice
from specdraft.tree import ALONE, CHOSEN, ROOT, DraftTree
from specdraft.verify import Verdict


@dataclass
class Transforms:
    """One row's."""

    tokens: list[float] = field(default_factory=list)
    """For each emitted token, a uniform draw from [P(before token), P(up to token)] under the target's p, its tokens in
    falling order of probability."""
    drafts: list[float | None] = field(default_factory=list)
    """The same with the tokens in rising order of p over the draft law there: first what was drafted more often than
    the target would write it, which a wrong rule writes too often or too seldom. None where nothing was drafted."""
    trials: list[float] = field(default_factory=list)
    """The place of each drawn trial's token in the law that its tree says it was drawn from, accepted or not; tokens of
    siblings drawn before it first, then in falling order. Uniform if the drafter hands on its q."""


class Witness:
    """Records the transforms of a batch."""

    def __init__(self, seeds: Sequence[int], found: Sequence[Transforms]) -> None:
        self._dice = SeededDice(seeds)
        self._found = list(found)

    def first(self, law: Tensor, tokens: Tensor) -> None:
        """The tokens [batch] that were drawn from the prompts' own laws [batch, V]."""
        self._emitted(law[:, None], None, tokens[:, None], [1] * len(tokens))

    def round(self, tree: DraftTree, p: Tensor, verdict: Verdict, tokens: Tensor, counts: Sequence[int]) -> None:
        """What was drafted, the target's laws [batch, 1 + nodes, V], what came of it, and the tokens [batch, n] of
        which the first `counts` entered the output."""
        if tree.laws is not None:
            self._trials(tree)
        self._emitted(_laws_of(p, verdict), _drafted(tree, verdict, p), tokens, counts)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with `rows` alone, in that order."""
        self._dice, self._found = self._dice.keep(rows), [self._found[row] for row in rows]

    def _emitted(self, laws: Tensor, drafted: Tensor | None, tokens: Tensor, counts: Sequence[int]) -> None:
        laws = laws.double()
        by_law = _places(laws, -laws, tokens)
        if drafted is not None:
            by_draft = _places(laws, laws / drafted.double(), tokens)
            offered = (drafted > 0).any(-1).tolist()
        for row, count in enumerate(counts):
            found = self._found[row]
            for step in range(count):
                inside = float(self._dice.uniform([row])[0])
                found.tokens.append(by_law[0][row][step] + inside * by_law[1][row][step])
                seen = drafted is not None and offered[row][step]
                found.drafts.append(by_draft[0][row][step] + inside * by_draft[1][row][step] if seen else None)

    def _trials(self, tree: DraftTree) -> None:
        drawn, (before, own) = _trial_places(tree)
        for row, trials in enumerate(drawn.tolist()):
            for trial in (place for place, made in enumerate(trials) if made):
                inside = float(self._dice.uniform([row])[0])
                self._found[row].trials.append(before[row][trial] + inside * own[row][trial])


def _laws_of(p: Tensor, verdict: Verdict) -> Tensor:
    """The target's law at the root and each accepted node: [batch, 1 + most accepted, V]."""
    nodes = torch.cat([torch.zeros_like(verdict.accepted)[:, None], verdict.path + 1], 1)
    nodes = nodes[:, : int(verdict.accepted.max()) + 1].clamp(min=0)
    return p[torch.arange(len(p), device=p.device)[:, None], nodes]


def _drafted(tree: DraftTree, verdict: Verdict, p: Tensor) -> Tensor:
    """How many trials at the root and at each accepted node are to propose each token, [batch, 1 + most accepted, V]:
    the sum of their laws, one-hot where chosen. It is settled before any of them is drawn, so it tells nothing of the
    token that is emitted there."""
    most = int(verdict.accepted.max())
    at = torch.cat([torch.full_like(verdict.accepted, ROOT)[:, None], verdict.path[:, :most]], 1)
    at[:, 1:][at[:, 1:] < 0] = ROOT - 1  # beyond the accepted nodes no trial took place
    index = tree.draws.node.clamp(min=0)
    real = (tree.draws.node >= 0) & (tree.candidate & tree.present).gather(1, index)
    here = real[:, None] & (tree.parents.gather(1, index)[:, None] == at[..., None])
    chosen, each = tree.draws.law == CHOSEN, (*here.shape[:2], -1)
    found = p.new_zeros(*here.shape[:2], p.shape[-1])
    found.scatter_add_(2, tree.tokens.gather(1, index)[:, None].expand(each), (here & chosen[:, None]).to(p))
    if tree.laws is not None:
        trials = p.new_zeros(*here.shape[:2], tree.laws.shape[1])
        trials.scatter_add_(2, tree.draws.law.clamp(min=0)[:, None].expand(each), (here & ~chosen[:, None]).to(p))
        found += trials @ tree.laws.to(p)
    return found


def _trial_places(tree: DraftTree) -> tuple[Tensor, tuple[list[list[float]], list[list[float]]]]:
    """Which trials were drawn, bool [batch, draws], and each one's `_places` in its law. Tokens of earlier siblings
    come first; where they were drawn with it without replacement, its law is what they left."""
    assert tree.laws is not None
    draws, index = tree.draws, tree.draws.node.clamp(min=0)
    drawn = (draws.node >= 0) & (draws.law != CHOSEN) & tree.present.gather(1, index)
    parent, tokens = tree.parents.gather(1, index), tree.tokens.gather(1, index)
    earlier = (drawn[:, None] & (parent[..., None] == parent[:, None])).tril(-1)
    together = earlier & (draws.group[..., None] == draws.group[:, None]) & (draws.group != ALONE)[:, None]
    law = tree.laws[torch.arange(tree.batch, device=index.device)[:, None], draws.law.clamp(min=0)].double()
    siblings = tokens[:, None].expand(earlier.shape)
    law = law * (torch.zeros_like(law).scatter_add_(2, siblings, together.double()) == 0)
    law = law / law.sum(-1, keepdim=True)
    return drawn, _places(law, -law - torch.zeros_like(law).scatter_add_(2, siblings, earlier.double()), tokens)


def _places(laws: Tensor, keys: Tensor, tokens: Tensor) -> tuple[list[list[float]], list[list[float]]]:
    """Of each token [rows, n], with the vocabulary in rising order of `keys` [rows, n, V] and then of id: the
    probability of what stands before it under `laws`, and its own."""
    own, ids = tokens[..., None], torch.arange(laws.shape[-1], device=laws.device)
    key = keys.gather(-1, own)
    before = (keys < key) | ((keys == key) & (ids < own))
    return torch.where(before, laws, 0).sum(-1).tolist(), laws.gather(-1, own)[..., 0].tolist()

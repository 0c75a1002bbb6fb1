"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the target drafts for itself, without a model beside it.

A Jacobi iteration guesses many positions at once and asks the target, in the pass that it makes anyway, what it would
write after each guess. Guesses that are still wrong often hold runs of tokens that are right, only elsewhere; these
n-grams go to a pool, and the ones that begin with the root are what is drafted.

The window of a row is `window` columns by n - 1 levels. Column j of level k is a guess for position root + 1 + k + j,
a level being one iteration younger than the one above. The first level is the trunk: a chain below the root. Below
trunk node j hangs the rest of column j, and what the target says at its end completes an n-gram and is column j of the
youngest level in the next round. All of these are probes: scored in the target's pass, never accepted themselves.

What a user gains: some speed-up from any target at once, with nothing to train, download or keep in memory, most of it
on repetitive text such as code and at batch 1. What it costs: window * (n - 1) tokens more in every pass, so it pays
on hardware that idles while it reads the weights, and slows down a large batch or a CPU. A trained drafter beats it
where there is one; prompt lookup is cheaper where answers copy the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.causal import Observation, Session
from specdraft.config import SpecdraftError
from specdraft.dice import Dice
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.tree import ALONE, CHOSEN, NO_NODE, ROOT, DraftTree, Draws
from specdraft.verify import Verdict
from specdraft.warping import Warp

Spots = dict[tuple[int, int], int]
"""The node of each token below each parent."""


class Pool:
    """n-grams by their first token, the most recent first, `most` of each; one that comes again moves to the front."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._grams: dict[int, list[tuple[int, ...]]] = {}

    def add(self, gram: Sequence[int]) -> None:
        first, *rest = gram
        found = self._grams.setdefault(first, [])
        if (known := tuple(rest)) in found:
            found.remove(known)
        found.insert(0, known)
        del found[self._most :]

    def after(self, first: int) -> list[tuple[int, ...]]:
        """What followed `first`, n - 1 tokens each."""
        return list(self._grams.get(first, ()))


class Branches:
    """A tree of one row while it grows; equal tokens below one parent are one node."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int, bool]] = []
        """token, parent and whether it is a candidate"""
        self._spots: Spots = {}
        self._children: dict[int, int] = {}

    def offer(self, tokens: Sequence[int], depth: int, width: int, most: int) -> None:
        """A branch of candidates below the root, cut where it is too deep, too wide or one node too many."""
        at = ROOT
        for token in tokens[:depth]:
            if (at, token) not in self._spots:
                if self._children.get(at, 0) == width or len(self.nodes) == most:
                    return
                self._children[at] = self._children.get(at, 0) + 1
            at = self.node(token, at, candidate=True)

    def node(self, token: int, parent: int, candidate: bool = False) -> int:
        spot = self._spots.setdefault((parent, token), len(self.nodes))
        if spot == len(self.nodes):
            self.nodes.append((token, parent, candidate))
        return spot


@dataclass
class Row:
    root: int
    levels: list[list[int]]
    """The window: n - 1 levels of `window` guesses, the oldest first."""
    pool: Pool

    def columns(self) -> list[tuple[int, ...]]:
        return list(zip(*self.levels, strict=True))


@dataclass(frozen=True)
class LookaheadMemory:
    rows: list[Row]
    device: torch.device


class LookaheadDrafter:
    """`window` columns of guesses, n-grams of `ngram` tokens, and up to `guesses` of them drafted at once.

    A chain is the most recent n-gram that begins with the root; a dynamic tree is as many of them as fit its depth,
    width and nodes. They are chosen, at any temperature; the window asks for the target's likeliest token at any
    temperature too, so what is drafted depends on committed tokens alone.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, window: int = 7, ngram: int = 5, guesses: int = 7) -> None:
        if window < 1 or ngram < 2 or guesses < 1:
            raise SpecdraftError(
                f"lookahead needs a window and guesses of at least 1 and an ngram of at least 2, got window {window}, "
                f"ngram {ngram} and guesses {guesses}"
            )
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self.shape: Shape = DynamicTree(ngram - 1, guesses, guesses * (ngram - 1))

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> LookaheadMemory:
        rows = zip(seen.tokens.tolist(), seen.mask.sum(1).tolist(), roots.tolist(), strict=True)
        return LookaheadMemory([self._start(tokens[:length], root) for tokens, length, root in rows], roots.device)

    def propose(self, memory: LookaheadMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        depth, width, most = self._bounds()
        found = []
        for row in memory.rows:
            branches = Branches()
            for gram in row.pool.after(row.root)[: self.guesses]:
                branches.offer(gram, depth, width, most)
            trunk = ROOT
            for column in row.columns():
                at = trunk = branches.node(column[0], trunk)
                for token in column[1:]:
                    at = branches.node(token, at)
            found.append(branches.nodes)
        return _tree(found, memory.device)

    def remember(self, memory: LookaheadMemory, verdict: Verdict, seen: Observation) -> LookaheadMemory:
        """One step of the iteration in the rows whose window was scored; in the others the window stays as it is."""
        if (probed := verdict.probed) is not None:
            scored = zip(_spots(probed.tree), probed.likeliest.tolist(), verdict.accepted.tolist(), strict=True)
            for row, (spots, likeliest, accepted) in zip(memory.rows, scored, strict=True):
                if (answers := _answers(row, spots, likeliest)) is not None:
                    self._step(row, answers, accepted)
        for row, root in zip(memory.rows, verdict.token.tolist(), strict=True):
            row.root = root
        return memory

    def keep(self, memory: LookaheadMemory, rows: Sequence[int]) -> LookaheadMemory:
        return LookaheadMemory([memory.rows[row] for row in rows], memory.device)

    def _start(self, prompt: list[int], root: int) -> Row:
        """The first guess is that the end of the text comes again, each column a run of it."""
        span = self.window + self.ngram - 2
        text = [*prompt, root][-span:]
        text = (text * -(-span // len(text)))[:span]
        levels = [text[level : level + self.window] for level in range(self.ngram - 1)]
        return Row(root, levels, Pool(self.guesses))

    def _step(self, row: Row, answers: list[int], accepted: int) -> None:
        """Columns whose positions have been passed go to the far end, as guesses for what comes there."""
        for column, answer in reversed([*zip(row.columns(), answers, strict=True)]):
            row.pool.add((*column, answer))
        shift = accepted % self.window
        row.levels = [level[shift:] + level[:shift] for level in [*row.levels[1:], answers]]

    def _bounds(self) -> tuple[int, int, int]:
        """Depth, width and nodes of what is drafted."""
        shape = self.shape
        if not isinstance(shape, Chain | DynamicTree):
            raise SpecdraftError(f"lookahead drafts chains and dynamic trees, and was asked for {shape}")
        if shape.stop_below > 0:
            raise SpecdraftError("lookahead has no confidence in its guesses: leave stop_below at 0")
        return (shape.gamma, 1, shape.gamma) if isinstance(shape, Chain) else (shape.depth, shape.width, shape.nodes)


def _spots(tree: DraftTree) -> list[Spots]:
    found = []
    for columns in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.present.tolist(), strict=True):
        nodes = enumerate(zip(*columns, strict=True))
        found.append({(parent, token): node for node, (token, parent, present) in nodes if present})
    return found


def _answers(row: Row, spots: Spots, likeliest: list[int]) -> list[int] | None:
    """What the target says at the end of each column; None if this tree does not hold the row's window."""
    answers, trunk = [], ROOT
    try:
        for column in row.columns():
            at = trunk = spots[trunk, column[0]]
            for token in column[1:]:
                at = spots[at, token]
            answers.append(likeliest[1 + at])
    except KeyError:
        return None
    return answers


def _tree(rows: Sequence[Sequence[tuple[int, int, bool]]], device: torch.device) -> DraftTree:
    """Rows of tokens, parents and candidates as one tree, padded; every candidate is chosen."""
    longest = max(map(len, rows))
    padded = [[(*node, True) for node in row] + [(0, ROOT, False, False)] * (longest - len(row)) for row in rows]
    tokens, parents, candidate, present = torch.tensor(padded, device=device).unbind(-1)
    candidate, present = candidate.bool(), present.bool()
    node = torch.arange(longest, device=device).where(candidate, NO_NODE)
    draws = Draws(node, torch.full_like(tokens, CHOSEN), torch.full_like(tokens, ALONE))
    return DraftTree(tokens, parents, present, candidate, draws, None)

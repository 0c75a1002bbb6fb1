"""The one speculative loop: any drafter, any batch, any temperature.

    prefill -> root -> [propose a tree -> one target pass over it -> verify -> commit -> remember] until every row ends

Plain decoding is the same loop without a drafter: a tree without nodes, and one token a pass.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.causal import Session
from specdraft.config import SpecdraftError
from specdraft.dice import Dice, SeededDice
from specdraft.drafters.base import Drafter
from specdraft.target import FrozenTarget
from specdraft.tree import ALONE, CHOSEN, ROOT, DraftTree
from specdraft.verify import Probed, Thresholds, Verdict, typical, verify
from specdraft.warping import Warp


class Round(NamedTuple):
    """One target pass, seen from one row."""

    offered: int
    """Depths at which a candidate stood on the accepted path: `accepted` or `accepted + 1`."""
    accepted: int
    """Accepted drafted tokens, before the row is trimmed at an end token or at the length cap."""
    emitted: int
    """Tokens that entered the output."""
    proposed: int
    """Candidate nodes in the tree."""
    chances: tuple[float, ...]
    """At each offered depth, the analytic probability that some candidate is accepted."""


@dataclass
class Generation:
    """What one prompt became. The first token comes from the prompt's own pass and belongs to no round."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    ended: bool = False
    """An end token was reached (it is the last of `tokens`), not the length cap."""
    pit: list[float] = field(default_factory=list)
    """Sampled decoding: for each token, a uniform draw from [P(before token), P(up to token)] under the target's p, its
    tokens in falling order of probability, made by a stream of its own. Uniform on [0, 1] if tokens follow p."""
    draft_pit: list[float | None] = field(default_factory=list)
    """The same with the tokens in rising order of p over the draft law there: first what was drafted more often than
    the target would write it, which a wrong rule writes too often or too seldom. None where nothing was drafted."""
    trial_pit: list[float] = field(default_factory=list)
    """Sampled decoding: the place of each drawn trial's token in the law that its tree says it was drawn from, accepted
    or not; tokens of siblings drawn before it first, then in falling order. Uniform if the drafter hands on its q."""


@dataclass
class Decoding:
    generations: list[Generation]
    """In the order of the prompts."""
    prefill_seconds: float = 0.0
    target_seconds: float = 0.0
    """In the target's verification passes, head and warping included."""
    drafter_seconds: float = 0.0
    other_seconds: float = 0.0
    """In verification, commits and bookkeeping."""
    passes: int = 0
    """Target passes after the prompts', over batches."""

    @property
    def new_tokens(self) -> int:
        return sum(len(generation.tokens) for generation in self.generations)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.target_seconds + self.drafter_seconds + self.other_seconds

    @contextmanager
    def timed(self, what: str, device: torch.device) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        setattr(self, what, getattr(self, what) + time.perf_counter() - start)


@torch.no_grad()
def generate(
    target: FrozenTarget,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    warp: Warp,
    max_new_tokens: int,
    batch_size: int = 1,
    seed: int = 0,
    first_index: int = 0,
    lossy: Thresholds | None = None,
    progress: Callable[[int], None] | None = None,
) -> Decoding:
    """Decode `prompts` (token ids) in batches, in order. `drafter` None is plain decoding.

    A row's outcome depends on (seed, first_index + its index), not on the rows beside it or the batch size: whoever
    decodes in several calls counts on. `progress` is called with the number of prompts done since the last call.
    `lossy`: accept by `verify.typical` with these thresholds, which changes the law of what is written; None, the rule
    that keeps it. Raises SpecdraftError for an empty prompt or cap, and for `lossy` where decoding is greedy.
    """
    if max_new_tokens < 1:
        raise SpecdraftError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
        raise SpecdraftError(f"prompt {empty[0]} has no token; every prompt needs at least one")
    if lossy is not None and warp.greedy:
        raise SpecdraftError("typical acceptance needs a temperature above 0: greedy decoding has one token to accept")
    decoding = Decoding([Generation() for _ in prompts])
    for start in range(0, len(prompts), batch_size):
        indices = range(start, min(start + batch_size, len(prompts)))
        batch = _Batch(target, drafter, warp, max_new_tokens, decoding, indices, seed, first_index, lossy)
        batch.prefill([prompts[index] for index in indices])
        while batch.alive:
            batch.round()
        if progress is not None:
            progress(len(indices))
    return decoding


class _Batch:
    """Rows that are decoded together; a row that ends leaves the batch."""

    def __init__(
        self,
        target: FrozenTarget,
        drafter: Drafter | None,
        warp: Warp,
        cap: int,
        decoding: Decoding,
        indices: Sequence[int],
        seed: int,
        first_index: int,
        lossy: Thresholds | None = None,
    ) -> None:
        self.target, self.drafter, self.warp, self.cap, self.decoding = target, drafter, warp, cap, decoding
        self.lossy = lossy
        self.session: Session = target.session(drafter.taps if drafter is not None else (), len(indices))
        self.ends = frozenset(target.end_ids)
        self.alive = [decoding.generations[index] for index in indices]
        self.dice: Dice = SeededDice([_seed(seed, first_index + index, 0) for index in indices])
        self.pit_dice = SeededDice([_seed(seed, first_index + index, 1) for index in indices])
        self.roots = torch.empty(0, dtype=torch.int64)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        tokens, mask = pad(prompts, self.target.device)
        with self.decoding.timed("prefill_seconds", self.target.device):
            seen = self.session.read(tokens, mask)
            last = seen.hidden[torch.arange(len(prompts), device=mask.device), mask.sum(1) - 1]
            law = self._law(last)
            if self.warp.greedy:
                self.roots = law
            else:
                self.roots = self.dice.draw(law, range(len(prompts)))
                self._transform(law[:, None], None, self.roots[:, None], torch.ones_like(self.roots))
        with self.decoding.timed("drafter_seconds", self.target.device):
            self.memory = None if self.drafter is None else self.drafter.begin(seen, self.roots, self.session)
        for row, token in enumerate(self.roots.tolist()):
            self._emit(self.alive[row], [token])
        self._drop_ended()

    def round(self) -> None:
        device = self.target.device
        with self.decoding.timed("drafter_seconds", device):
            if self.drafter is None:
                tree = DraftTree.empty(len(self.alive), device)
            else:
                tree = self.drafter.propose(self.memory, warp=self.warp, dice=self.dice)
        with self.decoding.timed("target_seconds", device):
            seen = self.session.extend(self.roots, tree)
            p = self._law(seen.hidden)
        with self.decoding.timed("other_seconds", device):
            verdict = self._verdict(tree, p)
            if tree.laws is not None and not self.warp.greedy:
                self._transform_trials(tree)
            committed = self.session.commit(verdict)
            self.roots = verdict.token
            emitted = torch.cat([committed.tokens[:, 1:], torch.zeros_like(self.roots)[:, None]], 1)
            emitted.scatter_(1, verdict.accepted[:, None], verdict.token[:, None])
            if not self.warp.greedy:
                self._transform(_laws_of(p, verdict), _drafted(tree, verdict, p), emitted, verdict.accepted + 1)
            self._record(tree, verdict, emitted)
            self.decoding.passes += 1
        if self.drafter is not None and any(map(self._goes_on, self.alive)):
            with self.decoding.timed("drafter_seconds", device):
                self.memory = self.drafter.remember(self.memory, verdict, committed)
        with self.decoding.timed("other_seconds", device):
            self._drop_ended()

    def _law(self, hidden: Tensor) -> Tensor:
        """p after hidden states [rows, ..., H]: probabilities, or argmax ids where decoding is greedy."""
        logits = self.target.head(hidden)
        if not (finite := torch.isfinite(logits.amax(-1))).all():
            row = int((~finite).nonzero()[0, 0])
            raise ValueError(f"the target's logits hold NaN or infinity in pass {self.decoding.passes}, row {row}")
        return logits.argmax(-1) if self.warp.greedy else self.warp(logits)

    def _verdict(self, tree: DraftTree, p: Tensor) -> Verdict:
        verdict = verify(tree, p, self.dice) if self.lossy is None else typical(tree, p, self.lossy, self.dice)
        if torch.equal(tree.candidate, tree.present):
            return verdict
        return verdict._replace(probed=Probed(tree, p if self.warp.greedy else p.argmax(-1)))

    def _record(self, tree: DraftTree, verdict: Verdict, emitted: Tensor) -> None:
        """Append each row's tokens and round."""
        proposed = (tree.candidate & tree.present).sum(1).tolist()
        offered, chances, accepted = verdict.offered.sum(1).tolist(), verdict.chance.tolist(), verdict.accepted.tolist()
        for row, tokens in enumerate(emitted.tolist()):
            count = self._emit(self.alive[row], tokens[: accepted[row] + 1])
            chance = tuple(chances[row][: offered[row]])
            self.alive[row].rounds.append(Round(offered[row], accepted[row], count, proposed[row], chance))

    def _emit(self, generation: Generation, tokens: list[int]) -> int:
        """Append up to an end token or the cap; returns how many."""
        tokens = tokens[: self.cap - len(generation.tokens)]
        for place, token in enumerate(tokens):
            if token in self.ends:
                tokens, generation.ended = tokens[: place + 1], True
                break
        generation.tokens.extend(tokens)
        return len(tokens)

    def _goes_on(self, generation: Generation) -> bool:
        return not generation.ended and len(generation.tokens) < self.cap

    def _transform(self, laws: Tensor, drafted: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        """Record the randomised probability integral transforms of tokens [rows, n], of which `counts` were emitted."""
        laws = laws.double()
        by_law = _places(laws, -laws, tokens)
        if drafted is not None:
            by_draft = _places(laws, laws / drafted.double(), tokens)
            offered = (drafted > 0).any(-1).tolist()
        for row, count in enumerate(counts.tolist()):
            generation = self.alive[row]
            for step in range(min(count, self.cap - len(generation.tokens))):
                inside = float(self.pit_dice.uniform([row])[0])
                generation.pit.append(by_law[0][row][step] + inside * by_law[1][row][step])
                seen = drafted is not None and offered[row][step]
                generation.draft_pit.append(by_draft[0][row][step] + inside * by_draft[1][row][step] if seen else None)

    def _transform_trials(self, tree: DraftTree) -> None:
        """Record the transforms of the tokens that were drawn."""
        drawn, (before, own) = _trial_places(tree)
        for row, trials in enumerate(drawn.tolist()):
            for trial in (place for place, made in enumerate(trials) if made):
                inside = float(self.pit_dice.uniform([row])[0])
                self.alive[row].trial_pit.append(before[row][trial] + inside * own[row][trial])

    def _drop_ended(self) -> None:
        rows = [row for row, generation in enumerate(self.alive) if self._goes_on(generation)]
        if len(rows) == len(self.alive):
            return
        for generation in self.alive:
            for places in (generation.pit, generation.draft_pit):
                del places[len(generation.tokens) :]  # of tokens that were trimmed
        self.alive = [self.alive[row] for row in rows]
        if not rows:
            return
        self.roots = self.roots[rows]
        self.dice, self.pit_dice = self.dice.keep(rows), self.pit_dice.keep(rows)
        self.session.keep(rows)
        if self.drafter is not None:
            self.memory = self.drafter.keep(self.memory, rows)


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of token ids to int64 and bool [batch, longest], padded on the right."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(longest, device=device) < lengths[:, None]


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


def _seed(seed: int, index: int, stream: int) -> int:
    """One 63-bit seed for each (seed, row, stream), by a splitmix64 step."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) >> 1

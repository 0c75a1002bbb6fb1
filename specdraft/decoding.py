"""The one speculative loop: any drafter, any batch, any temperature.

    prefill -> root -> [propose a tree -> one target pass over it -> verify -> commit -> remember] until every row ends

Plain decoding is the same loop without a drafter: a tree without nodes, and one token a pass.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor

from specdraft.causal import Session
from specdraft.config import SpecdraftError
from specdraft.controls import StopStrings
from specdraft.dice import Dice, SeededDice
from specdraft.drafters.base import Drafter
from specdraft.reliability import reliability
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Probed, Thresholds, Verdict, typical, verify
from specdraft.warping import Prefixes, Processors, Warp
from specdraft.witness import Transforms, Witness

Ended = Literal["end token", "stop string", "cap"]


class Round(NamedTuple):
    """One target pass, seen from one row."""

    offered: int
    """Depths at which a candidate stood on the accepted path: `accepted` or `accepted + 1`."""
    accepted: int
    """Accepted drafted tokens, before the row is trimmed at an end token, a stop string or the length cap."""
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
    ended: Ended | None = None
    """Why; None: it goes on. The end token, or the one that completed a stop string, is the last of `tokens`."""
    transforms: Transforms = field(default_factory=Transforms)
    """What a witness recorded; without one, nothing."""
    reliability: Tensor | None = field(default=None, compare=False)
    """float64 [BINS, 4] on the CPU: the sums of `reliability.reliability` over the rounds; None: no drafter gave its
    confidence, or nobody asked."""


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
    witness_seconds: float = 0.0
    """In recording transforms: no part of decoding, and not of `seconds`."""
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
    max_new_tokens: int | Sequence[int],
    processors: Processors | None = None,
    stop: Sequence[str] = (),
    lossy: Thresholds | None = None,
    batch_size: int = 1,
    seed: int = 0,
    streams: Sequence[int] | None = None,
    dice: Callable[[Sequence[int]], Dice] = SeededDice,
    witness: bool = False,
    calibrate: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Decoding:
    """Decode `prompts` (token ids) in batches, in order. `drafter` None is plain decoding.

    A row ends at an end token of the target, at the token that completes one of the strings `stop` in its answer, or
    at its cap: `max_new_tokens`, one for all or one a prompt. Its outcome depends on (seed, its stream), not on the
    rows beside it or the batch size, but for what an adaptive drafter draws (see `drafters.adaptive`); `streams`: a
    number a prompt, None: 0, 1, 2... `dice` makes a batch's from a seed a row. `processors` change the target's logits
    before the warp (see `warping.Processors`), and the drafter's where `proposals` makes its tree. `lossy`: accept by
    `verify.typical` with these thresholds, which changes the law of what is written; None, the rule that keeps it.
    `witness`: record each generation's `transforms`; `calibrate`: its `reliability`. `progress` is called with the
    prompts done since the last call.

    Raises SpecdraftError for an empty prompt or cap, for stop strings without a tokenizer, for `lossy` or `witness`
    where decoding is greedy, and where the processors leave a row no token.
    """
    caps = _caps(prompts, max_new_tokens)
    if warp.greedy:
        _check_greedy(lossy, witness)
    ends, numbers = frozenset(target.end_ids), range(len(prompts)) if streams is None else streams
    decoding = Decoding([Generation() for _ in prompts])
    for start in range(0, len(prompts), batch_size):
        indices = range(start, min(start + batch_size, len(prompts)))
        rows = [
            _Row(
                decoding.generations[index],
                prompts[index],
                caps[index],
                ends,
                StopStrings(stop, target.tokenizer) if stop else None,
                None if processors is None else processors(len(prompts[index])),
            )
            for index in indices
        ]
        seeds, aside = ([_seed(seed, numbers[index], stream) for index in indices] for stream in (0, 1))
        seer = Witness(aside, [row.generation.transforms for row in rows]) if witness else None
        batch = _Batch(target, drafter, warp, decoding, rows, dice(seeds), seer, lossy, calibrate)
        batch.prefill()
        while batch.rows:
            batch.round()
        if progress is not None:
            progress(len(indices))
    return decoding


def _check_greedy(lossy: Thresholds | None, witness: bool) -> None:
    if lossy is not None:
        raise SpecdraftError("typical acceptance needs a temperature above 0: greedy decoding has one token to accept")
    if witness:
        raise SpecdraftError("a witness needs a temperature above 0: greedy decoding is compared token by token")


def _caps(prompts: Sequence[Sequence[int]], cap: int | Sequence[int]) -> list[int]:
    """The cap of each prompt. Raises SpecdraftError for an empty prompt or cap."""
    if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
        raise SpecdraftError(f"prompt {empty[0]} has no token; every prompt needs at least one")
    caps = [cap] * len(prompts) if isinstance(cap, int) else list(cap)
    if len(caps) != len(prompts) or min(caps, default=1) < 1:
        raise SpecdraftError(f"max_new_tokens must be at least 1, one for all or one a prompt, got {cap}")
    return caps


@dataclass
class _Row:
    """One prompt that is being answered."""

    generation: Generation
    prompt: Sequence[int]
    cap: int
    ends: frozenset[int]
    stops: StopStrings | None = None
    processors: Sequence[LogitsProcessor] | None = None

    def emit(self, tokens: Sequence[int]) -> int:
        """Append up to the end; returns how many."""
        generation = self.generation
        for count, token in enumerate(tokens, 1):
            generation.tokens.append(token)
            generation.ended = self._ended(token)
            if generation.ended is not None:
                return count
        return len(tokens)

    def _ended(self, newest: int) -> Ended | None:
        if newest in self.ends:
            return "end token"
        if self.stops is not None and self.stops.completed_by(newest):
            return "stop string"
        return "cap" if len(self.generation.tokens) == self.cap else None


class _Batch:
    """Rows that are decoded together; a row that ends leaves the batch."""

    def __init__(
        self,
        target: FrozenTarget,
        drafter: Drafter | None,
        warp: Warp,
        decoding: Decoding,
        rows: list[_Row],
        dice: Dice,
        witness: Witness | None = None,
        lossy: Thresholds | None = None,
        calibrate: bool = False,
    ) -> None:
        self.target, self.drafter, self.warp, self.decoding = target, drafter, warp, decoding
        self.rows, self.dice, self.witness, self.lossy = rows, dice, witness, lossy
        self.calibrate = calibrate
        self.session: Session = target.session(drafter.taps if drafter is not None else (), len(rows))
        self.roots = torch.empty(0, dtype=torch.int64)

    def prefill(self) -> None:
        tokens, mask = pad([row.prompt for row in self.rows], self.target.device)
        everyone, device = range(len(self.rows)), self.target.device
        with self.decoding.timed("prefill_seconds", device):
            seen = self.session.read(tokens, mask)
            last = seen.hidden[torch.arange(len(tokens), device=mask.device), mask.sum(1) - 1]
            law = self._law(last[:, None], DraftTree.empty(len(tokens), device), self._prefixes())[:, 0]
            self.roots = law if self.warp.greedy else self.dice.draw(law, everyone)
        if self.witness is not None:
            with self.decoding.timed("witness_seconds", device):
                self.witness.first(law, self.roots)
        with self.decoding.timed("drafter_seconds", device):
            self.memory = None if self.drafter is None else self.drafter.begin(seen, self.roots, self.session)
        for row, token in zip(self.rows, self.roots.tolist(), strict=True):
            row.emit([token])
        self._drop_ended()

    def round(self) -> None:
        device, prefixes = self.target.device, self._prefixes()
        with self.decoding.timed("drafter_seconds", device):
            if self.drafter is None:
                tree = DraftTree.empty(len(self.rows), device)
            else:
                warp = replace(self.warp, prefixes=prefixes)
                tree = self.drafter.propose(self.memory, warp=warp, dice=self.dice)
        with self.decoding.timed("target_seconds", device):
            seen = self.session.extend(self.roots, tree)
            p = self._law(seen.hidden, tree, prefixes)
        with self.decoding.timed("other_seconds", device):
            verdict = self._verdict(tree, p)
            committed = self.session.commit(verdict)
            self.roots = verdict.token
            emitted = torch.cat([committed.tokens[:, 1:], torch.zeros_like(self.roots)[:, None]], 1)
            emitted.scatter_(1, verdict.accepted[:, None], verdict.token[:, None])
            counts = self._record(tree, p, verdict, emitted)
            self.decoding.passes += 1
        if self.witness is not None:
            with self.decoding.timed("witness_seconds", device):
                self.witness.round(tree, p, verdict, emitted, counts)
        if self.drafter is not None and any(row.generation.ended is None for row in self.rows):
            with self.decoding.timed("drafter_seconds", device):
                self.memory = self.drafter.remember(self.memory, verdict, committed)
        with self.decoding.timed("other_seconds", device):
            self._drop_ended()

    def _prefixes(self) -> Prefixes | None:
        """The rows' texts, where there is something that reads them."""
        processors = [row.processors for row in self.rows if row.processors is not None]
        if not processors:
            return None
        device = self.target.device
        ids = [torch.tensor([*row.prompt, *row.generation.tokens], device=device) for row in self.rows]
        return Prefixes(ids, processors, torch.tensor(self.target.end_ids, dtype=torch.int64, device=device))

    def _law(self, hidden: Tensor, tree: DraftTree, prefixes: Prefixes | None) -> Tensor:
        """p after the root and each node, whose hidden states are [rows, 1 + nodes, H]: probabilities, or argmax ids
        where decoding is greedy; -1 where processors leave none."""
        logits = self.target.head(hidden)
        if not (finite := torch.isfinite(logits.amax(-1))).all():
            row = int((~finite).nonzero()[0, 0])
            raise ValueError(f"the target's logits hold NaN or infinity in pass {self.decoding.passes}, row {row}")
        if prefixes is None:
            return logits.argmax(-1) if self.warp.greedy else self.warp(logits)
        present = torch.cat([torch.ones_like(tree.present[:, :1]), tree.present], 1) if tree.nodes else None
        logits = prefixes.process(logits, tree.tokens, tree.attends()[..., 1:], present)
        left = torch.isfinite(logits.amax(-1))
        self._check_left(left[:, 0])
        return logits.argmax(-1).where(left, -1) if self.warp.greedy else self.warp(logits)

    def _check_left(self, left: Tensor) -> None:
        if not left.all():
            index = int((~left).nonzero()[0, 0])
            raise SpecdraftError(
                f"the logits processors leave row {index} of a batch no token that could come next: ask less of them"
            )

    def _verdict(self, tree: DraftTree, p: Tensor) -> Verdict:
        verdict = verify(tree, p, self.dice) if self.lossy is None else typical(tree, p, self.lossy, self.dice)
        self._check_left(verdict.token >= 0)
        if torch.equal(tree.candidate, tree.present):
            return verdict
        return verdict._replace(probed=Probed(tree, p if self.warp.greedy else p.argmax(-1)))

    def _record(self, tree: DraftTree, p: Tensor, verdict: Verdict, emitted: Tensor) -> list[int]:
        """Append each row's tokens and round; returns how many of its tokens entered the output."""
        proposed = (tree.candidate & tree.present).sum(1).tolist()
        offered, chances, accepted = verdict.offered.sum(1).tolist(), verdict.chance.tolist(), verdict.accepted.tolist()
        counts = []
        for index, (row, tokens) in enumerate(zip(self.rows, emitted.tolist(), strict=True)):
            count = row.emit(tokens[: accepted[index] + 1])
            chance = tuple(chances[index][: offered[index]])
            row.generation.rounds.append(Round(offered[index], accepted[index], count, proposed[index], chance))
            counts.append(count)
        if self.calibrate and tree.confidence is not None:
            for row, sums in zip(self.rows, reliability(tree, p, verdict).cpu(), strict=True):
                before = row.generation.reliability
                row.generation.reliability = sums if before is None else before + sums
        return counts

    def _drop_ended(self) -> None:
        rows = [index for index, row in enumerate(self.rows) if row.generation.ended is None]
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in rows]
        if not rows:
            return
        self.roots, self.dice = self.roots[rows], self.dice.keep(rows)
        if self.witness is not None:
            self.witness.keep(rows)
        self.session.keep(rows)
        if self.drafter is not None:
            self.memory = self.drafter.keep(self.memory, rows)


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of token ids to int64 and bool [batch, longest], padded on the right."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(longest, device=device) < lengths[:, None]


def _seed(seed: int, index: int, stream: int) -> int:
    """One 63-bit seed for each (seed, row, stream), by a splitmix64 step."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) >> 1

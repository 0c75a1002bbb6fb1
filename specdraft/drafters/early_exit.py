"""The target drafts for itself with some of its own layers, on its own keys and values.

Its first layers (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710) or all but a few (Draft & Verify, Zhang et al.
2023, arXiv 2309.08168) need no training: `LayersDrafter`, and `search` for which to keep. `EarlyExitDrafter` leaves
after layer k through a small trained adapter (after Kangaroo, Liu et al. 2024, arXiv 2404.18911, whose adapter attends;
this one does not, and so keeps nothing of its own). A draft is scratch in the target's session, read by the kept layers
alone, and forgotten before the target verifies it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, NamedTuple, cast

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdraft import theory
from specdraft.causal import Observation, Session
from specdraft.config import Recipe, SpecdraftError
from specdraft.data.batches import TokenRows
from specdraft.dice import Dice
from specdraft.drafters.base import DrafterConfig, DrafterRecipe, TrainableDrafter
from specdraft.drafters.proposals import Frontier, Words, propose
from specdraft.drafters.shapes import Chain, Shape
from specdraft.objectives import Prediction
from specdraft.reduction import law_positions
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

_LONGEST = 10  # chain lengths that a search weighs


@dataclass(frozen=True)
class OwnMemory:
    """What the target itself remembers, and the roots that it has not read yet."""

    session: Session
    roots: Tensor
    """int64 [batch]"""

    @classmethod
    def of(cls, session: Session | None, roots: Tensor) -> "OwnMemory":
        if session is None:
            raise SpecdraftError("a drafter that drafts with the target's own layers begins with the target's session")
        return cls(session, roots)

    def keep(self, rows: Sequence[int]) -> "OwnMemory":
        """Of the rows that go on; the target has dropped the others from its session itself."""
        return OwnMemory(self.session, self.roots[list(rows)])

    def draft(
        self,
        layers: Collection[int],
        score: Callable[[Observation], Tensor],
        shape: Shape,
        words: Words,
        warp: Warp,
        dice: Dice,
    ) -> DraftTree:
        """Read the roots and what is drafted below them with `layers`; `score`: what they saw to logits. Whatever
        happens, the session is left as it was."""
        session, roots = self.session, self.roots[:, None]

        def read(tokens: Tensor, depth: int, attends: Tensor) -> Tensor:
            return score(session.grow(tokens, torch.full_like(tokens, depth), attends, layers))

        def grow(frontier: Frontier) -> Tensor:
            root = torch.ones_like(frontier.attends[:, :, :1])
            return read(frontier.tokens, frontier.depth, torch.cat([root, frontier.attends], 2))

        try:
            first = read(roots, 0, torch.ones_like(roots[:, :, None], dtype=torch.bool))[:, 0]
            return propose(shape, first, grow, words, warp, dice)
        finally:
            session.discard()


class LayersDrafter:
    """Drafts with the target's `layers` alone, counted from 1, then its final norm and head. Nothing is trained.

    Raises SpecdraftError for no layer or one that the target lacks.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, target: FrozenTarget, layers: Iterable[int]) -> None:
        self.target = target
        self.layers = checked(target, layers)
        self.shape: Shape = Chain()

    @classmethod
    def without(cls, target: FrozenTarget, skip: Iterable[int]) -> "LayersDrafter":
        """All layers but these. Raises SpecdraftError also for one to skip that the target lacks."""
        skipped = checked(target, skip) if skip else ()
        return cls(target, (layer for layer in range(1, target.num_layers + 1) if layer not in skipped))

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> OwnMemory:
        return OwnMemory.of(session, roots)

    def remember(self, memory: OwnMemory, verdict: Verdict, seen: Observation) -> OwnMemory:
        return OwnMemory(memory.session, verdict.token)

    def keep(self, memory: OwnMemory, rows: Sequence[int]) -> OwnMemory:
        return memory.keep(rows)

    def propose(self, memory: OwnMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        words = Words(self.target.vocab_size)
        return memory.draft(self.layers, lambda seen: self.target.head(seen.hidden), self.shape, words, warp, dice)


def checked(target: FrozenTarget, layers: Iterable[int]) -> tuple[int, ...]:
    """Layers of the target in order, each once. Raises SpecdraftError if there is none or one that it lacks."""
    found = tuple(sorted(set(layers)))
    if not found or found[0] < 1 or found[-1] > target.num_layers:
        raise SpecdraftError(
            f"layers {list(found)} of {target.name}: there must be at least one, and they are counted from 1 to "
            f"{target.num_layers}"
        )
    return found


class EarlyExitRecipe(DrafterRecipe):
    kind: Literal["early_exit"] = "early_exit"
    """The drafting method."""
    exit: int | None = Field(default=None, ge=1)
    """Leave the target after so many of its layers. Unset: after a third."""
    width: int | None = Field(default=None, ge=0)
    """Width of the adapter's bottleneck. Unset: half of the target's."""
    depth: int = Field(default=1, ge=1)
    """Blocks of the adapter, one after the other."""

    @field_validator("width")
    @classmethod
    def _some(cls, width: int | None) -> int | None:
        if width == 0:
            raise ValueError(
                "without an adapter there is nothing to train; `specdraft eval` drafts with the plain layers "
                "(drafter: {kind: early_exit, exit: ...})"
            )
        return width

    @model_validator(mode="before")
    @classmethod
    def _no_skipping(cls, given: Any) -> Any:
        if isinstance(given, dict) and "skip" in given:
            raise ValueError(
                "an adapter behind skipped layers cannot be trained, for what it would read depends on the keys and "
                "values of the whole target; give exit, or draft with the plain layers in `specdraft eval`"
            )
        return given


class EarlyExitConfig(DrafterConfig):
    model_type = "specdraft_early_exit"

    target_layers: int = 0
    exit: int = 0
    width: int = 0
    depth: int = 1
    rms_norm_eps: float = 1e-5


class Bottleneck(nn.Module):
    """x + up(silu(down(norm(x)))); `up` begins at zero, so that the block begins as nothing."""

    def __init__(self, config: EarlyExitConfig) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.target_hidden_size, config.rms_norm_eps)
        self.down = nn.Linear(config.target_hidden_size, config.width, bias=False)
        self.up = nn.Linear(config.width, config.target_hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.up(silu(self.down(self.norm(hidden))))


class EarlyExitDrafter(TrainableDrafter):
    """q[:, i + 1] = head(final norm(adapter(output of layer k at i))): norm and head are the target's, and frozen.

    Layer k has read the same whether the target read on or not: what it taps of whole rows is what decoding gives it.
    """

    recipe_class = EarlyExitRecipe
    config_class = EarlyExitConfig
    config: EarlyExitConfig

    def __init__(self, config: EarlyExitConfig) -> None:
        super().__init__(config)
        self.taps = (config.exit,)
        self.blocks = nn.ModuleList(Bottleneck(config) for _ in range(config.depth))
        self.post_init()
        for block in self.blocks:
            nn.init.zeros_(cast(Bottleneck, block).up.weight)

    @classmethod
    def for_target(cls, target: FrozenTarget, recipe: EarlyExitRecipe, counts: Tensor) -> "EarlyExitDrafter":
        """Also raises SpecdraftError for an exit that the target lacks."""
        leave = recipe.exit or max(1, target.num_layers // 3)
        checked(target, [leave])
        config = EarlyExitConfig(
            vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            target_layers=target.num_layers,
            exit=leave,
            width=recipe.width or target.hidden_size // 2,
            depth=recipe.depth,
        )
        drafter = cls(config)
        drafter.attach(target)
        nn.Module.to(drafter, target.device)
        return drafter

    def attach(self, target: FrozenTarget) -> None:
        """Also raises SpecdraftError for a target of another number of layers."""
        if target.num_layers != self.config.target_layers:
            raise SpecdraftError(
                f"the drafter leaves a target of {self.config.target_layers} layers after layer {self.config.exit}; "
                f"{target.name} has {target.num_layers} layers"
            )
        super().attach(target)

    def read_out(self, taps: Tensor) -> Tensor:
        """Outputs of layer k [..., H] to what the head reads [..., H], in the target's dtype."""
        hidden = taps.to(self.device, self.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        return self.target.final_norm(hidden.to(self.target.dtype))

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        return [Prediction(1, 0, self.read_out(seen.taps), self.target.output_head(), self.kept_ids())]

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> OwnMemory:
        return OwnMemory.of(session, roots)

    def remember(self, memory: OwnMemory, verdict: Verdict, seen: Observation) -> OwnMemory:
        return OwnMemory(memory.session, verdict.token)

    def keep(self, memory: OwnMemory, rows: Sequence[int]) -> OwnMemory:
        return memory.keep(rows)

    @torch.no_grad()
    def propose(self, memory: OwnMemory, *, warp: Warp, dice: Dice) -> DraftTree:
        def score(seen: Observation) -> Tensor:
            return self.target.head(self.read_out(seen.taps))[..., : self.config.vocab_size]

        layers, words = range(1, self.config.exit + 1), Words(self.target.vocab_size)
        return memory.draft(layers, score, self.shape, words, warp, dice)

    def servable_config(self) -> dict[str, Any]:
        """config.json in our own words: no engine loads an adapter at an exit."""
        names = "vocab_size target_hidden_size target_layers exit width depth rms_norm_eps trained_length".split()
        own = {"drafter": "early_exit", **{name: getattr(self.config, name) for name in names}}
        return {"architectures": ["EarlyExitDrafter"], "torch_dtype": str(self.dtype).split(".")[1], "specdraft": own}

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> EarlyExitConfig:
        return EarlyExitConfig(**{name: value for name, value in written["specdraft"].items() if name != "drafter"})


class SearchRecipe(Recipe):
    answers: tuple[str, ...]
    """The target's own answers, as `respond` writes them: the text on which layers are judged."""
    keep: int | None = Field(default=None, ge=1)
    """Layers to keep. Unset: as many as promise the most speed."""
    rows: int = Field(default=16, ge=1)
    """How many of the answers are read."""
    max_length: int = Field(default=256, ge=2)
    """Tokens of each that are read."""
    trials: int = Field(default=100, ge=0)
    """Changes to the first guess that are tried."""
    seed: int = 0
    """Decides which changes are tried."""


class Found(NamedTuple):
    """What a search ended with."""

    layers: tuple[int, ...]
    """Those to keep, counted from 1."""
    agreement: float
    """Share of positions where their likeliest token is the target's: a greedy draft's alpha at depth 1."""
    speed: float
    """Promised speedup of the best chain, tau / (1 + gamma * c): c is the share of the weights that a step reads."""


def search(
    target: FrozenTarget, rows: TokenRows, recipe: SearchRecipe, progress: Callable[[int, int], None] | None = None
) -> Found:
    """Which layers to draft with, judged by `rows` (the recipe's `rows` first ones): a function of its arguments alone.

    Each layer is left out alone once; the first guess leaves out those that were missed least. Then layers are changed
    at random, `trials` times, and what promises more speed stays. `progress` is called with (done, total).
    Raises SpecdraftError if there are not more layers than are to be kept.
    """
    count = target.num_layers
    if recipe.keep is not None and recipe.keep >= count:
        raise SpecdraftError(f"search.keep is {recipe.keep}: {target.name} has {count} layers, so at most {count - 1}")
    exam = _Exam(target, [rows[row] for row in range(min(recipe.rows, len(rows)))])
    every, stream, known, done = frozenset(range(1, count + 1)), Random(recipe.seed), dict[frozenset[int], Found](), 0
    sizes = range(1, count) if recipe.keep is None else [recipe.keep]
    total = count + len(sizes) + recipe.trials

    def judged(layers: frozenset[int]) -> Found:
        nonlocal done
        if layers not in known:
            known[layers] = exam.judge(layers)
        done += 1
        if progress is not None:
            progress(done, total)
        return known[layers]

    missed = sorted(range(1, count + 1), key=lambda layer: judged(every - {layer}).agreement)  # the most missed first
    best = max((judged(frozenset(missed[:size])) for size in sizes), key=lambda found: found.speed)
    for _ in range(recipe.trials):
        kept, left = set(best.layers), sorted(every - set(best.layers))
        taken, dropped = stream.choice(left), stream.choice(best.layers)
        change = "swap" if recipe.keep is not None else stream.choice(("swap", "take", "drop"))
        if change != "drop" and (change == "swap" or len(left) > 1):
            kept.add(taken)
        if change != "take" and len(kept) > 1:
            kept.remove(dropped)
        best = max(best, judged(frozenset(kept)), key=lambda found: found.speed)
    return best


class _Exam:
    """The target's reading of some rows, held, so that each set of layers is asked what follows every prefix.

    At every position the kept layers read one token behind the target's own keys and values of all before it: what a
    draft's first step does, at all positions in one pass.
    """

    def __init__(self, target: FrozenTarget, rows: Sequence[dict[str, Tensor]]) -> None:
        self.target = target
        self.held: list[tuple[Session, Tensor, Tensor, Tensor]] = []
        for row in rows:
            tokens = row["input_ids"][None].to(target.device)
            asked = law_positions(row["labels"][None].to(target.device), 0)
            session = target.session((), 1)
            seen = session.read(tokens, torch.ones_like(tokens, dtype=torch.bool))
            self.held.append((session, tokens, asked, target.head(seen.hidden[asked]).argmax(-1)))
        self.sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in target.layers]
        self.head_size = target.hidden_size * target.vocab_size

    def judge(self, layers: Collection[int]) -> Found:
        hits, positions = 0, 0
        for session, tokens, asked, want in self.held:
            length = tokens.shape[1]
            behind = torch.arange(length, device=tokens.device)[None] - length
            itself = torch.eye(length, dtype=torch.bool, device=tokens.device)[None]
            hidden = session.grow(tokens, behind, itself, layers).hidden
            session.discard()
            hits += int((self.target.head(hidden[asked]).argmax(-1) == want).sum())
            positions += len(want)
        agreement = hits / max(positions, 1)
        read = self.head_size + sum(self.sizes[layer - 1] for layer in layers)
        c = read / (self.head_size + sum(self.sizes))
        chains = range(1, _LONGEST + 1)
        speed = max(theory.speedup(theory.expected_tokens(agreement, gamma), gamma, c) for gamma in chains)
        return Found(tuple(sorted(layers)), agreement, speed)

"""A drafter small enough to train in a test: residual heads over one tap, in the manner of Medusa."""

from collections.abc import Sequence
from typing import Any

import torch
from models import tiny_model
from torch import Tensor, nn
from torch.nn.functional import silu

from specdraft.causal import Observation
from specdraft.data.batches import RowsReport, TokenRows
from specdraft.drafters.base import DrafterConfig, TrainableDrafter
from specdraft.drafters.eagle import Eagle3Drafter, Eagle3Recipe
from specdraft.objectives import Prediction
from specdraft.target import FrozenTarget

_WRITTEN = ("width", "vocab_size", "target_hidden_size", "shifts", "kept", "biased")


class HeadsConfig(DrafterConfig):
    model_type = "specdraft_test_heads"

    width: int = 0
    shifts: Sequence[int] = (1, 2)
    kept: Sequence[int] | None = None
    biased: bool = False


class HeadsDrafter(TrainableDrafter):
    """Head k reads the tap at t and the embedding of token t + 1, and predicts the law of token t + 1 + k."""

    config_class = HeadsConfig
    config: HeadsConfig

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.taps = (1,)
        width = config.width
        self.blocks = nn.ModuleList(nn.Linear(2 * width, width) for _ in config.shifts)
        self.lm_head = nn.Linear(width, len(config.kept or range(config.vocab_size)), bias=config.biased)
        self.post_init()

    def servable_config(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in _WRITTEN}

    @classmethod
    def config_from_servable(cls, written: dict[str, Any]) -> HeadsConfig:
        return HeadsConfig(**{name: value for name, value in written.items() if name != "torch_dtype"})

    def predict(self, tokens: Tensor, seen: Observation) -> list[Prediction]:
        after = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
        features = torch.cat([seen.taps.to(self.lm_head.weight.dtype), self.embed(after)], -1)
        kept = None if self.config.kept is None else torch.tensor(self.config.kept, device=tokens.device)
        return [
            Prediction(depth, shift, silu(block(features)), self.lm_head, kept)
            for depth, (shift, block) in enumerate(zip(self.config.shifts, self.blocks, strict=True), 1)
        ]


def heads_drafter(target: FrozenTarget, **changes: object) -> HeadsDrafter:
    torch.manual_seed(1)
    width, ids = target.hidden_size, target.vocab_size
    drafter = HeadsDrafter(HeadsConfig(width=width, target_hidden_size=width, vocab_size=ids, **changes))
    drafter.attach(target)
    return drafter


class ForcedDice:
    """Dice that draw the given tokens, int64 [batch, steps]."""

    def __init__(self, tokens: Tensor) -> None:
        self.columns = iter(tokens.unbind(1))

    def accept(self, chance: Tensor, rows: Sequence[int]) -> Tensor:
        raise AssertionError("a drafter tosses no coin")

    def draw(self, law: Tensor, rows: Sequence[int]) -> Tensor:
        return next(self.columns)

    def keep(self, rows: Sequence[int]) -> "ForcedDice":
        return self


def eagle3(target: FrozenTarget, kept: Tensor | None = None, **recipe: Any) -> Eagle3Drafter:
    """An EAGLE-3 head as it starts; `kept`: the ids of its reduced vocabulary."""
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    if kept is not None:
        counts[kept], recipe["vocabulary"] = 1, len(kept)
    return Eagle3Drafter.for_target(target, Eagle3Recipe(**recipe), counts)


def tiny_target() -> FrozenTarget:
    return FrozenTarget(tiny_model())


def token_rows(lengths: Sequence[int], prompt: int = 3, silent: Sequence[int] = (), vocab: int = 96) -> TokenRows:
    """Random rows, supervised after the prompt; `silent` ones nowhere."""
    stream = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab, (sum(lengths),), generator=stream, dtype=torch.int32)
    masks = [(torch.arange(length) >= prompt) & (row not in silent) for row, length in enumerate(lengths)]
    supervised = torch.cat(masks)
    return TokenRows(ids, supervised, torch.tensor(lengths), "test", RowsReport())

"""What an evaluation is asked for."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from specdraft.config import Recipe
from specdraft.controls import Controls
from specdraft.evaluation.lossless import TIE_FACTOR
from specdraft.evaluation.systems import (
    Acceptance,
    ChainSystem,
    ExactAcceptance,
    System,
    TreeSystem,
    TypicalAcceptance,
)
from specdraft.verify import Thresholds
from specdraft.warping import Warp


class EvalRecipe(Recipe):
    prompts: tuple[str, ...] = ()
    """JSONL files (turns, messages or prompt, with an optional category) or datasets to evaluate on."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many prompts."""
    turns: int | None = Field(default=None, ge=1)
    """Of a prompt with several user turns, so many are answered, one after another. The later ones follow the answers
    of plain decoding (without it, of the first system), for every system alike. Unset: all."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """Variables of the chat template, as serving sets them."""
    systems: tuple[System, ...] = (ChainSystem(), TreeSystem())
    """What the drafter drafts, each evaluated in turn on the same prompts."""
    acceptance: Acceptance = ExactAcceptance()
    """The rule by which drafted tokens are accepted."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy decoding."""
    top_k: int | None = Field(default=None, ge=1)
    """Keep the likeliest so many tokens, for target and drafter alike."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the likeliest tokens of this total probability, for target and drafter alike."""
    controls: Controls = Controls()
    """Penalties on what was said before, and strings that end an answer: in every run."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Cap on each answer."""
    batch_size: int = Field(default=1, ge=1)
    """Prompts decoded together."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Rising batch sizes at which all is decoded again, for the curve of speed-up over batch size."""
    seed: int = 0
    """Of sampling and of the bootstrap."""
    compare_with_plain: bool = True
    """Also decode without a drafter: needed for the speed-up, and for the verdict on greedy answers."""
    bootstrap_samples: int = Field(default=2000, ge=100)
    """Resamples behind each interval."""
    tie_factor: float = Field(default=TIE_FACTOR, ge=0)
    """Half precision: a greedy answer may part from plain decoding where both tokens lie within so many times what the
    dtype itself does to the target's logits there (its plain pass against float32) of the best logit."""
    shown: int = Field(default=8, ge=0)
    """Answers shown in the report for each system."""
    training_prompts: tuple[str, ...] = ()
    """What the drafter was trained on, to count the evaluation prompts that it has seen."""
    training_log: Path | None = None
    """A `trainer_state.json`, whose curves the report shows."""

    @property
    def warp(self) -> Warp:
        return Warp(self.temperature, self.top_k, self.top_p)

    @property
    def lossy(self) -> Thresholds | None:
        rule = self.acceptance
        return Thresholds(rule.epsilon, rule.delta) if isinstance(rule, TypicalAcceptance) else None

    @model_validator(mode="after")
    def _lossy_when_sampled(self) -> Self:
        if self.lossy is not None and self.warp.greedy:
            raise ValueError("acceptance typical has no effect at temperature 0: set a temperature, or leave it exact")
        if (least := self.controls.min_new_tokens or 0) > self.max_new_tokens:
            raise ValueError(f"controls.min_new_tokens is {least}, beyond max_new_tokens, {self.max_new_tokens}")
        if self.batch_sizes and not self.compare_with_plain:
            raise ValueError("batch_sizes has no effect without plain decoding: leave it out, or compare_with_plain on")
        if [*self.batch_sizes] != sorted(set(self.batch_sizes)):
            raise ValueError(f"batch_sizes must rise, got {list(self.batch_sizes)}")
        return self

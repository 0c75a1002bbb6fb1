"""What a request may ask for besides temperature: penalties on what was said before, and strings that end an answer."""

from collections.abc import Sequence

import torch
from pydantic import Field, field_validator
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
)

from specdraft.config import Recipe, SpecdraftError
from specdraft.warping import Processors


class Controls(Recipe):
    """What serving engines let a request set, under their names. It comes before the temperature, in p and q alike."""

    repetition_penalty: float = Field(default=1.0, gt=0)
    """Tokens of the prompt and of the answer so far: their logits are divided by this where positive, else multiplied
    (CTRL, arXiv 1909.05858). 1 is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logits of tokens that stand in the answer so far."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logits of such tokens as often as they stand there."""
    no_repeat_ngram: int | None = Field(default=None, ge=1)
    """So many tokens in a row never come twice, in prompt and answer together."""
    min_new_tokens: int | None = Field(default=None, ge=1)
    """No end token before so many others."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, at the token that completes one of them."""

    @field_validator("stop")
    @classmethod
    def _some_text(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("an empty stop string would end every answer: leave it out")
        return stop

    def processors(self, end_ids: Sequence[int]) -> Processors | None:
        """What `generate` takes, for a target that ends at `end_ids`; None: nothing is to be processed.

        Raises SpecdraftError for `min_new_tokens` where the target has no end token.
        """
        if self.min_new_tokens is not None and not end_ids:
            raise SpecdraftError("min_new_tokens has no effect: the target has no end token; unset it")
        shared: list[LogitsProcessor] = []
        if self.repetition_penalty != 1:
            shared.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.no_repeat_ngram is not None:
            shared.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram))
        presence, frequency, least = self.presence_penalty, self.frequency_penalty, self.min_new_tokens
        if not shared and least is None and not (presence or frequency):
            return None

        def of_a_row(prompt: int) -> list[LogitsProcessor]:
            own: list[LogitsProcessor] = []
            if presence or frequency:
                own.append(CountPenalty(prompt, presence, frequency))
            if least is not None:
                own.append(MinNewTokensLengthLogitsProcessor(prompt, least, [*end_ids]))
            return [*shared, *own]

        return of_a_row

    @property
    def description(self) -> str:
        """The settings that differ from their defaults, for a report."""
        changed = self.model_dump(exclude_defaults=True)
        told = {
            name: ", ".join(map(repr, value)) if name == "stop" else f"{value:g}" for name, value in changed.items()
        }
        return "; ".join(f"{name.replace('_', ' ')} {text}" for name, text in told.items()) or "none"


class CountPenalty(LogitsProcessor):
    """logits - presence * [count > 0] - frequency * count, by how often each token stands behind the prompt: the
    penalties of OpenAI's interface, which transformers does not have."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.presence * (counts > 0).to(scores) - self.frequency * counts


class StopStrings:
    """Reads one answer, token by token, and tells when it has said one of some strings.

    The answer's text is what an engine streams: whole characters, as soon as they are whole. Special tokens count with
    their text. Raises SpecdraftError without a tokenizer, or with one that is not a fast one.
    """

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None or not tokenizer.is_fast:
            raise SpecdraftError("stop strings need the target's tokenizer, a fast one: leave them out, or load it")
        self._stop, self._tokenizer, self._stream = tuple(stop), tokenizer.backend_tokenizer, DecodeStream()
        self._kept = max(map(len, stop)) - 1  # of what was said, so much may begin a string
        self._said = ""

    def completed_by(self, token: int) -> bool:
        """Whether the answer, with this token, holds one of the strings."""
        text = self._said + (self._stream.step(self._tokenizer, token) or "")
        self._said = text[len(text) - min(self._kept, len(text)) :]
        return any(string in text for string in self._stop)

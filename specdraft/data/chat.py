"""Chats to token ids and a supervised mask, token for token what serving renders plus what the target emits.

For each assistant turn the prompt is what a serving engine would send: the template over the messages before it, with
the generation prompt. What follows it, up to the first id at which the target stops, is supervised. So nothing is
searched for by its looks, history that a template renders differently (a stripped think block) is learnt from as it
is served, and a template needs no generation markers. Turns are chained into one sample as long as each prompt goes
on exactly where the turn before ended; where it does not, a new sample begins.

Within a turn everything that the target writes is supervised: reasoning, tool calls, and, where a turn has several
channels (gpt-oss), the header between them, which the target writes itself; the turn's own header is in the prompt.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specdraft.config import SpecdraftError
from specdraft.data.conversations import Conversation, Message, RowError

TemplateArgs = Mapping[str, bool | int | str]
_SENTINEL = "specdraft probe"


class Sample(NamedTuple):
    """One row of training data. `supervised[i]` says that the target wrote token i."""

    ids: list[int]
    supervised: list[bool]


class ChatFormat:
    """A tokenizer's chat template in one mode, and the ids at which the target stops.

    `template_args` are the template's variables as the serving engine is given them (`chat_template_kwargs` there),
    for example {"enable_thinking": False}. `end_ids` defaults to the tokenizer's end token. Raises SpecdraftError if
    there is no template, or if it does not read one of the variables.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_args: TemplateArgs | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        self.template_args: dict[str, Any] = dict(template_args or {})
        self.template = _template(tokenizer, self.name)
        for name in self.template_args:
            if not re.search(rf"\b{re.escape(name)}\b", self.template):
                raise SpecdraftError(
                    f"the chat template of {self.name} does not read {name!r}: it would have no effect"
                )
        self._end_ids = set(end_ids) or {tokenizer.eos_token_id}
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = {*tokenizer.all_special_ids, *(id for id, token in added if token.special)}
        self._marked = re.search(r"{%-?\s*generation\b", self.template) is not None
        self._header, self._closing = self._frame()
        self._opens_thinking = self._header.rstrip().endswith("<think>")

        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides ids and masks: template, its variables, tokenizer, end ids."""
        parts = [self.template, sorted(self.template_args.items()), self.tokenizer_fingerprint]
        return hashlib.sha256(json.dumps([*parts, sorted(self._end_ids, key=str)]).encode()).hexdigest()

    def prompt_ids(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """What serving sends for the next assistant turn. Raises RowError if the template refuses the messages."""
        return self._encode(self._render(self._completed(messages), tools, True))

    def answer_text(self, ids: Sequence[int]) -> str:
        """What an answer says, as the next turn's template is given it: without its end and other special tokens."""
        words = ids[:-1] if ids and ids[-1] in self._end_ids else ids
        return self.tokenizer.decode(words, skip_special_tokens=True)

    def samples(self, conversation: Conversation) -> list[Sample]:
        """The conversation's assistant turns, in as few samples as their renderings allow; [] if it has none.

        Answers that a target wrote are their recorded ids, never tokenised again. Raises RowError.
        """
        if conversation.text is not None:
            return [self._text_sample(conversation.text)]
        samples: list[Sample] = []
        for prompt, answer in self._turns(conversation):
            last = samples[-1] if samples else Sample([], [])
            known = len(last.ids)
            if prompt[:known] == last.ids:
                samples = samples[:-1]
            else:
                last, known = Sample([], []), 0
            supervised = last.supervised + [False] * (len(prompt) - known) + answer.supervised
            samples.append(Sample(prompt + answer.ids, supervised))
        return samples

    def _turns(self, conversation: Conversation) -> list[tuple[list[int], Sample]]:
        """Each assistant turn's prompt ids, and the ids after it."""
        if conversation.answers:
            self._check_writer(conversation)
            return [
                (answer.prompt_ids, Sample(answer.answer_ids, [True] * len(answer.answer_ids)))
                for answer in conversation.answers
            ]
        messages = self._completed(conversation.messages)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        return [self._turn(messages[: place + 1], conversation.messages[place], conversation.tools) for place in places]

    def _turn(
        self, messages: list[Message], as_given: Message, tools: list[dict[str, Any]] | None
    ) -> tuple[list[int], Sample]:
        prompt = self._render(messages[:-1], tools, True)
        whole = self._render(messages, tools, False)
        prompt_ids = self._encode(prompt)
        if not whole.startswith(prompt):
            return prompt_ids, self._supervise(self._encode(self._emitted(prompt, whole, as_given)))
        ids = self._encode(whole)
        if ids[: len(prompt_ids)] != prompt_ids:  # a token would straddle the border: serving cannot emit it
            return prompt_ids, self._supervise(self._encode(whole[len(prompt) :]))
        answer = self._supervise(ids[len(prompt_ids) :])
        if self._marked:
            marks = self._marks(messages, tools)[len(prompt_ids) :]
            end = max((at for at, flag in enumerate(answer.supervised) if flag), default=-1)
            if any(marks[: end + 1]):
                answer = Sample(answer.ids, [at == end or (at < end and mark == 1) for at, mark in enumerate(marks)])
        return prompt_ids, answer

    def _supervise(self, ids: list[int]) -> Sample:
        """Ids after a prompt: supervised through the first end id, else the last special one, else all."""
        stops = [at for at, id in enumerate(ids) if id in self._end_ids]
        special = [at for at, id in enumerate(ids) if id in self._special_ids]
        end = stops[0] if stops else special[-1] if special else len(ids) - 1
        return Sample(ids, [at <= end for at in range(len(ids))])

    def _emitted(self, prompt: str, whole: str, message: Message) -> str:
        """The text that the target wrote, where the template rewrites it: R1's drops the reasoning of every turn."""
        content = message["content"]
        final = content.rpartition("</think>")[2].strip()
        at = whole.rfind(final)
        if self._opens_thinking and _orphaned(content) and final and at >= 0:
            return content + whole[at + len(final) :]
        raise RowError(
            "the rendered chat does not begin with what serving sends",
            f"template of {self.name} with {self.template_args}: serving ends in {prompt[-80:]!r}, the chat goes on "
            f"differently: {whole[len(_common(prompt, whole)) :][:80]!r}",
        )

    def _text_sample(self, text: str) -> Sample:
        """A chat that was rendered before: what stands between each assistant header and the closing is supervised."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans, closing = [], self._closing.strip()
        for found in re.finditer(re.escape(self._header), text) if self._header.strip() else ():
            end = text.find(closing, found.end()) if closing else -1
            spans.append((found.end(), end + len(closing) if end >= 0 else len(text)))
        supervised = [any(a <= start and end <= b for a, b in spans) for start, end in encoded["offset_mapping"]]
        if not any(supervised):
            raise RowError(
                "no supervised token: no assistant header in the text",
                f"searched for {self._header!r}, the header of the chat template of {self.name}; the text begins "
                f"{text[:200]!r}",
            )
        return Sample(encoded["input_ids"], supervised)

    def _frame(self) -> tuple[str, str]:
        """What the template writes before and after an assistant's words, in this mode."""
        question: list[Message] = [{"role": "user", "content": "hello"}]
        before, after = self._render(question, None, False), self._render(question, None, True)
        header = after[len(before) :] if after.startswith(before) else ""
        whole = self._render([*question, {"role": "assistant", "content": _SENTINEL}], None, False)
        if _SENTINEL not in whole:
            raise SpecdraftError(
                f"the chat template of {self.name} does not render an assistant's words; it renders {whole[:200]!r}"
            )
        return header, whole.rpartition(_SENTINEL)[2]

    def _completed(self, messages: Sequence[Message]) -> list[Message]:
        """Give an answer the opening think tag that stood in its prompt, so that templates see its reasoning whole."""
        return [
            {**message, "content": "<think>\n" + message["content"]}
            if self._opens_thinking and message["role"] == "assistant" and _orphaned(message["content"])
            else message
            for message in messages
        ]

    def _render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False, **self.template_args
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise RowError("the chat template refuses it", f"template of {self.name}: {error}") from error
        assert isinstance(text, str)
        return text

    def _marks(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True, **self.template_args
        )
        return encoded["assistant_masks"]

    def _encode(self, text: str) -> list[int]:
        """Rendered text to ids. The template has written every special token, the first one included."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _check_writer(self, conversation: Conversation) -> None:
        writer = (conversation.written_by or {}).get("tokenizer")
        if writer != self.tokenizer_fingerprint:
            raise SpecdraftError(
                f"{conversation.where}: its answers are ids of another tokenizer ({writer}) than that of {self.name} "
                f"({self.tokenizer_fingerprint}); let this target answer the prompts (`respond`)"
            )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of what the tokenizer does to a text; its padding and truncation state is no part of it."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.update(padding=None, truncation=None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]


def _template(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise SpecdraftError(
            f"the tokenizer of {name} has no chat template: specdraft trains on chats as they are served; use the "
            "target's instruct version, or set tokenizer.chat_template"
        ) from error


def _orphaned(content: str) -> bool:
    return "</think>" in content and "<think>" not in content.partition("</think>")[0]


def _common(one: str, other: str) -> str:
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]

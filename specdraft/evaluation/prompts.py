"""The prompts of an evaluation: what is asked, as the target is asked it, and whether training saw it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from specdraft.config import SpecdraftError
from specdraft.data.chat import ChatFormat
from specdraft.data.conversations import ROLES, Conversation, Faults, Message, RowError, read_conversations
from specdraft.target import FrozenTarget


class Prompt(NamedTuple):
    ids: list[int]
    """Token ids, the generation prompt included."""
    text: str
    """The last thing that the user said."""
    category: str | None = None
    then: Callable[[Sequence[int]], "Prompt | None"] | None = None
    """From the ids of an answer to the user's next turn; None: this turn is the last."""

    def after(self, answer: Sequence[int]) -> "Prompt | None":
        """What is asked once this has been answered; None: nothing."""
        return None if self.then is None else self.then(answer)


def read_prompts(
    target: FrozenTarget,
    sources: Sequence[str],
    limit: int | None,
    template_args: Mapping[str, bool | int | str],
    faults: Faults,
) -> list[Prompt]:
    """The questions of JSONL files and datasets, rendered by the target's chat template.

    A chat is asked its last user turn, with what came before; of several `turns` without answers, the first, and each
    of the others `then`, once those before are answered, as Spec-Bench has it (arXiv 2401.07851). A later turn that the
    template refuses goes to `faults` when it would be asked. Raises SpecdraftError if nothing usable is found.
    """
    if target.tokenizer is None:
        raise SpecdraftError(f"{target.name} has no tokenizer, so that prompts cannot be read for it")
    chat = ChatFormat(target.tokenizer, template_args, target.end_ids)
    prompts: list[Prompt] = []
    for conversation in read_conversations(sources, faults):
        if limit is not None and len(prompts) == limit:
            break
        try:
            asked = question(conversation)
            prompts.append(_prompt(chat, conversation, asked, conversation.messages[len(asked) :], faults))
        except RowError as fault:
            faults.note(conversation.where, fault)
    if not prompts:
        raise SpecdraftError(f"no prompt to evaluate on in {', '.join(sources) or 'evaluation.prompts'}; {faults}")
    return prompts


def _prompt(
    chat: ChatFormat, conversation: Conversation, said: list[Message], later: list[Message], faults: Faults
) -> Prompt:
    """`said` ends in the turn to be answered, `later` begins with the one after it. Raises RowError."""

    def then(answer: Sequence[int]) -> Prompt | None:
        reply = {"role": "assistant", "content": chat.answer_text(answer)}
        try:
            return _prompt(chat, conversation, [*said, reply, later[0]], later[1:], faults)
        except RowError as fault:
            faults.note(conversation.where, fault)
            return None

    goes_on = bool(later) and ROLES[later[0]["role"]] == "user"
    ids = chat.prompt_ids(said, conversation.tools)
    return Prompt(ids, said[-1]["content"], conversation.category, then if goes_on else None)


def question(conversation: Conversation) -> list[Message]:
    """The messages that end in the turn to be answered. Raises RowError for a chat that has been rendered already."""
    messages = conversation.messages
    if not messages:
        raise RowError("a rendered text is no prompt", "give messages, turns or prompt")
    roles = [ROLES[message["role"]] for message in messages]
    end = next((i for i, (a, b) in enumerate(pairwise(roles)) if a == b == "user"), len(roles) - 1) + 1
    while roles[end - 1] == "assistant":
        end -= 1
    return messages[:end]


def seen_in_training(prompts: Sequence[Prompt], sources: Sequence[str]) -> int:
    """How many of the prompts stand among the user turns of the training sources, spacing and case aside (X-08)."""
    seen = {
        _fingerprint(message["content"])
        for conversation in read_conversations(sources, Faults())
        for message in conversation.messages
        if ROLES[message["role"]] == "user"
    }
    return sum(_fingerprint(prompt.text) in seen for prompt in prompts)


def _fingerprint(text: str) -> bytes:
    return hashlib.sha256(" ".join(text.casefold().split()).encode()).digest()

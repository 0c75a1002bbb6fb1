"""Prompts and chats from JSONL files, dataset folders or the Hub, in one shape; what was skipped, where and why.

Known shapes of a row: `messages` (OpenAI: role, content, tool_calls, reasoning_content), `conversations` (ShareGPT:
from, value), `turns` (user turns to be answered one after another, with an optional `category`), `prompt` (one user
turn) and `text` (a chat that has been rendered already). A row that cannot be used is a fault: it is counted by
reason and the run goes on, unless it is strict. Roles have to alternate: a chat in which two user turns or two
assistant turns follow each other, or that does not begin with a user turn after its system messages, is skipped, not
mended, since no serving engine would see it so.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specdraft.config import SpecdraftError

Message = dict[str, Any]
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
FOLLOWS = {None: "system user", "system": "system user", "user": "assistant", "tool": "assistant tool"}
LONGEST_LINE = 16 * 2**20  # bytes
SHOWN = 20  # faults that are kept word for word


class RowError(SpecdraftError):
    """One row cannot be used. `reason` is the kind, the same for every row with it; `detail` tells this row's case."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass
class Faults:
    """What was skipped: a count for each reason, and the first faults word for word with their places."""

    counts: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)

    def note(self, where: str, fault: RowError) -> None:
        self.counts[fault.reason] += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{where}: {fault}")

    def check(self, strict: bool) -> None:
        """Raises SpecdraftError naming files and lines if `strict` and something was skipped."""
        if strict and self.counts:
            raise SpecdraftError(f"strict, and {self}")

    def __str__(self) -> str:
        total = self.counts.total()
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.counts.most_common())
        more = [] if total <= len(self.shown) else [f"and {total - len(self.shown)} more"]
        return "\n  ".join([f"{total} rows cannot be used ({reasons})", *self.shown, *more])


class Answer(NamedTuple):
    """An answer that a target wrote: message `message` of its chat is these ids, decoded."""

    message: int
    prompt_ids: list[int]
    answer_ids: list[int]
    finish: str  # "end" (answer_ids ends with an end id) or "length"


@dataclass(frozen=True)
class Conversation:
    """One chat. `messages` in OpenAI's shape, or `text` rendered already; `answers` where a target wrote some."""

    key: str
    """A hash of the content (with a number for its second and later occurrences)."""
    where: str
    """`file:line`, for people."""
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    category: str | None = None
    answers: tuple[Answer, ...] = ()
    written_by: dict[str, Any] | None = None
    """The target and the settings that wrote the answers; None: nobody that we know of."""


def read_conversations(sources: Sequence[str], faults: Faults) -> Iterator[Conversation]:
    """The usable rows of all sources, in order; the others go to `faults`.

    A source is a JSONL file, a dataset folder, or a Hub id, the latter two with `#split` or `#config/split`. Raises
    SpecdraftError for a source that cannot be found.
    """
    seen: Counter[str] = Counter()
    for source in sources:
        for where, row in _rows(source):
            try:
                if isinstance(row, RowError):
                    raise row
                conversation = parse_row(row, where)
            except RowError as fault:
                faults.note(where, fault)
                continue
            seen[conversation.key] += 1
            if (times := seen[conversation.key]) > 1:
                conversation = Conversation(**{**vars(conversation), "key": f"{conversation.key}-{times}"})
            yield conversation


def sources_digest(sources: Sequence[str]) -> str:
    """A hash of what the sources hold now, whatever they are called."""
    digest = hashlib.sha256()
    for source in sources:
        if Path(source).is_file():
            with open(source, "rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
        else:
            for _, row in _rows(source):
                digest.update(json.dumps(row, default=str, sort_keys=True).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def parse_row(row: Any, where: str = "row") -> Conversation:
    """One JSON object to a Conversation. Raises RowError."""
    if not isinstance(row, dict):
        raise RowError("not a JSON object", type(row).__name__)
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json(tools)
    text = row.get("text") if not {"messages", "conversations", "turns", "prompt"} & row.keys() else None
    if text is not None and not (isinstance(text, str) and text.strip()):
        raise RowError("empty text")
    messages = [] if text is not None else _messages(row)
    try:
        identity = json.dumps([row.get("id"), messages, tools, text], sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowError("not valid Unicode", str(error)) from error
    return Conversation(
        key=hashlib.sha256(identity).hexdigest()[:16],
        where=where,
        messages=messages,
        tools=tools or None,
        text=text,
        category=row.get("category"),
        answers=_answers(row, messages),
        written_by=row.get("written_by"),
    )


def _messages(row: dict[str, Any]) -> list[Message]:
    name = next((name for name in ("messages", "conversations", "turns", "prompt") if name in row), None)
    if name is None:
        raise RowError(
            "no messages, conversations, turns, prompt or text", f"the row has {', '.join(sorted(row)) or 'nothing'}"
        )
    given = [row[name]] if name == "prompt" and isinstance(row[name], str) else row[name]
    if not isinstance(given, list):
        raise RowError(f"{name} is not a list", json.dumps(given)[:80])
    if not given:
        raise RowError("empty conversation")
    if name == "turns" or given == [row.get("prompt")]:
        return [_message({"role": "user", "content": turn}, number) for number, turn in enumerate(given)]
    messages = [_message(message, number) for number, message in enumerate(given)]
    _check_order([message["role"] for message in messages])
    return messages


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, dict):
        raise RowError("a message is not an object", f"message {number}: {str(message)[:80]}")
    spoken = message.get("role", message.get("from"))
    role = ROLES.get(spoken) if isinstance(spoken, str) else None
    if role is None:
        raise RowError("unknown role", f"{spoken!r} in message {number}; known are {', '.join(ROLES)}")
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RowError("content that is not text", f"message {number}")
        content = "".join(part["text"] for part in content)
    calls = [_call(call) for call in message.get("tool_calls") or []]
    known = {"role": spoken if spoken == "developer" else role, "content": content}
    kept = {name: value for name, value in message.items() if name not in ("role", "from", "content", "value")}
    kept = {name: value for name, value in kept.items() if value is not None and value != []}
    if calls:
        kept["tool_calls"] = calls
    if content is None and role == "assistant" and (calls or "reasoning_content" in kept or "thinking" in kept):
        known["content"] = ""
    elif not isinstance(content, str):
        raise RowError("content that is not text", f"message {number}: {str(content)[:80]}")
    return {**known, **kept}


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object, as serving engines hand it to the template."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        return {**call, "function": {**function, "arguments": _json(function["arguments"])}}
    return call


def _check_order(roles: list[str]) -> None:
    before = None
    for number, spoken in enumerate(roles):
        role = ROLES[spoken]
        allowed = FOLLOWS.get(before, "user tool")
        if role not in allowed.split():
            if before in (None, "system"):
                raise RowError(f"begins with {role}", f"message {number}; a user turn is wanted")
            raise RowError("roles do not alternate", f"message {number} is {role} after {before}")
        before = role
    if before == "system":
        raise RowError("no user turn", "the chat has system messages only")


def _answers(row: dict[str, Any], messages: list[Message]) -> tuple[Answer, ...]:
    try:
        answers = tuple(Answer(**answer) for answer in row.get("answers") or ())
    except TypeError as error:
        raise RowError("answers are not as `respond` writes them", str(error)) from error
    for answer in answers:
        if not 0 <= answer.message < len(messages) or messages[answer.message]["role"] != "assistant":
            raise RowError("answers are not as `respond` writes them", f"message {answer.message} is no assistant turn")
    return answers


def _rows(source: str) -> Iterator[tuple[str, Any]]:
    if Path(source).is_file():
        yield from _lines(Path(source))
    else:
        for number, row in enumerate(_dataset(source)):
            yield f"{source}:{number}", {name: value for name, value in row.items() if value is not None}


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Place and content of each line that is not blank; a RowError stands for one that cannot be read."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            size = len(line)
            while not line.endswith(b"\n") and (rest := file.readline(LONGEST_LINE)):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            where = f"{path}:{number}"
            if size > len(line):
                yield where, RowError("line too long", f"{size:,} bytes; the limit is {LONGEST_LINE:,}")
                continue
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                try:
                    yield where, _json(line.decode())
                except RowError as fault:
                    yield where, fault
                except UnicodeDecodeError as error:
                    yield where, RowError("not valid UTF-8", str(error))


def _json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RowError("not valid JSON", str(error)) from error


def _dataset(source: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    name, _, selection = source.partition("#")
    config, _, split = selection.rpartition("/")
    if name.endswith((".jsonl", ".json")):
        raise SpecdraftError(f"no such file: {name}")
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            found = load_from_disk(name)
        else:
            found = load_dataset(name, config or None, split=split or "train")
        return found[split or "train"] if isinstance(found, DatasetDict) else found
    except Exception as error:  # the libraries raise many kinds; the source's name is what the reader needs
        raise SpecdraftError(
            f"cannot read {source!r}: {type(error).__name__}: {error}\nA source is a JSONL file, a dataset folder or a "
            "Hub id, the latter two with #split or #config/split"
        ) from error

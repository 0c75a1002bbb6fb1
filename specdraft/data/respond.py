"""The target writes the answers that a drafter learns from, in process: greedy or sampled, resumable, ids kept.

A drafter imitates one target; answers by others teach it what this target would not say. So every user turn of the
prompts is answered anew, turn by turn, and an assistant turn that a row brings is dropped. Only a chat with tool
results, which belong to the calls before them, keeps its history and has its last assistant turn written anew.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from pydantic import Field, model_validator
from rich.console import Console

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.batches import one_at_a_time
from specdraft.data.chat import ChatFormat
from specdraft.data.conversations import Answer, Conversation, Faults, Message, RowError, read_conversations
from specdraft.dice import Dice, SeededDice
from specdraft.progress import progress_bar
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.warping import Warp

log = logging.getLogger(__name__)


class RespondRecipe(Recipe):
    target: TargetRecipe
    """Who answers."""
    prompts: tuple[str, ...]
    """JSONL files, dataset folders or Hub ids (these with `#split` or `#config/split`): messages, turns or prompt."""
    output: str
    """JSONL file to append to. A run that was stopped goes on where it was; other settings need another file."""
    limit: int | None = Field(None, ge=1)
    """Answer the first so many usable rows of the prompts."""
    max_new_tokens: int = Field(512, ge=1)
    """An answer is cut here; it is then a sample without its end."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Prompts longer than this are skipped and counted. Default: what the target's context leaves beside an answer."""
    batch_size: int = Field(32, ge=1)
    """Most rows that are answered together: every row of a batch takes as much room as its longest, so a prompt that is
    far longer than the others is answered among fewer. Rows that have ended are dropped as they do."""
    temperature: float = Field(0.0, ge=0)
    """0: greedy."""
    top_k: int | None = Field(None, ge=1)
    """Draw from the so many likeliest tokens."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Draw from the likeliest tokens that make up this probability."""
    samples: int = Field(1, ge=1)
    """Answers to each prompt, drawn one without regard to another. Raised later, the output is added to."""
    seed: int = 0
    """Each answer's draws depend on this, its prompt and its turn, not on the rows beside it."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """The chat template's variables, as the serving engine gets them; such as enable_thinking."""
    strict: bool = False
    """Fail on rows that cannot be used, instead of counting and skipping them."""

    @model_validator(mode="after")
    def _drawn(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples has no effect at temperature 0, where all answers are one: set a temperature")
        return self


@dataclass
class _Work:
    """One row being answered. `script` is its chat, with None where the target is to speak."""

    key: str
    script: list[Message | None]
    first_prompt: list[int]
    origin: Conversation
    answers: list[Answer] = field(default_factory=list)


def respond(recipe: RespondRecipe, target: FrozenTarget | None = None) -> dict[str, Any]:
    """Answer the recipe's prompts that its output does not hold yet; returns a summary.

    A line of the output has id, messages (answers included), answers (of each: which message it became, prompt_ids,
    answer_ids, finish), written_by (target, fingerprint, settings), and tools and category where the prompt had them.
    `target` stands in for the recipe's. Raises SpecdraftError if the output was written with other settings or by
    another target.
    """
    target = target or FrozenTarget.load(recipe.target)
    chats = ChatFormat(target.tokenizer, recipe.chat_template_kwargs, target.end_ids)
    written_by = _settings(recipe, target, chats)
    output = Path(recipe.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    faults, finished, new_tokens = Faults(), Counter[str](), 0
    with one_at_a_time(output), open(output, "a+b") as file:
        done = _resume(file, output, written_by)
        todo = _todo(recipe, target, chats, done, faults)
        faults.check(recipe.strict)
        if not todo and not done:
            raise SpecdraftError(f"no prompt to answer in {', '.join(recipe.prompts)}: {faults}")
        begun = time.monotonic()
        for batch in _shown(_batches(todo, recipe.batch_size, recipe.max_new_tokens), len(todo)):
            _converse(batch, target, chats, recipe)
            for work in batch:
                file.write(_line(work, written_by))
                finished.update(answer.finish for answer in work.answers)
                new_tokens += sum(len(answer.answer_ids) for answer in work.answers)
            file.flush()
        seconds = time.monotonic() - begun
    return {
        "output": str(output),
        "rows": len(done) + len(todo),
        "answered": len(todo),
        "skipped": dict(faults.counts),
        "examples": faults.shown,
        "finish": dict(finished),
        "new_tokens": new_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(new_tokens / seconds, 1) if new_tokens else 0.0,
        "target": target.name,
        "fingerprint": target.fingerprint,
    }


def write_answers(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], warp: Warp, dice: Dice, max_new_tokens: int
) -> list[list[int]]:
    """Plain decoding of prompts side by side: the ids that the target emits, through an end id or up to the cap."""
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    session = target.session((), len(prompts))
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    mask = torch.arange(int(lengths.max()), device=target.device) < lengths[:, None]
    tokens = torch.zeros_like(mask, dtype=torch.int64)
    tokens[mask] = torch.tensor([id for prompt in prompts for id in prompt], device=target.device)

    def goes_on(answer: list[int]) -> bool:
        return len(answer) < max_new_tokens and not (answer and answer[-1] in target.end_ids)

    while True:
        seen = session.read(tokens, mask)
        logits = target.head(seen.hidden[torch.arange(len(rows), device=mask.device), mask.sum(1) - 1])
        emitted = logits.argmax(-1) if warp.greedy else dice.draw(warp(logits), range(len(rows)))
        for row, token in zip(rows, emitted.tolist(), strict=True):
            if goes_on(answers[row]):
                answers[row].append(token)
        alive = [at for at, row in enumerate(rows) if goes_on(answers[row])]
        if not alive:
            return answers
        if len(alive) <= len(rows) * 7 // 8:  # leaving copies all keys and values, so rows leave in company
            session.keep(alive)
            dice, emitted, rows = dice.keep(alive), emitted[alive], [rows[at] for at in alive]
        tokens, mask = emitted[:, None], torch.ones_like(emitted, dtype=torch.bool)[:, None]


def _converse(batch: Sequence[_Work], target: FrozenTarget, chats: ChatFormat, recipe: RespondRecipe) -> None:
    """Answer a batch of rows turn by turn; a chat that outgrows the limit ends before the turn that does not fit."""
    warp = Warp(recipe.temperature, recipe.top_k, recipe.top_p)
    limit = _prompt_limit(recipe, target)
    while turn := [(work, work.script.index(None)) for work in batch if None in work.script]:
        going, prompts, seeds = [], [], []
        for work, place in turn:
            said = [message for message in work.script[:place] if message is not None]
            prompt = chats.prompt_ids(said, work.origin.tools) if work.answers else work.first_prompt
            if work.answers and len(prompt) > limit:
                del work.script[work.answers[-1].message + 1 :]
                continue
            going.append((work, place))
            prompts.append(prompt)
            seeds.append(_seed(recipe.seed, work.key, place))
        if not going:
            return
        answers = write_answers(target, prompts, warp, SeededDice(seeds), recipe.max_new_tokens)
        for (work, place), prompt, ids in zip(going, prompts, answers, strict=True):
            ended = ids[-1] in target.end_ids
            work.script[place] = {"role": "assistant", "content": chats.answer_text(ids)}
            work.answers.append(Answer(place, prompt, ids, "end" if ended else "length"))


def _todo(
    recipe: RespondRecipe, target: FrozenTarget, chats: ChatFormat, done: set[str], faults: Faults
) -> list[_Work]:
    """The rows still to be answered, longest prompts first: rows of a batch are alike, and time left is honest."""
    limit, todo, usable = _prompt_limit(recipe, target), [], 0
    for conversation in read_conversations(recipe.prompts, faults):
        if recipe.limit is not None and usable == recipe.limit:
            break
        try:
            script = _script(conversation)
            prompt = chats.prompt_ids([m for m in script[: script.index(None)] if m is not None], conversation.tools)
            if len(prompt) > limit:
                raise RowError(f"prompt longer than {limit} tokens", f"max_prompt_tokens; it has {len(prompt)}")
        except RowError as fault:
            faults.note(conversation.where, fault)
            continue
        usable += 1
        for sample in range(recipe.samples):
            key = f"{conversation.key}#{sample + 1}" if sample else conversation.key
            if key not in done:
                todo.append(_Work(key, [*script], prompt, conversation))
    return sorted(todo, key=lambda work: -len(work.first_prompt))


def _script(conversation: Conversation) -> list[Message | None]:
    messages = conversation.messages
    if conversation.text is not None:
        raise RowError("text cannot be answered", "a rendered chat has no turns; give messages, turns or prompt")
    if any(message["role"] == "tool" for message in messages):
        return [*(messages[:-1] if messages[-1]["role"] == "assistant" else messages), None]
    script: list[Message | None] = []
    for message in messages:
        if message["role"] != "assistant":
            script.append(message)
        if message["role"] == "user":
            script.append(None)
    return script


def _prompt_limit(recipe: RespondRecipe, target: FrozenTarget) -> int:
    context = getattr(target.config, "max_position_embeddings", None) or 2**31
    room = context - recipe.max_new_tokens
    if room < 1:
        raise SpecdraftError(
            f"max_new_tokens {recipe.max_new_tokens} leaves no room for a prompt: context is {context}"
        )
    return room if recipe.max_prompt_tokens is None else min(room, recipe.max_prompt_tokens)


def _settings(recipe: RespondRecipe, target: FrozenTarget, chats: ChatFormat) -> dict[str, Any]:
    """All that decides the answers to a prompt, as each row of the output records it."""
    deciding = {"temperature", "top_k", "top_p", "seed", "max_new_tokens", "chat_template_kwargs"}
    return {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "tokenizer": chats.tokenizer_fingerprint,
        "chat_format": chats.fingerprint[:16],
        **recipe.model_dump(mode="json", include=deciding),
    }


def _resume(file: BinaryIO, path: Path, written_by: dict[str, Any]) -> set[str]:
    """The ids that the output holds. A last line that was cut is removed; the file stands at its end."""
    done: set[str] = set()
    file.seek(0)
    whole = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            before, id = row["written_by"], row["id"]
        except (ValueError, KeyError, TypeError) as error:
            raise SpecdraftError(
                f"{path}:{number}: not a line that `respond` wrote ({error}); choose another output"
            ) from error
        if before != written_by:
            differ = [name for name in {**before, **written_by} if before.get(name) != written_by.get(name)]
            was = ", ".join(f"{name} {before.get(name)!r}, now {written_by.get(name)!r}" for name in differ)
            raise SpecdraftError(
                f"{path}:{number}: was written with other settings ({was}); choose another output, or the same settings"
            )
        done.add(id)
        whole += len(line)
    file.truncate(whole)
    file.seek(0, 2)
    return done


def _line(work: _Work, written_by: dict[str, Any]) -> bytes:
    row: dict[str, Any] = {"id": work.key, "messages": work.script}
    if work.origin.category is not None:
        row["category"] = work.origin.category
    if work.origin.tools:
        row["tools"] = work.origin.tools
    row |= {"answers": [answer._asdict() for answer in work.answers], "written_by": written_by}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _seed(seed: int, key: str, place: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}/{place}".encode()).digest()[:7])


def _batches(todo: Sequence[_Work], size: int, answer: int) -> Iterator[Sequence[_Work]]:
    """At most `size` rows each, none with less than half of the room that its longest needs for prompt and answer."""
    start = 0
    while start < len(todo):
        room = len(todo[start].first_prompt) + answer
        alike = [2 * (len(work.first_prompt) + answer) >= room for work in todo[start : start + size]]
        yield todo[start : start + sum(alike)]  # longest first: those that are alike come first
        start += sum(alike)


def _shown(batches: Iterator[Sequence[_Work]], rows: int) -> Iterator[Sequence[_Work]]:
    """The batches, with a progress bar on stderr; where that is no terminal, a log line a batch."""
    begun, answered = time.monotonic(), 0
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("answers", total=rows)
        for batch in batches:
            yield batch
            answered += len(batch)
            progress.advance(task, len(batch))
            if not progress.console.is_terminal:
                left = (time.monotonic() - begun) / answered * (rows - answered)
                log.info("%d of %d rows answered, about %.0f s left", answered, rows, left)

"""Training rows: chats tokenised once and cached by content, batched by length in an order that can be resumed."""

import fcntl
import hashlib
import json
import logging
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.chat import ChatFormat
from specdraft.data.conversations import Conversation, Faults, RowError, read_conversations, sources_digest
from specdraft.reduction import IGNORED

log = logging.getLogger(__name__)
_LAYOUT = 1  # of the cache file and of what decides its content; raise it when either changes
_MOST_POOLED = 32  # global batches that are sorted by length together, in an epoch of enough of them


class DataRecipe(Recipe):
    answers: tuple[str, ...]
    """Chats to train on: JSONL files (best those that `respond` wrote), dataset folders or Hub ids; `#split` or
    `#config/split` selects within the latter two."""
    max_length: int = Field(2048, ge=2)
    """Rows are cut to this many tokens; a row without a supervised token left is skipped and counted."""
    min_supervised: int = Field(1, ge=1)
    """Rows with fewer supervised tokens are skipped and counted."""
    limit: int | None = Field(None, ge=1)
    """Use the first so many usable rows of the sources."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """The chat template's variables, as the serving engine gets them; such as enable_thinking. Answers that `respond`
    wrote keep the prompts that they were written for."""
    strict: bool = False
    """Fail on rows that cannot be used, instead of counting and skipping them."""
    cache_dir: str = "~/.cache/specdraft"
    """Where tokenised rows are kept. The name of a cache file covers everything that decides its content."""
    store: str | None = None
    """A folder that `capture` wrote for these rows: the target's features are read instead of computed."""


@dataclass
class RowsReport:
    """What became of the sources: counts, what was skipped and why, and who wrote the answers."""

    conversations: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    written_by: dict[str, int] = field(default_factory=dict)
    """Rows by the target and temperature that wrote their answers; "unknown" for those that `respond` did not write,
    from which drafters learn badly: their answers are not what the target would say."""

    @property
    def supervised_ratio(self) -> float:
        return self.supervised / max(self.tokens, 1)

    def __str__(self) -> str:
        writers = ", ".join(f"{rows} by {writer}" for writer, rows in self.written_by.items())
        skipped = "; ".join(f"{count} x {reason}" for reason, count in self.skipped.items()) or "none"
        return (
            f"{self.rows:,} rows of {self.conversations:,} chats, {self.tokens:,} tokens, {self.supervised_ratio:.1%} "
            f"supervised, {self.truncated:,} truncated; answers: {writers}; skipped: {skipped}"
        )


class TokenRows(Dataset[dict[str, Tensor]]):
    """Tokenised rows. `rows[i]` is {"row": int64 [], "input_ids": int64 [T], "labels": int64 [T]}.

    Labels equal the ids where supervised, else -100, and are not shifted. `key` is a hash of all that decided the rows.
    """

    def __init__(self, ids: Tensor, supervised: Tensor, lengths: Tensor, key: str, report: RowsReport) -> None:
        self.ids, self.supervised, self.lengths = ids, supervised, lengths
        self.key, self.report = key, report
        self._starts = lengths.cumsum(0) - lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        start = int(self._starts[row])
        span = slice(start, start + int(self.lengths[row]))
        ids = self.ids[span].long()
        labels = torch.where(self.supervised[span], ids, IGNORED)
        return {"row": torch.tensor(row), "input_ids": ids, "labels": labels}

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each id is supervised: int64 [vocab_size]."""
        return torch.bincount(self.ids[self.supervised].long(), minlength=vocab_size)

    def save(self, path: Path) -> None:
        """Written beside `path` and renamed, so that what is there is whole."""
        tensors = {"ids": self.ids, "supervised": self.supervised, "lengths": self.lengths}
        part = path.with_suffix(f".part-{os.getpid()}")
        save_file(tensors, part, {"key": self.key, "report": json.dumps(asdict(self.report))})
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> "TokenRows":
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("ids", "supervised", "lengths")}
            about = file.metadata()
        return cls(**tensors, key=about["key"], report=RowsReport(**json.loads(about["report"])))


def load_rows(recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int] = ()) -> TokenRows:
    """The recipe's rows, from the cache if the same rows were built before.

    Every process may call it: one of a machine builds, the others wait for the file, outside any collective. Raises
    SpecdraftError if no row is left, or if one was skipped and the recipe is strict.
    """
    chats = ChatFormat(tokenizer, recipe.chat_template_kwargs, end_ids)
    decides = recipe.model_dump(include={"max_length", "min_supervised", "limit"})
    parts = [_LAYOUT, decides, chats.fingerprint, sources_digest(recipe.answers)]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(recipe.cache_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rows-{key}.safetensors"
    with one_at_a_time(path):
        if not path.exists():
            build_rows(recipe, chats, key).save(path)
    rows = TokenRows.load(path)
    log.info("%s", rows.report)
    Faults(Counter(rows.report.skipped), rows.report.examples).check(recipe.strict)
    return rows


def build_rows(recipe: DataRecipe, chats: ChatFormat, key: str = "") -> TokenRows:
    """Tokenise the recipe's sources, without a cache."""
    faults, report, written_by = Faults(), RowsReport(), Counter[str]()
    ids, supervised, lengths = array("i"), array("b"), array("q")
    for conversation in read_conversations(recipe.answers, faults):
        if recipe.limit is not None and report.conversations == recipe.limit:
            break
        try:
            samples = _samples(conversation, chats, recipe)
        except RowError as fault:
            faults.note(conversation.where, fault)
            continue
        report.conversations += 1
        report.truncated += sum(length > recipe.max_length for _, _, length in samples)
        written_by[_writer(conversation)] += len(samples)
        for row_ids, row_supervised, _ in samples:
            ids.extend(row_ids)
            supervised.extend(row_supervised)
            lengths.append(len(row_ids))
    report.rows, report.tokens, report.supervised = len(lengths), len(ids), sum(supervised)
    report.skipped, report.examples, report.written_by = dict(faults.counts), faults.shown, dict(written_by)
    if not lengths:
        raise SpecdraftError(f"no row to train on in {', '.join(recipe.answers)}: {faults}")
    return TokenRows(
        torch.frombuffer(ids, dtype=torch.int32),
        torch.frombuffer(supervised, dtype=torch.int8).bool(),
        torch.frombuffer(lengths, dtype=torch.int64),
        key,
        report,
    )


def _samples(
    conversation: Conversation, chats: ChatFormat, recipe: DataRecipe
) -> list[tuple[list[int], list[bool], int]]:
    """A conversation's rows, cut to max_length: ids, mask, length before the cut. Raises RowError if none is left."""
    samples = chats.samples(conversation)
    if not samples:
        raise RowError(
            "no assistant turn", "nothing in it was written by an assistant; let the target answer (`respond`)"
        )
    limit = recipe.max_length
    kept = [
        (ids[:limit], mask[:limit], len(ids)) for ids, mask in samples if sum(mask[:limit]) >= recipe.min_supervised
    ]
    if kept:
        return kept
    if all(any(mask) and not any(mask[:limit]) for _, mask in samples):
        raise RowError(
            f"no supervised token after truncation to {limit}",
            f"max_length is {limit}, and the answer begins at token {samples[0].supervised.index(True)}",
        )
    most = max(sum(mask[:limit]) for _, mask in samples)
    raise RowError(f"fewer than {recipe.min_supervised} supervised tokens", f"min_supervised; the row has {most}")


def _writer(conversation: Conversation) -> str:
    if (by := conversation.written_by) is None:
        return "unknown"
    return f"{by['target']} ({by['fingerprint']}) at temperature {by['temperature']:g}"


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock of `path` (a file beside it) among the processes of this machine; a dead holder lets it go."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def batch_order(
    lengths: Tensor, batch_size: int, *, seed: int, epoch: int, rank: int = 0, world: int = 1
) -> list[list[int]]:
    """This rank's batches of row numbers in one epoch: a function of its arguments alone.

    lengths int64 [rows]. Every rank has the same number of batches, none empty, of at most `batch_size` rows, whose
    sizes differ by at most one. Every row comes once an epoch over all ranks (with batches of one row, up to
    world - 1 come twice to fill the last). Rows of similar length share a global batch. Raises SpecdraftError if there
    are fewer rows than ranks.
    """
    rows = len(lengths)
    if rows < world:
        raise SpecdraftError(
            f"{rows} training rows cannot be shared among {world} ranks: give more data or fewer ranks"
        )
    stream = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(rows, generator=stream)
    steps = -(-rows // (batch_size * world))
    pools = shuffled.split(min(max(steps // 8, 1), _MOST_POOLED) * batch_size * world)
    order = torch.cat([pool[lengths[pool].argsort(descending=True, stable=True)] for pool in pools])
    order = torch.cat([order, order[: max(0, steps * world - rows)]])
    cuts = [len(order) * step // steps for step in range(steps + 1)]
    batches = [order[start + rank : end : world].tolist() for start, end in pairwise(cuts)]
    return [batches[step] for step in torch.randperm(steps, generator=stream).tolist()]


class LengthBatches(Sampler[list[int]]):
    """A batch sampler over `batch_order`. `set_epoch` chooses the epoch; the same epoch gives the same batches."""

    def __init__(self, lengths: Tensor, batch_size: int, *, seed: int, rank: int = 0, world: int = 1) -> None:
        self.lengths, self.batch_size = lengths, batch_size
        self.seed, self.rank, self.world = seed, rank, world
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[int]]:
        yield from batch_order(
            self.lengths, self.batch_size, seed=self.seed, epoch=self.epoch, rank=self.rank, world=self.world
        )


def collate(rows: Sequence[dict[str, Tensor]], pad_id: int = 0) -> dict[str, Any]:
    """Rows to a batch, padded on the right.

    {"row": int64 [B], "input_ids": int64 [B, T], "labels": int64 [B, T] (-100 where not supervised; not shifted),
    "attention_mask": int64 [B, T]}
    """

    def pad(name: str, value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)

    input_ids = pad("input_ids", pad_id)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
    return {
        "row": torch.stack([row["row"] for row in rows]),
        "input_ids": input_ids,
        "labels": pad("labels", IGNORED),
        "attention_mask": mask.long(),
    }

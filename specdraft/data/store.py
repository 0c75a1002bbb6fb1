"""Optional disk store of what the target computes at the training rows, for runs of several epochs.

One folder: `index.json` says for which target, taps and rows it was made; each shard is a safetensors file with the
tokens of consecutive rows one after another: `hidden` [tokens, H] (after the final norm), `taps` [tokens, n * H] and
`log_partition` float32 [tokens], the log-sum-exp of the full-vocabulary logits of the *stored* hidden state, so that a
law over kept ids alone is still normalised exactly. Shards are written whole or not at all; a stopped run goes on.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdraft.causal import Observation
from specdraft.config import Recipe, SpecdraftError
from specdraft.data.batches import DataRecipe, TokenRows, collate, load_rows, one_at_a_time
from specdraft.target import FrozenTarget, TargetRecipe

_LAYOUT = 1
_HEAD_CHUNK = 512  # positions whose full-vocabulary logits are held at once


class CaptureRecipe(Recipe):
    target: TargetRecipe
    """Whose features."""
    data: DataRecipe
    """The training rows; give training the same settings, or it will refuse the store."""
    taps: tuple[int, ...]
    """The layers whose outputs the drafter reads, in its order; 0 is the embedding."""
    output: str
    """Folder to write. A run that was stopped goes on where it was."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the stored features."""
    shard_tokens: int = Field(65536, ge=1)
    """Tokens in a shard, rows kept whole."""
    batch_tokens: int = Field(4096, ge=1)
    """Tokens, padding included, in one pass of the target."""


def capture(recipe: CaptureRecipe, target: FrozenTarget | None = None) -> dict[str, Any]:
    """Compute and store the features of the recipe's rows; returns a summary. `target` stands in for the recipe's.

    Raises SpecdraftError if the folder holds features of another target, of other taps or rows.
    """
    if recipe.data.store is not None:
        raise SpecdraftError(f"data.store ({recipe.data.store}) has no effect here: capture writes `output`")
    target = target or FrozenTarget.load(recipe.target)
    rows = load_rows(recipe.data, target.tokenizer, target.end_ids)
    folder = Path(recipe.output)
    folder.mkdir(parents=True, exist_ok=True)
    index = {**_identity(target, recipe.taps, rows), "dtype": recipe.dtype, "shard_tokens": recipe.shard_tokens}
    shards = _plan(rows.lengths, recipe.shard_tokens)
    written = 0
    with one_at_a_time(folder / "index.json"):
        if (folder / "index.json").exists():
            _check_index(folder, index)
        (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n")
        todo = [number for number in range(len(shards)) if not _shard(folder, number).exists()]
        for number in track(todo, "capture", console=Console(stderr=True)):
            part = folder / f"part-{os.getpid()}"
            save_file(_features(target, recipe, rows, shards[number]), part)
            part.replace(_shard(folder, number))
            written += 1
    return {
        "output": str(folder),
        "rows": len(rows),
        "tokens": rows.report.tokens,
        "shards": len(shards),
        "written": written,
        "bytes": sum(_shard(folder, number).stat().st_size for number in range(len(shards))),
        "target": target.name,
        "fingerprint": target.fingerprint,
        "taps": list(recipe.taps),
        "data": rows.key,
    }


class FeatureStore:
    """Reads what `capture` wrote. `collate` takes the place of `batches.collate` in a DataLoader, workers included.

    Raises SpecdraftError if the folder is not complete, or was made for another target, other taps or other rows.
    """

    def __init__(self, folder: str | Path, target: FrozenTarget, taps: Sequence[int], rows: TokenRows) -> None:
        self.folder = Path(folder)
        if not (self.folder / "index.json").exists():
            raise SpecdraftError(f"{folder} holds no captured features; write them with `specdraft capture`")
        index = _check_index(self.folder, _identity(target, taps, rows))
        self.dtype = target.dtype
        self._places: list[tuple[int, int]] = []
        self._lengths = rows.lengths
        for number, shard in enumerate(_plan(rows.lengths, index["shard_tokens"])):
            if not _shard(self.folder, number).exists():
                raise SpecdraftError(
                    f"{folder} is not complete (no shard {number}); run the same `specdraft capture` again"
                )
            starts = rows.lengths[shard.start : shard.stop].cumsum(0) - rows.lengths[shard.start : shard.stop]
            self._places += [(number, start) for start in starts.tolist()]
        self._open: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def read(self, row: int) -> dict[str, Tensor]:
        """One row's hidden [T, H] and taps [T, n * H] in the stored dtype, and log_partition float32 [T]."""
        number, start = self._places[row]
        if number not in self._open:
            self._open[number] = safe_open(_shard(self.folder, number), "pt")
        end = start + int(self._lengths[row])
        return {name: self._open[number].get_slice(name)[start:end] for name in ("hidden", "taps", "log_partition")}

    def collate(self, rows: Sequence[dict[str, Tensor]], pad_id: int = 0) -> dict[str, Any]:
        """A batch as `batches.collate` makes it, with what the evidence needs: `observation` (Observation, features in
        the target's dtype, zero at padding) and `log_partition` (float32 [B, T])."""
        batch = collate(rows, pad_id)
        read = [self.read(int(row["row"])) for row in rows]
        hidden, taps, log_partition = (
            torch.nn.utils.rnn.pad_sequence([features[name] for features in read], batch_first=True)
            for name in ("hidden", "taps", "log_partition")
        )
        positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
        batch["observation"] = Observation(
            batch["input_ids"], batch["attention_mask"].bool(), positions, hidden.to(self.dtype), taps.to(self.dtype)
        )
        batch["log_partition"] = log_partition
        return batch


def _features(target: FrozenTarget, recipe: CaptureRecipe, rows: TokenRows, shard: range) -> dict[str, Tensor]:
    """One shard's tensors. Rows of similar length go through the target together."""
    dtype = getattr(torch, recipe.dtype)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for numbers in _batches(rows.lengths, shard, recipe.batch_tokens):
        batch = collate([rows[number] for number in numbers])
        seen = target.observe(batch["input_ids"], batch["attention_mask"].bool(), recipe.taps)
        for at, number in enumerate(numbers):
            length = int(rows.lengths[number])
            found[number] = seen.hidden[at, :length].to("cpu", dtype), seen.taps[at, :length].to("cpu", dtype)
    hidden = torch.cat([found[number][0] for number in shard])
    taps = torch.cat([found[number][1] for number in shard])
    chunks = [target.head(chunk.to(target.dtype)).float().logsumexp(-1).cpu() for chunk in hidden.split(_HEAD_CHUNK)]
    return {"hidden": hidden, "taps": taps, "log_partition": torch.cat(chunks)}


def _batches(lengths: Tensor, shard: range, most: int) -> Iterator[list[int]]:
    """The shard's rows, longest first, in batches of at most `most` padded tokens (or of one row)."""
    batch: list[int] = []
    for number in sorted(shard, key=lambda number: -int(lengths[number])):
        if batch and int(lengths[batch[0]]) * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(number)
    yield batch


def _plan(lengths: Tensor, most: int) -> list[range]:
    """Consecutive rows to shards of about `most` tokens."""
    shards, start, size = [], 0, 0
    for row, length in enumerate(lengths.tolist()):
        if size and size + length > most:
            shards.append(range(start, row))
            start, size = row, 0
        size += length
    return [*shards, range(start, len(lengths))]


def _shard(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.safetensors"


def _identity(target: FrozenTarget, taps: Sequence[int], rows: TokenRows) -> dict[str, Any]:
    return {
        "layout": _LAYOUT,
        "target": target.fingerprint,
        "hidden_size": target.hidden_size,
        "taps": list(taps),
        "data": rows.key,
    }


def _check_index(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The folder's index. Raises SpecdraftError where it differs from what is wanted."""
    try:
        index = json.loads((folder / "index.json").read_text())
    except ValueError as error:
        raise SpecdraftError(
            f"{folder / 'index.json'} cannot be read ({error}); capture into another folder"
        ) from error
    differ = [
        f"{name} is {index.get(name)!r}, wanted {value!r}" for name, value in wanted.items() if index.get(name) != value
    ]
    if differ:
        raise SpecdraftError(
            f"{folder} holds features of something else: {'; '.join(differ)}. Capture again into another folder, or "
            "use the target, taps and data settings that it was made with"
        )
    return index

"""Keys and values of a batch whose rows have lengths of their own, and the attention mask that goes with them.

A committed token of row b at position t has its keys and values in column t, whatever the other rows hold. Drafted
tokens are scratch: they stand in the columns behind the longest row until they are committed, and so moved up to where
they belong, or discarded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class ColumnLayer(CacheLayerMixin):
    """One layer's keys and values, [batch, heads, columns, width], in buffers that grow by half, never by one.

    Sliding-window layers keep every column too: the window is in the mask, and a rejected draft can be taken back.
    """

    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.filled = 0
        """Columns in use; the ones behind are free."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[3])
        self.values = value_states.new_empty(*value_states.shape[:2], 0, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write behind the filled columns; returns all filled columns, the new ones included, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.filled + key_states.shape[2]
        if end > self.keys.shape[2]:
            room = max(end, self.keys.shape[2] * 3 // 2) + 32
            self.keys, self.values = _grown(self.keys, self.filled, room), _grown(self.values, self.filled, room)
        self.keys[:, :, self.filled : end] = key_states
        self.values[:, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def move(self, source: Tensor, landing: Tensor) -> None:
        """Copy, in each row, column source[b, i] to landing[b, i]: int64 [batch, moved]."""
        rows = torch.arange(len(source), device=source.device)[:, None]
        for buffer in (self.keys, self.values):
            buffer[rows, :, landing] = buffer[rows, :, source]  # scatter_ would be a hundred times slower in bfloat16

    def keep(self, rows: Tensor, width: int) -> None:
        self.keys, self.values, self.filled = self.keys[rows, :, :width], self.values[rows, :, :width], width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """The columns of all layers, and how many of them each row has committed."""

    layers: list[ColumnLayer]  # type: ignore[assignment]

    def __init__(self, batch: int, device: torch.device) -> None:
        super().__init__(layer_class_to_replicate=ColumnLayer)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        """int64 [batch]: committed tokens of each row"""
        self.width = 0
        """The longest row's length; scratch columns begin here."""

    def mask(self, positions: Tensor, attends: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The additive mask of new tokens over the committed columns and the scratch columns, themselves included.

        `positions` int64 [batch, new], each of which sees the committed columns before it; `attends` bool [batch, new,
        scratch]; `window`: a token sees only positions less than `window` behind it (`attends` must heed it already).
        Returns [batch, 1, new, width + scratch]: 0 where seen, the lowest finite number of `dtype` where not.
        """
        columns = torch.arange(self.width, device=self.lengths.device)
        committed = columns < torch.minimum(positions, self.lengths[:, None])[:, :, None]
        if window is not None:
            committed = committed & (positions[:, :, None] - columns < window)
        seen = torch.cat([committed, attends], 2)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    def commit(self, kept: Tensor, counts: Tensor) -> None:
        """Keep the first `counts[b]` of the scratch columns kept[b] (int64 [batch, most]), in that order."""
        steps = torch.arange(kept.shape[1], device=kept.device)
        landing = self.lengths[:, None] + steps
        source = torch.where(steps < counts[:, None], self.width + kept, landing)
        if not torch.equal(source, landing):
            for layer in self.layers:
                layer.move(source, landing)
        self.lengths = self.lengths + counts
        self.width = int(self.lengths.max())
        self.discard()

    def discard(self) -> None:
        """Forget the scratch columns."""
        for layer in self.layers:
            layer.filled = self.width

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with `rows` alone, in that order; scratch is forgotten."""
        index = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[index]
        self.width = int(self.lengths.max())
        for layer in self.layers:
            layer.keep(index, self.width)


def _grown(buffer: Tensor, filled: int, room: int) -> Tensor:
    grown = buffer.new_zeros(*buffer.shape[:2], room, buffer.shape[3])
    grown[:, :, :filled] = buffer[:, :, :filled]
    return grown

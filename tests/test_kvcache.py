"""Columns and rows of the cache, against plain Python lists."""

import random

import torch
from torch import Tensor

from specdraft.kvcache import RowCache

HEADS, WIDTH, LAYERS = 2, 3, 2


def entries(ids: Tensor) -> Tensor:
    """int64 [batch, new] to keys [batch, heads, new, width] that show which token they belong to."""
    return ids[:, None, :, None].expand(-1, HEADS, -1, WIDTH).float()


def write(cache: RowCache, ids: Tensor) -> Tensor:
    for layer in range(LAYERS):
        keys, values = cache.update(entries(ids) + 1000 * layer, -entries(ids), layer)
    assert keys.shape[2] == values.shape[2]
    return keys


def held(cache: RowCache, layer: int) -> list[list[int]]:
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    rows = []
    for row, length in enumerate(cache.lengths.tolist()):
        mine = keys[row, 0, :length, 0].long() - 1000 * layer
        assert torch.equal(keys[row, :, :length], entries(mine[None])[0] + 1000 * layer)
        assert torch.equal(values[row, :, :length], -entries(mine[None])[0])
        rows.append(mine.tolist())
    return rows


def test_e19_e25_commits_discards_and_dropped_rows_are_those_of_lists() -> None:
    chance = random.Random(0)
    cache, want, fresh = RowCache(4, torch.device("cpu")), [[], [], [], []], iter(range(1, 10**6))
    for turn in range(40):
        new = chance.randint(1, 9)
        ids = torch.tensor([[next(fresh) for _ in range(new)] for _ in want])
        keys = write(cache, ids)
        assert keys.shape[2] == cache.width + new
        if turn % 5 == 4:
            cache.discard()
        else:
            counts = [chance.randint(0, new) for _ in want]
            most = max(counts)
            kept = [sorted(chance.sample(range(new), count)) for count in counts]
            cache.commit(
                torch.tensor([[*k, *[0] * (most - len(k))] for k in kept]).view(len(want), most), torch.tensor(counts)
            )
            for row, columns in zip(range(len(want)), kept, strict=True):
                want[row] += ids[row, columns].tolist()
        if turn in (12, 25):
            rows = [2, 0, 1][: len(want) - 1]
            cache.keep(rows)
            want = [want[row] for row in rows]
        assert cache.lengths.tolist() == [len(row) for row in want]
        assert cache.width == max(map(len, want))
        assert all(held(cache, layer) == want for layer in range(LAYERS))


def test_e25_free_and_rejected_columns_are_masked_and_finite() -> None:
    """A zeroed or stale tail must take no softmax mass, and hold no NaN that a weight of 0 would spread."""
    cache = RowCache(2, torch.device("cpu"))
    write(cache, torch.arange(12).view(2, 6))
    cache.commit(torch.arange(6).expand(2, -1), torch.tensor([6, 2]))
    positions, attends = cache.lengths[:, None] + torch.arange(2), torch.ones(2, 2, 2).tril().bool()
    mask = cache.mask(positions, attends, torch.float32)
    low = torch.finfo(torch.float32).min
    assert mask.shape == (2, 1, 2, 8)
    assert mask[0, 0].eq(low).tolist() == [[False] * 6 + [False, True], [False] * 8]
    assert mask[1, 0].eq(low).tolist() == [
        [False] * 2 + [True] * 4 + [False, True],
        [False] * 2 + [True] * 4 + [False] * 2,
    ]
    assert torch.isfinite(cache.layers[0].keys).all()


def test_e20_a_window_hides_what_is_far_behind_by_position() -> None:
    cache = RowCache(2, torch.device("cpu"))
    write(cache, torch.arange(12).view(2, 6))
    cache.commit(torch.arange(6).expand(2, -1), torch.tensor([6, 2]))
    seen = cache.mask(cache.lengths[:, None], torch.ones(2, 1, 1).bool(), torch.bfloat16, window=3) == 0
    assert seen[:, 0, 0].tolist() == [
        [False, False, False, False, True, True, True],
        [True, True, False, False, False, False, True],
    ]

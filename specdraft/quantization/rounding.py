"""Weights to integers: to the nearest, or so that a layer's outputs on real inputs change least."""

import torch
from torch import Tensor

from specdraft.config import SpecdraftError
from specdraft.lowbit import Scheme

_DAMPING = 0.01
_BLOCK = 128  # columns whose errors are handed on together
_CLIPS = tuple(1 - 0.025 * step for step in range(17))
"""Parts of the largest weight that are tried as the end of the integers' range: outliers may be cut off."""


def nearest_scale(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Scales [out, groups] of float [out, in] weights, in `dtype`: the largest of each row or group at the range's end.

    The range has one integer more below 0 than above: its end is half way between.
    """
    most = _grouped(weight.float(), scheme).abs().amax(-1)
    return _usable(most / (scheme.largest + 0.5), dtype)


def clipped_scale(weight: Tensor, scheme: Scheme, dtype: torch.dtype, power: Tensor) -> Tensor:
    """The same, cut off where that makes the squared error smaller; `power` [in]: the mean square of each input."""
    grouped, heavy = _grouped(weight.float(), scheme), _grouped(power.float()[None], scheme)
    full = nearest_scale(weight, scheme, torch.float32)
    best, least = _usable(full, dtype), torch.full_like(full, torch.inf)
    for clip in _CLIPS:
        scale = _usable(full * clip, dtype)
        wide = scale.float()[..., None]
        error = ((_rounded(grouped / wide, scheme) * wide - grouped).square() * heavy).sum(-1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def to_nearest(weight: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """int8 [out, in]: each weight rounded by itself."""
    grouped = _grouped(weight.float(), scheme) / scale.float()[..., None]
    return _rounded(grouped, scheme).flatten(1).to(torch.int8)


def gptq(weight: Tensor, scale: Tensor, scheme: Scheme, hessian: Tensor) -> Tensor:
    """GPTQ (Frantar et al. 2022, arXiv 2210.17323): int8 [out, in] that keep weight @ x on the inputs behind `hessian`.

    Columns are rounded one after the other, those with the strongest inputs first, and the error of each is made up
    for by those that are not rounded yet. `hessian` float64 [in, in]: sum of x x^T. Scales are given beforehand, so
    that the order of rounding is no concern of whoever reads them. Raises SpecdraftError for sums that are not finite.
    """
    if not hessian.isfinite().all():
        raise SpecdraftError("the calibration's inputs are not finite: the drafter or its target computes no numbers")
    order = hessian.diagonal().argsort(descending=True)
    columns = weight.double()[:, order]
    steps = scale.double().repeat_interleave(weight.shape[1] // scale.shape[1], 1)[:, order]
    upper = _factor(hessian[order][:, order])
    found = torch.empty_like(columns)
    for start in range(0, columns.shape[1], _BLOCK):
        end = min(start + _BLOCK, columns.shape[1])
        errors = torch.empty_like(columns[:, start:end])
        for place in range(start, end):
            found[:, place] = _rounded(columns[:, place] / steps[:, place], scheme)
            error = (columns[:, place] - found[:, place] * steps[:, place]) / upper[place, place]
            columns[:, place:end] -= error[:, None] * upper[place, place:end]
            errors[:, place - start] = error
        columns[:, end:] -= errors @ upper[start:end, end:]
    return found[:, order.argsort()].to(torch.int8)


def _factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse. An input that never came has no say in the others."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal += _DAMPING * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def _grouped(values: Tensor, scheme: Scheme) -> Tensor:
    """[rows, in] to [rows, groups, columns of a group]."""
    return values.unflatten(1, (scheme.groups(values.shape[1]), -1))


def _rounded(values: Tensor, scheme: Scheme) -> Tensor:
    return values.round().clamp(-scheme.largest - 1, scheme.largest)


def _usable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, and 1 where all weights are 0, or so small that the dtype has no scale for them."""
    held = scale.to(dtype)
    return torch.where(held > torch.finfo(dtype).tiny, held, torch.ones_like(held))

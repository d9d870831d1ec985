"""Sampling an image or a volume at the points of a grid (`torch.nn.functional.grid_sample`).

The bicubic mode has no rule: PyTorch's decomposition of `grid_sampler_2d` says it in gathers.

Shapes: N = batch, C = channels, d = spatial dims (2 or 3), S = sizes of the input, O = sizes of the
output; a grid is [N, *O, d] with the last input dim first, from -1 to 1.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array, lax

from headrace.bridge.ops.registry import lowers

aten: Any = torch.ops.aten
_LINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


@lowers(aten.grid_sampler_3d.default, opmath=True)
def aten_grid_sampler_3d(
    input: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Array:
    """grid_sampler_3d(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, ...)"""
    sizes = input.shape[2:]
    points = [
        _place(grid[..., len(sizes) - 1 - k], size, padding_mode, align_corners)
        for k, size in enumerate(sizes)
    ]
    if interpolation_mode == _NEAREST:
        return _read(input, [jnp.round(p) for p in points])
    low = [jnp.floor(p) for p in points]
    total = jnp.zeros((), input.dtype)
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        weight = jnp.ones((), grid.dtype)
        for point, start, high in zip(points, low, corner, strict=True):
            part = point - lax.stop_gradient(start)
            weight = weight * (part if high else 1 - part)
        found = _read(input, [start + high for start, high in zip(low, corner, strict=True)])
        total = total + found * weight[:, None].astype(input.dtype)
    return total


def _place(x: Array, size: int, padding_mode: int, align_corners: bool) -> Array:
    """Coordinates from -1..1 to indices, outside ones folded in as the padding mode says."""
    place = (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2
    if padding_mode == _REFLECTION:
        place = _reflect(place, 0, size - 1) if align_corners else _reflect(place, -0.5, size - 0.5)
    return place if padding_mode == _ZEROS else jnp.clip(place, 0, size - 1)


def _reflect(x: Array, low: float, high: float) -> Array:
    if high == low:
        return jnp.zeros_like(x)
    span = high - low
    around = jnp.abs(x - low) % (2 * span)
    return low + jnp.minimum(around, 2 * span - around)


def _read(values: Array, places: list[Array]) -> Array:
    """values[N, C, *S] at places of [N, *O] each -> [N, C, *O]; 0 outside."""
    sizes = values.shape[2:]
    inside = jnp.ones((), bool)
    wanted: list[Array] = []
    for place, size in zip(places, sizes, strict=True):
        inside = inside & (place >= 0) & (place <= size - 1)
        wanted.append(jnp.clip(place, 0, size - 1).astype(jnp.int32))
    rows = jnp.arange(values.shape[0]).reshape(-1, *([1] * (wanted[0].ndim - 1)))
    found = jnp.moveaxis(values, 1, -1)[(rows, *wanted)]
    return jnp.moveaxis(jnp.where(inside[..., None], found, 0), -1, 1)

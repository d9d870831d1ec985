"""Sums, means and maxima over runs of rows: embedding_bag, segment_reduce, histograms.

Shapes: B = bags or segments, I = rows or indices, D = features.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from headrace.bridge.dtypes import default_int
from headrace.bridge.ops.dims import one_dim
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten
Scalar = bool | int | float
_SUM, _MEAN, _MAX = 0, 1, 2


def _embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    mode: int,
    per_sample_weights: Array | None,
    include_last_offset: bool,
    padding_idx: int,
) -> tuple[Array, Array, Array, Array]:
    bags = offsets.shape[0] - (1 if include_last_offset else 0)
    starts = offsets[:bags]
    # Row i belongs to the last bag that starts at or before it.
    bag_I = jnp.searchsorted(starts, jnp.arange(indices.shape[0]), side="right") - 1
    kept = jnp.ones(indices.shape, jnp.bool_) if padding_idx < 0 else indices != padding_idx
    rows_ID = jnp.take(weight, indices, axis=0, mode="fill")
    if per_sample_weights is not None:
        rows_ID = rows_ID * per_sample_weights[:, None]
    count = jax.ops.segment_sum(kept.astype(default_int()), bag_I, bags)
    if mode == _MAX:
        low = jnp.where(kept[:, None], rows_ID, -jnp.inf)
        result = _segment_max(low, bag_I, bags)
        result = jnp.where((count > 0)[:, None], result, 0)
    else:
        result = jax.ops.segment_sum(jnp.where(kept[:, None], rows_ID, 0), bag_I, bags)
        if mode == _MEAN:
            result = result / jnp.maximum(count, 1)[:, None].astype(result.dtype)
    empty = jnp.zeros((0,), default_int())
    return result.astype(weight.dtype), bag_I.astype(offsets.dtype), count, empty


def _segment_max(rows_ID: Array, bag_I: Array, bags: int) -> Array:
    """The derivative goes to the first row that attains the maximum."""
    fixed = lax.stop_gradient(rows_ID)
    best_BD = jax.ops.segment_max(fixed, bag_I, bags)
    place_I = jnp.arange(rows_ID.shape[0])
    hit_ID = jnp.where(fixed == best_BD[bag_I], place_I[:, None], rows_ID.shape[0])
    first_BD = jax.ops.segment_min(hit_ID, bag_I, bags)
    return jnp.take_along_axis(rows_ID, jnp.minimum(first_BD, rows_ID.shape[0] - 1), axis=0)


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def aten__embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, Array, Array, Array]:
    """_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, ...)"""
    if scale_grad_by_freq:
        counts = jnp.bincount(indices, length=weight.shape[0])
        fixed = lax.stop_gradient(weight)
        share = jnp.maximum(counts, 1)[:, None].astype(weight.dtype)
        weight = fixed + (weight - fixed) / share
    return _embedding_bag(
        weight, indices, offsets, mode, per_sample_weights, include_last_offset, padding_idx
    )


_EMPTY_SEGMENT = {"sum": 0.0, "mean": np.nan, "max": -np.inf, "min": np.inf, "prod": 1.0}


@lowers(aten.segment_reduce.default)
def aten_segment_reduce(
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    indices: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Scalar | None = None,
) -> Array:
    """segment_reduce(Tensor data, str reduce, *, Tensor? lengths=None, ...)"""
    dim = one_dim(axis, data.ndim)
    given = lengths if lengths is not None else offsets
    assert given is not None
    lead = data.shape[:dim]
    lines = data.reshape(-1, *data.shape[dim:])
    bounds = given.reshape(-1, given.shape[-1])
    if lengths is not None:
        bounds = jnp.concatenate(
            [jnp.zeros((bounds.shape[0], 1), bounds.dtype), jnp.cumsum(bounds, -1)], -1
        )
    start = _EMPTY_SEGMENT[reduce] if initial is None else float(initial)

    def one(line: Array, edges: Array) -> Array:
        return _segments(line, edges, reduce, start, initial is not None)

    result = jax.vmap(one)(lines, bounds)
    return result.reshape(*lead, *result.shape[1:])


def _segments(line: Array, edges: Array, reduce: str, start: float, given: bool) -> Array:
    """[B, ...] of [I, ...]: each segment is a mask over the rows."""
    rows = jnp.arange(line.shape[0])
    inside = (rows[None] >= edges[:-1, None]) & (rows[None] < edges[1:, None])
    inside = inside.reshape(*inside.shape, *(1,) * (line.ndim - 1))
    if reduce in ("max", "min"):
        pick, rest = (jnp.max, -jnp.inf) if reduce == "max" else (jnp.min, jnp.inf)
        best = pick(jnp.where(inside, line[None], rest), axis=1)
        bound = jnp.maximum if reduce == "max" else jnp.minimum
        return bound(best, jnp.asarray(start, line.dtype)) if given else best
    if reduce == "prod":
        return jnp.prod(jnp.where(inside, line[None], 1), axis=1) * start
    total = jnp.sum(jnp.where(inside, line[None], 0), axis=1)
    if reduce == "sum":
        return total + start
    count = jnp.sum(inside, axis=1).astype(line.dtype)
    base = start if given else 0.0
    return jnp.where(count > 0, (total + base) / jnp.maximum(count, 1), start)


def _histogram_range(x: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """An empty range means that of the data; a range of one value is widened, as in torch."""
    same = low == high
    low, high = jnp.where(same, jnp.min(x), low), jnp.where(same, jnp.max(x), high)
    flat = low == high
    return jnp.where(flat, low - 0.5, low), jnp.where(flat, high + 0.5, high)


@lowers(aten.histogram.bin_ct)
def aten_histogram(
    self: Array,
    bins: int = 100,
    *,
    range: list[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, Array]:
    """histogram.bin_ct(Tensor self, int bins=100, *, float[]? range=None, ...)"""
    x = self.reshape(-1)
    zero = jnp.zeros((), x.dtype)
    bounds = (zero, zero) if range is None else tuple(jnp.asarray(b, x.dtype) for b in range)
    low, high = _histogram_range(x, *bounds) if self.size else (bounds[0], bounds[1] + 1)
    edges = jnp.linspace(low, high, bins + 1, dtype=x.dtype)
    return aten_histogram_edges(self, edges, weight=weight, density=density)


@lowers(aten.histogram.bins_tensor)
def aten_histogram_edges(
    self: Array, bins: Array, *, weight: Array | None = None, density: bool = False
) -> tuple[Array, Array]:
    """histogram.bins_tensor(Tensor self, Tensor bins, *, Tensor? weight=None, ...)"""
    flat = None if weight is None else weight.reshape(-1)
    counts, _ = jnp.histogram(self.reshape(-1), bins, weights=flat, density=density)
    return counts.astype(self.dtype), bins

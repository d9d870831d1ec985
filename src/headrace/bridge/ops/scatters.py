"""Writing by index: each rule returns a new tensor in which some places differ.

An index out of range, an error in torch, writes nowhere here. Where several values meet in one
place torch promises no order for plain writes and neither do these rules; sums, products and
bounds are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from headrace.bridge.ops.dims import one_dim
from headrace.bridge.ops.indexing import as_index, order_of
from headrace.bridge.ops.registry import lowers
from headrace.bridge.ops.shape import strided_places

aten = torch.ops.aten
Scalar = bool | int | float | complex


def _places(self: Array, dim: int, index: Array) -> tuple[Any, ...]:
    """The NumPy index for torch's `self[i][index[i][j]]` addressing."""
    axis = one_dim(dim, self.ndim)
    grid: list[Any] = list(np.ogrid[tuple(slice(0, size) for size in index.shape)])
    grid[axis] = index
    return tuple(grid)


def _matching(src: Array | Scalar, index: Array, dtype: np.dtype) -> Array:
    """src may be larger than index: its leading corner counts."""
    if not isinstance(src, jax.Array):
        return jnp.asarray(src, dtype)
    return src[tuple(slice(0, size) for size in index.shape)].astype(dtype)


def _written(self: Array, places: Any, values: Array, write: str) -> Array:
    """`self.at[places].<write>(values)`; sums of bools are "or", products "and"."""
    if self.dtype == np.bool_:
        write = {"add": "max", "multiply": "min"}.get(write, write)
    if write == "multiply" and jnp.issubdtype(self.dtype, jnp.inexact):
        return _multiplied(self, values, places)
    return getattr(self.at[places], write)(values)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _multiplied(self: Array, values: Array, places: Any) -> Array:
    """Scatter-multiply with a derivative that holds where indices repeat and factors are 0."""
    return self.at[places].multiply(values)


@_multiplied.defjvp
def _multiplied_jvp(
    places: Any, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (self, values), (d_self, d_values) = primals, tangents
    zero, zeros = self == 0, values == 0
    count = zero.astype(jnp.int32).at[places].add(zeros.astype(jnp.int32))
    rest = jnp.where(zero, 1, self).at[places].multiply(jnp.where(zeros, 1, values))
    relative = d_self / jnp.where(zero, 1, self)
    relative_values = d_values / jnp.where(zeros, 1, values)
    smooth = jnp.where(zero, 0, relative).at[places].add(jnp.where(zeros, 0, relative_values))
    at_zero = jnp.where(zero, relative, 0).at[places].add(jnp.where(zeros, relative_values, 0))
    slope = jnp.where(count == 0, smooth, jnp.where(count == 1, at_zero, 0))
    return self.at[places].multiply(values), rest * slope


def _scattered(self: Array, dim: int, index: Array, src: Array | Scalar, write: str) -> Array:
    if self.ndim == 0 or index.ndim == 0:
        flat, places = self.reshape(-1), index.reshape(-1)
        source = src.reshape(-1) if isinstance(src, jax.Array) else src
        return _scattered(flat, 0, places, source, write).reshape(self.shape)
    if index.size == 0:
        return self
    return _written(self, _places(self, dim, index), _matching(src, index, self.dtype), write)


@lowers(aten.scatter.src)
def aten_scatter(self: Array, dim: int, index: Array, src: Array) -> Array:
    """scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    return _scattered(self, dim, index, src, "set")


@lowers(aten.scatter.value)
def aten_scatter_value(self: Array, dim: int, index: Array, value: Scalar) -> Array:
    """scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    return _scattered(self, dim, index, value, "set")


_WRITES = {"add": "add", "multiply": "multiply"}


@lowers(aten.scatter.reduce)
def aten_scatter_reduce(self: Array, dim: int, index: Array, src: Array, *, reduce: str) -> Array:
    """scatter.reduce(Tensor self, int dim, Tensor index, Tensor src, *, str reduce) -> Tensor"""
    return _scattered(self, dim, index, src, _WRITES[reduce])


@lowers(aten.scatter.value_reduce)
def aten_scatter_value_reduce(
    self: Array, dim: int, index: Array, value: Scalar, *, reduce: str
) -> Array:
    """scatter.value_reduce(Tensor self, int dim, Tensor index, Scalar value, *, ...)"""
    return _scattered(self, dim, index, value, _WRITES[reduce])


@lowers(aten.scatter_add.default)
def aten_scatter_add(self: Array, dim: int, index: Array, src: Array) -> Array:
    """scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    return _scattered(self, dim, index, src, "add")


def _limit(dtype: np.dtype, largest: bool) -> Any:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min
    if dtype == np.bool_:
        return largest
    return jnp.inf if largest else -jnp.inf


def _reduced(
    self: Array, dim: int, index: Array, src: Array, reduce: str, include_self: bool
) -> Array:
    """`scatter_reduce`; without `include_self` written places start from the neutral element."""
    base, touched = self, None
    if not include_self:
        touched = _scattered(jnp.zeros(self.shape, jnp.bool_), dim, index, True, "set")
        neutral = {"sum": 0, "mean": 0, "prod": 1}.get(reduce)
        if neutral is None:
            neutral = _limit(self.dtype, largest=reduce == "amin")
        base = jnp.where(touched, jnp.asarray(neutral, self.dtype), self)
    if reduce in ("amax", "amin"):
        return _extremes(base, dim, index, src, "max" if reduce == "amax" else "min")
    if reduce != "mean":
        write = {"sum": "add", "prod": "multiply"}[reduce]
        return _scattered(base, dim, index, src, write)
    total = _scattered(base, dim, index, src, "add")
    ones = jnp.ones(index.shape, self.dtype)
    start = jnp.ones_like(self) if include_self else jnp.zeros_like(self)
    count = jnp.maximum(_scattered(start, dim, index, ones, "add"), 1)
    if jnp.issubdtype(self.dtype, jnp.integer):
        return jnp.floor_divide(total, count)
    return total / count


def _extremes(base: Array, dim: int, index: Array, src: Array, write: str) -> Array:
    """Max or min; the derivative is shared evenly by all that attain it, as in torch."""
    value = jax.lax.stop_gradient(
        _scattered(jax.lax.stop_gradient(base), dim, index, jax.lax.stop_gradient(src), write)
    )
    if not jnp.issubdtype(base.dtype, jnp.floating):
        return value
    own = (base == value).astype(base.dtype)
    flat_index = index.reshape(-1) if base.ndim == 0 else index
    source = _matching(src, index, base.dtype)
    chosen = (
        value.reshape(-1)[flat_index].reshape(index.shape)
        if base.ndim == 0
        else (value[_places(base, dim, index)] if index.size else source)
    )
    hits = (source == chosen).astype(base.dtype)
    count = _scattered(own, dim, index, hits, "add")
    zero_base = base - jax.lax.stop_gradient(base)
    zero_src = (source - jax.lax.stop_gradient(source)) * hits
    slope = _scattered(zero_base * own, dim, index, zero_src, "add")
    return value + jnp.where(jnp.isfinite(slope), slope, 0) / jnp.maximum(count, 1)


@lowers(aten.scatter_reduce.two)
def aten_scatter_reduce_two(
    self: Array, dim: int, index: Array, src: Array, reduce: str, *, include_self: bool = True
) -> Array:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, ...)"""
    return _reduced(self, dim, index, src, reduce, include_self)


def _along(self: Array, dim: int, index: Array | slice | int) -> tuple[Any, ...]:
    return (*(slice(None),) * one_dim(dim, self.ndim), index)


@lowers(aten.index_add.default)
def aten_index_add(
    self: Array, dim: int, index: Array, source: Array, *, alpha: Scalar = 1
) -> Array:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    added = source.astype(self.dtype)
    added = added if alpha == 1 else added * jnp.asarray(alpha, self.dtype)
    if self.ndim == 0:
        return self + added.reshape(-1).sum().astype(self.dtype)
    added = _like_rows(added, self)
    axis = dim % self.ndim
    needed = (*self.shape[:axis], index.size, *self.shape[axis + 1 :])
    if added.shape != needed:
        raise ValueError(
            f"a source of shape {added.shape} was given; index_add along dim {dim} of "
            f"{self.shape} with {index.size} indices needs {needed}"
        )
    return _written(self, _along(self, dim, index.reshape(-1)), added, "add")


def _like_rows(source: Array, self: Array) -> Array:
    return source.reshape(1) if source.ndim == 0 and self.ndim == 1 else source


@lowers(aten.index_copy.default)
def aten_index_copy(self: Array, dim: int, index: Array, source: Array) -> Array:
    """index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor"""
    if self.ndim == 0:
        return source.reshape(())
    return self.at[_along(self, dim, index.reshape(-1))].set(_like_rows(source, self))


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def aten_index_fill(self: Array, dim: int, index: Array, value: Array | Scalar) -> Array:
    """index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    filler = jnp.asarray(value).astype(self.dtype)
    if self.ndim == 0:
        return filler.reshape(())
    return self.at[_along(self, dim, index.reshape(-1))].set(filler)


@lowers(aten.index_reduce.default)
def aten_index_reduce(
    self: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    """index_reduce(Tensor self, int dim, Tensor index, Tensor source, str reduce, ...) -> Tensor"""
    if self.ndim == 0:
        return _reduced(self, 0, index.reshape(()), source.reshape(()), reduce, include_self)
    axis = one_dim(dim, self.ndim)
    line = index.reshape([-1 if d == axis else 1 for d in range(self.ndim)])
    full = jnp.broadcast_to(line, source.shape)
    return _reduced(self, dim, full, source, reduce, include_self)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def aten_index_put(
    self: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False
) -> Array:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    first = indices[0]
    if len(indices) == 1 and first is not None and first.dtype == np.bool_:
        return _masked_put(self, first, values, accumulate)
    write = "add" if accumulate else "set"
    return _written(self, as_index(indices), values.astype(self.dtype), write)


def _masked_put(self: Array, mask: Array, values: Array, accumulate: bool) -> Array:
    """`self[mask] = values` has a static shape: values are broadcast, or taken in order."""
    rest = self.shape[mask.ndim :]
    where = mask.reshape(mask.shape + (1,) * len(rest))
    values = values.astype(self.dtype)
    if values.ndim > len(rest) and values.shape[0] > 1:
        values = values[order_of(mask)]
    elif values.ndim > len(rest):
        values = values[0] if values.shape[0] else jnp.zeros((), self.dtype)
    return jnp.where(where, self + values if accumulate else values, self)


@lowers(aten.put.default)
def aten_put(self: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    """put(Tensor self, Tensor index, Tensor source, bool accumulate=False) -> Tensor"""
    values = source.reshape(-1).astype(self.dtype)
    write = "add" if accumulate else "set"
    return _written(self.reshape(-1), index.reshape(-1), values, write).reshape(self.shape)


@lowers(aten.slice_scatter.default)
def aten_slice_scatter(
    self: Array,
    src: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, ...)"""
    written = self.at[_along(self, dim, slice(start, end, step))]
    return written.set(src.astype(self.dtype))


@lowers(aten.select_scatter.default)
def aten_select_scatter(self: Array, src: Array, dim: int, index: int) -> Array:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    return self.at[_along(self, dim, index)].set(src.astype(self.dtype))


@lowers(aten.diagonal_scatter.default)
def aten_diagonal_scatter(
    self: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Array:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    last = jnp.moveaxis(self, (dim1, dim2), (-2, -1))
    rows = np.arange(src.shape[-1]) + max(-offset, 0)
    written = last.at[..., rows, rows + offset].set(src.astype(self.dtype))
    return jnp.moveaxis(written, (-2, -1), (dim1, dim2))


@lowers(aten.as_strided_scatter.default)
def aten_as_strided_scatter(
    self: Array,
    src: Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Array:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, ...) -> Tensor"""
    places = strided_places(size, stride, storage_offset)
    return self.reshape(-1).at[places].set(src.astype(self.dtype)).reshape(self.shape)

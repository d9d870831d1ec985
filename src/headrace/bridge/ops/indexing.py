"""Reading by index: gather, select, mask, diagonal, embedding.

An index out of range, an error in torch, reads nan (or the largest integer) here: visible, and
XLA cannot raise. A boolean index selects a number of elements that depends on values; only
concrete masks can do that.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from jax.core import Tracer

from headrace.bridge.dtypes import default_int, scalar_to_jax
from headrace.bridge.ops.casts import cast
from headrace.bridge.ops.dims import one_dim
from headrace.bridge.ops.registry import lowers
from headrace.errors import CaptureError

aten = torch.ops.aten
Scalar = bool | int | float | complex


@lowers(aten.embedding.default)
def aten_embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, ...)"""
    rows = jnp.take(weight, indices, axis=0, mode="fill")
    if padding_idx >= 0:
        rows = jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)
    if scale_grad_by_freq:
        counts = jnp.bincount(indices.ravel(), length=weight.shape[0])[indices]
        fixed = lax.stop_gradient(rows)
        rows = fixed + (rows - fixed) / counts[..., None].astype(rows.dtype)
    return rows


def as_index(indices: Sequence[Array | None]) -> tuple[Array | slice, ...]:
    """ATen's list of optional indices as a NumPy index."""
    masks = [i for i in indices if i is not None and i.dtype == np.bool_]
    if any(isinstance(mask, Tracer) for mask in masks):
        raise CaptureError(
            "A tensor is indexed with a boolean mask; the result's shape depends on the mask's "
            "values, which XLA cannot compile. Use torch.where, or multiply by the mask."
        )
    return tuple(slice(None) if i is None else _integers(i) for i in indices)


def _integers(index: Array) -> Array:
    return index.astype(jnp.bool_) if index.dtype == np.uint8 else index


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def aten_index(self: Array, indices: Sequence[Array | None]) -> Array:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    return self.at[as_index(indices)].get(mode="fill")


@lowers(aten.gather.default)
def aten_gather(self: Array, dim: int, index: Array) -> Array:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    if index.ndim == 0 or self.ndim == 0:
        return jnp.take(self.ravel(), index)
    if index.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    axis = one_dim(dim, self.ndim)
    kept = tuple(slice(None) if d == axis else slice(0, size) for d, size in enumerate(index.shape))
    return jnp.take_along_axis(self[kept], index, axis, mode="fill")


@lowers(aten.take_along_dim.default)
def aten_take_along_dim(self: Array, indices: Array, dim: int | None = None) -> Array:
    """take_along_dim(Tensor self, Tensor indices, int? dim=None) -> Tensor"""
    if dim is None:
        return jnp.take(self.ravel(), indices.ravel())
    return jnp.take_along_axis(self, indices, one_dim(dim, self.ndim), mode="fill")


@lowers(aten.take.default)
def aten_take(self: Array, index: Array) -> Array:
    """take(Tensor self, Tensor index) -> Tensor"""
    return jnp.take(self.ravel(), index)


@lowers(aten.index_select.default)
def aten_index_select(self: Array, dim: int, index: Array) -> Array:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    if self.ndim == 0:
        return self
    return jnp.take(self, index.reshape(-1), one_dim(dim, self.ndim), mode="fill")


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def aten_masked_fill(self: Array, mask: Array, value: Array | Scalar) -> Array:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    # float32's least value stands in masks of 16-bit models; torch casts it to -inf.
    is_array = isinstance(value, jax.Array)
    filler = cast(value, self.dtype) if is_array else scalar_to_jax(value, self.dtype)
    return jnp.where(mask.astype(jnp.bool_), filler, self)


@lowers(aten.masked_scatter.default)
def aten_masked_scatter(self: Array, mask: Array, source: Array) -> Array:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor"""
    if mask.dtype != jnp.bool_:
        raise ValueError(f"a mask of {mask.dtype} was given; masked_scatter needs bool: mask != 0")
    base, where = jnp.broadcast_arrays(self, mask)
    if source.size == 0:
        return base
    return jnp.where(where, source.ravel()[order_of(where)], base)


def order_of(mask: Array) -> Array:
    """For each place the number of True places before it: its place in a packed source."""
    before = jnp.cumsum(mask.ravel(), dtype=default_int()) - 1
    return jnp.maximum(before, 0).reshape(mask.shape)


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def aten_diagonal(self: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """diagonal(Tensor self, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    return jnp.diagonal(self, offset, dim1, dim2)


@lowers(aten.linalg_diagonal.default)
def aten_linalg_diagonal(A: Array, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    """linalg_diagonal(Tensor A, *, int offset=0, int dim1=-2, int dim2=-1) -> Tensor"""
    return jnp.diagonal(A, offset, dim1, dim2)


@lowers(aten.diag.default)
def aten_diag(self: Array, diagonal: int = 0) -> Array:
    """diag(Tensor self, int diagonal=0) -> Tensor"""
    return jnp.diag(self, diagonal)


@lowers(aten.diag_embed.default)
def aten_diag_embed(self: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    """diag_embed(Tensor self, int offset=0, int dim1=-2, int dim2=-1) -> Tensor"""
    length = self.shape[-1]
    size = length + abs(offset)
    first, second = one_dim(dim1, self.ndim + 1), one_dim(dim2, self.ndim + 1)
    if first > second:
        first, second, offset = second, first, -offset
    rows = np.arange(length) + max(-offset, 0)
    square = jnp.zeros((*self.shape[:-1], size, size), self.dtype)
    square = square.at[..., rows, rows + offset].set(self)
    return jnp.moveaxis(square, (-2, -1), (first, second))


@lowers(aten.tril.default)
def aten_tril(self: Array, diagonal: int = 0) -> Array:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    return jnp.tril(self, diagonal)


@lowers(aten.triu.default)
def aten_triu(self: Array, diagonal: int = 0) -> Array:
    """triu(Tensor self, SymInt diagonal=0) -> Tensor"""
    return jnp.triu(self, diagonal)


@lowers(aten.one_hot.default)
def aten_one_hot(self: Array, num_classes: int = -1) -> Array:
    """one_hot(Tensor self, int num_classes=-1) -> Tensor"""
    if num_classes == -1:
        raise CaptureError(
            "one_hot was given no num_classes; the result's shape then depends on the largest "
            "value, which XLA cannot compile. Pass num_classes."
        )
    return jax.nn.one_hot(self, num_classes, dtype=default_int())


@lowers(aten.nonzero_static.default)
def aten_nonzero_static(self: Array, *, size: int, fill_value: int = -1) -> Array:
    """nonzero_static(Tensor self, *, SymInt size, int fill_value=-1) -> Tensor"""
    if self.ndim == 0:
        return jnp.zeros((size, 0), default_int())
    if self.size == 0:  # jnp.nonzero then leaves fill_value out
        return jnp.full((size, self.ndim), fill_value, default_int())
    places = jnp.nonzero(self, size=size, fill_value=fill_value)
    return jnp.stack(places, axis=-1).astype(default_int())

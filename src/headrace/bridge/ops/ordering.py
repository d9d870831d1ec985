"""Sorting, the k largest, order statistics, and search in sorted sequences.

nan counts as the greatest value, as in torch. All sorts are stable, which torch allows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from headrace.bridge.dtypes import default_int
from headrace.bridge.ops.dims import one_dim
from headrace.bridge.ops.promotion import category
from headrace.bridge.ops.reductions import picked
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten
Scalar = bool | int | float


def _order(self: Array, axis: int, descending: bool) -> Array:
    """Places in sorted order, int64 under the policy."""
    keys = lax.stop_gradient(self)
    keys = keys.astype(jnp.uint8) if category(keys.dtype) == 0 else keys
    return jnp.argsort(keys, axis, stable=True, descending=descending).astype(default_int())


def _sorted(self: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    if self.ndim == 0:
        return self, jnp.zeros((), default_int())
    axis = one_dim(dim, self.ndim)
    places = _order(self, axis, descending)
    return jnp.take_along_axis(self, places, axis), places


@lowers(aten.sort.default)
def aten_sort(self: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    return _sorted(self, dim, descending)


@lowers(aten.sort.stable)
def aten_sort_stable(
    self: Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    """sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False)"""
    return _sorted(self, dim, descending)


@lowers(aten.argsort.default)
def aten_argsort(self: Array, dim: int = -1, descending: bool = False) -> Array:
    """argsort(Tensor self, int dim=-1, bool descending=False) -> Tensor"""
    return _sorted(self, dim, descending)[1]


@lowers(aten.argsort.stable)
def aten_argsort_stable(
    self: Array, *, stable: bool, dim: int = -1, descending: bool = False
) -> Array:
    """argsort.stable(Tensor self, *, bool stable, int dim=-1, bool descending=False) -> Tensor"""
    return _sorted(self, dim, descending)[1]


@lowers(aten.msort.default)
def aten_msort(self: Array) -> Array:
    """msort(Tensor self) -> Tensor"""
    return _sorted(self, 0, False)[0]


@lowers(aten.topk.default)
def aten_topk(
    self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True)"""
    if self.ndim == 0:
        return self, jnp.zeros((), default_int())
    axis = one_dim(dim, self.ndim)
    if largest and category(self.dtype) in (1, 2):
        _, places = lax.top_k(jnp.moveaxis(lax.stop_gradient(self), axis, -1), k)
        places = jnp.moveaxis(places, -1, axis).astype(default_int())
    else:
        places = lax.slice_in_dim(_order(self, axis, largest), 0, k, 1, axis)
    return jnp.take_along_axis(self, places, axis), places


@lowers(aten.kthvalue.default)
def aten_kthvalue(self: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """kthvalue(Tensor self, SymInt k, int dim=-1, bool keepdim=False) -> (Tensor values, ...)"""
    if self.ndim == 0:
        return self, jnp.zeros((), default_int())
    axis = one_dim(dim, self.ndim)
    places = lax.slice_in_dim(_order(self, axis, False), k - 1, k, 1, axis)
    return picked(self, places, axis, keepdim)


def _median(self: Array, dim: int, keepdim: bool, skip_nan: bool) -> tuple[Array, Array]:
    """The lower median; nan wins unless skipped."""
    if self.ndim == 0:
        return self, jnp.zeros((), default_int())
    axis = one_dim(dim, self.ndim)
    order = _order(self, axis, False)
    count = jnp.full(jnp.sum(self, axis, keepdims=True).shape, self.shape[axis], default_int())
    rank = (count - 1) // 2
    if category(self.dtype) == 2:
        missing = jnp.sum(jnp.isnan(self), axis, keepdims=True, dtype=default_int())
        rank = jnp.where(missing > 0, count - missing, rank)
        if skip_nan:
            rank = jnp.maximum((count - missing - 1) // 2, 0)
    return picked(self, jnp.take_along_axis(order, rank, axis), axis, keepdim)


@lowers(aten.median.dim)
def aten_median_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """median.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _median(self, dim, keepdim, False)


@lowers(aten.nanmedian.dim)
def aten_nanmedian_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """nanmedian.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _median(self, dim, keepdim, True)


@lowers(aten.median.default)
def aten_median(self: Array) -> Array:
    """median(Tensor self) -> Tensor"""
    return _median(self.reshape(-1), 0, False, False)[0]


@lowers(aten.nanmedian.default)
def aten_nanmedian(self: Array) -> Array:
    """nanmedian(Tensor self) -> Tensor"""
    return _median(self.reshape(-1), 0, False, True)[0]


@lowers(aten.mode.default)
def aten_mode(self: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """mode(Tensor self, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    if self.ndim == 0:
        return self, jnp.zeros((), default_int())
    axis = one_dim(dim, self.ndim)
    line = jnp.moveaxis(lax.stop_gradient(self), axis, -1)
    equal = line[..., :, None] == line[..., None, :]
    count = jnp.sum(equal, -1)
    # Of the most frequent values torch takes the smallest, and its last place.
    frequent = count == jnp.max(count, -1, keepdims=True)
    order = _order(line, line.ndim - 1, False)
    rank_in_order = jnp.argmax(jnp.take_along_axis(frequent, order, -1), -1, keepdims=True)
    value = jnp.take_along_axis(line, jnp.take_along_axis(order, rank_in_order, -1), -1)
    places = line.shape[-1] - 1 - jnp.argmax(jnp.flip(line == value, -1), -1, keepdims=True)
    return picked(self, jnp.moveaxis(places, -1, axis), axis, keepdim)


def _side(right: bool, side: str | None) -> str:
    return side or ("right" if right else "left")


def _searched(sequence: Array, values: Array, side: str, out_int32: bool) -> Array:
    dtype = jnp.promote_types(sequence.dtype, values.dtype)
    sequence, values = sequence.astype(dtype), values.astype(dtype)

    def search(line: Array, wanted: Array) -> Array:
        return jnp.searchsorted(line, wanted, side=side)

    if sequence.ndim > 1:
        rows = sequence.reshape(-1, sequence.shape[-1])
        wanted = values.reshape(rows.shape[0], -1)
        found = jax.vmap(search)(rows, wanted).reshape(values.shape)
    else:
        found = search(sequence, values)
    return found.astype(np.int32 if out_int32 else default_int())


@lowers(aten.searchsorted.Tensor)
def aten_searchsorted(
    sorted_sequence: Array,
    self: Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, ...)"""
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1)
    return _searched(sorted_sequence, self, _side(right, side), out_int32)


@lowers(aten.searchsorted.Scalar)
def aten_searchsorted_scalar(
    sorted_sequence: Array,
    self: Scalar,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """searchsorted.Scalar(Tensor sorted_sequence, Scalar self, *, bool out_int32=False, ...)"""
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1)
    wanted = jnp.asarray(self, sorted_sequence.dtype)
    return _searched(sorted_sequence, wanted, _side(right, side), out_int32)


@lowers(aten.bucketize.Tensor)
def aten_bucketize(
    self: Array, boundaries: Array, *, out_int32: bool = False, right: bool = False
) -> Array:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, ...)"""
    if boundaries.ndim != 1:
        raise ValueError(
            f"boundaries of shape {boundaries.shape} were given; bucketize needs one dimension. "
            "Use torch.searchsorted for a row of boundaries each."
        )
    return _searched(boundaries, self, _side(right, None), out_int32)


@lowers(aten.bucketize.Scalar)
def aten_bucketize_scalar(
    self: Scalar, boundaries: Array, *, out_int32: bool = False, right: bool = False
) -> Array:
    """bucketize.Scalar(Scalar self, Tensor boundaries, *, bool out_int32=False, ...)"""
    return _searched(boundaries, jnp.asarray(self), _side(right, None), out_int32)

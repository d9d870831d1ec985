"""Running sums, products, maxima: one pass along a dim, the same length out as in."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import Array, lax

from headrace.bridge.dtypes import default_int, to_jax_dtype
from headrace.bridge.ops.casts import cast
from headrace.bridge.ops.dims import one_dim
from headrace.bridge.ops.promotion import category, opmath_of
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten
Dtype = torch.dtype | None


def _addable(self: Array, dtype: Dtype) -> Array:
    if dtype is not None:
        return cast(self, to_jax_dtype(dtype))
    return self.astype(default_int()) if category(self.dtype) < 2 else self


@lowers(aten.cumsum.default)
def aten_cumsum(self: Array, dim: int, *, dtype: Dtype = None) -> Array:
    """cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    values = _addable(self, dtype)
    if self.ndim == 0:
        return values
    compute = values.astype(opmath_of(values.dtype))
    return jnp.cumsum(compute, one_dim(dim, self.ndim)).astype(values.dtype)


@lowers(aten.cumprod.default)
def aten_cumprod(self: Array, dim: int, *, dtype: Dtype = None) -> Array:
    """cumprod(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    values = _addable(self, dtype)
    if self.ndim == 0:
        return values
    compute = values.astype(opmath_of(values.dtype))
    return jnp.cumprod(compute, one_dim(dim, self.ndim)).astype(values.dtype)


@lowers(aten.logcumsumexp.default)
def aten_logcumsumexp(self: Array, dim: int) -> Array:
    """logcumsumexp(Tensor self, int dim) -> Tensor"""
    if self.ndim == 0:
        return self
    compute = self.astype(opmath_of(self.dtype))
    return lax.cumlogsumexp(compute, one_dim(dim, self.ndim)).astype(self.dtype)


def _running(self: Array, dim: int, largest: bool) -> tuple[Array, Array]:
    """Running extreme and its latest place; nan, once met, stays."""
    if self.ndim == 0:
        return self, jnp.zeros((), default_int())
    axis = one_dim(dim, self.ndim)
    places = lax.broadcasted_iota(default_int(), self.shape, axis)
    if self.size == 0:
        return self, places

    def later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        wins = b[0] >= a[0] if largest else b[0] <= a[0]
        if category(self.dtype) == 2:
            wins = jnp.isnan(b[0]) | (wins & ~jnp.isnan(a[0]))
        return jnp.where(wins, b[0], a[0]), jnp.where(wins, b[1], a[1])

    _, chosen = lax.associative_scan(later, (lax.stop_gradient(self), places), axis=axis)
    return jnp.take_along_axis(self, chosen, axis), chosen


@lowers(aten.cummax.default)
def aten_cummax(self: Array, dim: int) -> tuple[Array, Array]:
    """cummax(Tensor self, int dim) -> (Tensor values, Tensor indices)"""
    return _running(self, dim, True)


@lowers(aten.cummin.default)
def aten_cummin(self: Array, dim: int) -> tuple[Array, Array]:
    """cummin(Tensor self, int dim) -> (Tensor values, Tensor indices)"""
    return _running(self, dim, False)


@lowers(aten.diff.default)
def aten_diff(
    self: Array,
    n: int = 1,
    dim: int = -1,
    prepend: Array | None = None,
    append: Array | None = None,
) -> Array:
    """diff(Tensor self, int n=1, int dim=-1, Tensor? prepend, Tensor? append) -> Tensor"""
    return jnp.diff(self, n=n, axis=dim, prepend=prepend, append=append)

"""Sums, means, extremes, norms and running versions of them.

Integer sums and counts are int64 under the dtype policy. Extremes over dims share the
derivative evenly among ties (`amax`, `max`), extremes along one dim give it to the index they
return (`max.dim`), both as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import torch
from jax import Array

from headrace.bridge.dtypes import default_int, to_jax_dtype
from headrace.bridge.ops.casts import cast
from headrace.bridge.ops.dims import one_dim, reduced_dims
from headrace.bridge.ops.promotion import category, int_to_float, opmath_of, real_of
from headrace.bridge.ops.registry import lowers
from headrace.bridge.ops.unary import absolute

aten = torch.ops.aten
Scalar = bool | int | float
Dims = int | Sequence[int] | None
Dtype = torch.dtype | None


def _summable(self: Array, dtype: Dtype) -> Array:
    if dtype is not None:
        return cast(self, to_jax_dtype(dtype))
    return self.astype(default_int()) if category(self.dtype) < 2 else self


@lowers(aten.sum.default)
def aten_sum(self: Array, *, dtype: Dtype = None) -> Array:
    """sum(Tensor self, *, ScalarType? dtype=None) -> Tensor"""
    return jnp.sum(_summable(self, dtype))


@lowers(aten.sum.dim_IntList)
def aten_sum_dim(self: Array, dim: Dims, keepdim: bool = False, *, dtype: Dtype = None) -> Array:
    """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None)"""
    return jnp.sum(_summable(self, dtype), reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowers(aten.nansum.default)
def aten_nansum(
    self: Array, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None
) -> Array:
    """nansum(Tensor self, int[1]? dim=None, bool keepdim=False, *, ...)"""
    values = _summable(self, dtype)
    kept = jnp.where(jnp.isnan(values), 0, values) if category(values.dtype) >= 2 else values
    return jnp.sum(kept, reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowers(aten.mean.default)
def aten_mean(self: Array, *, dtype: Dtype = None) -> Array:
    """mean(Tensor self, *, ScalarType? dtype=None) -> Tensor"""
    return jnp.mean(self if dtype is None else cast(self, to_jax_dtype(dtype)))


@lowers(aten.mean.dim)
def aten_mean_dim(self: Array, dim: Dims, keepdim: bool = False, *, dtype: Dtype = None) -> Array:
    """mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ...)"""
    values = self if dtype is None else cast(self, to_jax_dtype(dtype))
    return jnp.mean(values, reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowers(aten.nanmean.default)
def aten_nanmean(
    self: Array, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None
) -> Array:
    """nanmean(Tensor self, int[1]? dim=None, bool keepdim=False, *, ...)"""
    values = self if dtype is None else cast(self, to_jax_dtype(dtype))
    axes = reduced_dims(dim, self.ndim)
    present = ~jnp.isnan(values)
    total = jnp.sum(jnp.where(present, values, 0), axes, keepdims=keepdim)
    return total / jnp.sum(present, axes, keepdims=keepdim).astype(values.dtype)


def _variance(
    self: Array, dim: Dims, correction: Scalar | None, keepdim: bool
) -> tuple[Array, Array]:
    """Variance and mean, both in the dtype torch computes in."""
    axes = reduced_dims(dim, self.ndim)
    compute = self.astype(opmath_of(self.dtype))
    mean = jnp.mean(compute, axes, keepdims=True)
    gap = compute - mean
    square = jnp.real(gap * jnp.conj(gap)) if category(gap.dtype) == 3 else gap * gap
    count = math.prod(self.shape[axis] for axis in axes)
    divisor = max(count - (1 if correction is None else correction), 0)
    total = jnp.sum(square, axes, keepdims=keepdim)
    return total / jnp.asarray(divisor, total.dtype), mean.reshape(total.shape)


def _safe_sqrt(x: Array) -> Array:
    """sqrt whose derivative at 0 is 0, torch's choice for std and norms."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), jnp.where(x == 0, 0.0, x))


def _spread_of(
    self: Array, dim: Dims, correction: Scalar | None, keepdim: bool, root: bool, with_mean: bool
) -> Array | tuple[Array, Array]:
    variance, mean = _variance(self, dim, correction, keepdim)
    result = (_safe_sqrt(variance) if root else variance).astype(real_of(self.dtype))
    return (result, mean.astype(self.dtype)) if with_mean else result


def _register_spread(name: str, root: bool, with_mean: bool) -> None:
    packet = getattr(aten, name)

    @lowers(packet.correction)
    def with_correction(
        self: Array, dim: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
    ) -> Array | tuple[Array, Array]:
        """var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, ...)"""
        return _spread_of(self, dim, correction, keepdim, root, with_mean)

    @lowers(packet.dim)
    def with_dim(
        self: Array, dim: Dims, unbiased: bool = True, keepdim: bool = False
    ) -> Array | tuple[Array, Array]:
        """var.dim(Tensor self, int[1]? dim, bool unbiased=True, bool keepdim=False) -> Tensor"""
        return _spread_of(self, dim, int(unbiased), keepdim, root, with_mean)

    @lowers(packet.default)
    def of_all(self: Array, unbiased: bool = True) -> Array | tuple[Array, Array]:
        """var(Tensor self, bool unbiased=True) -> Tensor"""
        return _spread_of(self, None, int(unbiased), False, root, with_mean)


for _name in ("var", "std", "var_mean", "std_mean"):
    _register_spread(_name, _name.startswith("std"), _name.endswith("_mean"))


@lowers(aten.amax.default)
def aten_amax(self: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    """amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return jnp.max(self, reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowers(aten.amin.default)
def aten_amin(self: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    """amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return jnp.min(self, reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowers(aten.aminmax.default)
def aten_aminmax(
    self: Array, *, dim: int | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    """aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)"""
    return aten_amin(self, dim, keepdim), aten_amax(self, dim, keepdim)


@lowers(aten.max.default)
def aten_max(self: Array) -> Array:
    """max(Tensor self) -> Tensor"""
    return jnp.max(self)


@lowers(aten.min.default)
def aten_min(self: Array) -> Array:
    """min(Tensor self) -> Tensor"""
    return jnp.min(self)


def picked(self: Array, places: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """The values at one index a line, and the index; `places` keeps `dim` with size 1."""
    values = jnp.take_along_axis(self, places, dim)
    if not keepdim:
        values, places = jnp.squeeze(values, dim), jnp.squeeze(places, dim)
    return values, places.astype(default_int())


@lowers(aten.max.dim)
def aten_max_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    if self.ndim == 0:
        return self, jnp.zeros((), default_int())
    axis = one_dim(dim, self.ndim)
    return picked(self, jnp.argmax(self, axis, keepdims=True), axis, keepdim)


@lowers(aten.min.dim)
def aten_min_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """min.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    if self.ndim == 0:
        return self, jnp.zeros((), default_int())
    axis = one_dim(dim, self.ndim)
    return picked(self, jnp.argmin(self, axis, keepdims=True), axis, keepdim)


@lowers(aten.argmax.default)
def aten_argmax(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    axis = None if dim is None or self.ndim == 0 else dim
    return jnp.argmax(self, axis, keepdims=keepdim).astype(default_int())


@lowers(aten.argmin.default)
def aten_argmin(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """argmin(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    axis = None if dim is None or self.ndim == 0 else dim
    return jnp.argmin(self, axis, keepdims=keepdim).astype(default_int())


def _truth(self: Array, dim: Dims, keepdim: bool, every: bool) -> Array:
    reduce = jnp.all if every else jnp.any
    axes = tuple(range(self.ndim)) if dim is None else reduced_dims(dim, self.ndim)
    if not isinstance(dim, int) and dim is not None and len(dim) == 0:
        axes = ()
    result = reduce(self.astype(jnp.bool_), axes, keepdims=keepdim)
    return result.astype(self.dtype) if self.dtype == np.uint8 else result


def _register_truth(name: str, every: bool) -> None:
    packet = getattr(aten, name)

    @lowers(packet.default)
    def of_all(self: Array) -> Array:
        """all(Tensor self) -> Tensor"""
        return _truth(self, None, False, every)

    @lowers(packet.dim)
    def with_dim(self: Array, dim: int, keepdim: bool = False) -> Array:
        """all.dim(Tensor self, int dim, bool keepdim=False) -> Tensor"""
        return _truth(self, dim, keepdim, every)

    @lowers(packet.dims)
    def with_dims(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
        """all.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
        return _truth(self, dim, keepdim, every)


_register_truth("all", True)
_register_truth("any", False)


@lowers(aten.prod.default)
def aten_prod(self: Array, *, dtype: Dtype = None) -> Array:
    """prod(Tensor self, *, ScalarType? dtype=None) -> Tensor"""
    return jnp.prod(_summable(self, dtype))


@lowers(aten.prod.dim_int)
def aten_prod_dim(self: Array, dim: int, keepdim: bool = False, *, dtype: Dtype = None) -> Array:
    """prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ...)"""
    return jnp.prod(_summable(self, dtype), reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowers(aten.count_nonzero.default)
def aten_count_nonzero(self: Array, dim: int | None = None) -> Array:
    """count_nonzero(Tensor self, int? dim=None) -> Tensor"""
    return jnp.sum(self != 0, reduced_dims(dim, self.ndim), dtype=default_int())


@lowers(aten.count_nonzero.dim_IntList)
def aten_count_nonzero_dims(self: Array, dim: Sequence[int]) -> Array:
    """count_nonzero.dim_IntList(Tensor self, int[] dim) -> Tensor"""
    return jnp.sum(self != 0, reduced_dims(dim, self.ndim), dtype=default_int())


@lowers(aten.logsumexp.default, aten.special_logsumexp.default)
def aten_logsumexp(self: Array, dim: Dims, keepdim: bool = False) -> Array:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor"""
    values = self.astype(int_to_float(self.dtype))
    compute = values.astype(opmath_of(values.dtype))
    axes = reduced_dims(dim, self.ndim)
    return special.logsumexp(compute, axes, keepdims=keepdim).astype(values.dtype)


def vector_norm(self: Array, order: Scalar, dim: Dims, keepdim: bool, dtype: Dtype) -> Array:
    """The p-norm over dims, with the derivative 0 where the norm is 0."""
    values = self if dtype is None else cast(self, to_jax_dtype(dtype))
    result = real_of(values.dtype)
    size = absolute(values.astype(opmath_of(values.dtype)))
    if category(values.dtype) == 3:
        size = _safe_sqrt(jnp.real(values) ** 2 + jnp.imag(values) ** 2)
    axes = reduced_dims(dim, self.ndim)
    if order == math.inf:
        norm = jnp.max(size, axes, keepdims=keepdim)
    elif order == -math.inf:
        norm = jnp.min(size, axes, keepdims=keepdim)
    elif order == 0:
        norm = jnp.sum((size != 0).astype(size.dtype), axes, keepdims=keepdim)
    elif order == 1:
        norm = jnp.sum(size, axes, keepdims=keepdim)
    elif order == 2:
        norm = _safe_sqrt(jnp.sum(size * size, axes, keepdims=keepdim))
    else:
        norm = _general_norm(size, order, axes, keepdim)
    return norm.astype(result)


def _general_norm(size: Array, order: Scalar, axes: tuple[int, ...], keepdim: bool) -> Array:
    if order < 0:
        return jnp.sum(size**order, axes, keepdims=keepdim) ** (1 / order)
    nonzero = size != 0
    powers = jnp.where(nonzero, jnp.where(nonzero, size, 1) ** order, 0)
    total = jnp.sum(powers, axes, keepdims=keepdim)
    some = total != 0
    return jnp.where(some, jnp.where(some, total, 1) ** (1 / order), 0)


@lowers(aten.linalg_vector_norm.default)
def aten_linalg_vector_norm(
    self: Array, ord: Scalar = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None
) -> Array:
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, ...)"""
    return vector_norm(self, ord, dim, keepdim, dtype)


@lowers(aten.norm.Scalar)
def aten_norm(self: Array, p: Scalar = 2) -> Array:
    """norm.Scalar(Tensor self, Scalar p=2) -> Tensor"""
    return vector_norm(self, p, None, False, None)


@lowers(aten.norm.ScalarOpt_dim)
def aten_norm_dim(self: Array, p: Scalar | None, dim: Dims, keepdim: bool = False) -> Array:
    """norm.ScalarOpt_dim(Tensor self, Scalar? p, int[1] dim, bool keepdim=False) -> Tensor"""
    return vector_norm(self, 2 if p is None else p, dim, keepdim, None)


@lowers(aten.norm.ScalarOpt_dim_dtype)
def aten_norm_dim_dtype(
    self: Array, p: Scalar | None, dim: Dims, keepdim: bool, *, dtype: torch.dtype
) -> Array:
    """norm.ScalarOpt_dim_dtype(Tensor self, Scalar? p, int[1] dim, bool keepdim, *, ...)"""
    return vector_norm(self, 2 if p is None else p, dim, keepdim, dtype)


@lowers(aten.norm.ScalarOpt_dtype)
def aten_norm_dtype(self: Array, p: Scalar | None, *, dtype: torch.dtype) -> Array:
    """norm.ScalarOpt_dtype(Tensor self, Scalar? p, *, ScalarType dtype) -> Tensor"""
    return vector_norm(self, 2 if p is None else p, None, False, dtype)


@lowers(aten.trace.default)
def aten_trace(self: Array) -> Array:
    """trace(Tensor self) -> Tensor"""
    return jnp.trace(_summable(self, None))


@lowers(aten.renorm.default, opmath=True)
def aten_renorm(self: Array, p: Scalar, dim: int, maxnorm: Scalar) -> Array:
    """renorm(Tensor self, Scalar p, int dim, Scalar maxnorm) -> Tensor"""
    others = [axis for axis in range(self.ndim) if axis != dim % self.ndim]
    norm = vector_norm(self, p, others, True, None)
    return self * jnp.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1)

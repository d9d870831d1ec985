"""Tensors out of nothing or out of another tensor's shape.

`empty` gives zeros: a value that is never read costs nothing, one that is read must not vary
between runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from headrace.bridge.dtypes import default_float, default_int, scalar_to_jax, to_jax_dtype
from headrace.bridge.ops.promotion import int_to_float, result_dtype
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten
Scalar = bool | int | float | complex
Dtype = torch.dtype | None


def _or_float(dtype: Dtype) -> np.dtype:
    return default_float() if dtype is None else to_jax_dtype(dtype)


def _or_own(dtype: Dtype, self: Array) -> np.dtype:
    return self.dtype if dtype is None else to_jax_dtype(dtype)


def _full(shape: Sequence[int], value: Scalar, dtype: np.dtype) -> Array:
    return jnp.full(tuple(shape), scalar_to_jax(value, dtype), dtype)


@lowers(aten.zeros.default, aten.empty.memory_format)
def aten_zeros(size: Sequence[int], *, dtype: Dtype = None) -> Array:
    """zeros(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.zeros(tuple(size), _or_float(dtype))


@lowers(aten.empty_strided.default)
def aten_empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Dtype = None) -> Array:
    """empty_strided(SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.zeros(tuple(size), _or_float(dtype))


@lowers(aten.empty_permuted.default)
def aten_empty_permuted(
    size: Sequence[int], physical_layout: Sequence[int], *, dtype: Dtype = None
) -> Array:
    """empty_permuted(SymInt[] size, int[] physical_layout, *, ScalarType? dtype=None, ...)"""
    return jnp.zeros(tuple(size), _or_float(dtype))


@lowers(aten.ones.default)
def aten_ones(size: Sequence[int], *, dtype: Dtype = None) -> Array:
    """ones(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.ones(tuple(size), _or_float(dtype))


@lowers(aten.full.default)
def aten_full(size: Sequence[int], fill_value: Scalar, *, dtype: Dtype = None) -> Array:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    inferred = result_dtype(fill_value) if dtype is None else to_jax_dtype(dtype)
    return _full(size, fill_value, inferred)


@lowers(aten.zeros_like.default, aten.empty_like.default)
def aten_zeros_like(self: Array, *, dtype: Dtype = None) -> Array:
    """zeros_like(Tensor self, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.zeros(self.shape, _or_own(dtype, self))


@lowers(aten.ones_like.default)
def aten_ones_like(self: Array, *, dtype: Dtype = None) -> Array:
    """ones_like(Tensor self, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.ones(self.shape, _or_own(dtype, self))


@lowers(aten.full_like.default)
def aten_full_like(self: Array, fill_value: Scalar, *, dtype: Dtype = None) -> Array:
    """full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _full(self.shape, fill_value, _or_own(dtype, self))


@lowers(aten.new_zeros.default, aten.new_empty.default)
def aten_new_zeros(self: Array, size: Sequence[int], *, dtype: Dtype = None) -> Array:
    """new_zeros(Tensor self, SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.zeros(tuple(size), _or_own(dtype, self))


@lowers(aten.new_empty_strided.default)
def aten_new_empty_strided(
    self: Array, size: Sequence[int], stride: Sequence[int], *, dtype: Dtype = None
) -> Array:
    """new_empty_strided(Tensor self, SymInt[] size, SymInt[] stride, *, ...) -> Tensor"""
    return jnp.zeros(tuple(size), _or_own(dtype, self))


@lowers(aten.new_ones.default)
def aten_new_ones(self: Array, size: Sequence[int], *, dtype: Dtype = None) -> Array:
    """new_ones(Tensor self, SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.ones(tuple(size), _or_own(dtype, self))


@lowers(aten.new_full.default)
def aten_new_full(
    self: Array, size: Sequence[int], fill_value: Scalar, *, dtype: Dtype = None
) -> Array:
    """new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...)"""
    return _full(size, fill_value, _or_own(dtype, self))


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def aten_fill(self: Array, value: Array | Scalar) -> Array:
    """fill.Scalar(Tensor self, Scalar value) -> Tensor"""
    return jnp.full(self.shape, value, self.dtype)


@lowers(aten.scalar_tensor.default)
def aten_scalar_tensor(s: Scalar, *, dtype: Dtype = None) -> Array:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.asarray(s, _or_float(dtype))


def _arange(start: Any, end: Any, step: Any, dtype: Dtype) -> Array:
    whole = all(isinstance(value, int) for value in (start, end, step))
    inferred = default_int() if whole else default_float()
    if dtype is not None and not dtype.is_floating_point:
        # torch truncates first, and counts int64 in whole numbers.
        start, step = int(start), int(step)
        end = int(end) if dtype == torch.int64 else end
    # In float64 as torch counts, so that the length does not depend on the result's dtype.
    values = np.arange(start, end, step)
    return jnp.asarray(values.astype(inferred if dtype is None else to_jax_dtype(dtype)))


@lowers(aten.arange.default)
def aten_arange(end: Scalar, *, dtype: Dtype = None) -> Array:
    """arange(Scalar end, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _arange(0, end, 1, dtype)


@lowers(aten.arange.start)
def aten_arange_start(start: Scalar, end: Scalar, *, dtype: Dtype = None) -> Array:
    """arange.start(Scalar start, Scalar end, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _arange(start, end, 1, dtype)


@lowers(aten.arange.start_step)
def aten_arange_start_step(
    start: Scalar, end: Scalar, step: Scalar = 1, *, dtype: Dtype = None
) -> Array:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, ...)"""
    return _arange(start, end, step, dtype)


@lowers(aten.linspace.default, aten.linspace.Scalar_Tensor, aten.linspace.Tensor_Scalar)
@lowers(aten.linspace.Tensor_Tensor)
def aten_linspace(
    start: Scalar | Array, end: Scalar | Array, steps: int, *, dtype: Dtype = None
) -> Array:
    """linspace(Scalar start, Scalar end, int steps, *, ScalarType? dtype=None, ...) -> Tensor"""
    target = _or_float(dtype)
    compute = int_to_float(target) if target.itemsize > 2 else np.dtype(np.float32)
    values = jnp.linspace(jnp.asarray(start, compute), jnp.asarray(end, compute), steps)
    return jnp.trunc(values).astype(target) if target.kind in "iu" else values.astype(target)


@lowers(aten.logspace.default, aten.logspace.Scalar_Tensor, aten.logspace.Tensor_Scalar)
@lowers(aten.logspace.Tensor_Tensor)
def aten_logspace(
    start: Scalar | Array,
    end: Scalar | Array,
    steps: int,
    base: float = 10.0,
    *,
    dtype: Dtype = None,
) -> Array:
    """logspace(Scalar start, Scalar end, int steps, float base=10.0, *, ...)"""
    target = _or_float(dtype)
    exponents = aten_linspace(start, end, steps, dtype=None if target.kind in "iu" else dtype)
    values = jnp.power(base, exponents)
    if target.kind in "iu":
        # A power a rounding error below a whole number must not lose one to truncation.
        whole = jnp.round(values)
        values = jnp.where(jnp.abs(values - whole) < 1e-5 * jnp.abs(whole), whole, values)
    return values.astype(target)


@lowers(aten.eye.default)
def aten_eye(n: int, *, dtype: Dtype = None) -> Array:
    """eye(SymInt n, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.eye(n, dtype=_or_float(dtype))


@lowers(aten.eye.m)
def aten_eye_m(n: int, m: int, *, dtype: Dtype = None) -> Array:
    """eye.m(SymInt n, SymInt m, *, ScalarType? dtype=None, ...) -> Tensor"""
    return jnp.eye(n, m, dtype=_or_float(dtype))


@lowers(aten.tril_indices.default)
def aten_tril_indices(row: int, col: int, offset: int = 0, *, dtype: Dtype = torch.int64) -> Array:
    """tril_indices(int row, int col, int offset=0, *, ScalarType? dtype=long, ...) -> Tensor"""
    places = np.stack(np.tril_indices(row, offset, col))
    return jnp.asarray(places, to_jax_dtype(dtype or torch.int64))


@lowers(aten.triu_indices.default)
def aten_triu_indices(row: int, col: int, offset: int = 0, *, dtype: Dtype = torch.int64) -> Array:
    """triu_indices(int row, int col, int offset=0, *, ScalarType? dtype=long, ...) -> Tensor"""
    places = np.stack(np.triu_indices(row, offset, col))
    return jnp.asarray(places, to_jax_dtype(dtype or torch.int64))

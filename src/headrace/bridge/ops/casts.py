"""Dtype changes, and operators that only move or mark a tensor: copies, detaching, assertions.

Devices mean nothing inside one XLA program; only the dtype of a `to` survives. Assertions are
checked by torch at capture time and are no-ops here.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from headrace.bridge.dtypes import to_jax_dtype
from headrace.bridge.ops.promotion import category
from headrace.bridge.ops.registry import aliases, lowers

aten = torch.ops.aten

aliases(
    dict.fromkeys(
        (
            aten.alias.default,
            aten.alias_copy.default,
            aten.clone.default,
            aten.contiguous.default,
            aten.lift.default,
            aten.lift_fresh.default,
            aten.lift_fresh_copy.default,
            aten._pin_memory.default,
            aten.detach_copy.default,
        ),
        lambda x: x,
    )
)
aliases({aten.detach.default: lax.stop_gradient})


def cast(x: Array, dtype: np.dtype) -> Array:
    """`x.astype(dtype)` as torch casts: complex loses its imaginary part without a warning."""
    if category(x.dtype) == 3 and category(dtype) != 3:
        x = jnp.real(x) if category(dtype) else x != 0
    return x.astype(dtype)


@lowers(aten.to.dtype)
def aten_to_dtype(self: Array, dtype: torch.dtype) -> Array:
    """to.dtype(Tensor self, ScalarType dtype, bool non_blocking=False, bool copy=False, ...)"""
    return cast(self, to_jax_dtype(dtype))


@lowers(aten.to.device)
def aten_to_device(self: Array, dtype: torch.dtype) -> Array:
    """to.device(Tensor self, Device device, ScalarType dtype, bool non_blocking=False, ...)"""
    return cast(self, to_jax_dtype(dtype))


@lowers(aten.to.dtype_layout, aten._to_copy.default)
def aten_to_copy(self: Array, *, dtype: torch.dtype | None = None) -> Array:
    """_to_copy(Tensor self, *, ScalarType? dtype=None, ...) -> Tensor"""
    return self if dtype is None else cast(self, to_jax_dtype(dtype))


@lowers(aten.to.prim_Device, aten.to.prim_dtype)
def aten_to_prim(self: Array, dtype: torch.dtype | None = None) -> Array:
    """to.prim_dtype(Tensor self, int? dtype=None, bool non_blocking=False, bool copy=False)"""
    return self if dtype is None else cast(self, to_jax_dtype(dtype))


@lowers(aten.to.other, aten.type_as.default)
def aten_to_other(self: Array, other: Array) -> Array:
    """to.other(Tensor self, Tensor other, bool non_blocking=False, bool copy=False, ...)"""
    return cast(self, other.dtype)


@lowers(aten.copy.default)
def aten_copy(self: Array, src: Array) -> Array:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor"""
    return jnp.broadcast_to(cast(src, self.dtype), self.shape)


@lowers(aten.view.dtype)
def aten_view_dtype(self: Array, dtype: torch.dtype) -> Array:
    """view.dtype(Tensor self, ScalarType dtype) -> Tensor"""
    target = to_jax_dtype(dtype)
    if target.itemsize == self.dtype.itemsize:
        return lax.bitcast_convert_type(self, target)
    if target.itemsize < self.dtype.itemsize:
        parts = lax.bitcast_convert_type(self, target)
        return parts.reshape(*parts.shape[:-2], -1)
    ratio = target.itemsize // self.dtype.itemsize
    return lax.bitcast_convert_type(self.reshape(*self.shape[:-1], -1, ratio), target)


@lowers(aten.view_as_real.default)
def aten_view_as_real(self: Array) -> Array:
    """view_as_real(Tensor self) -> Tensor"""
    return jnp.stack([jnp.real(self), jnp.imag(self)], axis=-1)


@lowers(aten.view_as_complex.default)
def aten_view_as_complex(self: Array) -> Array:
    """view_as_complex(Tensor self) -> Tensor"""
    return lax.complex(self[..., 0], self[..., 1])


@lowers(aten.complex.default)
def aten_complex(real: Array, imag: Array) -> Array:
    """complex(Tensor real, Tensor imag) -> Tensor"""
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@lowers(aten.polar.default)
def aten_polar(abs: Array, angle: Array) -> Array:
    """polar(Tensor abs, Tensor angle) -> Tensor"""
    return lax.complex(abs * jnp.cos(angle), abs * jnp.sin(angle))


def _nothing(*operands: Any) -> None:
    return None


aliases(
    dict.fromkeys(
        (
            aten._assert_tensor_metadata.default,
            aten._assert_scalar.default,
            aten._assert_async.default,
            aten._assert_async.msg,
            aten.sym_constrain_range.default,
            aten.sym_constrain_range_for_size.default,
        ),
        _nothing,
    )
)

"""Two or three operands, elementwise: sums, products, quotients, remainders, powers, bounds, bits.

Division by an integer zero, an error in torch, is undefined here: XLA cannot raise.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import torch
from jax import Array, lax

from headrace.bridge.dtypes import to_jax_dtype
from headrace.bridge.ops.promotion import (
    Promotion,
    category,
    is_number,
    promoted_dtype,
    result_dtype,
)
from headrace.bridge.ops.registry import DEFAULT, INT_TO_FLOAT, aliases, lowers

aten = torch.ops.aten
Scalar = bool | int | float | complex
Value = Array | Scalar


def _scaled(x: Array, factor: Scalar) -> Array:
    return x if is_number(factor, 1) else x * jnp.asarray(factor, x.dtype)


@lowers(aten.add.Tensor, promotion=DEFAULT, over=("self", "other"))
def aten_add(self: Array, other: Array, *, alpha: Scalar = 1) -> Array:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return self + _scaled(other, alpha)


@lowers(aten.add.Scalar, promotion=DEFAULT, over=("self", "other"))
def aten_add_scalar(self: Array, other: Array, alpha: Scalar = 1) -> Array:
    """add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return self + _scaled(other, alpha)


@lowers(aten.sub.Tensor, aten.subtract.Tensor, promotion=DEFAULT, over=("self", "other"))
def aten_sub(self: Array, other: Array, *, alpha: Scalar = 1) -> Array:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return self - _scaled(other, alpha)


@lowers(aten.sub.Scalar, aten.subtract.Scalar, promotion=DEFAULT, over=("self", "other"))
def aten_sub_scalar(self: Array, other: Array, alpha: Scalar = 1) -> Array:
    """sub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return self - _scaled(other, alpha)


@lowers(aten.rsub.Tensor, promotion=DEFAULT, over=("self", "other"))
def aten_rsub(self: Array, other: Array, *, alpha: Scalar = 1) -> Array:
    """rsub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return other - _scaled(self, alpha)


@lowers(aten.rsub.Scalar, promotion=DEFAULT, over=("self", "other"))
def aten_rsub_scalar(self: Array, other: Array, alpha: Scalar = 1) -> Array:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return other - _scaled(self, alpha)


def _truncated(x: Array, y: Array) -> Array:
    return lax.div(x, y) if category(x.dtype) < 2 else jnp.trunc(x / y)


def _floored(x: Array, y: Array) -> Array:
    if category(x.dtype) < 2:
        return jnp.floor_divide(x, y)
    zero = y == 0
    divisor = jnp.where(zero, 1, y)
    return jnp.where(zero, x / y, jnp.floor_divide(x, divisor)).astype(x.dtype)


def _divided(x: Value, y: Value, rounding_mode: str | None) -> Array:
    promotion = Promotion.INT_TO_FLOAT if rounding_mode is None else Promotion.DEFAULT
    dtype = promoted_dtype(promotion, x, y)
    left, right = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    if rounding_mode is None:
        return left / right
    left, right = jnp.broadcast_arrays(left, right)
    rounded = _truncated if rounding_mode == "trunc" else _floored
    return rounded(lax.stop_gradient(left), lax.stop_gradient(right))


@lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
@lowers(aten.divide.Tensor, aten.divide.Scalar)
def aten_div(self: Array, other: Value) -> Array:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    return _divided(self, other, None)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
@lowers(aten.divide.Tensor_mode, aten.divide.Scalar_mode)
def aten_div_mode(self: Array, other: Value, *, rounding_mode: str | None) -> Array:
    """div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"""
    return _divided(self, other, rounding_mode)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def aten_floor_divide(self: Array, other: Value) -> Array:
    """floor_divide(Tensor self, Tensor other) -> Tensor"""
    return _divided(self, other, "floor")


def _power(x: Value, exponent: Value) -> Array:
    dtype = result_dtype(x, exponent)
    base = jnp.asarray(x, dtype)
    if isinstance(exponent, (bool, int)):
        whole: int | None = int(exponent)
    else:
        whole = int(exponent) if isinstance(exponent, float) and exponent.is_integer() else None
    if whole is not None and abs(whole) < 64 and category(dtype) >= 1:
        # A Python exponent becomes multiplications, exact and with a derivative at 0.
        if category(dtype) == 1 and whole < 0:
            raise ValueError("integers to negative integer powers were given; cast to float first")
        return lax.integer_pow(base, whole)
    if isinstance(exponent, float) and exponent == 0.5:
        return jnp.sqrt(base)
    raised = jnp.asarray(exponent, dtype)
    if category(dtype) == 0:
        return base | ~raised
    if category(dtype) == 1:
        return _integer_power(*jnp.broadcast_arrays(base, raised))
    return jnp.power(base, raised)


def _integer_power(base: Array, exponent: Array) -> Array:
    # Negative exponents: 1 and -1 keep their powers, all else truncates to 0.
    odd = jnp.where(exponent % 2 == 0, jnp.ones_like(base), base)
    negative = jnp.where(jnp.abs(base) == 1, odd, 0)
    return jnp.where(exponent < 0, negative, jnp.power(base, jnp.maximum(exponent, 0)))


@lowers(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar)
def aten_pow(self: Value, exponent: Value) -> Array:
    """pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor"""
    return _power(self, exponent)


@lowers(aten.float_power.Tensor_Tensor, aten.float_power.Tensor_Scalar, aten.float_power.Scalar)
def aten_float_power(self: Value, exponent: Value) -> Array:
    """float_power.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor"""
    is_complex = category(result_dtype(self, exponent)) == 3
    wide = to_jax_dtype(torch.complex128 if is_complex else torch.float64)
    raised = exponent.astype(wide) if isinstance(exponent, Array) else exponent
    return _power(jnp.asarray(self, wide), raised)


def _fmod(x: Array, y: Array) -> Array:
    return lax.rem(*jnp.broadcast_arrays(x, y))


def _fmax(x: Array, y: Array) -> Array:
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


def _fmin(x: Array, y: Array) -> Array:
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


def _xlogy(x: Array, y: Array) -> Array:
    return jnp.where(jnp.isnan(y), y, special.xlogy(x, y))


@jax.custom_jvp
def _nextafter(x: Array, y: Array) -> Array:
    return jnp.nextafter(x, y)


@_nextafter.defjvp
def _nextafter_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    # A step of one unit in the last place: the identity to first order, unless already there.
    x, y = primals
    return _nextafter(x, y), jnp.where(x == y, 0, tangents[0])


def _heaviside(x: Array, values: Array) -> Array:
    return jnp.where(x == 0, values, (x > 0).astype(x.dtype))


aliases(
    {
        aten.mul.Tensor: jnp.multiply,
        aten.mul.Scalar: jnp.multiply,
        aten.multiply.Tensor: jnp.multiply,
        aten.multiply.Scalar: jnp.multiply,
        aten.remainder.Tensor: jnp.remainder,
        aten.remainder.Scalar: jnp.remainder,
        aten.remainder.Scalar_Tensor: jnp.remainder,
        aten.fmod.Tensor: _fmod,
        aten.fmod.Scalar: _fmod,
        aten.maximum.default: jnp.maximum,
        aten.max.other: jnp.maximum,
        aten.minimum.default: jnp.minimum,
        aten.min.other: jnp.minimum,
        aten.fmax.default: _fmax,
        aten.fmin.default: _fmin,
        aten.heaviside.default: _heaviside,
        aten.gcd.default: jnp.gcd,
        aten.lcm.default: jnp.lcm,
        aten.nextafter.default: _nextafter,
        aten.bitwise_and.Tensor: jnp.bitwise_and,
        aten.bitwise_and.Scalar: jnp.bitwise_and,
        aten.bitwise_and.Scalar_Tensor: jnp.bitwise_and,
        aten.bitwise_or.Tensor: jnp.bitwise_or,
        aten.bitwise_or.Scalar: jnp.bitwise_or,
        aten.bitwise_or.Scalar_Tensor: jnp.bitwise_or,
        aten.bitwise_xor.Tensor: jnp.bitwise_xor,
        aten.bitwise_xor.Scalar: jnp.bitwise_xor,
        aten.bitwise_xor.Scalar_Tensor: jnp.bitwise_xor,
        aten.__and__.Tensor: jnp.bitwise_and,
        aten.__and__.Scalar: jnp.bitwise_and,
        aten.__or__.Tensor: jnp.bitwise_or,
        aten.__or__.Scalar: jnp.bitwise_or,
        aten.__xor__.Tensor: jnp.bitwise_xor,
        aten.__xor__.Scalar: jnp.bitwise_xor,
        aten.bitwise_left_shift.Tensor: jnp.left_shift,
        aten.bitwise_left_shift.Tensor_Scalar: jnp.left_shift,
        aten.bitwise_left_shift.Scalar_Tensor: jnp.left_shift,
        aten.bitwise_right_shift.Tensor: jnp.right_shift,
        aten.bitwise_right_shift.Tensor_Scalar: jnp.right_shift,
        aten.bitwise_right_shift.Scalar_Tensor: jnp.right_shift,
        aten.__lshift__.Tensor: jnp.left_shift,
        aten.__lshift__.Scalar: jnp.left_shift,
        aten.__rshift__.Tensor: jnp.right_shift,
        aten.__rshift__.Scalar: jnp.right_shift,
    },
    promotion=DEFAULT,
)
aliases(
    {
        aten.atan2.default: jnp.arctan2,
        aten.arctan2.default: jnp.arctan2,
        aten.hypot.default: jnp.hypot,
        aten.copysign.Tensor: jnp.copysign,
        aten.copysign.Scalar: jnp.copysign,
        aten.logaddexp.default: jnp.logaddexp,
        aten.logaddexp2.default: jnp.logaddexp2,
        aten.xlogy.Tensor: _xlogy,
        aten.xlogy.Scalar_Self: _xlogy,
        aten.xlogy.Scalar_Other: _xlogy,
        aten.special_xlogy.default: _xlogy,
        aten.special_xlogy.self_scalar: _xlogy,
        aten.special_xlogy.other_scalar: _xlogy,
        aten.ldexp.Tensor: lambda x, y: x * jnp.exp2(y),
    },
    promotion=INT_TO_FLOAT,
)


def _bounded(x: Array, low: Array | None, high: Array | None) -> Array:
    """Values inside, ends included, keep the whole derivative (jnp.clip halves it at the ends)."""
    if low is not None:
        x = jnp.where((x < low) | (low != low), low, x)
    if high is not None:
        x = jnp.where((x > high) | (high != high), high, x)
    return x


@lowers(aten.clamp.default, aten.clip.default, promotion=DEFAULT)
@lowers(aten.clamp.Tensor, aten.clip.Tensor, promotion=DEFAULT)
def aten_clamp(self: Array, min: Any = None, max: Any = None) -> Array:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    return _bounded(self, min, max)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor, promotion=DEFAULT)
def aten_clamp_min(self: Array, min: Array) -> Array:
    """clamp_min(Tensor self, Scalar min) -> Tensor"""
    return _bounded(self, min, None)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor, promotion=DEFAULT)
def aten_clamp_max(self: Array, max: Array) -> Array:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return _bounded(self, None, max)


@lowers(aten.addcmul.default, promotion=DEFAULT, over=("self", "tensor1", "tensor2"), opmath=True)
def aten_addcmul(self: Array, tensor1: Array, tensor2: Array, *, value: Scalar = 1) -> Array:
    """addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    return self + _scaled(tensor1, value) * tensor2


@lowers(aten.addcdiv.default, promotion=DEFAULT, over=("self", "tensor1", "tensor2"), opmath=True)
def aten_addcdiv(self: Array, tensor1: Array, tensor2: Array, *, value: Scalar = 1) -> Array:
    """addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    return self + _scaled(tensor1, value) / tensor2


@lowers(aten.lerp.Scalar, aten.lerp.Tensor, promotion=DEFAULT, opmath=True)
def aten_lerp(self: Array, end: Array, weight: Array) -> Array:
    """lerp.Tensor(Tensor self, Tensor end, Tensor weight) -> Tensor"""
    # torch's two forms: exact at both ends.
    near = self + weight * (end - self)
    return jnp.where(jnp.abs(weight) < 0.5, near, end - (end - self) * (1 - weight))

"""One operand, elementwise: signs, rounding, powers, exponentials, trigonometry, special
functions.

Activations are in `activations.py`. 16-bit floats: single primitives round once anyway;
compound formulas are computed in float32 (`opmath`), as torch's kernels do.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import jax.scipy.special as special
import torch
from jax import Array, lax

from headrace.bridge.ops.promotion import category, int_to_float
from headrace.bridge.ops.registry import (
    ALWAYS_BOOL,
    BOOL_TO_LONG,
    COMPLEX_TO_FLOAT,
    DEFAULT,
    INT_TO_FLOAT,
    aliases,
    lowers,
)

aten = torch.ops.aten


def _on_floats(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Rounding leaves integers alone; jnp would turn them into floats."""
    return lambda x: function(x) if category(x.dtype) >= 2 else x


def _sign(x: Array) -> Array:
    # torch: sign(nan) == 0; jnp keeps the nan.
    if category(x.dtype) == 0:
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _sgn(x: Array) -> Array:
    if category(x.dtype) != 3:
        return _sign(x)
    size = jnp.abs(jnp.where(x == 0, 1, x))
    return jnp.where(x == 0, jnp.zeros_like(x), x / size)


def absolute(x: Array) -> Array:
    """|x| with torch's derivative 0 at 0; lax has 1 there, and nan for complex numbers."""
    if category(x.dtype) == 0:
        return x
    if category(x.dtype) == 2:
        return x * lax.sign(x)
    if category(x.dtype) == 1:
        return jnp.abs(x)
    zero = x == 0
    return jnp.where(zero, 0, jnp.abs(jnp.where(zero, 1, x)))


def _square(x: Array) -> Array:
    return x * x


aliases(
    {
        aten.acos.default: jnp.arccos,
        aten.acosh.default: jnp.arccosh,
        aten.asin.default: jnp.arcsin,
        aten.asinh.default: jnp.arcsinh,
        aten.atan.default: jnp.arctan,
        aten.atanh.default: jnp.arctanh,
        aten.arccos.default: jnp.arccos,
        aten.arccosh.default: jnp.arccosh,
        aten.arcsin.default: jnp.arcsin,
        aten.arcsinh.default: jnp.arcsinh,
        aten.arctan.default: jnp.arctan,
        aten.arctanh.default: jnp.arctanh,
        aten.cos.default: jnp.cos,
        aten.cosh.default: jnp.cosh,
        aten.sin.default: jnp.sin,
        aten.sinh.default: jnp.sinh,
        aten.tan.default: jnp.tan,
        aten.tanh.default: jnp.tanh,
        aten.exp.default: jnp.exp,
        aten.exp2.default: jnp.exp2,
        aten.special_exp2.default: jnp.exp2,
        aten.expm1.default: jnp.expm1,
        aten.special_expm1.default: jnp.expm1,
        aten.log.default: jnp.log,
        aten.log10.default: jnp.log10,
        aten.log1p.default: jnp.log1p,
        aten.special_log1p.default: jnp.log1p,
        aten.log2.default: jnp.log2,
        aten.sqrt.default: jnp.sqrt,
        aten.rsqrt.default: lambda x: lax.rsqrt(x),
        aten.reciprocal.default: lambda x: 1 / x,
    },
    promotion=INT_TO_FLOAT,
)
aliases(
    {
        aten.erf.default: special.erf,
        aten.special_erf.default: special.erf,
        aten.erfc.default: special.erfc,
        aten.special_erfc.default: special.erfc,
        aten.erfinv.default: special.erfinv,
        aten.special_erfinv.default: special.erfinv,
        aten.special_ndtr.default: special.ndtr,
        aten.special_log_ndtr.default: special.log_ndtr,
        aten.special_ndtri.default: special.ndtri,
        aten.special_i0e.default: special.i0e,
        aten.special_i1.default: special.i1,
        aten.special_i1e.default: special.i1e,
        aten.sinc.default: jnp.sinc,
        aten.special_sinc.default: jnp.sinc,
        aten.deg2rad.default: jnp.deg2rad,
        aten.rad2deg.default: jnp.rad2deg,
    },
    promotion=INT_TO_FLOAT,
    opmath=True,
)
aliases(
    {
        aten.ceil.default: _on_floats(jnp.ceil),
        aten.floor.default: _on_floats(jnp.floor),
        aten.trunc.default: _on_floats(jnp.trunc),
        aten.fix.default: _on_floats(jnp.trunc),
        aten.round.default: _on_floats(jnp.round),
        aten.frac.default: lambda x: x - lax.stop_gradient(jnp.trunc(x)),
        aten.neg.default: jnp.negative,
        aten.negative.default: jnp.negative,
        aten.positive.default: lambda x: x,
        aten.sign.default: _sign,
        aten.sgn.default: _sgn,
        aten.bitwise_not.default: jnp.bitwise_not,
        aten.conj_physical.default: jnp.conj,
        aten._conj.default: jnp.conj,
        aten._conj_physical.default: jnp.conj,
        aten.conj.default: jnp.conj,
        aten.resolve_conj.default: lambda x: x,
        aten.resolve_neg.default: lambda x: x,
    },
    promotion=DEFAULT,
)
aliases({aten.square.default: _square}, promotion=BOOL_TO_LONG)
aliases(
    {aten.abs.default: absolute, aten.absolute.default: absolute},
    promotion=COMPLEX_TO_FLOAT,
)
aliases(
    {
        aten.isnan.default: jnp.isnan,
        aten.isinf.default: jnp.isinf,
        aten.isfinite.default: jnp.isfinite,
        aten.isposinf.default: jnp.isposinf,
        aten.isneginf.default: jnp.isneginf,
        aten.isreal.default: lambda x: jnp.imag(x) == 0,
        aten.signbit.default: lambda x: jnp.signbit(x) if category(x.dtype) >= 2 else x < 0,
        aten.logical_not.default: jnp.logical_not,
    },
    promotion=ALWAYS_BOOL,
)
aliases({aten.real.default: jnp.real, aten.imag.default: jnp.imag})


@lowers(aten.round.decimals, promotion=DEFAULT)
def aten_round(self: Array, *, decimals: int) -> Array:
    """round.decimals(Tensor self, *, int decimals) -> Tensor"""
    if category(self.dtype) < 2 or decimals == 0:
        return self if category(self.dtype) < 2 else jnp.round(self)
    scale = 10.0 ** abs(decimals)
    return jnp.round(self * scale) / scale if decimals > 0 else jnp.round(self / scale) * scale


@lowers(aten.nan_to_num.default)
def aten_nan_to_num(
    self: Array,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Array:
    """nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor"""
    if category(self.dtype) < 2:
        return self
    return jnp.nan_to_num(self, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@lowers(
    aten.logit.default,
    aten.special_logit.default,
    promotion=INT_TO_FLOAT,
    over=("self",),
    opmath=True,
)
def aten_logit(self: Array, eps: float | None = None) -> Array:
    """logit(Tensor self, float? eps=None) -> Tensor"""
    if eps is not None:
        self = jnp.where(self < eps, eps, jnp.where(self > 1 - eps, 1 - eps, self))
    return jnp.log(self / (1 - self))


@lowers(aten.angle.default)
def aten_angle(self: Array) -> Array:
    """angle(Tensor self) -> Tensor"""
    if category(self.dtype) == 3:
        return jnp.angle(self)
    real = self.astype(int_to_float(self.dtype))
    sides = jnp.where(real < 0, jnp.asarray(jnp.pi, real.dtype), 0)
    return jnp.where(jnp.isnan(real), real, lax.stop_gradient(sides))

"""Special functions that need more than one call into jax.scipy.special.

Float32 throughout for 16-bit inputs.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import torch
from jax import Array, lax

from headrace.bridge.ops.registry import INT_TO_FLOAT, aliases, lowers

aten = torch.ops.aten


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _hurwitz(s: int, q: Array) -> Array:
    """zeta(s, ...)"""
    shift = jnp.maximum(jnp.ceil(-q), 0)

    def add(i: Array, total: Array) -> Array:
        term = jnp.where(i < shift, q + i, 1)
        return total + jnp.where(i < shift, lax.integer_pow(1 / term, s), 0)

    top = jnp.max(jnp.where(jnp.isfinite(shift), shift, 0), initial=0).astype(jnp.int32)
    below = lax.fori_loop(0, top, add, jnp.zeros_like(q))
    pole = (q <= 0) & (q == jnp.floor(q))
    rest = special.zeta(jnp.asarray(s, q.dtype), jnp.where(pole, 1, q + shift)).astype(q.dtype)
    return jnp.where(pole, jnp.inf, below + rest)


@_hurwitz.defjvp
def _hurwitz_jvp(s: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (q,), (dq,) = primals, tangents
    return _hurwitz(s, q), -s * _hurwitz(s + 1, q) * dq


def _zeta(x: Array, q: Array) -> Array:
    """Hurwitz zeta with torch's poles: at x = 1, and where q is 0 or a negative integer."""
    pole = (x == 1) | ((x > 1) & (q <= 0) & (q == jnp.floor(q)))
    return jnp.where(pole, jnp.inf, jnp.where(x < 1, jnp.nan, special.zeta(x, q)))


def _trigamma(x: Array) -> Array:
    """Reflected for x < 1/2, as torch computes it."""
    low = x < 0.5
    value = _hurwitz(2, jnp.where(low, 1 - x, x))
    return jnp.where(low, jnp.square(jnp.pi / jnp.sin(jnp.pi * x)) - value, value)


@jax.custom_jvp
def digamma(x: Array) -> Array:
    """digamma with torch's poles (0 gives minus infinity, negative integers nan) and derivative."""
    value = special.digamma(x)
    pole = (x < 0) & (x == jnp.floor(x))
    at_zero = jnp.where(jnp.signbit(x), jnp.inf, -jnp.inf)
    return jnp.where(x == 0, at_zero, jnp.where(pole, jnp.nan, value))


@digamma.defjvp
def _digamma_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return digamma(x), dx * _trigamma(x)


@jax.custom_jvp
def lgamma(x: Array) -> Array:
    """log |gamma| whose derivative is the digamma above."""
    return special.gammaln(x)


@lgamma.defjvp
def _lgamma_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return lgamma(x), dx * digamma(x)


@jax.custom_jvp
def i0(x: Array) -> Array:
    """The modified Bessel function; jax's own derivative loses digits for large arguments."""
    return special.i0(x)


@i0.defjvp
def _i0_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return i0(x), dx * special.i1(x)


def _xlog1py(x: Array, y: Array) -> Array:
    return jnp.where(jnp.isnan(y), y, special.xlog1py(x, y))


def _spherical_bessel_j0(x: Array) -> Array:
    near = jnp.abs(x) < 0.5
    square = x * x
    series = 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))
    return jnp.where(near, series, jnp.sin(x) / jnp.where(near, 1, x))


aliases(
    {
        aten.digamma.default: digamma,
        aten.special_digamma.default: digamma,
        aten.special_psi.default: digamma,
        aten.lgamma.default: lgamma,
        aten.special_gammaln.default: lgamma,
        aten.igamma.default: special.gammainc,
        aten.igammac.default: special.gammaincc,
        aten.special_gammainc.default: special.gammainc,
        aten.special_gammaincc.default: special.gammaincc,
        aten.special_xlog1py.default: _xlog1py,
        aten.special_xlog1py.self_scalar: _xlog1py,
        aten.special_xlog1py.other_scalar: _xlog1py,
        aten.special_zeta.default: _zeta,
        aten.special_zeta.self_scalar: _zeta,
        aten.special_zeta.other_scalar: _zeta,
        aten.special_modified_bessel_i0.default: i0,
        aten.i0.default: i0,
        aten.special_i0.default: i0,
        aten.special_modified_bessel_i1.default: special.i1,
        aten.special_spherical_bessel_j0.default: _spherical_bessel_j0,
    },
    promotion=INT_TO_FLOAT,
    opmath=True,
)


@lowers(aten.polygamma.default, promotion=INT_TO_FLOAT, over=("self",), opmath=True)
def aten_polygamma(n: int, self: Array) -> Array:
    """polygamma(int n, Tensor self) -> Tensor"""
    if n == 0:
        return digamma(self)
    if n == 1:
        return _trigamma(self)
    return (-1) ** (n + 1) * math.factorial(n) * _hurwitz(n + 1, self)


@lowers(aten.mvlgamma.default, promotion=INT_TO_FLOAT, over=("self",), opmath=True)
def aten_mvlgamma(self: Array, p: int) -> Array:
    """mvlgamma(Tensor self, int p) -> Tensor"""
    constant = p * (p - 1) / 4 * jnp.log(jnp.pi)
    return constant + sum(lgamma(self - i / 2) for i in range(p))


@lowers(aten.special_entr.default, promotion=INT_TO_FLOAT, opmath=True)
def aten_special_entr(self: Array) -> Array:
    """special_entr(Tensor self) -> Tensor"""
    return special.entr(self)


@lowers(aten.special_erfcx.default, promotion=INT_TO_FLOAT)
def aten_special_erfcx(self: Array) -> Array:
    """special_erfcx(Tensor self) -> Tensor"""
    # exp(x^2) erfc(x); where erfc underflows, the asymptotic series in 1/x^2.
    edge = 5.0 if self.dtype.itemsize < 8 else 20.0
    small = jnp.minimum(self, edge)
    near = jnp.exp(small * small) * special.erfc(small)
    large = jnp.where(self > edge, self, edge)
    t = 1 / (2 * large * large)
    series = 1 - t * (1 - 3 * t * (1 - 5 * t * (1 - 7 * t)))
    return jnp.where(self > edge, series / (large * jnp.sqrt(jnp.pi)), near)


@lowers(aten.frexp.Tensor)
def aten_frexp(self: Array) -> tuple[Array, Array]:
    """frexp.Tensor(Tensor self) -> (Tensor mantissa, Tensor exponent)"""
    mantissa, exponent = jnp.frexp(self)
    return mantissa, exponent.astype(jnp.int32)

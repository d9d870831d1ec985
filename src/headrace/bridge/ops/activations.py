"""Activation functions and the softmax family.

16-bit floats are computed in float32 and rounded once, as in torch's kernels. Where jax.nn has
a function of the same name its defaults differ from ATen's in places; each such place is
marked.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import Array

from headrace.bridge.dtypes import to_jax_dtype
from headrace.bridge.ops.dims import one_dim
from headrace.bridge.ops.promotion import category, int_to_float, opmath_of
from headrace.bridge.ops.registry import DEFAULT, INT_TO_FLOAT, aliases, lowers

aten = torch.ops.aten
Scalar = bool | int | float


def _relu6(x: Array) -> Array:
    # torch's derivative at both ends is 0, that of clip is a half.
    return jnp.where(x <= 0, jnp.zeros_like(x), jnp.where(x >= 6, jnp.full_like(x, 6), x))


def _relu(x: Array) -> Array:
    return jax.nn.relu(x) if category(x.dtype) >= 2 else jnp.maximum(x, 0)


aliases({aten.relu.default: _relu, aten.relu6.default: _relu6}, promotion=DEFAULT)
aliases(
    {
        aten.sigmoid.default: jax.nn.sigmoid,
        aten.special_expit.default: jax.nn.sigmoid,
        aten.silu.default: jax.nn.silu,
        aten.mish.default: lambda x: x * jnp.tanh(jax.nn.softplus(x)),
        aten.log_sigmoid.default: jax.nn.log_sigmoid,
        aten.selu.default: jax.nn.selu,
    },
    promotion=INT_TO_FLOAT,
    opmath=True,
    recompute=True,
)


@lowers(aten.gelu.default, promotion=INT_TO_FLOAT, opmath=True, recompute=True)
def aten_gelu(self: Array, *, approximate: str = "none") -> Array:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    # jax.nn.gelu defaults to the tanh form, ATen to the erf form.
    return jax.nn.gelu(self, approximate=approximate == "tanh")


@lowers(aten.log_sigmoid_forward.default, promotion=INT_TO_FLOAT, opmath=True)
def aten_log_sigmoid_forward(self: Array) -> tuple[Array, Array]:
    """log_sigmoid_forward(Tensor self) -> (Tensor output, Tensor buffer)"""
    return jax.nn.log_sigmoid(self), jnp.zeros((0,), self.dtype)


@lowers(aten.leaky_relu.default, promotion=DEFAULT, over=("self",))
def aten_leaky_relu(self: Array, negative_slope: Scalar = 0.01) -> Array:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    return jnp.where(self > 0, self, self * negative_slope)


@lowers(aten.elu.default, promotion=DEFAULT, over=("self",), opmath=True)
def aten_elu(self: Array, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1) -> Array:
    """elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor"""
    below = jnp.where(self > 0, 0, self)  # keeps exp, and its derivative, finite
    return scale * jnp.where(self > 0, self, alpha * jnp.expm1(below * input_scale))


@lowers(aten.celu.default, promotion=DEFAULT, over=("self",), opmath=True)
def aten_celu(self: Array, alpha: Scalar = 1.0) -> Array:
    """celu(Tensor self, Scalar alpha=1.0) -> Tensor"""
    return aten_elu(self, alpha, 1, 1 / alpha)


@lowers(aten.prelu.default, aten._prelu_kernel.default, promotion=DEFAULT)
def aten_prelu(self: Array, weight: Array) -> Array:
    """prelu(Tensor self, Tensor weight) -> Tensor"""
    if weight.size > 1 and weight.ndim == 1 and self.ndim > 1:
        weight = weight.reshape((1, -1) + (1,) * (self.ndim - 2))
    elif weight.size == 1:
        weight = weight.reshape(())
    return jnp.where(self > 0, self, weight * self)


@lowers(aten.softplus.default, promotion=INT_TO_FLOAT, over=("self",), opmath=True)
def aten_softplus(self: Array, beta: Scalar = 1, threshold: Scalar = 20) -> Array:
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    scaled = self * beta
    curved = scaled <= threshold
    return jnp.where(curved, jnp.log1p(jnp.exp(jnp.where(curved, scaled, 0))) / beta, self)


@lowers(aten.hardtanh.default, promotion=DEFAULT, over=("self",))
def aten_hardtanh(self: Array, min_val: Scalar = -1, max_val: Scalar = 1) -> Array:
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    low, high = jnp.asarray(min_val, self.dtype), jnp.asarray(max_val, self.dtype)
    return jnp.where(self <= low, low, jnp.where(self >= high, high, self))


@lowers(aten.hardsigmoid.default, promotion=DEFAULT, opmath=True)
def aten_hardsigmoid(self: Array) -> Array:
    """hardsigmoid(Tensor self) -> Tensor"""
    return _relu6(self + 3) / 6


@lowers(aten.hardswish.default, promotion=DEFAULT, opmath=True)
def aten_hardswish(self: Array) -> Array:
    """hardswish(Tensor self) -> Tensor"""
    return self * _relu6(self + 3) / 6


@lowers(aten.hardshrink.default, promotion=DEFAULT, over=("self",))
def aten_hardshrink(self: Array, lambd: Scalar = 0.5) -> Array:
    """hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    return jnp.where((self >= -lambd) & (self <= lambd), jnp.zeros_like(self), self)


@lowers(aten.softshrink.default, promotion=DEFAULT, over=("self",))
def aten_softshrink(self: Array, lambd: Scalar = 0.5) -> Array:
    """softshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    shrunk = jnp.where(self < -lambd, self + lambd, self * 0)
    return jnp.where(self > lambd, self - lambd, shrunk)


@lowers(aten.threshold.default, promotion=DEFAULT, over=("self",))
def aten_threshold(self: Array, threshold: Scalar, value: Scalar) -> Array:
    """threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor"""
    return jnp.where(self <= threshold, jnp.asarray(value, self.dtype), self)


@lowers(aten.rrelu.default, promotion=DEFAULT, over=("self",), draws=True)
def aten_rrelu(
    self: Array,
    lower: Scalar = 0.125,
    upper: Scalar = 0.3333333333333333,
    training: bool = False,
    *,
    key: Array,
) -> Array:
    """rrelu(Tensor self, Scalar lower=0.125, Scalar upper=0.33, bool training=False) -> Tensor"""
    slope = (lower + upper) / 2
    if training:
        slope = jax.random.uniform(key, self.shape, jnp.float32, lower, upper).astype(self.dtype)
    return jnp.where(self >= 0 if not training else self > 0, self, self * slope)


@lowers(aten.glu.default, promotion=DEFAULT, opmath=True)
def aten_glu(self: Array, dim: int = -1) -> Array:
    """glu(Tensor self, int dim=-1) -> Tensor"""
    value, gate = jnp.split(self, 2, axis=dim)
    return value * jax.nn.sigmoid(gate)


@lowers(aten.softmax.int, aten.special_softmax.default)
def aten_softmax(self: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    """softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor"""
    result = to_jax_dtype(dtype) if dtype is not None else int_to_float(self.dtype)
    return _softmax(self, dim, result)


@lowers(aten._softmax.default)
def aten__softmax(self: Array, dim: int, half_to_float: bool) -> Array:
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    return _softmax(self, dim, jnp.dtype(jnp.float32) if half_to_float else self.dtype)


@lowers(aten._safe_softmax.default)
def aten__safe_softmax(self: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    """_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor"""
    dead = jnp.all(self == -jnp.inf, axis=dim, keepdims=True)
    return jnp.where(dead, 0, aten_softmax(jnp.where(dead, 0, self), dim, dtype))


@lowers(aten.log_softmax.int, aten.special_log_softmax.default)
def aten_log_softmax(self: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    """log_softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor"""
    result = to_jax_dtype(dtype) if dtype is not None else int_to_float(self.dtype)
    return _log_softmax(self, dim, result)


@lowers(aten._log_softmax.default)
def aten__log_softmax(self: Array, dim: int, half_to_float: bool) -> Array:
    """_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    return _log_softmax(self, dim, jnp.dtype(jnp.float32) if half_to_float else self.dtype)


def _softmax(x: Array, dim: int, dtype: jnp.dtype) -> Array:
    compute = x.astype(opmath_of(dtype))
    if x.ndim == 0:
        return jax.nn.softmax(compute[None])[0].astype(dtype)
    return jax.nn.softmax(compute, axis=one_dim(dim, x.ndim)).astype(dtype)


def _log_softmax(x: Array, dim: int, dtype: jnp.dtype) -> Array:
    compute = x.astype(opmath_of(dtype))
    if x.ndim == 0:
        return jax.nn.log_softmax(compute[None])[0].astype(dtype)
    return jax.nn.log_softmax(compute, axis=one_dim(dim, x.ndim)).astype(dtype)

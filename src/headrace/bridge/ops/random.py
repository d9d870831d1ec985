"""Operators that draw random numbers: each takes a JAX PRNG key, and the same key gives the same
numbers.

The numbers differ from torch's for the same seed; distributions, shapes and dtypes are the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from headrace.bridge.dtypes import default_float, default_int, to_jax_dtype
from headrace.bridge.ops.promotion import is_float, opmath_of
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten
Dtype = torch.dtype | None


def _uniform(key: Array, shape: Sequence[int], dtype: np.dtype) -> Array:
    return jax.random.uniform(key, tuple(shape), opmath_of(dtype)).astype(dtype)


def _gaussian(key: Array, shape: Sequence[int], dtype: np.dtype) -> Array:
    return jax.random.normal(key, tuple(shape), opmath_of(dtype)).astype(dtype)


def _float(dtype: Dtype) -> np.dtype:
    return default_float() if dtype is None else to_jax_dtype(dtype)


def _own(dtype: Dtype, self: Array) -> np.dtype:
    return self.dtype if dtype is None else to_jax_dtype(dtype)


def _dropped(x: Array, p: float, key: Array, shape: Sequence[int]) -> tuple[Array, Array]:
    """x with elements zeroed with probability p and the rest scaled up; and what was kept."""
    if p == 0.0:
        return x, jnp.ones(x.shape, jnp.bool_)
    if p == 1.0:
        return jnp.zeros_like(x), jnp.zeros(x.shape, jnp.bool_)
    kept = jax.random.bernoulli(key, 1 - p, tuple(shape))
    return jnp.where(kept, x / (1 - p), jnp.zeros_like(x)), jnp.broadcast_to(kept, x.shape)


@lowers(aten.dropout.default, draws=True)
def aten_dropout(input: Array, p: float, train: bool, *, key: Array) -> Array:
    """dropout(Tensor input, float p, bool train) -> Tensor"""
    return _dropped(input, p, key, input.shape)[0] if train else input


@lowers(aten.native_dropout.default, draws=True)
def aten_native_dropout(
    input: Array, p: float, train: bool | None, *, key: Array
) -> tuple[Array, Array]:
    """native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)"""
    if train is False:
        return input, jnp.ones(input.shape, jnp.bool_)
    return _dropped(input, p, key, input.shape)


def _by_feature(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:2], *(1,) * (len(shape) - 2))


@lowers(aten.feature_dropout.default, draws=True)
def aten_feature_dropout(input: Array, p: float, train: bool, *, key: Array) -> Array:
    """feature_dropout(Tensor input, float p, bool train) -> Tensor"""
    return _dropped(input, p, key, _by_feature(input.shape))[0] if train else input


# The value SELU tends to: -scale * alpha.
_SELU_FLOOR = -1.7580993408473766


def _alpha_dropped(x: Array, p: float, key: Array, shape: Sequence[int]) -> Array:
    """Dropped elements take SELU's floor; an affine map restores mean and variance."""
    if p == 1.0:
        return jnp.zeros_like(x)
    kept = jax.random.bernoulli(key, 1 - p, tuple(shape))
    a = ((1 - p) * (1 + p * _SELU_FLOOR**2)) ** -0.5
    return jnp.where(kept, x, jnp.asarray(_SELU_FLOOR, x.dtype)) * a - a * p * _SELU_FLOOR


@lowers(aten.alpha_dropout.default, draws=True)
def aten_alpha_dropout(input: Array, p: float, train: bool, *, key: Array) -> Array:
    """alpha_dropout(Tensor input, float p, bool train) -> Tensor"""
    return _alpha_dropped(input, p, key, input.shape) if train and p else input


@lowers(aten.feature_alpha_dropout.default, draws=True)
def aten_feature_alpha_dropout(input: Array, p: float, train: bool, *, key: Array) -> Array:
    """feature_alpha_dropout(Tensor input, float p, bool train) -> Tensor"""
    return _alpha_dropped(input, p, key, _by_feature(input.shape)) if train and p else input


@lowers(aten.rand.default, aten.rand.generator, draws=True)
def aten_rand(size: Sequence[int], *, dtype: Dtype = None, key: Array) -> Array:
    """rand(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _uniform(key, size, _float(dtype))


@lowers(aten.randn.default, aten.randn.generator, draws=True)
def aten_randn(size: Sequence[int], *, dtype: Dtype = None, key: Array) -> Array:
    """randn(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _gaussian(key, size, _float(dtype))


@lowers(aten.rand_like.default, aten.rand_like.generator, draws=True)
def aten_rand_like(self: Array, *, dtype: Dtype = None, key: Array) -> Array:
    """rand_like(Tensor self, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _uniform(key, self.shape, _own(dtype, self))


@lowers(aten.randn_like.default, aten.randn_like.generator, draws=True)
def aten_randn_like(self: Array, *, dtype: Dtype = None, key: Array) -> Array:
    """randn_like(Tensor self, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _gaussian(key, self.shape, _own(dtype, self))


def _integers(key: Array, shape: Sequence[int], low: int, high: int, dtype: np.dtype) -> Array:
    return jax.random.randint(key, tuple(shape), low, high, default_int()).astype(dtype)


@lowers(aten.randint.default, aten.randint.generator, draws=True)
def aten_randint(
    high: int, size: Sequence[int], *, dtype: Dtype = torch.int64, key: Array
) -> Array:
    """randint(SymInt high, SymInt[] size, *, ScalarType? dtype=long, ...) -> Tensor"""
    return _integers(key, size, 0, high, to_jax_dtype(dtype or torch.int64))


@lowers(aten.randint.low, aten.randint.low_generator, draws=True)
def aten_randint_low(
    low: int, high: int, size: Sequence[int], *, dtype: Dtype = torch.int64, key: Array
) -> Array:
    """randint.low(SymInt low, SymInt high, SymInt[] size, *, ScalarType? dtype=long, ...)"""
    return _integers(key, size, low, high, to_jax_dtype(dtype or torch.int64))


@lowers(aten.randint_like.default, draws=True)
def aten_randint_like(self: Array, high: int, *, dtype: Dtype = None, key: Array) -> Array:
    """randint_like(Tensor self, SymInt high, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _integers(key, self.shape, 0, high, _own(dtype, self))


@lowers(aten.randint_like.low_dtype, draws=True)
def aten_randint_like_low(
    self: Array, low: int, high: int, *, dtype: Dtype = None, key: Array
) -> Array:
    """randint_like.low_dtype(Tensor self, SymInt low, SymInt high, *, ...)"""
    return _integers(key, self.shape, low, high, _own(dtype, self))


@lowers(aten.randperm.default, aten.randperm.generator, draws=True)
def aten_randperm(n: int, *, dtype: Dtype = torch.int64, key: Array) -> Array:
    """randperm(SymInt n, *, ScalarType? dtype=long, ...) -> Tensor"""
    return jax.random.permutation(key, n).astype(to_jax_dtype(dtype or torch.int64))


@lowers(aten.bernoulli.default, draws=True)
def aten_bernoulli(self: Array, *, key: Array) -> Array:
    """bernoulli(Tensor self, *, Generator? generator=None) -> Tensor"""
    return jax.random.bernoulli(key, self.astype(opmath_of(self.dtype))).astype(self.dtype)


@lowers(aten.bernoulli.p, draws=True)
def aten_bernoulli_p(self: Array, p: float, *, key: Array) -> Array:
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    return jax.random.bernoulli(key, p, self.shape).astype(self.dtype)


@lowers(aten.bernoulli.Tensor, draws=True)
def aten_bernoulli_tensor(self: Array, p: Array, *, key: Array) -> Array:
    """bernoulli.Tensor(Tensor self, Tensor p, *, Generator? generator=None) -> Tensor"""
    return jax.random.bernoulli(key, p, self.shape).astype(self.dtype)


@lowers(aten.normal.Tensor_Tensor, draws=True)
def aten_normal(mean: Array, std: Array, *, key: Array) -> Array:
    """normal.Tensor_Tensor(Tensor mean, Tensor std, *, Generator? generator=None) -> Tensor"""
    shape = jnp.broadcast_shapes(mean.shape, std.shape)
    return mean + std * _gaussian(key, shape, mean.dtype)


@lowers(aten.normal.Tensor_float, draws=True)
def aten_normal_tensor_float(mean: Array, std: float = 1.0, *, key: Array) -> Array:
    """normal.Tensor_float(Tensor mean, float std=1.0, *, Generator? generator=None) -> Tensor"""
    return mean + std * _gaussian(key, mean.shape, mean.dtype)


@lowers(aten.normal.float_Tensor, draws=True)
def aten_normal_float_tensor(mean: float, std: Array, *, key: Array) -> Array:
    """normal.float_Tensor(float mean, Tensor std, *, Generator? generator=None) -> Tensor"""
    return mean + std * _gaussian(key, std.shape, std.dtype)


@lowers(aten.normal.float_float, draws=True)
def aten_normal_float_float(
    mean: float, std: float, size: Sequence[int], *, dtype: Dtype = None, key: Array
) -> Array:
    """normal.float_float(float mean, float std, SymInt[] size, *, ScalarType? dtype=None, ...)"""
    return mean + std * _gaussian(key, size, _float(dtype))


@lowers(aten.normal_functional.default, draws=True)
def aten_normal_functional(
    self: Array, mean: float = 0.0, std: float = 1.0, *, key: Array
) -> Array:
    """normal_functional(Tensor self, float mean=0.0, float std=1.0, *, ...)"""
    return mean + std * _gaussian(key, self.shape, self.dtype)


@lowers(aten.uniform.default, draws=True)
def aten_uniform(self: Array, from_: float = 0.0, to: float = 1.0, *, key: Array) -> Array:
    """uniform(Tensor self, float from=0.0, float to=1.0, *, Generator? generator=None) -> Tensor"""
    if from_ > to:
        raise ValueError(f"uniform from {from_} to {to} was given; it needs from <= to")
    return from_ + (to - from_) * _uniform(key, self.shape, self.dtype)


@lowers(aten.exponential.default, draws=True)
def aten_exponential(self: Array, lambd: float = 1.0, *, key: Array) -> Array:
    """exponential(Tensor self, float lambd=1.0, *, Generator? generator=None) -> Tensor"""
    drawn = jax.random.exponential(key, self.shape, opmath_of(self.dtype))
    return (drawn / lambd).astype(self.dtype)


@lowers(aten.multinomial.default, draws=True)
def aten_multinomial(
    self: Array, num_samples: int, replacement: bool = False, *, key: Array
) -> Array:
    """multinomial(Tensor self, SymInt num_samples, bool replacement=False, ...) -> Tensor"""
    if not is_float(self.dtype) or num_samples < 1:
        raise ValueError(
            f"multinomial of {num_samples} samples from {self.dtype} weights was given; it needs "
            "at least one sample and floating-point weights"
        )
    logits = jnp.log(self.astype(opmath_of(self.dtype)))
    if replacement:
        drawn = jax.random.categorical(key, logits, shape=(num_samples, *self.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1).astype(default_int())
    # The largest of log p + Gumbel noise are a sample without replacement.
    noisy = logits + jax.random.gumbel(key, self.shape, logits.dtype)
    return jax.lax.top_k(noisy, num_samples)[1].astype(default_int())


@lowers(aten.cauchy.default, draws=True)
def aten_cauchy(self: Array, median: float = 0.0, sigma: float = 1.0, *, key: Array) -> Array:
    """cauchy(Tensor self, float median=0.0, float sigma=1.0, *, Generator? generator=None)"""
    drawn = jax.random.cauchy(key, self.shape, opmath_of(self.dtype))
    return (median + sigma * drawn).astype(self.dtype)


@lowers(aten.log_normal.default, draws=True)
def aten_log_normal(self: Array, mean: float = 1.0, std: float = 2.0, *, key: Array) -> Array:
    """log_normal(Tensor self, float mean=1.0, float std=2.0, *, Generator? generator=None)"""
    drawn = jax.random.normal(key, self.shape, opmath_of(self.dtype))
    return jnp.exp(mean + std * drawn).astype(self.dtype)


@lowers(aten.geometric.default, draws=True)
def aten_geometric(self: Array, p: float, *, key: Array) -> Array:
    """geometric(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    return jax.random.geometric(key, p, self.shape).astype(self.dtype)


@lowers(aten.poisson.default, draws=True)
def aten_poisson(self: Array, *, key: Array) -> Array:
    """poisson(Tensor self, Generator? generator=None) -> Tensor"""
    return jax.random.poisson(key, self, self.shape).astype(self.dtype)


@lowers(aten._standard_gamma.default, draws=True)
def aten__standard_gamma(self: Array, *, key: Array) -> Array:
    """_standard_gamma(Tensor self, Generator? generator=None) -> Tensor"""
    return jax.random.gamma(key, self.astype(opmath_of(self.dtype))).astype(self.dtype)

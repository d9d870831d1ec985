"""Normalisation layers. Statistics of 16-bit inputs are taken in float32, as torch does; results
return to the input's dtype.

Shapes: N = batch, C = channels, G = groups. Batch norm hands back its new running statistics
where its schema says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from headrace.bridge.ops.promotion import opmath_of
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        x = x * weight.astype(x.dtype)
    return x if bias is None else x + bias.astype(x.dtype)


def _moments(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axes, keepdims=True)


def _layer_norm(
    x: Array, dims: int, weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    compute = x.astype(opmath_of(x.dtype))
    mean, variance = _moments(compute, tuple(range(x.ndim - dims, x.ndim)))
    scale = lax.rsqrt(variance + eps)
    return _affine((compute - mean) * scale, weight, bias).astype(x.dtype), mean, scale


@lowers(aten.layer_norm.default)
def aten_layer_norm(
    input: Array,
    normalized_shape: Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-05,
    cudnn_enable: bool = True,
) -> Array:
    """layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, ...)"""
    return _layer_norm(input, len(normalized_shape), weight, bias, eps)[0]


@lowers(aten.native_layer_norm.default)
def aten_native_layer_norm(
    input: Array,
    normalized_shape: Sequence[int],
    weight: Array | None,
    bias: Array | None,
    eps: float,
) -> tuple[Array, Array, Array]:
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, ...)"""
    result, mean, scale = _layer_norm(input, len(normalized_shape), weight, bias, eps)
    saved = _saved_dtype(input, weight)
    return result, mean.astype(saved), scale.astype(saved)


def _saved_dtype(x: Array, weight: Array | None) -> np.dtype:
    """Torch's CPU kernels keep statistics in the input's dtype unless the weights are wider."""
    return x.dtype if weight is None else weight.dtype


def _rms_norm(x: Array, dims: int, weight: Array | None, eps: float | None) -> tuple[Array, Array]:
    compute = x.astype(opmath_of(x.dtype))
    axes = tuple(range(x.ndim - dims, x.ndim))
    # torch's default is the machine epsilon of the dtype it computes in.
    epsilon = float(jnp.finfo(compute.dtype).eps) if eps is None else eps
    scale = lax.rsqrt(jnp.mean(jnp.square(compute), axes, keepdims=True) + epsilon)
    return _affine(compute * scale, weight, None).astype(x.dtype), scale


@lowers(aten.rms_norm.default)
def aten_rms_norm(
    input: Array,
    normalized_shape: Sequence[int],
    weight: Array | None = None,
    eps: float | None = None,
) -> Array:
    """rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None)"""
    return _rms_norm(input, len(normalized_shape), weight, eps)[0]


@lowers(aten._fused_rms_norm.default)
def aten__fused_rms_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    """_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps)"""
    return _rms_norm(input, len(normalized_shape), weight, eps)


def _channels(values: Array, ndim: int) -> Array:
    return values if ndim < 2 else values.reshape((1, -1) + (1,) * (ndim - 2))


def _group_norm(
    x: Array, groups: int, weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    compute = x.astype(opmath_of(x.dtype)).reshape(
        x.shape[0], groups, math.prod(x.shape[1:]) // groups
    )
    mean, variance = _moments(compute, (2,))
    scale = lax.rsqrt(variance + eps)
    normal = ((compute - mean) * scale).reshape(x.shape)
    weight = None if weight is None else _channels(weight, x.ndim)
    bias = None if bias is None else _channels(bias, x.ndim)
    return _affine(normal, weight, bias).astype(x.dtype), mean[..., 0], scale[..., 0]


@lowers(aten.group_norm.default)
def aten_group_norm(
    input: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-05,
    cudnn_enabled: bool = True,
) -> Array:
    """group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, ...)"""
    return _group_norm(input, num_groups, weight, bias, eps)[0]


@lowers(aten.native_group_norm.default)
def aten_native_group_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, ...)"""
    result, mean, scale = _group_norm(input, group, weight, bias, eps)
    return result, mean.astype(input.dtype), scale.astype(input.dtype)


def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Result, saved mean, saved 1/std, new running mean, new running variance."""
    compute = x.astype(opmath_of(x.dtype))
    axes = (0, *range(2, x.ndim))
    new_mean, new_var = running_mean, running_var
    if training or running_mean is None or running_var is None:
        mean, variance = (moment.reshape(-1) for moment in _moments(compute, axes))
        count = x.size // x.shape[1]
        new_mean = _blended(running_mean, mean, momentum)
        new_var = _blended(running_var, variance * (count / max(count - 1, 1)), momentum)
    else:
        mean, variance = running_mean.astype(compute.dtype), running_var.astype(compute.dtype)
    scale = lax.rsqrt(variance + eps)
    normal = (compute - _channels(mean, x.ndim)) * _channels(scale, x.ndim)
    weight = None if weight is None else _channels(weight, x.ndim)
    bias = None if bias is None else _channels(bias, x.ndim)
    saved = _saved_dtype(x, weight)
    result = _affine(normal, weight, bias).astype(x.dtype)
    return result, mean.astype(saved), scale.astype(saved), new_mean, new_var


def _blended(running: Array | None, batch: Array, momentum: float) -> Array | None:
    if running is None:
        return None
    return lax.stop_gradient(running * (1 - momentum) + momentum * batch.astype(running.dtype))


@lowers(aten.batch_norm.default)
def aten_batch_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Array:
    """batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, ...)"""
    stats = (running_mean, running_var)
    return _batch_norm(input, weight, bias, *stats, training, momentum, eps)[0]


@lowers(aten.native_batch_norm.default)
def aten_native_batch_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    """native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, ...)"""
    stats = (running_mean, running_var)
    result, mean, scale, _, _ = _batch_norm(input, weight, bias, *stats, training, momentum, eps)
    empty = jnp.zeros((0,), mean.dtype)
    return (result, mean, scale) if training else (result, empty, empty)


@lowers(aten._native_batch_norm_legit.no_stats)
def aten__native_batch_norm_legit_no_stats(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, ...)"""
    return _batch_norm(input, weight, bias, None, None, training, momentum, eps)[:3]


@lowers(aten._native_batch_norm_legit_no_training.default)
def aten__native_batch_norm_legit_no_training(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    """_native_batch_norm_legit_no_training(Tensor input, Tensor? weight, Tensor? bias, ...)"""
    stats = (running_mean, running_var)
    result = _batch_norm(input, weight, bias, *stats, False, momentum, eps)[0]
    empty = jnp.zeros((0,), opmath_of(input.dtype))
    return result, empty, empty


@lowers(aten._native_batch_norm_legit_functional.default)
def aten__native_batch_norm_legit_functional(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """_native_batch_norm_legit_functional(Tensor input, ...) -> (..., running_mean_out, ...)"""
    stats = (running_mean, running_var)
    result, mean, scale, *new = _batch_norm(input, weight, bias, *stats, training, momentum, eps)
    empty = jnp.zeros((0,), mean.dtype)
    saved = (mean, scale) if training else (empty, empty)
    return result, *saved, new[0], new[1]


@lowers(aten._batch_norm_with_update_functional.default)
def aten__batch_norm_with_update_functional(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array, Array | None, Array | None]:
    """_batch_norm_with_update_functional(Tensor input, ...) -> (..., reserve, ...)"""
    stats = (running_mean, running_var)
    result, mean, scale, *new = _batch_norm(input, weight, bias, *stats, True, momentum, eps)
    return result, mean, scale, jnp.zeros((0,), jnp.uint8), new[0], new[1]


@lowers(aten._batch_norm_no_update.default)
def aten__batch_norm_no_update(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array]:
    """_batch_norm_no_update(Tensor input, Tensor? weight, Tensor? bias, ...)"""
    stats = (running_mean, running_var)
    result = _batch_norm(input, weight, bias, *stats, False, momentum, eps)[0]
    empty = jnp.zeros((0,), input.dtype)
    return result, empty, empty, jnp.zeros((0,), jnp.uint8)

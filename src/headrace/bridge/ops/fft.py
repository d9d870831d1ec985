"""Fourier transforms: the three primitives that all of torch.fft is made of.

`normalization`: 0 none, 1 by the root of the length, 2 by the length. XLA transforms 32- and
64-bit floats only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import torch
from jax import Array

from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten


def _scaled(x: Array, count: int, normalization: int) -> Array:
    if normalization == 0:
        return x
    return x / (math.sqrt(count) if normalization == 1 else count)


def _transformed(x: Array, dims: Sequence[int], forward: bool) -> Array:
    """Unnormalised in both directions; one dim at a time, as XLA stops at three."""
    for dim in dims:
        x = jnp.fft.fft(x, axis=dim) if forward else jnp.fft.ifft(x, axis=dim, norm="forward")
    return x


def _count(x: Array, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


@lowers(aten._fft_c2c.default)
def aten__fft_c2c(self: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    """_fft_c2c(Tensor self, SymInt[] dim, int normalization, bool forward) -> Tensor"""
    return _scaled(_transformed(self, dim, forward), _count(self, dim), normalization)


@lowers(aten._fft_r2c.default)
def aten__fft_r2c(self: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """_fft_r2c(Tensor self, int[] dim, int normalization, bool onesided) -> Tensor"""
    if onesided:
        half = jnp.fft.rfft(self, axis=dim[-1])
        result = _transformed(half, dim[:-1], True)
    else:
        result = _transformed(self, dim, True)
    return _scaled(result, _count(self, dim), normalization)


@lowers(aten._fft_c2r.default)
def aten__fft_c2r(self: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """_fft_c2r(Tensor self, int[] dim, int normalization, SymInt last_dim_size) -> Tensor"""
    lines = _transformed(self, dim[:-1], False)
    result = jnp.fft.irfft(lines, n=last_dim_size, axis=dim[-1], norm="forward")
    return _scaled(result, _count(result, dim), normalization)

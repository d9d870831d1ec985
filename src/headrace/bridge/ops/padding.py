"""Padding: torch lists the last dim first, low side before high side; a negative constant pad
crops.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import torch
from jax import Array, lax

from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten
Scalar = bool | int | float


def _pairs(pad: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """One (low, high) a dim, first dim first."""
    given = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(given)) + given[::-1]


def _constant(x: Array, pad: Sequence[int], value: Scalar) -> Array:
    config = [(low, high, 0) for low, high in _pairs(pad, x.ndim)]
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def _mirrored(x: Array, pad: Sequence[int], mode: str) -> Array:
    """jnp.pad knows no negative pads: they crop, before wrapping around, after mirroring."""
    pairs = _pairs(pad, x.ndim)
    grown = [(max(low, 0), max(high, 0)) for low, high in pairs]
    crop = [(min(low, 0), min(high, 0), 0) for low, high in pairs]
    zero = jnp.zeros((), x.dtype)
    if mode == "wrap":
        return jnp.pad(lax.pad(x, zero, crop), grown, mode=mode)
    return lax.pad(jnp.pad(x, grown, mode=mode), zero, crop)


_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@lowers(aten.pad.default)
def aten_pad(
    self: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Array:
    """pad(Tensor self, SymInt[] pad, str mode='constant', float? value=None) -> Tensor"""
    if mode == "constant":
        return _constant(self, pad, 0 if value is None else value)
    return _mirrored(self, pad, _MODES[mode])


@lowers(aten.constant_pad_nd.default)
def aten_constant_pad_nd(self: Array, pad: Sequence[int], value: Scalar = 0) -> Array:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    return _constant(self, pad, value)


@lowers(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def aten_reflection_pad(self: Array, padding: Sequence[int]) -> Array:
    """reflection_pad2d(Tensor self, SymInt[4] padding) -> Tensor"""
    return _mirrored(self, padding, "reflect")


@lowers(
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default
)
def aten_replication_pad(self: Array, padding: Sequence[int]) -> Array:
    """replication_pad2d(Tensor self, SymInt[4] padding) -> Tensor"""
    return _mirrored(self, padding, "edge")

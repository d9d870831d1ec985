"""Comparisons, logic and choice by a condition.

Results are bool; operands meet in torch's promoted dtype, so `uint8 == -1` compares as torch
does.
"""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import Array

from headrace.bridge.ops.registry import ALWAYS_BOOL, DEFAULT, aliases, lowers

aten = torch.ops.aten

aliases(
    {
        aten.eq.Tensor: jnp.equal,
        aten.eq.Scalar: jnp.equal,
        aten.ne.Tensor: jnp.not_equal,
        aten.ne.Scalar: jnp.not_equal,
        aten.not_equal.Tensor: jnp.not_equal,
        aten.not_equal.Scalar: jnp.not_equal,
        aten.lt.Tensor: jnp.less,
        aten.lt.Scalar: jnp.less,
        aten.less.Tensor: jnp.less,
        aten.less.Scalar: jnp.less,
        aten.le.Tensor: jnp.less_equal,
        aten.le.Scalar: jnp.less_equal,
        aten.less_equal.Tensor: jnp.less_equal,
        aten.less_equal.Scalar: jnp.less_equal,
        aten.gt.Tensor: jnp.greater,
        aten.gt.Scalar: jnp.greater,
        aten.greater.Tensor: jnp.greater,
        aten.greater.Scalar: jnp.greater,
        aten.ge.Tensor: jnp.greater_equal,
        aten.ge.Scalar: jnp.greater_equal,
        aten.greater_equal.Tensor: jnp.greater_equal,
        aten.greater_equal.Scalar: jnp.greater_equal,
        aten.logical_and.default: jnp.logical_and,
        aten.logical_or.default: jnp.logical_or,
        aten.logical_xor.default: jnp.logical_xor,
    },
    promotion=ALWAYS_BOOL,
)


@lowers(aten.isclose.default, promotion=ALWAYS_BOOL)
def aten_isclose(
    self: Array, other: Array, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Array:
    """isclose(Tensor self, Tensor other, float rtol=1e-05, float atol=1e-08, ...)"""
    return jnp.isclose(self, other, rtol, atol, equal_nan)


@lowers(aten.where.self, promotion=DEFAULT, over=("self", "other"))
@lowers(aten.where.Scalar, aten.where.ScalarOther, promotion=DEFAULT, over=("self", "other"))
@lowers(aten.where.ScalarSelf, promotion=DEFAULT, over=("self", "other"))
def aten_where(condition: Array, self: Array, other: Array) -> Array:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    return jnp.where(condition.astype(jnp.bool_), self, other)

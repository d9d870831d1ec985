"""Mixture-of-experts operators: transformers' grouped matmul, and the histogram that sizes its
groups.

transformers registers `transformers::grouped_mm_fallback` for dtypes that `aten._grouped_mm`
does not take; both mean the same: rows of group e, given by running offsets, times matrix e.
`lax.ragged_dot` does that.

Shapes: S = rows sorted by group, D/F = input/output size, E = groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
import transformers.integrations.moe  # noqa: F401  registers the operator  # pyright: ignore[reportUnusedImport]
from jax import lax

from headrace.bridge.ops.registry import lowers

Array = jax.Array
aten = torch.ops.aten


@lowers(torch.ops.transformers.grouped_mm_fallback.default)
def grouped_mm_fallback(input: Array, weight: Array, offs: Array) -> Array:
    """grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor: [S,D] x [E,D,F]"""
    sizes = jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(jnp.int32)
    return lax.ragged_dot(input, weight, sizes, preferred_element_type=input.dtype)


@lowers(aten.histc.default)
def aten_histc(self: Array, bins: int = 100, min: float = 0, max: float = 0) -> Array:
    """histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor

    With min == max the data's own range is used; values outside of it and NaN are not counted.
    """
    values = lax.stop_gradient(self.reshape(-1)).astype(jnp.float32)
    low, high = jnp.float32(min), jnp.float32(max)
    if min == max and values.size:
        low, high = jnp.min(values), jnp.max(values)
        low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    place = jnp.floor((values - low) * (bins / (high - low))).astype(jnp.int32)
    place = jnp.where(values == high, bins - 1, place)
    inside = (values >= low) & (values <= high)
    counts = jnp.zeros(bins, jnp.int32).at[jnp.where(inside, place, bins)].add(1, mode="drop")
    return counts.astype(self.dtype)

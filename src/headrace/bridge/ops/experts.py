"""Mixture-of-experts operators: transformers' own grouped matmul.

transformers registers `transformers::grouped_mm_fallback` for dtypes that `aten._grouped_mm`
does not take; both mean the same: rows of group e, given by running offsets, times matrix e.
`lax.ragged_dot` does that.

Shapes: S = rows sorted by group, D/F = input/output size, E = groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
import transformers.integrations.moe  # noqa: F401  registers the operator
from jax import lax

from headrace.bridge.ops.registry import lowers

Array = jax.Array


@lowers(torch.ops.transformers.grouped_mm_fallback.default)
def grouped_mm_fallback(input: Array, weight: Array, offs: Array) -> Array:
    """grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor: [S,D] x [E,D,F]"""
    sizes = jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(jnp.int32)
    return lax.ragged_dot(input, weight, sizes, preferred_element_type=input.dtype)


"""Scaled dot-product attention in plain JAX, exact torch semantics.

Models captured through Headrace's own attention operator do not come here: that node goes to
`headrace.kernels`. This rule serves modules that call `F.scaled_dot_product_attention`
themselves.

Shapes: B = batch dims, N = query heads, K = key/value heads, T = queries, S = keys, H = head
size.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from headrace.bridge.ops.promotion import opmath_of
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten


@lowers(aten.scaled_dot_product_attention.default, draws=True)
def aten_scaled_dot_product_attention(
    query: Array,
    key_: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    key: Array,
) -> Array:
    """scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, ...)"""
    if enable_gqa and key_.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key_.shape[-3]
        key_, value = (jnp.repeat(x, groups, axis=-3) for x in (key_, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    compute = opmath_of(query.dtype)
    scores = jnp.matmul(query, jnp.swapaxes(key_, -1, -2), preferred_element_type=compute) * factor
    mask = np.tri(query.shape[-2], key_.shape[-2], dtype=np.bool_) if is_causal else attn_mask
    if mask is not None and mask.dtype == np.bool_:
        scores = jnp.where(mask, scores, -jnp.inf)
    elif mask is not None:
        scores = scores + mask.astype(compute)
    weights = _softmax(scores) if mask is not None else jax.nn.softmax(scores, axis=-1)
    if dropout_p > 0:
        kept = jax.random.bernoulli(key, 1 - dropout_p, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout_p), 0)
    return jnp.matmul(weights.astype(value.dtype), value)


def _softmax(scores: Array) -> Array:
    """A row that may attend to nothing gives zeros, not nan."""
    dead = jnp.all(scores == -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(dead, 0, jax.nn.softmax(jnp.where(dead, 0, scores), axis=-1))

"""Attention with all scores in memory: the reference, and the form for small or unusual cases.

Products run in the input dtype and accumulate in float32 (float64 for float64 inputs); the softmax
is float32. The only form with dropout and with additive masks, since both are O(T*S) anyway.
Differentiated by JAX itself.

Shapes: B = sequences, N = query heads, K = key/value heads, G = N / K, T = queries, S = keys, H =
head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace.kernels.masks import MaskArrays, MaskRule, visible_BNTS


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def dense_attention(
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    *,
    scale: float,
    rule: MaskRule,
    softcap: float | None = None,
    arrays: MaskArrays = MaskArrays(),  # noqa: B008 - immutable
    bias_BNTS: Array | None = None,
    sinks_N: Array | None = None,
    dropout: float = 0.0,
    key: Array | None = None,
) -> Array:
    """Softmax attention by the definition; `bias_BNTS` is added to the scores as it is.

    A row that bool masks hide completely gives zeros and no gradient. A row that an additive
    mask hides with finfo.min is uniform over all keys, as in PyTorch; with -inf it gives
    zeros.
    """
    B, N, T, H = q_BNTH.shape
    K, S = k_BKSH.shape[1:3]
    wide = accumulator_dtype(q_BNTH.dtype)
    q_BKGTH = q_BNTH.reshape(B, K, N // K, T, H)
    scores = jnp.einsum("bkgth,bksh->bkgts", q_BKGTH, k_BKSH, preferred_element_type=wide) * scale
    scores_BNTS = scores.reshape(B, N, T, S)
    if softcap is not None:
        scores_BNTS = softcap * jnp.tanh(scores_BNTS / softcap)
    if bias_BNTS is not None:
        scores_BNTS = scores_BNTS + bias_BNTS.astype(wide)
    keep_BNTS = visible_BNTS(rule, arrays, T, S)
    if keep_BNTS is not None:
        scores_BNTS = jnp.where(keep_BNTS, scores_BNTS, -jnp.inf)
    probs_BNTS = _softmax(scores_BNTS, sinks_N)
    if dropout > 0.0:
        assert key is not None, "attention() refuses dropout without a key"
        probs_BNTS = _dropout(probs_BNTS, dropout, key)
    probs = probs_BNTS.astype(v_BKSH.dtype).reshape(B, K, N // K, T, S)
    out = jnp.einsum("bkgts,bksh->bkgth", probs, v_BKSH, preferred_element_type=wide)
    return out.reshape(B, N, T, v_BKSH.shape[-1]).astype(q_BNTH.dtype)


def _softmax(scores_BNTS: Array, sinks_N: Array | None) -> Array:
    top = scores_BNTS.max(axis=-1, keepdims=True)
    sinks = None
    if sinks_N is not None:
        sinks = sinks_N.astype(scores_BNTS.dtype)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    # A row without a visible key has top = -inf; 0 makes its probabilities exp(-inf) = 0
    # instead of NaN.
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    weights = jnp.exp(scores_BNTS - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    return weights / jnp.where(total == 0.0, 1.0, total)


def _dropout(probs: Array, rate: float, key: Array) -> Array:
    keep = jax.random.bernoulli(key, 1.0 - rate, probs.shape)
    return jnp.where(keep, probs / (1.0 - rate), 0.0)

"""Portable attention in blocks: memory grows with the sequence, not with its square.

A loop runs over batch elements and groups of key/value heads, so that the scores of one block stay
in the cache; `attention_blocks` has what happens inside it. Probabilities are computed again in the
backward pass from the saved log-sum-exp, which was faster than saving them even on a CPU
(docs/experiments.md, "Attention on CPU").

Does not know: dropout, additive masks (`attention_dense` has them), devices. The outer loop runs
over the batch, so on a mesh this belongs inside shard_map (`attention_sharded`).

Shapes: B = sequences, N = query heads, K = key/value heads, G = N / K, T = queries, S = keys,
H = head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from headrace.kernels.attention_blocks import (
    Settings,
    View,
    backward_looped,
    backward_unrolled,
    forward_looped,
    forward_unrolled,
)
from headrace.kernels.masks import MaskArrays, MaskRule

# checkpoint name of what the backward pass needs (output, log-sum-exp); for remat policies
RESIDUALS = "attention_residuals"

UNROLL_LIMIT = 1024  # tokens up to which blocks are cut while tracing
BLOCK_UNROLLED = 128  # queries in such a block
BLOCK_Q, BLOCK_K = 512, 256  # tokens, looped form
GROUP_BYTES = 2**19  # scores of one block of one group of heads


def chunked_attention(
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    *,
    scale: float,
    rule: MaskRule,
    softcap: float | None = None,
    arrays: MaskArrays = MaskArrays(),  # noqa: B008 - immutable
    sinks_N: Array | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    unroll: bool | None = None,
) -> Array:
    """Softmax attention with its own reverse-mode derivative; the same values as `dense_attention`.

    Rows without a visible key give zeros and no gradient. `unroll` and the block sizes (in
    tokens) are chosen by sequence length when None. Gradients exist for q, k, v and sinks.
    """
    N, T = q_BNTH.shape[1:3]
    K, S = k_BKSH.shape[1:3]
    if unroll is None:
        unroll = max(T, S) <= UNROLL_LIMIT
    block_q = min(block_q or (BLOCK_UNROLLED if unroll else BLOCK_Q), T)
    block_k = min(block_k or (S if unroll else BLOCK_K), S)
    bytes_a_head = N // K * block_q * (S if unroll else block_k) * 4
    fitting = max(GROUP_BYTES // bytes_a_head, 1)
    group = max(g for g in range(1, K + 1) if K % g == 0 and g <= fitting)
    settings = Settings(scale, rule, softcap, unroll, block_q, block_k, group)
    return _attention(settings, q_BNTH, k_BKSH, v_BKSH, arrays, sinks_N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: Settings, q: Array, k: Array, v: Array, arrays: MaskArrays, sinks_N: Array | None
) -> Array:
    return _attention_fwd(settings, q, k, v, arrays, sinks_N)[0]


def _attention_fwd(
    settings: Settings, q: Array, k: Array, v: Array, arrays: MaskArrays, sinks_N: Array | None
) -> tuple[Array, Any]:
    forward = forward_unrolled if settings.unroll else forward_looped
    step = functools.partial(forward, settings)
    out, lse = _map_groups(step, settings.group, (q,), (k, v), arrays, sinks_N)
    out = checkpoint_name(out.reshape(*q.shape[:3], v.shape[-1]), RESIDUALS)
    lse = checkpoint_name(lse.reshape(q.shape[:3]), RESIDUALS)
    return out, (q, k, v, arrays, sinks_N, out, lse)


def _attention_bwd(settings: Settings, residuals: Any, dout: Array) -> tuple[Any, ...]:
    q, k, v, arrays, sinks_N, out, lse = residuals
    wide = lse.dtype
    # the sum over keys of p * dp
    delta = jnp.sum(out.astype(wide) * dout.astype(wide), axis=-1)
    backward = backward_unrolled if settings.unroll else backward_looped
    step = functools.partial(backward, settings)
    by_query = (q, dout, lse, delta)
    dq, dk, dv = _map_groups(step, settings.group, by_query, (k, v), arrays, sinks_N)
    dsinks = None
    if sinks_N is not None:
        probs = jnp.exp(sinks_N.astype(wide)[None, :, None] - lse)
        dsinks = -jnp.sum(probs * delta, axis=(0, 2)).astype(sinks_N.dtype)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), None, dsinks


_attention.defvjp(_attention_fwd, _attention_bwd)


def _map_groups(
    step: Callable[..., tuple[Array, ...]],
    group: int,
    by_query: tuple[Array, ...],
    by_key: tuple[Array, ...],
    arrays: MaskArrays,
    sinks_N: Array | None,
) -> tuple[Array, ...]:
    """step(view, *by_query [K,G,T,..], *by_key [K,S,..]) for every batch element and group.

    Results have B * groups in front.
    """
    B, N = by_query[0].shape[:2]
    K = by_key[0].shape[1]
    num_groups, G = K // group, N // K

    def select(b: Array, g: Array) -> View:
        padding, segments, mask = arrays
        if mask is not None:
            mask = mask[b] if mask.shape[0] > 1 else mask[0]
            heads = (num_groups, group, G, *mask.shape[1:])
            mask = mask[None] if mask.shape[0] == 1 else mask.reshape(heads)[g]
        return View(
            padding_S=None if padding is None else padding[b],
            segments_T=None if segments is None else segments[b],
            mask_KGTS=mask,
            sinks_KG=None if sinks_N is None else sinks_N.reshape(num_groups, group, G)[g],
        )

    def body(xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return step(select(xs[0] // num_groups, xs[0] % num_groups), *xs[1:])

    steps = B * num_groups
    queries = [x.reshape(steps, group, G, *x.shape[2:]) for x in by_query]
    keys = [x.reshape(steps, group, *x.shape[2:]) for x in by_key]
    return lax.map(body, (jnp.arange(steps), *queries, *keys))

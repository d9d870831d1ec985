"""The block arithmetic of `attention_chunked`: one batch element, one group of heads.

Short sequences are cut into query blocks while tracing, each with exactly the keys it can see.
Long ones loop over query and key blocks with the online softmax; the inner trip count follows
from the mask. Knows nothing of batches, custom derivatives or devices.

Shapes: K = key/value heads of the group, G = query heads for each, T = queries, S = keys,
H = head size; t, s = one block of queries, keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from headrace.kernels.attention_dense import accumulator_dtype
from headrace.kernels.masks import MaskRule, conjunction

Position = int | Array


class Settings(NamedTuple):
    """Everything static about one call."""

    scale: float
    rule: MaskRule
    softcap: float | None
    unroll: bool
    block_q: int
    block_k: int
    group: int  # key/value heads in one step of the outer loop


class View(NamedTuple):
    """Mask arrays and sinks of one batch element and group."""

    padding_S: Array | None
    segments_T: Array | None
    mask_KGTS: Array | None
    sinks_KG: Array | None


def _cut(x: Array, start: Position, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def _added(x: Array, start: Position, value: Array, axis: int) -> Array:
    """x with value added from start on. No scatter: XLA's partitioner in jax 0.11.2 dies of one."""
    value = value + _cut(x, start, value.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, value, start, axis=axis)


def _keep(rule: MaskRule, view: View, i: Position, t: int, j: Position, s: int) -> Array | None:
    """Which of the keys [j, j + s) the queries [i, i + t) see, broadcastable to [K, G, t, s]."""
    padding, segments, mask = view.padding_S, view.segments_T, view.mask_KGTS
    if mask is not None:
        mask = mask if mask.shape[-2] == 1 else _cut(mask, i, t, mask.ndim - 2)
        mask = mask if mask.shape[-1] == 1 else _cut(mask, j, s, mask.ndim - 1)
    same_ts = None
    if segments is not None:
        same_ts = _cut(segments, i, t, 0)[:, None] == _cut(segments, j, s, 0)[None, :]
    return conjunction(
        rule.visible(i + jnp.arange(t), j + jnp.arange(s)),
        None if padding is None else _cut(padding, j, s, 0)[None, :],
        same_ts,
        mask,
    )


def _scores(settings: Settings, q_KGtH: Array, k_KsH: Array) -> tuple[Array, Array | None]:
    """Scores before masking, and the soft-cap's tanh, which its derivative needs."""
    wide = accumulator_dtype(q_KGtH.dtype)
    scores = jnp.einsum("kgth,ksh->kgts", q_KGtH, k_KsH, preferred_element_type=wide)
    scores = scores * settings.scale
    if settings.softcap is None:
        return scores, None
    bent = jnp.tanh(scores / settings.softcap)
    return settings.softcap * bent, bent


def _hide(scores: Array, keep: Array | None) -> Array:
    return scores if keep is None else jnp.where(keep, scores, -jnp.inf)


def _finite(top: Array) -> Array:
    """0 where no key is visible (yet), so that exp(-inf - top) is 0 and not NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def _finish(weighted: Array, top: Array, total: Array, view: View) -> tuple[Array, Array]:
    """Output and log-sum-exp with the sinks; a row with nothing to see gets zeros and 0."""
    if view.sinks_KG is not None:
        sinks = view.sinks_KG.astype(top.dtype)[..., None, None]
        new_top = jnp.maximum(top, sinks)
        shrink = jnp.exp(top - new_top)
        weighted, total = weighted * shrink, total * shrink + jnp.exp(sinks - new_top)
        top = new_top
    total = jnp.where(total == 0.0, 1.0, total)
    return weighted / total, (_finite(top) + jnp.log(total))[..., 0]


def _backward_block(
    settings: Settings, keep: Array | None, by_query: tuple[Array, ...], k_KsH: Array, v_KsH: Array
) -> tuple[Array, Array, Array]:
    """What one block of queries and keys adds to dq, dk, dv, in the accumulator dtype."""
    q, dout, lse_KGt, delta_KGt = by_query
    product = functools.partial(jnp.einsum, preferred_element_type=lse_KGt.dtype)
    scores, bent = _scores(settings, q, k_KsH)
    probs = jnp.exp(_hide(scores, keep) - lse_KGt[..., None])
    dv_KsH = product("kgts,kgth->ksh", probs.astype(q.dtype), dout)
    dscores = probs * (product("kgth,ksh->kgts", dout, v_KsH) - delta_KGt[..., None])
    if bent is not None:
        dscores = dscores * (1.0 - bent * bent)
    dscores = dscores.astype(q.dtype)
    dq_KGtH = product("kgts,ksh->kgth", dscores, k_KsH) * settings.scale
    dk_KsH = product("kgts,kgth->ksh", dscores, q) * settings.scale
    return dq_KGtH, dk_KsH, dv_KsH


def _cast(grads: tuple[Array, ...], *like: Array) -> tuple[Array, ...]:
    return tuple(grad.astype(x.dtype) for grad, x in zip(grads, like, strict=True))


# Short sequences: blocks cut while tracing


def _cuts(settings: Settings, T: int, S: int) -> list[tuple[int, int, int, int]]:
    """(first query, number of queries, first key, number of keys) of every block.

    A block that sees no key at all (more queries than keys, windowed) is given one masked key.
    """
    cuts: list[tuple[int, int, int, int]] = []
    for i in range(0, T, settings.block_q):
        t = min(settings.block_q, T - i)
        first, end = settings.rule.key_range(i, i + t, S)
        first = min(first, end - 1)
        cuts.append((i, t, first, end - first))
    return cuts


def forward_unrolled(
    settings: Settings, view: View, q_KGTH: Array, k_KSH: Array, v_KSH: Array
) -> tuple[Array, Array]:
    """Output [K, G, T, H] and log-sum-exp [K, G, T]."""
    wide = accumulator_dtype(q_KGTH.dtype)
    outs: list[Array] = []
    lses: list[Array] = []
    for i, t, j, s in _cuts(settings, q_KGTH.shape[2], k_KSH.shape[1]):
        q, k, v = _cut(q_KGTH, i, t, 2), _cut(k_KSH, j, s, 1), _cut(v_KSH, j, s, 1)
        scores = _hide(_scores(settings, q, k)[0], _keep(settings.rule, view, i, t, j, s))
        top = scores.max(axis=-1, keepdims=True)
        probs = jnp.exp(scores - _finite(top))
        total = probs.sum(axis=-1, keepdims=True)
        probs = probs.astype(v.dtype)
        weighted = jnp.einsum("kgts,ksh->kgth", probs, v, preferred_element_type=wide)
        out, lse = _finish(weighted, top, total, view)
        outs.append(out.astype(q.dtype))
        lses.append(lse)
    return jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=2)


def backward_unrolled(settings: Settings, view: View, *args: Array) -> tuple[Array, ...]:
    """dq, dk, dv from (q, dout, log-sum-exp, delta) [K, G, T, ..] and k, v [K, S, H]."""
    by_query, (k_KSH, v_KSH) = args[:4], args[4:]
    q_KGTH, wide = args[0], args[2].dtype
    dqs: list[Array] = []
    dk, dv = jnp.zeros(k_KSH.shape, wide), jnp.zeros(v_KSH.shape, wide)
    for i, t, j, s in _cuts(settings, q_KGTH.shape[2], k_KSH.shape[1]):
        rows = tuple(_cut(x, i, t, 2) for x in by_query)
        k, v = _cut(k_KSH, j, s, 1), _cut(v_KSH, j, s, 1)
        keep = _keep(settings.rule, view, i, t, j, s)
        dq_t, dk_s, dv_s = _backward_block(settings, keep, rows, k, v)
        dqs.append(dq_t)
        dk, dv = _added(dk, j, dk_s, 1), _added(dv, j, dv_s, 1)
    return _cast((jnp.concatenate(dqs, axis=2), dk, dv), q_KGTH, k_KSH, v_KSH)


# Long sequences: loops over blocks. The last block of an odd length starts early enough to be
# whole; what it repeats is hidden (keys, and queries in the backward pass) or written twice alike.


def _loop(
    settings: Settings, T: int, S: int, body: Callable[[Array, Array, Array, Any], Any], i: Array
) -> Callable[[Any], Any]:
    """carry -> carry over the key blocks that query block i can see."""
    block_k = settings.block_k
    start_q = jnp.minimum(i * settings.block_q, T - settings.block_q)
    first, end = settings.rule.key_range(start_q, start_q + settings.block_q, S)

    def step(j: Array, carry: Any) -> Any:
        return body(start_q, jnp.minimum(j * block_k, S - block_k), j * block_k, carry)

    return lambda carry: lax.fori_loop(first // block_k, -(-end // block_k), step, carry)


def _unrepeated(settings: Settings, S: int, j: Array, new: Array) -> Array | None:
    if S % settings.block_k == 0:
        return None
    return (j + jnp.arange(settings.block_k) >= new)[None, :]


def forward_looped(
    settings: Settings, view: View, q_KGTH: Array, k_KSH: Array, v_KSH: Array
) -> tuple[Array, Array]:
    """Output [K, G, T, H] and log-sum-exp [K, G, T]."""
    K, G, T, _ = q_KGTH.shape
    S, H = v_KSH.shape[1:]
    t, s = settings.block_q, settings.block_k
    wide = accumulator_dtype(q_KGTH.dtype)

    def key_block(i: Array, j: Array, new: Array, carry: Any) -> Any:
        weighted, top, total = carry
        k, v = _cut(k_KSH, j, s, 1), _cut(v_KSH, j, s, 1)
        keep = conjunction(_keep(settings.rule, view, i, t, j, s), _unrepeated(settings, S, j, new))
        scores = _hide(_scores(settings, _cut(q_KGTH, i, t, 2), k)[0], keep)
        new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        shrink = jnp.exp(top - _finite(new_top))
        probs = jnp.exp(scores - _finite(new_top))
        total = total * shrink + probs.sum(axis=-1, keepdims=True)
        probs = probs.astype(v.dtype)
        added = jnp.einsum("kgts,ksh->kgth", probs, v, preferred_element_type=wide)
        return weighted * shrink + added, new_top, total

    def query_block(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        zeros = jnp.zeros((K, G, t, 1), wide)
        start = (jnp.zeros((K, G, t, H), wide), zeros - jnp.inf, zeros)
        weighted, top, total = _loop(settings, T, S, key_block, i)(start)
        out, lse = _finish(weighted, top, total, view)
        at = jnp.minimum(i * t, T - t)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=at, axis=2)
        return put(carry[0], out.astype(q_KGTH.dtype)), put(carry[1], lse)

    empty = jnp.zeros((K, G, T, H), q_KGTH.dtype), jnp.zeros((K, G, T), wide)
    return lax.fori_loop(0, -(-T // t), query_block, empty)


def backward_looped(settings: Settings, view: View, *args: Array) -> tuple[Array, ...]:
    """dq, dk, dv from (q, dout, log-sum-exp, delta) [K, G, T, ..] and k, v [K, S, H]."""
    by_query, (k_KSH, v_KSH) = args[:4], args[4:]
    q_KGTH, wide = args[0], args[2].dtype
    T, S = q_KGTH.shape[2], k_KSH.shape[1]
    t, s = settings.block_q, settings.block_k

    def query_block(n: Array, carry: Any) -> Any:
        unrepeated_t = None
        if T % t:
            unrepeated_t = (jnp.minimum(n * t, T - t) + jnp.arange(t) >= n * t)[:, None]

        def key_block(i: Array, j: Array, new: Array, carry: Any) -> Any:
            dq_t, dk, dv = carry
            rows = tuple(_cut(x, i, t, 2) for x in by_query)
            unrepeated_s = _unrepeated(settings, S, j, new)
            keep = _keep(settings.rule, view, i, t, j, s)
            keep = conjunction(keep, unrepeated_s, unrepeated_t)
            k, v = _cut(k_KSH, j, s, 1), _cut(v_KSH, j, s, 1)
            more = _backward_block(settings, keep, rows, k, v)
            return dq_t + more[0], _added(dk, j, more[1], 1), _added(dv, j, more[2], 1)

        dq, dk, dv = carry
        dq_t = jnp.zeros((*dq.shape[:2], t, dq.shape[3]), wide)
        dq_t, dk, dv = _loop(settings, T, S, key_block, n)((dq_t, dk, dv))
        return _added(dq, jnp.minimum(n * t, T - t), dq_t, 2), dk, dv

    start = tuple(jnp.zeros(x.shape, wide) for x in (q_KGTH, k_KSH, v_KSH))
    return _cast(lax.fori_loop(0, -(-T // t), query_block, start), q_KGTH, k_KSH, v_KSH)

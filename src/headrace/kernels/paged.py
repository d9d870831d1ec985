"""Attention over a paged key/value cache: write this step's keys and values, read all earlier ones.

One step holds two kinds of rows: `num_decode` rows of one query each, then blocks of `block`
consecutive queries of a prompt (several blocks may belong to one sequence). Keys and values of the
whole step are written first, so a block sees the blocks before it. Pages are found through a table
a row; page 0 belongs to nobody and takes what padding writes.

Three forms: `gather` (here) runs everywhere and reads the pages up to the longest live sequence in
blocks, with a running softmax; `ragged` is jax's TPU kernel (`paged_tpu`), `triton` its GPU kernel
(`paged_gpu`).

Pages keep the model's dtype, or int8 codes with a float32 scale for each token and head beside them
(not `ragged`). A scale is the same for all numbers of a key, so it moves out of both products: the
codes are multiplied as they are, exact in every float dtype, and nothing is put back in full.

On a CPU keys lie with their tokens last, [.., H, S], values with their numbers last, [.., S, H]:
both products read rows as they lie, and XLA took five times as long for queries by keys otherwise.
Elsewhere both are [.., S, H]: a TPU stores the last dim in lanes of 128, and pages are shorter.

Shapes: T = tokens of the step, R = rows, Q = queries a row, M = pages a sequence may have, P =
pages, S = tokens a page, N = query heads, K = key/value heads, G = N / K, H = head size, L = keys
read at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace.errors import ConfigError
from headrace.kernels.attention import traced_platform
from headrace.kernels.attention_dense import accumulator_dtype

PagedForm = Literal["gather", "ragged", "triton"]
KVCacheDtype = Literal["auto", "int8"]
KEYS_AT_A_TIME = {"cpu": 32}  # measured: smaller blocks stay in its cache
KEYS_ELSEWHERE = 128
SCALE_DTYPE = jnp.dtype("float32")


@dataclass(frozen=True, kw_only=True)
class PagedRows:
    """Where the tokens of one step stand.

    positions_T: index of each token in its sequence, -1 for padding. slots_T: page * S + offset
    that takes its key and value; padding writes into page 0. tables_RM: pages of every row in
    order. The first `num_decode` tokens are rows of one query, the others rows of `block` queries.
    """

    positions_T: Array
    slots_T: Array
    tables_RM: Array
    num_decode: int
    block: int

    @property
    def num_blocks(self) -> int:
        """Rows of `block` queries."""
        return self.tables_RM.shape[0] - self.num_decode


@dataclass(frozen=True, kw_only=True)
class PagedShape:
    """What one cache holds. `layers` caches of a loop lie behind each other in one array.

    dtype: of the model's keys and values. kv_cache_dtype: "auto" stores them so, "int8" as codes.
    """

    layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: jnp.dtype
    kv_cache_dtype: KVCacheDtype = "auto"

    @property
    def bytes_a_token(self) -> int:
        """Bytes that one token takes in all layers of this cache."""
        wide = self.key_size + self.value_size
        if self.kv_cache_dtype == "int8":
            return self.layers * self.num_kv_heads * (wide + 2 * SCALE_DTYPE.itemsize)
        return self.layers * self.num_kv_heads * wide * self.dtype.itemsize


def empty_pages(shape: PagedShape, form: PagedForm) -> tuple[Array, ...]:
    """Arrays of zeros. gather: keys and values [layers*P, K, S, H] (on a CPU keys [.., H, S]), for
    int8 also their scales [layers*P, K, S]. ragged: one array. triton: as gather, heads first.
    """
    if form == "triton":
        from headrace.kernels.paged_gpu import empty_triton_pages

        return empty_triton_pages(shape)
    pages = shape.layers * shape.num_pages
    if form == "ragged":
        if shape.kv_cache_dtype != "auto":
            raise ConfigError(
                f"paged attention in {shape.kv_cache_dtype} needs form='gather' or 'triton'"
            )
        from headrace.kernels.paged_tpu import empty_ragged_pages

        return empty_ragged_pages(shape)
    heads, S = (pages, shape.num_kv_heads), shape.page_size
    stored = jnp.int8 if shape.kv_cache_dtype == "int8" else shape.dtype
    a_key = (shape.key_size, S) if _tokens_last() else (S, shape.key_size)
    keys = jnp.zeros((*heads, *a_key), stored)
    values = jnp.zeros((*heads, S, shape.value_size), stored)
    if shape.kv_cache_dtype != "int8":
        return keys, values
    return keys, values, jnp.zeros((*heads, S), SCALE_DTYPE), jnp.zeros((*heads, S), SCALE_DTYPE)


def _tokens_last() -> bool:
    """Whether the keys of form `gather` lie as [.., H, S]."""
    return traced_platform() == "cpu"


def quantize_tokens(x_TKH: Array) -> tuple[Array, Array]:
    """int8 codes [T, K, H] and float32 scales [T, K]: the largest number of a head becomes 127."""
    wide = x_TKH.astype(SCALE_DTYPE)
    scales = jnp.abs(wide).max(axis=-1) / 127
    safe = jnp.where(scales == 0, 1, scales)
    return jnp.round(wide / safe[..., None]).astype(jnp.int8), scales


def paged_attention(
    pages: tuple[Array, ...],
    q_TNH: Array,
    k_TKH: Array | None,
    v_TKH: Array | None,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Array | None = None,
    first_page: Array | int = 0,
    form: PagedForm = "gather",
) -> tuple[Array, tuple[Array, ...]]:
    """Causal attention of this step's queries over everything their sequences have in the cache.

    pages: from `empty_pages`. k_TKH, v_TKH: written before reading; None reads what another layer
    wrote (shared keys and values). window: keys i - j < window are seen, as transformers counts.
    first_page: added to every page, for a layer of a stacked cache.
    Returns [T, N, H of values] in the dtype of q, and the pages. Queries at position -1 give zeros.
    """
    given: dict[str, Any] = {
        "scale": scale, "window": window, "softcap": softcap, "first_page": first_page,
    }  # fmt: skip
    if form == "triton":
        from headrace.kernels.paged_gpu import triton_attention

        return triton_attention(pages, q_TNH, k_TKH, v_TKH, rows, sinks_N=sinks_N, **given)
    if form == "ragged":
        if sinks_N is not None:
            raise ConfigError("paged attention with sinks needs form='gather'")
        from headrace.kernels.paged_tpu import ragged_attention

        return ragged_attention(pages, q_TNH, k_TKH, v_TKH, rows, **given)
    if k_TKH is not None and v_TKH is not None:
        pages = _written(pages, k_TKH, v_TKH, rows, first_page)
    options = (scale, window, softcap, sinks_N, first_page)
    return attend_rows(pages, q_TNH, rows, *options), pages


def attend_rows(
    pages: tuple[Array, ...],
    q_TNH: Array,
    rows: PagedRows,
    *options: Any,
    heads_first: bool = False,
    decode: Callable[[Array], Array] | None = None,
) -> Array:
    """Both kinds of rows, [T, N, H of values] in the dtype of q. options: those of `attend_pages`.

    decode: computes [D, N, H] for the rows of one query in place of `attend_pages`.
    """
    D, (T, N, H) = rows.num_decode, q_TNH.shape
    attend = partial(attend_pages, heads_first=heads_first)
    parts: list[Array] = []
    if D and decode is not None:
        parts.append(decode(q_TNH[:D]))
    elif D:
        where = (rows.positions_T[:D, None], rows.tables_RM[:D])
        parts.append(attend(q_TNH[:D, None], *where, pages, *options)[:, 0])
    if rows.num_blocks:
        q_RQNH = q_TNH[D:].reshape(rows.num_blocks, rows.block, N, H)
        positions_RQ = rows.positions_T[D:].reshape(rows.num_blocks, rows.block)
        out = attend(q_RQNH, positions_RQ, rows.tables_RM[D:], pages, *options)
        parts.append(out.reshape(T - D, N, -1))
    result = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return result.astype(q_TNH.dtype)


def stored_tokens(pages: tuple[Array, ...], k_TKH: Array, v_TKH: Array) -> list[Array]:
    """Keys and values as `pages` hold them; for int8 codes, with the scales of both behind them."""
    if len(pages) == 2:
        return [k_TKH.astype(pages[0].dtype), v_TKH.astype(pages[1].dtype)]
    (keys, key_scales), (values, value_scales) = map(quantize_tokens, (k_TKH, v_TKH))
    return [keys, values, key_scales, value_scales]


def _put(pages_PKS: Array, page_T: Array, offset_T: Array, new_TK: Array) -> Array:
    """Every head of every token in its place. The heads are indices too: with `[page, :, offset]`
    the TPU compiler turns the whole cache round and back, three times its bytes of temporaries.
    """
    heads_K = jnp.arange(pages_PKS.shape[1])
    return pages_PKS.at[page_T[:, None], heads_K, offset_T[:, None]].set(new_TK)


def _written(
    pages: tuple[Array, ...], k_TKH: Array, v_TKH: Array, rows: PagedRows, first_page: Array | int
) -> tuple[Array, ...]:
    """The pages with this step's keys and values in their slots."""
    size = pages[1].shape[2]
    page_T, offset_T = rows.slots_T // size + first_page, rows.slots_T % size
    (old_keys, *old), (new_keys, *new) = pages, stored_tokens(pages, k_TKH, v_TKH)
    if _tokens_last():
        keys = old_keys.at[page_T, :, :, offset_T].set(new_keys)
    else:
        keys = _put(old_keys, page_T, offset_T, new_keys)
    rest = (_put(x, page_T, offset_T, y) for x, y in zip(old, new, strict=True))
    return keys, *rest


def attend_pages(
    q_RQNH: Array,
    positions_RQ: Array,
    tables_RM: Array,
    pages: tuple[Array, ...],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_N: Array | None,
    first_page: Array | int,
    *,
    heads_first: bool = False,
) -> Array:
    """Softmax over the pages in blocks of L keys, from the first visible one to the longest row.

    q_RQNH [R, Q, N, H] -> [R, Q, N, H of values]. heads_first: pages lie as form `triton` has them.
    """
    R, Q, N, H = q_RQNH.shape
    keys, values, *scales = pages
    K, S = values.shape[0 if heads_first else 1], values.shape[2]
    tokens_last = _tokens_last() and not heads_first
    G, wide = N // K, accumulator_dtype(q_RQNH.dtype)
    wanted = KEYS_AT_A_TIME.get(traced_platform(), KEYS_ELSEWHERE)
    per_block = max(1, wanted // S)
    L = per_block * S
    M = tables_RM.shape[1]
    tables_RM = jnp.pad(tables_RM, ((0, 0), (0, -M % per_block))) + first_page
    q = q_RQNH.reshape(R, Q, K, G, H).transpose(0, 2, 3, 1, 4).reshape(R, K, G * Q, H)
    limit = positions_RQ[:, None, None, :, None]  # [R, 1, 1, Q, 1]

    def read(pages: Array, block: Array, tokens: int = 2) -> Array:
        """[R, K, L] or [R, K, L, H], for keys [R, K, H, L]; codes in the dtype of q. tokens: the
        axis of `pages` that counts tokens.
        """
        chosen = lax.dynamic_slice(tables_RM, (0, block * per_block), (R, per_block))
        found = jnp.moveaxis(pages[:, chosen], 0, 2) if heads_first else pages[chosen]
        sizes = [R, *found.shape[2:]]
        sizes[tokens] = L
        found = jnp.moveaxis(found, 1, tokens)  # the block's pages before their tokens
        found = found.reshape(sizes)
        return found.astype(q.dtype) if found.dtype == jnp.int8 else found

    def step(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        k = read(keys, block, 3) if tokens_last else read(keys, block).swapaxes(2, 3)
        scores = jnp.einsum("rkgh,rkhl->rkgl", q, k, preferred_element_type=wide)
        if scales:
            scores = scores * read(scales[0], block)[:, :, None]
        scores = scores.reshape(R, K, G, Q, L) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        at = block * L + jnp.arange(L)
        keep = at <= limit
        if window is not None:
            keep &= at > limit - window
        scores = jnp.where(keep, scores, -jnp.inf).reshape(R, K, G * Q, L)
        new_top = jnp.maximum(top, scores.max(-1))
        safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(scores - safe[..., None])
        shrink = jnp.exp(top - safe)
        v = read(values, block)
        taken = weights * read(scales[1], block)[:, :, None] if scales else weights
        added = jnp.einsum("rkgl,rklh->rkgh", taken.astype(v.dtype), v, preferred_element_type=wide)
        return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + added

    top = jnp.full((R, K, G * Q), -jnp.inf, wide)
    total = jnp.zeros((R, K, G * Q), wide)
    if sinks_N is not None:  # one more score whose value is zero
        sinks = sinks_N.astype(wide).reshape(1, K, G, 1)
        top = jnp.broadcast_to(sinks, (R, K, G, Q)).reshape(R, K, G * Q)
        total = jnp.ones_like(total)
    out = jnp.zeros((R, K, G * Q, values.shape[-1]), wide)
    last = positions_RQ.max() // L + 1  # -1 // L + 1 = 0: nothing but padding
    first = 0
    if window is not None:
        farthest = jnp.iinfo(positions_RQ.dtype).max
        oldest = jnp.where(positions_RQ < 0, farthest, positions_RQ).min()
        first = jnp.clip((oldest - window + 1) // L, 0, last)
    _, total, out = jax.lax.fori_loop(first, last, step, (top, total, out))
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.reshape(R, K, G, Q, -1).transpose(0, 3, 1, 2, 4).reshape(R, Q, N, -1)

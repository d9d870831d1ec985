"""Paged attention on TPU through jax's own ragged paged attention kernel.

The kernel reads one array in which keys and values of a head lie side by side, and wants head
sizes in multiples of 128, so smaller heads are padded with zeros (which change no score). A row of
the step is a sequence to it: its queries are the last ones of `kv_lens` tokens. Padding inside a
block therefore counts as further tokens of that block; they read stale keys and nobody reads them.

Shapes as in `paged`; C = 2 * K, keys and values interleaved.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from headrace.kernels.paged import PagedRows, PagedShape

LANES = 128
# Of the kernel's loop. The kernel's own table asks a device, so that nothing could be planned, and
# where it has no entry it takes 128 pages at a time: with large pages the whole context.
KEYS_A_BLOCK, QUERIES_A_BLOCK = 256, 32


def ragged_obstacles(shape: PagedShape, num_heads: int) -> list[str]:
    """Why the kernel cannot serve this cache with so many query heads; empty when it can."""
    found: list[str] = []
    if shape.key_size != shape.value_size:
        found.append(f"key size {shape.key_size} and value size {shape.value_size} differ")
    if shape.page_size % 16:
        found.append(f"page size {shape.page_size} is no multiple of 16")
    # The kernel's own rule for heads a block (get_min_heads_per_blk), and Pallas' rule that a
    # block of heads is all of them or a multiple of eight.
    packing = max(1, 4 // shape.dtype.itemsize)
    both = 2 * shape.num_kv_heads
    if shape.key_size > LANES and both != packing:
        # Mosaic: "The last dim size is not 128 in original base memref"
        found.append(
            f"heads of {shape.key_size} are read only where a device has one of them in 16 bits"
        )
    if not _tiles(both, packing):
        found.append(f"{shape.num_kv_heads} key/value heads in {shape.dtype} do not fill tiles")
        return found
    block = 8 * packing if both % (8 * packing) == 0 else both
    heads = block // 2 * (num_heads // shape.num_kv_heads)
    if _tiles(heads, packing) and heads != num_heads and heads % 8:
        found.append(f"{num_heads} query heads in {shape.dtype} do not split into blocks of eight")
    return found


def _tiles(heads: int, packing: int) -> bool:
    rows, rest = divmod(heads, packing)
    return rest == 0 and (rows in (1, 2, 4, 8) or rows % 8 == 0)


def empty_ragged_pages(shape: PagedShape) -> tuple[Array, ...]:
    """One array of zeros [layers*P, S, 2K, H padded]."""
    wide = -(-shape.key_size // LANES) * LANES
    pages = shape.layers * shape.num_pages
    return (jnp.zeros((pages, shape.page_size, 2 * shape.num_kv_heads, wide), shape.dtype),)


def ragged_attention(
    pages: tuple[Array, ...],
    q_TNH: Array,
    k_TKH: Array | None,
    v_TKH: Array | None,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    first_page: Array | int,
) -> tuple[Array, tuple[Array, ...]]:
    """`paged.paged_attention` with the kernel; runs on TPU only."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    (kv,) = pages
    size, wide = kv.shape[1], kv.shape[3]
    head = q_TNH.shape[-1]
    if k_TKH is not None and v_TKH is not None:
        both = jnp.stack([_widen(k_TKH, wide), _widen(v_TKH, wide)], axis=2)
        both_TCH = both.reshape(k_TKH.shape[0], -1, wide).astype(kv.dtype)
        kv = kv.at[rows.slots_T // size + first_page, rows.slots_T % size].set(both_TCH)
    D, blocks, block = rows.num_decode, rows.num_blocks, rows.block
    starts = jnp.concatenate(
        [jnp.arange(D, dtype=jnp.int32), D + block * jnp.arange(blocks + 1, dtype=jnp.int32)]
    )
    # A block's first token is real whenever the block is in use; an empty row reads page 0.
    firsts = jnp.maximum(rows.positions_T[starts[:-1]], 0)
    lengths = firsts + jnp.where(jnp.arange(D + blocks) < D, 1, block)
    kernel: Any = ragged_paged_attention
    out = kernel(
        _widen(q_TNH, wide).astype(kv.dtype),
        kv,
        lengths.astype(jnp.int32),
        (rows.tables_RM + first_page).astype(jnp.int32),
        starts,
        jnp.asarray([D + blocks], jnp.int32),
        sm_scale=scale,
        sliding_window=window,
        soft_cap=softcap,
        num_kv_pages_per_block=min(rows.tables_RM.shape[1], max(1, KEYS_A_BLOCK // size)),
        num_queries_per_block=QUERIES_A_BLOCK,
    )
    return out[..., :head].astype(q_TNH.dtype), (kv,)


def _widen(x: Array, wide: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, wide - x.shape[-1])))

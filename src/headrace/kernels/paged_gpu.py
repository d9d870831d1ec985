"""Paged attention on GPUs: jax's Triton kernel for rows that decode, the portable form for prompts.

The kernel wants the pages of one head beside each other, so keys and values lie as [K, layers*P, S,
H] here. It splits a row's pages over several programs, whose softmax sums are joined at the end. It
knows neither windows nor sinks; rows with either are read by the portable form from the same pages.

No GPU compiles a kernel the way another does, so an engine asks `triton_fault` on its own device
before it takes this form.

Shapes as in `paged`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from headrace.kernels.attention import traced_platform
from headrace.kernels.paged import (
    SCALE_DTYPE,
    PagedRows,
    PagedShape,
    attend_rows,
    stored_tokens,
)

KEYS_A_BLOCK, MOST_SPLITS = 64, 16
SMALLEST_DOT = 16  # of Triton's tensor core products


def triton_obstacles(shape: PagedShape) -> list[str]:
    """Why the kernel cannot serve this cache; empty when it can."""
    found: list[str] = []
    if shape.key_size != shape.value_size:
        found.append(f"key size {shape.key_size} and value size {shape.value_size} differ")
    for name, size in (("head size", shape.key_size), ("page size", shape.page_size)):
        if size & (size - 1):
            found.append(f"{name} {size} is no power of two")
    if shape.key_size < SMALLEST_DOT:
        found.append(f"head size {shape.key_size} is below {SMALLEST_DOT}")
    if shape.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        found.append(f"dtype {shape.dtype}")
    return found


def empty_triton_pages(shape: PagedShape) -> tuple[Array, ...]:
    """Zeros: keys and values [K, layers*P, S, H], for int8 also their scales [K, layers*P, S]."""
    slots = (shape.num_kv_heads, shape.layers * shape.num_pages, shape.page_size)
    if shape.kv_cache_dtype != "int8":
        return jnp.zeros((*slots, shape.key_size), shape.dtype), jnp.zeros(
            (*slots, shape.value_size), shape.dtype
        )
    codes = [jnp.zeros((*slots, n), jnp.int8) for n in (shape.key_size, shape.value_size)]
    return *codes, jnp.zeros(slots, SCALE_DTYPE), jnp.zeros(slots, SCALE_DTYPE)


def triton_attention(
    pages: tuple[Array, ...],
    q_TNH: Array,
    k_TKH: Array | None,
    v_TKH: Array | None,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_N: Array | None,
    first_page: Array | int,
) -> tuple[Array, tuple[Array, ...]]:
    """`paged.paged_attention` with the kernel; on a CPU it is interpreted."""
    if k_TKH is not None and v_TKH is not None:
        pages = _written(pages, k_TKH, v_TKH, rows, first_page)
    decode = None
    if window is None and sinks_N is None:
        D = rows.num_decode
        where = (rows.positions_T[:D], rows.tables_RM[:D] + first_page)
        decode = lambda q_DNH: _decode(pages, q_DNH, *where, scale, softcap)  # noqa: E731
    options = (scale, window, softcap, sinks_N, first_page)
    return attend_rows(pages, q_TNH, rows, *options, heads_first=True, decode=decode), pages


def _written(
    pages: tuple[Array, ...], k_TKH: Array, v_TKH: Array, rows: PagedRows, first_page: Array | int
) -> tuple[Array, ...]:
    size = pages[0].shape[2]
    page_T, offset_T = rows.slots_T // size + first_page, rows.slots_T % size
    return tuple(
        old.at[:, page_T, offset_T].set(new.swapaxes(0, 1))
        for old, new in zip(pages, stored_tokens(pages, k_TKH, v_TKH), strict=True)
    )


def _kernel() -> Any:
    """jax 0.11 calls it deprecated; where it is gone `triton_fault` says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    return paged_attention


def _decode(
    pages: tuple[Array, ...],
    q_DNH: Array,
    positions_D: Array,
    tables_DM: Array,
    scale: float,
    softcap: float | None,
) -> Array:
    """One query a row over all its pages [D, N, H]."""
    keys, values, *scales = pages
    size, width = keys.shape[2], tables_DM.shape[1]
    a_block = max(1, KEYS_A_BLOCK // size)
    blocks = -(-width // a_block)
    splits = min(MOST_SPLITS, blocks)
    wide = splits * -(-blocks // splits) * a_block
    kernel = _kernel()
    kind = q_DNH.dtype if scales else keys.dtype
    return kernel(
        (q_DNH.astype(jnp.float32) * scale).astype(kind),
        keys,
        values,
        jnp.pad(tables_DM, ((0, 0), (0, wide - width))).astype(jnp.int32),
        (positions_D + 1).astype(jnp.int32),
        *scales,
        pages_per_compute_block=a_block,
        k_splits=splits,
        attn_logits_soft_cap=softcap,
        interpret=traced_platform() == "cpu",
    )


@cache
def triton_fault(shape: PagedShape, num_heads: int) -> str:
    """What is wrong with the kernel on this device: "" when it agrees with the portable form.

    Compiles and runs small steps of the given heads, with and without soft-capping.
    """
    from headrace.kernels.paged import empty_pages, paged_attention

    size, D = shape.page_size, 3
    small = replace(shape, layers=1, num_pages=3 * D + 1)
    tables = 1 + jnp.arange(3 * D, dtype=jnp.int32).reshape(D, 3)
    count = 2 * size + 3
    draw = jax.random.normal(jax.random.key(0), (count, D, num_heads + 2 * shape.num_kv_heads, 1))
    x = jnp.sin(draw * jnp.arange(1.0, shape.key_size + 1)).astype(shape.dtype)
    q, k, v = jnp.split(x, [num_heads, num_heads + shape.num_kv_heads], axis=2)

    def outputs(form: Any, softcap: float | None) -> Array:
        def step(pages: Any, at: Any) -> Any:
            i, q, k, v = at
            slots = tables[:, i // size] * size + i % size
            rows = PagedRows(
                positions_T=jnp.full(D, i), slots_T=slots, tables_RM=tables, num_decode=D, block=1
            )
            out, pages = paged_attention(
                pages, q, k, v, rows, scale=0.2, softcap=softcap, form=form
            )
            return pages, out

        at = (jnp.arange(count, dtype=jnp.int32), q, k, v)
        return jax.jit(lambda at: jax.lax.scan(step, empty_pages(small, form), at)[1])(at)

    tolerance = 1e-4 if shape.dtype == jnp.float32 else 3e-2
    try:
        for softcap in (None, 20.0):
            got, want = (
                outputs(form, softcap).astype(jnp.float32) for form in ("triton", "gather")
            )
            error = float(jnp.abs(got - want).max())
            if not error <= tolerance:
                return f"it differs by {error:.2g} from the portable form"
    except Exception as error:  # whatever a driver or compiler says: there is another form
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""

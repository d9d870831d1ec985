"""Paged attention against dense attention over each sequence alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.kernels.attention import attention, target_platform
from headrace.kernels.paged import (
    PagedForm,
    PagedRows,
    PagedShape,
    empty_pages,
    paged_attention,
    quantize_tokens,
)

N, K, H, SIZE, BLOCK, PAGES_A_ROW = 4, 2, 8, 4, 8, 40


def _reference(q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    """[T, heads, H] of one sequence through the reference form."""
    swap = lambda x: jnp.asarray(x).swapaxes(0, 1)[None]  # noqa: E731
    out = attention(swap(q), swap(k), swap(v), causal=True, implementation="dense", **options)
    return np.asarray(out[0].swapaxes(0, 1))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"softcap": 3.0}, {"window": 130}, {"sinks": True}, {"int8": True}],
    ids=["plain", "window", "softcap", "wide", "sinks", "int8"],
)
def test_a_step_equals_every_sequence_alone(options: dict[str, Any], layer: int) -> None:
    _compare(options, layer, "gather")


@pytest.mark.parametrize("options", [{"window": 5}, {"int8": True}], ids=["window", "int8"])
def test_keys_lie_another_way_elsewhere_and_read_the_same(options: dict[str, Any]) -> None:
    with target_platform("tpu"):
        _compare(options, 1, "gather", tokens_last=False)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0}, {"window": 5}, {"sinks": True}, {"int8": True}],
    ids=["softcap", "window", "sinks", "int8"],
)
def test_the_kernel_for_gpus_reads_and_writes_the_same(options: dict[str, Any]) -> None:
    """Interpreted. What it does not know (windows, sinks) is read from its pages without it."""
    _compare(options, 1, "triton")


def _compare(
    options: dict[str, Any], layer: int, form: PagedForm, *, tokens_last: bool = True
) -> None:
    """Two decode rows, an empty one, a prompt over two blocks with padding; shuffled pages."""
    options = dict(options)
    int8 = options.pop("int8", False)
    rng = np.random.default_rng(0)
    lengths = {"a": 151, "b": 6, "prompt": 20}
    done = {"a": 150, "b": 5, "prompt": 7}  # tokens that earlier steps wrote
    data = {
        name: [rng.standard_normal((n, heads, H)).astype(np.float32) for heads in (N, K, K)]
        for name, n in lengths.items()
    }
    free = list(rng.permutation(np.arange(1, 60)))
    tables = {
        name: np.array([free.pop() for _ in range(-(-n // SIZE))], np.int32)
        for name, n in lengths.items()
    }
    shape = PagedShape(
        layers=2,
        num_pages=60,
        page_size=SIZE,
        num_kv_heads=K,
        key_size=H,
        value_size=H,
        dtype=jnp.dtype("float32"),
        kv_cache_dtype="int8" if int8 else "auto",
    )
    pages = tuple(np.array(x) for x in empty_pages(shape, form))
    exact = data
    if int8:  # what is read is what the codes say
        data = {name: [q, _rounded(k), _rounded(v)] for name, (q, k, v) in data.items()}
    for name, count in done.items():
        for i in range(count):
            page, at = tables[name][i // SIZE] + layer * 60, i % SIZE
            new: list[Any] = [exact[name][1][i], exact[name][2][i]]
            if int8:
                scales = [np.abs(x).max(-1) / 127 for x in new]
                new = [x / s[:, None] for x, s in zip(new, scales, strict=True)]
                new = [np.rint(x) for x in new] + scales
            for number, (old, x) in enumerate(zip(pages, new, strict=True)):
                if form == "triton":
                    old[:, page, at] = x
                elif number == 0 and tokens_last:
                    old[page, :, :, at] = x
                else:
                    old[page, :, at] = x
    order = [("a", 150), ("b", 5), (None, -1)]
    order += [("prompt", i) for i in range(7, 20)] + [(None, -1)] * 3
    positions = np.array([i for _, i in order], np.int32)
    slots = np.array(
        [0 if n is None else tables[n][i // SIZE] * SIZE + i % SIZE for n, i in order], np.int32
    )
    rows = np.zeros((5, PAGES_A_ROW), np.int32)
    for r, name in enumerate(["a", "b", None, "prompt", "prompt"]):
        if name is not None:
            rows[r, : len(tables[name])] = tables[name]
    token = [
        np.stack([exact[n][part][i] if n else np.zeros_like(exact["a"][part][0]) for n, i in order])
        for part in range(3)
    ]
    sinks = jnp.asarray(rng.standard_normal(N), jnp.float32) if options.pop("sinks", 0) else None
    out, (new_keys, *_) = jax.jit(
        lambda pages, q, k, v: paged_attention(
            pages,
            q,
            k,
            v,
            PagedRows(
                positions_T=jnp.asarray(positions),
                slots_T=jnp.asarray(slots),
                tables_RM=jnp.asarray(rows),
                num_decode=3,
                block=BLOCK,
            ),
            scale=0.3,
            sinks_N=sinks,
            first_page=layer * 60,
            form=form,
            **options,
        )
    )(pages, *token)
    for i, (name, position) in enumerate(order):
        if name is None:
            assert np.all(np.asarray(out)[i] == 0)
            continue
        want = _reference(*data[name], scale=0.3, sinks=sinks, **options)[position]
        np.testing.assert_allclose(np.asarray(out)[i], want, rtol=2e-5, atol=2e-6)
    written = np.asarray(new_keys).swapaxes(0, 1) if form == "triton" else np.asarray(new_keys)
    other = written[(1 - layer) * 60 + 1 : (1 - layer) * 60 + 60]
    assert np.all(other == 0), "another layer's pages were written"


def _rounded(x_TKH: np.ndarray) -> np.ndarray:
    """The numbers that int8 codes with a scale for each token and head stand for, in float64."""
    wide = x_TKH.astype(np.float64)
    scales = np.abs(wide).max(-1, keepdims=True) / 127
    return (np.rint(wide / scales) * scales).astype(np.float32)


def test_codes_are_within_half_a_step_of_the_numbers() -> None:
    """Against float64, with heads of very different size, a head of zeros and a head of one."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 3, 16)) * 10.0 ** rng.integers(-6, 6, (50, 3, 1))
    x[0, 0], x[1, 1], x[1, 1, 3] = 0.0, 0.0, -7.0
    codes, scales = (np.asarray(a) for a in quantize_tokens(jnp.asarray(x, jnp.float32)))
    assert codes.dtype == np.int8
    step = np.abs(x).max(-1, keepdims=True) / 127
    error = np.abs(codes * scales.astype(np.float64)[..., None] - x)
    assert np.all(error <= 0.5001 * step)
    assert np.all(codes[0, 0] == 0)
    assert codes[1, 1, 3] == -127
    assert np.abs(codes).max() == 127


def test_int8_pages_take_a_byte_a_number_and_a_scale_a_head() -> None:
    sizes = {}
    for kind in ("float32", "bfloat16", "int8"):
        shape = PagedShape(
            layers=3,
            num_pages=5,
            page_size=16,
            num_kv_heads=8,
            key_size=128,
            value_size=64,
            dtype=jnp.dtype("bfloat16" if kind == "int8" else kind),
            kv_cache_dtype="int8" if kind == "int8" else "auto",
        )
        sizes[kind] = sum(x.nbytes for x in empty_pages(shape, "gather"))
        assert sizes[kind] == shape.bytes_a_token * 5 * 16
    scales = 3 * 5 * 16 * 8 * 2 * 4
    assert sizes["int8"] - scales == sizes["bfloat16"] / 2 == sizes["float32"] / 4
    with pytest.raises(ConfigError, match="int8 needs form='gather' or 'triton'"):
        empty_pages(shape, "ragged")


def test_shared_keys_are_read_and_not_written() -> None:
    shape = PagedShape(
        layers=1,
        num_pages=3,
        page_size=SIZE,
        num_kv_heads=K,
        key_size=H,
        value_size=H,
        dtype=jnp.dtype("float32"),
    )
    pages = empty_pages(shape, "gather")
    rows = PagedRows(
        positions_T=jnp.array([0]),
        slots_T=jnp.array([SIZE]),
        tables_RM=jnp.array([[1]]),
        num_decode=1,
        block=BLOCK,
    )
    q, k, v = (jnp.ones((1, heads, H)) for heads in (N, K, K))
    first, pages = paged_attention(pages, q, k, 2 * v, rows, scale=1.0)
    second, after = paged_attention(pages, q, None, None, rows, scale=1.0)
    np.testing.assert_allclose(first, 2.0)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(pages[0], after[0])

"""The TPU form compiled by the real TPU compiler, with no TPU present."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.kernels.attention import target_platform
from headrace.kernels.paged import (
    PagedForm,
    PagedRows,
    PagedShape,
    empty_pages,
    paged_attention,
)
from headrace.kernels.paged_sharded import one_part, page_spec, paged_attention_on_mesh
from headrace.kernels.paged_tpu import ragged_obstacles
from headrace.plan.topology import prepare_environment, without_compilation_cache

DECODE, BLOCKS, BLOCK, PAGES_A_ROW, PAGES = 8, 2, 32, 16, 64


@pytest.fixture(scope="module")
def tpu_mesh() -> Mesh:
    pytest.importorskip("libtpu")
    prepare_environment()
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    return Mesh(np.array(devices[:1]), ("x",))


def _shape(kv_heads: int, size: int, dtype: Any) -> PagedShape:
    return PagedShape(
        layers=2,
        num_pages=PAGES,
        page_size=32,
        num_kv_heads=kv_heads,
        key_size=size,
        value_size=size,
        dtype=jnp.dtype(dtype),
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "window", "softcap", "fits"),
    [
        (32, 8, 128, jnp.bfloat16, None, None, True),
        (8, 1, 256, jnp.bfloat16, 512, 30.0, True),
        (32, 4, 64, jnp.float32, None, None, True),
        (8, 8, 64, jnp.float32, None, None, False),
        (12, 12, 64, jnp.bfloat16, None, None, False),
        (8, 4, 256, jnp.bfloat16, None, None, False),
    ],
)
def test_what_fits_compiles_and_what_does_not_is_known(
    tpu_mesh: Mesh,
    heads: int,
    kv_heads: int,
    size: int,
    dtype: Any,
    window: int | None,
    softcap: float | None,
    fits: bool,
) -> None:
    shape = _shape(kv_heads, size, dtype)
    assert (not ragged_obstacles(shape, heads)) == fits
    lower = partial(_lowered, tpu_mesh, shape, heads, "ragged", window=window, softcap=softcap)
    if fits:
        assert "custom-call" in lower().compile().as_text()
    else:
        # Mosaic's own errors have no common class
        with pytest.raises(Exception, match=r"tiled|divisible|not 128"):
            lower().compile()


def test_the_portable_form_makes_no_copy_of_the_cache(tpu_mesh: Mesh) -> None:
    shape = replace(_shape(4, 256, jnp.bfloat16), num_pages=4096)
    with without_compilation_cache():
        memory = _lowered(tpu_mesh, shape, 8, "gather").compile().memory_analysis()
    cache = shape.num_pages * shape.page_size * shape.bytes_a_token
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache / 20


def _lowered(mesh: Mesh, shape: PagedShape, heads: int, form: PagedForm, **options: Any) -> Any:
    """A step with decode rows and blocks, pages donated."""
    where, dtype = NamedSharding(mesh, PartitionSpec()), shape.dtype
    tokens, size = DECODE + BLOCKS * BLOCK, shape.key_size

    def array(size: tuple[int, ...], kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, kind, sharding=where)

    def step(pages: Any, q: Any, k: Any, v: Any, at: Any, slots: Any, tables: Any) -> Any:
        rows = PagedRows(
            positions_T=at, slots_T=slots, tables_RM=tables, num_decode=DECODE, block=BLOCK
        )
        return paged_attention(
            pages, q, k, v, rows, scale=0.1, first_page=shape.num_pages, form=form, **options
        )

    with target_platform("tpu"), jax.set_mesh(mesh):
        pages = jax.eval_shape(lambda: empty_pages(shape, form))
        arguments = (
            tuple(array(p.shape, p.dtype) for p in pages),
            array((tokens, heads, size), dtype),
            array((tokens, shape.num_kv_heads, size), dtype),
            array((tokens, shape.num_kv_heads, size), dtype),
            array((tokens,), jnp.int32),
            array((tokens,), jnp.int32),
            array((DECODE + BLOCKS, PAGES_A_ROW), jnp.int32),
        )
        return jax.jit(step, donate_argnums=0).lower(*arguments)


def test_on_a_mesh_every_chip_reads_its_own_heads() -> None:
    """Two chips of four key/value heads each: pages are halved and nothing is gathered."""
    pytest.importorskip("libtpu")
    prepare_environment()
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    mesh = Mesh(np.array(devices[:2]), ("tensor",))
    shape, tokens = _shape(8, 128, jnp.bfloat16), DECODE + BLOCKS * BLOCK
    assert not ragged_obstacles(one_part(shape, mesh), 16)
    spec, everywhere = page_spec(shape, "ragged", mesh), PartitionSpec()

    def array(size: tuple[int, ...], kind: Any, where: PartitionSpec = everywhere) -> Any:
        return jax.ShapeDtypeStruct(size, kind, sharding=NamedSharding(mesh, where))

    def step(pages: Any, q: Any, k: Any, v: Any, at: Any, slots: Any, tables: Any) -> Any:
        rows = PagedRows(
            positions_T=at, slots_T=slots, tables_RM=tables, num_decode=DECODE, block=BLOCK
        )
        return paged_attention_on_mesh(mesh, spec, pages, q, k, v, rows, scale=0.1, form="ragged")

    pages = jax.eval_shape(lambda: empty_pages(shape, "ragged"))
    arguments = (
        tuple(array(p.shape, p.dtype, spec) for p in pages),
        array((tokens, 32, 128), jnp.bfloat16),
        array((tokens, 8, 128), jnp.bfloat16),
        array((tokens, 8, 128), jnp.bfloat16),
        array((tokens,), jnp.int32),
        array((tokens,), jnp.int32),
        array((DECODE + BLOCKS, PAGES_A_ROW), jnp.int32),
    )
    with without_compilation_cache(), target_platform("tpu"), jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    text, whole = compiled.as_text(), sum(p.size * p.dtype.itemsize for p in pages)
    assert "custom-call" in text and "all-gather" not in text
    assert compiled.memory_analysis().alias_size_in_bytes == whole // 2

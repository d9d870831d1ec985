"""The Triton form of paged attention, as far as a machine without a GPU can see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from headrace.kernels import paged_gpu
from headrace.kernels.attention import target_platform
from headrace.kernels.paged import PagedRows, PagedShape, empty_pages, paged_attention

SHAPE = PagedShape(
    layers=2,
    num_pages=9,
    page_size=16,
    num_kv_heads=2,
    key_size=64,
    value_size=64,
    dtype=jnp.dtype("bfloat16"),
)


def test_a_kernel_that_agrees_has_no_fault_and_one_that_does_not_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = replace(SHAPE, key_size=16, value_size=16)
    paged_gpu.triton_fault.cache_clear()
    assert paged_gpu.triton_fault(small, 4) == ""
    right = paged_gpu._decode
    monkeypatch.setattr(paged_gpu, "_decode", lambda *args: right(*args) * 1.5)
    paged_gpu.triton_fault.cache_clear()
    assert "differs by" in paged_gpu.triton_fault(small, 4)

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(paged_gpu, "_decode", broken)
    paged_gpu.triton_fault.cache_clear()
    assert paged_gpu.triton_fault(small, 4) == "RuntimeError: no such instruction"
    paged_gpu.triton_fault.cache_clear()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")  # jax 0.11
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_step_lowers_to_triton_for_cuda(kv_cache_dtype: Any) -> None:
    shape = replace(SHAPE, kv_cache_dtype=kv_cache_dtype)
    rows = PagedRows(
        positions_T=jnp.zeros(12, jnp.int32),
        slots_T=jnp.zeros(12, jnp.int32),
        tables_RM=jnp.zeros((5, 7), jnp.int32),
        num_decode=4,
        block=8,
    )
    q, k, v = (jnp.zeros((12, n, 64), jnp.bfloat16) for n in (8, 2, 2))

    def step(pages: Any, q: Any, k: Any, v: Any) -> Any:
        return paged_attention(pages, q, k, v, rows, scale=0.125, form="triton")

    h100 = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    some_gpu = jax.sharding.AbstractMesh((), (), abstract_device=h100)  # jax 0.11 asks for one
    with target_platform("gpu"), jax.sharding.use_abstract_mesh(some_gpu):
        traced = jax.jit(step).trace(empty_pages(shape, "triton"), q, k, v)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1


def test_obstacles_are_named_together() -> None:
    odd = replace(SHAPE, key_size=12, value_size=8, page_size=24)
    found = "; ".join(paged_gpu.triton_obstacles(odd))
    for part in ("12 and value size 8", "head size 12 is no power", "page size 24", "below 16"):
        assert part in found
    assert paged_gpu.triton_obstacles(SHAPE) == []

"""Paged attention on a mesh: every device holds and reads its own key/value heads.

Heads are divided over the axis `tensor` when it divides the key/value heads; with fewer of them
every device holds all pages and computes all heads. The step's tokens and tables are whole
everywhere.

Shapes as in `paged`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax import Array, shard_map
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from headrace.kernels.paged import PagedForm, PagedRows, PagedShape, paged_attention
from headrace.kernels.partition import TENSOR


def parts_of_heads(num_kv_heads: int, mesh: Mesh | AbstractMesh | None) -> int:
    """Into how many parts the key/value heads are divided: the size of `tensor`, or 1."""
    size = 1 if mesh is None else mesh.shape.get(TENSOR, 1)
    return 1 if num_kv_heads % size else size


def one_part(shape: PagedShape, mesh: Mesh | AbstractMesh | None) -> PagedShape:
    """What one device holds of a cache."""
    heads = shape.num_kv_heads // parts_of_heads(shape.num_kv_heads, mesh)
    return replace(shape, num_kv_heads=heads)


def page_spec(shape: PagedShape, form: PagedForm, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """How every array of `empty_pages` lies on the mesh."""
    if parts_of_heads(shape.num_kv_heads, mesh) == 1:
        return PartitionSpec()
    axis = {"triton": 0, "gather": 1, "ragged": 2}[form]  # that counts heads
    return PartitionSpec(*[None] * axis, TENSOR)


def paged_attention_on_mesh(
    mesh: Mesh | AbstractMesh,
    spec: PartitionSpec,
    pages: tuple[Array, ...],
    q_TNH: Array,
    k_TKH: Array | None,
    v_TKH: Array | None,
    rows: PagedRows,
    *,
    sinks_N: Array | None = None,
    first_page: Array | int = 0,
    **options: Any,
) -> tuple[Array, tuple[Array, ...]]:
    """`paged_attention` inside shard_map. spec: of the pages, from `page_spec`. options: scale,
    window, softcap, form.
    """
    heads = TENSOR if TENSOR in spec else None
    by_head, whole = PartitionSpec(None, heads), PartitionSpec()

    def local(
        pages: tuple[Array, ...],
        q: Array,
        k: Array | None,
        v: Array | None,
        sinks: Array | None,
        positions: Array,
        slots: Array,
        tables: Array,
        first: Array | int,
    ) -> tuple[Array, tuple[Array, ...]]:
        own = replace(rows, positions_T=positions, slots_T=slots, tables_RM=tables)
        return paged_attention(pages, q, k, v, own, sinks_N=sinks, first_page=first, **options)

    divided = shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, by_head, by_head, by_head, PartitionSpec(heads), *[whole] * 4),
        out_specs=(by_head, spec),
        check_vma=False,  # Pallas calls do not declare over which axes their results vary
    )
    where = (rows.positions_T, rows.slots_T, rows.tables_RM, first_page)
    return divided(pages, q_TNH, k_TKH, v_TKH, sinks_N, *where)

"""Attention on a mesh: every device computes its own sequences and heads.

Neither a Pallas call nor the chunked form's loop over the batch can be partitioned by XLA, which
would gather the whole batch on every device; inside shard_map each device sees its part only.
The sequence itself is not divided here.

Shapes: B = sequences, N = query heads, K = key/value heads, T = queries, S = keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from headrace.errors import ConfigError
from headrace.kernels.attention import attention


def attention_on_mesh(
    mesh: Mesh,
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    *,
    batch_axes: Sequence[str] = ("data", "fsdp"),
    head_axis: str | None = "tensor",
    padding_mask: Array | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    sinks: Array | None = None,
    **options: Any,
) -> Array:
    """`attention` with B divided over `batch_axes` and heads over `head_axis`.

    Axes that the mesh does not have are left out. `options` are the rest of attention's keywords;
    dropout is refused, since every device would draw the same. Raises ConfigError when batch or
    heads cannot be divided evenly.
    """
    axes = tuple(axis for axis in batch_axes if axis in mesh.shape)
    heads = head_axis if head_axis in mesh.shape else None
    _check(mesh, q_BNTH, k_BKSH, axes, heads, options)
    batch = axes or None
    rows, by_head = PartitionSpec(batch), PartitionSpec(batch, heads)
    mask = None if mask is None else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask_spec = None
    if mask is not None:
        mask_batch = batch if mask.shape[0] > 1 else None
        mask_spec = PartitionSpec(mask_batch, heads if mask.shape[1] > 1 else None)
    arrays = {
        "padding_mask": (padding_mask, rows),
        "segment_ids": (segment_ids, rows),
        "mask": (mask, mask_spec),
        "sinks": (sinks, PartitionSpec(heads)),
    }
    given = {name: array for name, (array, _) in arrays.items() if array is not None}
    specs = {name: arrays[name][1] for name in given}

    def local(q: Array, k: Array, v: Array, given: dict[str, Array]) -> Array:
        return attention(q, k, v, **given, **options)

    divided = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(by_head, by_head, by_head, specs),
        out_specs=by_head,
        check_vma=False,  # Pallas calls do not declare over which axes their results vary
    )
    return divided(q_BNTH, k_BKSH, v_BKSH, given)


def _check(
    mesh: Mesh,
    q: Array,
    k: Array,
    batch_axes: tuple[str, ...],
    head_axis: str | None,
    options: dict[str, Any],
) -> None:
    problems: list[str] = []
    parts = 1
    for axis in batch_axes:
        parts *= mesh.shape[axis]
    if q.shape[0] % parts:
        problems.append(f"{q.shape[0]} sequences over {parts} devices; needed: a multiple")
    if head_axis is not None and (k.shape[1] % mesh.shape[head_axis]):
        problems.append(
            f"{k.shape[1]} key/value heads over {head_axis}={mesh.shape[head_axis]}; "
            "needed: a multiple, or head_axis=None"
        )
    if options.get("dropout", 0.0) > 0.0:
        problems.append(f"dropout={options['dropout']}; needed: 0 on a mesh")
    if problems:
        raise ConfigError("attention_on_mesh cannot run:\n  " + "\n  ".join(problems))

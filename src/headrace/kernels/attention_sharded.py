"""Attention on a mesh: every device computes its own sequences and heads.

Neither a Pallas call nor the chunked form's loop over the batch can be partitioned by XLA, which
would gather the whole batch on every device; inside shard_map each device sees its part only.

Context parallelism, where each device holds a part of every sequence, has two forms:

    by heads   queries, keys and values change from a part of the tokens with all heads to all
               tokens with a part of the heads (all-to-all), and back: any kernel, any mask, equal
               work. Needs query heads that tensor x context divides.
    gathered   keys and values are gathered, each device keeps its queries; masks become arrays.

Shapes: B = sequences, N = query heads, K = key/value heads, T = queries, S = keys.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from headrace.errors import ConfigError
from headrace.kernels.attention import attention
from headrace.kernels.masks import MaskRule, conjunction
from headrace.kernels.partition import BATCH_AXES, CONTEXT, TENSOR, Partition


def attention_on_mesh(
    mesh: Mesh | AbstractMesh,
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    *,
    padding_mask: Array | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    sinks: Array | None = None,
    **options: Any,
) -> Array:
    """`attention` with B divided over the batch axes, heads over `tensor` (and `context`).

    Key/value heads that the axes do not divide are repeated until they are: each device gets those
    its own query heads use. Axes that the mesh does not have are left out. `options` are the rest
    of attention's keywords. Dropout and additive masks run in the dense form, which XLA divides
    itself. Raises ConfigError when the sequences cannot be divided evenly.
    """
    partition = Partition(mesh=mesh)
    _check(partition, q_BNTH)
    arrays: dict[str, Any] = {
        "padding_mask": padding_mask, "segment_ids": segment_ids, "mask": mask, "sinks": sinks,
    }  # fmt: skip
    additive = mask is not None and mask.dtype != jnp.bool_
    if additive or options.get("dropout", 0.0) > 0.0:
        return attention(q_BNTH, k_BKSH, v_BKSH, **arrays, **options, implementation="dense")
    if mask is not None:
        arrays["mask"] = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    num_heads = q_BNTH.shape[1]
    if num_heads % partition.size((TENSOR, CONTEXT)) == 0:
        return _by_heads(partition, (TENSOR, CONTEXT), q_BNTH, k_BKSH, v_BKSH, arrays, options)
    axes = (TENSOR,) if num_heads % partition.size(TENSOR) == 0 else ()
    if partition.size(CONTEXT) == 1:
        return _by_heads(partition, axes, q_BNTH, k_BKSH, v_BKSH, arrays, options)
    return _gathered(partition, axes, q_BNTH, k_BKSH, v_BKSH, arrays, options)


def _by_heads(
    partition: Partition,
    axes: tuple[str, ...],
    q: Array,
    k: Array,
    v: Array,
    arrays: dict[str, Any],
    options: dict[str, Any],
) -> Array:
    rows, heads = partition.entry(*BATCH_AXES), partition.entry(*(a for a in axes if a == TENSOR))
    tokens = partition.entry(*(a for a in axes if a == CONTEXT))
    k, v = (_repeated(partition, x, q.shape[1], heads) for x in (k, v))
    given = {name: array for name, array in arrays.items() if array is not None}
    specs = {name: _mask_spec(name, array, rows, heads) for name, array in given.items()}
    divided = PartitionSpec(rows, heads, tokens)
    parts = partition.size(CONTEXT) if tokens is not None else 1

    def local(q: Array, k: Array, v: Array, given: dict[str, Array]) -> Array:
        if parts == 1:
            return attention(q, k, v, **given, **options)
        num_heads = q.shape[1]
        k, v = (_repeat(x, num_heads, parts) for x in (k, v))
        q, k, v = (_exchange(x, heads_to_tokens=False) for x in (q, k, v))
        own = {name: _own_heads(name, x, num_heads, parts) for name, x in given.items()}
        return _exchange(attention(q, k, v, **own, **options), heads_to_tokens=True)

    return _divided(partition, local, (divided, divided, divided, specs), divided)(q, k, v, given)


def _exchange(x_BNTH: Array, *, heads_to_tokens: bool) -> Array:
    """A part of the tokens of all heads <-> all tokens of a part of the heads."""
    split, join = (2, 1) if heads_to_tokens else (1, 2)
    return jax.lax.all_to_all(x_BNTH, CONTEXT, split_axis=split, concat_axis=join, tiled=True)


def _own_heads(name: str, array: Array, num_heads: int, parts: int) -> Array:
    """The entries of this device's heads, of what has entries by head."""
    axis = {"sinks": 0, "mask": 1}.get(name)
    if axis is None or array.shape[axis] != num_heads:
        return array
    size = num_heads // parts
    start = jax.lax.axis_index(CONTEXT) * size
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=axis)


def _mask_spec(name: str, array: Array, rows: Any, heads: Any) -> PartitionSpec:
    if name == "sinks":
        return PartitionSpec(heads)
    if name == "mask":
        first, second = array.shape[:2]
        return PartitionSpec(rows if first > 1 else None, heads if second > 1 else None)
    return PartitionSpec(rows)


def _gathered(
    partition: Partition,
    axes: tuple[str, ...],
    q: Array,
    k: Array,
    v: Array,
    arrays: dict[str, Any],
    options: dict[str, Any],
) -> Array:
    """Each device has its own queries and every key; memory of the mask is T / context * S."""
    rows, heads = partition.entry(*BATCH_AXES), partition.entry(*axes)
    k, v = (_repeated(partition, x, q.shape[1], heads) for x in (k, v))
    options = dict(options)
    rule = MaskRule(causal=options.pop("causal"), window=options.pop("window", None))
    segments = arrays["segment_ids"]
    given = {name: arrays[name] for name in ("padding_mask", "mask", "sinks")}
    given |= {"query_segments": segments, "key_segments": segments}
    given = {name: array for name, array in given.items() if array is not None}
    specs = {name: _mask_spec(name, array, rows, heads) for name, array in given.items()}
    if "query_segments" in given:
        specs["query_segments"] = PartitionSpec(rows, CONTEXT)
    if "mask" in given and given["mask"].shape[2] > 1:
        specs["mask"] = PartitionSpec(*specs["mask"], CONTEXT)
    by_query, by_head = PartitionSpec(rows, heads, CONTEXT), PartitionSpec(rows, heads)

    def local(q: Array, k: Array, v: Array, given: dict[str, Array]) -> Array:
        given = dict(given)
        length = q.shape[2]
        rows_T = jax.lax.axis_index(CONTEXT) * length + jnp.arange(length)
        keep = rule.visible(rows_T, jnp.arange(k.shape[2]))
        keep = None if keep is None else keep[None, None]
        own, every = given.pop("query_segments", None), given.pop("key_segments", None)
        if own is not None and every is not None:
            keep = conjunction(keep, own[:, None, :, None] == every[:, None, None, :])
        keep = conjunction(keep, given.pop("mask", None))
        return attention(q, k, v, causal=False, mask=keep, **given, **options)

    specs_in = (by_query, by_head, by_head, specs)
    return _divided(partition, local, specs_in, by_query)(q, k, v, given)


def _divided(partition: Partition, local: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        local,
        mesh=partition.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # Pallas calls do not declare over which axes their results vary
    )


def _repeated(partition: Partition, x_BKSH: Array, num_heads: int, heads: Any) -> Array:
    """Key/value heads repeated until the axis of the heads divides them.

    They are whole on every device before, so each takes its own without any traffic.
    """
    parts = 1 if heads is None else partition.size(heads)
    if x_BKSH.shape[1] % parts == 0:
        return x_BKSH
    rows, tokens = partition.entry(*BATCH_AXES), partition.entry(CONTEXT)
    x_BKSH = partition.constrain(x_BKSH, rows, None, tokens, None)
    return _repeat(x_BKSH, num_heads, parts)


def _repeat(x_BKSH: Array, num_heads: int, parts: int) -> Array:
    """The fewest repetitions that `parts` divides; the query groups stay the same."""
    heads = x_BKSH.shape[1]
    times = next(
        m
        for m in range(1, num_heads // heads + 1)
        if heads * m % parts == 0 and num_heads % (heads * m) == 0
    )
    return x_BKSH if times == 1 else jnp.repeat(x_BKSH, times, axis=1)


def _check(partition: Partition, q: Array) -> None:
    parts = partition.size(BATCH_AXES)
    if q.shape[0] % parts:
        raise ConfigError(
            f"attention_on_mesh cannot run: {q.shape[0]} sequences over {parts} devices of the "
            "batch axes; needed: a multiple"
        )
    length, context = q.shape[2], partition.size(CONTEXT)
    if length % context:
        raise ConfigError(
            f"attention_on_mesh cannot run: {length} tokens over context {context}; needed: a "
            "multiple (pad_to_multiple_of)"
        )

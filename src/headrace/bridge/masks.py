"""The attention and mask operators in JAX.

A `headrace::mask` node lowers to a `MaskSpec`, a description; it becomes a boolean array only if
something other than attention reads it. Shapes: B = batch, N = query heads, T = queries, S = keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from headrace.kernels.attention import attention
from headrace.kernels.attention_sharded import attention_on_mesh
from headrace.kernels.partition import Partition

Array = jax.Array


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """A mask by its meaning. `window` 0 is none; `padding` [B, S] is True for real keys; equal
    `segments` attend.
    """

    batch_size: int
    q_length: int
    kv_length: int
    causal: bool
    window: int
    padding: Array | None
    segments: Array | None

    def dense(self) -> Array:
        """bool [B, 1, T, S], as the operator records it."""
        i = jnp.arange(self.q_length)[:, None]
        j = jnp.arange(self.kv_length)[None, :]
        keep = (j <= i) if self.causal else jnp.ones((self.q_length, self.kv_length), bool)
        if self.window:
            keep &= (j > i - self.window) if self.causal else (jnp.abs(i - j) <= self.window)
        keep = jnp.broadcast_to(keep, (self.batch_size, 1, self.q_length, self.kv_length))
        if self.padding is not None:
            keep &= self.padding[:, None, None, :].astype(bool)
        if self.segments is not None:
            keep &= self.segments[:, None, :, None] == self.segments[:, None, None, :]
        return keep


def mask_rule(
    batch_size: int,
    q_length: int,
    kv_length: int,
    causal: bool,
    window: int,
    padding: Array | None = None,
    segments: Array | None = None,
) -> MaskSpec:
    """headrace::mask"""
    return MaskSpec(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        causal=causal,
        window=window,
        padding=padding,
        segments=segments,
    )


def attention_rule(
    query: Array,
    key_: Array,
    value: Array,
    mask: MaskSpec | Array | None,
    bias: Array | None,
    sinks: Array | None,
    causal: bool,
    scale: float,
    softcap: float,
    dropout: float,
    layer: int,
    *,
    segment_ids: Array | None = None,
    key: Array | None = None,
    partition: Partition | None = None,
) -> Array:
    """headrace::attention; `segment_ids` [B, T] of the batch apply to self-attention only."""
    attend: Any = attention
    if partition is not None:
        attend = functools.partial(attention_on_mesh, partition.mesh)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap or None, "sinks": sinks}
    if key is not None:
        options |= {"dropout": dropout, "key": key}
    if isinstance(mask, MaskSpec):
        segments = mask.segments
        if segment_ids is not None and mask.q_length == mask.kv_length:
            segments = segment_ids
        if bias is not None:
            allowed = replace(mask, segments=segments).dense()
            options["mask"] = jnp.where(allowed, bias, jnp.finfo(bias.dtype).min)
            return attend(query, key_, value, causal=False, **options)
        options |= {
            "window": mask.window or None,
            "padding_mask": None if mask.padding is None else mask.padding.astype(bool),
            "segment_ids": segments,
        }
        return attend(query, key_, value, causal=mask.causal, **options)
    if segment_ids is not None and query.shape[2] == key_.shape[2]:
        options["segment_ids"] = segment_ids
    if bias is not None:
        mask = bias if mask is None else _biased(mask, bias)
    return attend(query, key_, value, causal=causal and query.shape[2] > 1, mask=mask, **options)


def _biased(mask: Array, bias: Array) -> Array:
    if mask.dtype == jnp.bool_:
        return jnp.where(mask, bias, jnp.finfo(bias.dtype).min)
    return mask + bias

"""Rows that a mask selects, padded to the largest number there can be (`passes/bounded.py`).

Rows behind the selected ones read place 0, so that whatever is computed from them is as finite as
the rest; `valid` says which rows are real.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from headrace.bridge.dtypes import default_int
from headrace.bridge.ops.registry import lowers

Array = jax.Array


@torch.library.custom_op("headrace::places", mutates_args=())
def places_op(mask: Tensor) -> Tensor:
    """Indices [numel, ndim] of the elements that are not zero, in order, then zeros."""
    found = mask.nonzero()
    rest = found.new_zeros(mask.numel() - found.shape[0], mask.ndim)
    return torch.cat([found, rest])


@places_op.register_fake
def _(mask: Tensor) -> Tensor:  # pyright: ignore[reportUnusedFunction]
    return mask.new_empty((mask.numel(), mask.ndim), dtype=torch.int64)


@torch.library.custom_op("headrace::valid", mutates_args=())
def valid_op(like: Tensor, dim: int, count: Tensor, times: int) -> Tensor:
    """Booleans [1, .., n, .., 1]: the first `count * times` of the n = like.shape[dim] rows."""
    shape = [1] * like.ndim
    shape[dim] = like.shape[dim]
    return (torch.arange(like.shape[dim], device=like.device) < count * times).view(shape)


@valid_op.register_fake
def _(like: Tensor, dim: int, count: Tensor, times: int) -> Tensor:  # pyright: ignore[reportUnusedFunction]
    shape = [1] * like.ndim
    shape[dim] = like.shape[dim]
    return like.new_empty(shape, dtype=torch.bool)


@torch.library.custom_op("headrace::pieces", mutates_args=())
def pieces_op(input: Tensor, counts: list[Tensor], dim: int) -> list[Tensor]:
    """`input` split into pieces of `counts` rows, each padded to the length of `input`."""
    length = input.shape[dim]
    steps, start = torch.arange(length, device=input.device), 0
    found: list[Tensor] = []
    for count in counts:
        found.append(input.index_select(dim, (steps + start).clamp(max=length - 1)))
        start = start + count
    return found


@pieces_op.register_fake
def _(input: Tensor, counts: list[Tensor], dim: int) -> list[Tensor]:  # pyright: ignore[reportUnusedFunction]
    return [torch.empty_like(input) for _ in counts]


@torch.library.custom_op("headrace::shared", mutates_args=())
def shared_op(input: Tensor, each: Tensor, shares: int) -> Tensor:
    """[shares, n // shares, ..] of the n rows of `input`: `each` rows for each, in order."""
    room = input.shape[0] // shares
    starts = torch.arange(shares, device=input.device) * each
    steps = torch.arange(room, device=input.device)
    return input[(starts[:, None] + steps).clamp(max=input.shape[0] - 1)]


@shared_op.register_fake
def _(input: Tensor, each: Tensor, shares: int) -> Tensor:  # pyright: ignore[reportUnusedFunction]
    return input.new_empty((shares, input.shape[0] // shares, *input.shape[1:]))


@torch.library.custom_op("headrace::joined", mutates_args=())
def joined_op(tensors: list[Tensor], counts: list[Tensor], dim: int) -> Tensor:
    """The first `counts` rows of each tensor, one after the other; together as many as each has."""
    parts = zip(tensors, counts, strict=True)
    return torch.cat([t.narrow(dim, 0, int(count)) for t, count in parts], dim)


@joined_op.register_fake
def _(tensors: list[Tensor], counts: list[Tensor], dim: int) -> Tensor:  # pyright: ignore[reportUnusedFunction]
    return torch.empty_like(tensors[0])


@lowers(torch.ops.headrace.places.default)
def places(mask: Array) -> Array:
    """places(Tensor mask) -> Tensor"""
    found = jnp.nonzero(mask, size=mask.size, fill_value=0)
    return jnp.stack(found, axis=1).astype(default_int())


@lowers(torch.ops.headrace.valid.default)
def valid(like: Array, dim: int, count: Array, times: int) -> Array:
    """valid(Tensor like, int dim, Tensor count, int times) -> Tensor"""
    shape: Sequence[int] = [like.shape[dim] if d == dim else 1 for d in range(like.ndim)]
    return (jnp.arange(like.shape[dim]) < count * times).reshape(shape)


@lowers(torch.ops.headrace.pieces.default)
def pieces(input: Array, counts: Sequence[Array], dim: int) -> list[Array]:
    """pieces(Tensor input, Tensor[] counts, SymInt dim) -> Tensor[]"""
    starts = _starts(counts)
    steps = jnp.arange(input.shape[dim])
    return [jnp.take(input, steps + start, axis=dim, mode="clip") for start in starts[:-1]]


@lowers(torch.ops.headrace.shared.default)
def shared(input: Array, each: Array, shares: int) -> Array:
    """shared(Tensor input, Tensor each, SymInt shares) -> Tensor"""
    places = jnp.arange(shares)[:, None] * each + jnp.arange(input.shape[0] // shares)
    return jnp.take(input, places, axis=0, mode="clip")


@lowers(torch.ops.headrace.joined.default)
def joined(tensors: Sequence[Array], counts: Sequence[Array], dim: int) -> Array:
    """joined(Tensor[] tensors, Tensor[] counts, SymInt dim) -> Tensor"""
    starts = _starts(counts)
    row = jnp.arange(tensors[0].shape[dim])
    piece = jnp.clip(jnp.searchsorted(starts, row, side="right") - 1, 0, len(tensors) - 1)
    stacked = jnp.stack([jnp.moveaxis(t, dim, 0) for t in tensors])
    return jnp.moveaxis(stacked[piece, row - starts[piece]], 0, dim)


def _starts(counts: Sequence[Array]) -> Array:
    """Where each piece starts, and the end."""
    return jnp.concatenate([jnp.zeros(1, default_int()), jnp.cumsum(jnp.stack(counts))])

"""Views and rearrangements: every result is a new value, XLA decides what is copied.

A JAX array has no strides; `as_strided` reads the tensor as if it were contiguous, which
functional graphs give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from jax.core import Tracer

from headrace.bridge.ops.dims import one_dim
from headrace.bridge.ops.promotion import result_dtype
from headrace.bridge.ops.registry import aliases, lowers
from headrace.errors import CaptureError

aten = torch.ops.aten


@lowers(aten.view.default, aten._unsafe_view.default, aten.view_copy.default)
def aten_view(self: Array, size: Sequence[int]) -> Array:
    """view(Tensor self, SymInt[] size) -> Tensor"""
    return jnp.reshape(self, _sized(size, self.size))


@lowers(aten.reshape.default)
def aten_reshape(self: Array, shape: Sequence[int]) -> Array:
    """reshape(Tensor self, SymInt[] shape) -> Tensor"""
    return jnp.reshape(self, _sized(shape, self.size))


def _sized(shape: Sequence[int], total: int) -> tuple[int, ...]:
    """-1 resolved; jnp cannot when another size is 0."""
    known = math.prod(size for size in shape if size != -1)
    return tuple(total // max(known, 1) if size == -1 else size for size in shape)


def _like(x: Array, other: Array) -> Array:
    return jnp.reshape(x, other.shape)


def _matrix_transpose(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


aliases(
    {
        aten.view_as.default: _like,
        aten.reshape_as.default: _like,
        aten.t.default: lambda x: x.T,
        aten.numpy_T.default: lambda x: x.T,
        aten.mT.default: _matrix_transpose,
        aten.mH.default: lambda x: jnp.conj(_matrix_transpose(x)),
        aten.adjoint.default: lambda x: jnp.conj(_matrix_transpose(x)),
        aten.ravel.default: jnp.ravel,
        aten.fliplr.default: jnp.fliplr,
        aten.flipud.default: jnp.flipud,
        aten.flip.default: lambda x, dims: jnp.flip(x, tuple(dims)),
        aten.permute.default: lambda x, dims: jnp.transpose(x, tuple(dims)),
        aten.movedim.int: jnp.moveaxis,
        aten.moveaxis.int: jnp.moveaxis,
        aten.movedim.intlist: lambda x, a, b: jnp.moveaxis(x, tuple(a), tuple(b)),
        aten.moveaxis.intlist: lambda x, a, b: jnp.moveaxis(x, tuple(a), tuple(b)),
        aten.tile.default: lambda x, dims: jnp.tile(x, tuple(dims)),
        aten.expand_as.default: lambda x, other: jnp.broadcast_to(x, other.shape),
        aten.broadcast_to.default: lambda x, size: aten_expand(x, size),
        aten.broadcast_tensors.default: lambda xs: list(jnp.broadcast_arrays(*xs)),
        aten.squeeze.default: lambda x: jnp.squeeze(x),
        aten.squeeze_copy.default: lambda x: jnp.squeeze(x),
        aten.squeeze.dim: lambda x, dim: _squeezed(x, [dim]),
        aten.squeeze.dims: lambda x, dims: _squeezed(x, dims),
        aten.unflatten.int: lambda x, dim, sizes: _unflattened(x, dim, sizes),
        aten.meshgrid.default: lambda xs: _meshgrid(xs, "ij"),
    }
)


def _squeezed(x: Array, dims: Sequence[int]) -> Array:
    axes = {one_dim(dim, x.ndim) for dim in dims}
    return jnp.squeeze(x, tuple(axis for axis in axes if x.ndim and x.shape[axis] == 1))


def _unflattened(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    axis = one_dim(dim, x.ndim)
    return x.reshape(*x.shape[:axis], *_sized(sizes, x.shape[axis]), *x.shape[axis + 1 :])


@lowers(aten.transpose.int)
def aten_transpose(self: Array, dim0: int, dim1: int) -> Array:
    """transpose.int(Tensor self, int dim0, int dim1) -> Tensor"""
    return jnp.swapaxes(self, dim0, dim1) if self.ndim else self


@lowers(aten.swapaxes.default)
def aten_swapaxes(self: Array, axis0: int, axis1: int) -> Array:
    """swapaxes(Tensor self, int axis0, int axis1) -> Tensor"""
    return aten_transpose(self, axis0, axis1)


@lowers(aten.swapdims.default)
def aten_swapdims(self: Array, dim0: int, dim1: int) -> Array:
    """swapdims(Tensor self, int dim0, int dim1) -> Tensor"""
    return aten_transpose(self, dim0, dim1)


@lowers(aten.unsqueeze.default)
def aten_unsqueeze(self: Array, dim: int) -> Array:
    """unsqueeze(Tensor self, int dim) -> Tensor"""
    return jnp.expand_dims(self, dim)


@lowers(aten.expand.default)
def aten_expand(self: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    """expand(Tensor self, SymInt[] size, *, bool implicit=False) -> Tensor"""
    own = (1,) * (len(size) - self.ndim) + self.shape
    return jnp.broadcast_to(self, [o if s == -1 else s for s, o in zip(size, own, strict=True)])


@lowers(aten.flatten.using_ints)
def aten_flatten(self: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    """flatten.using_ints(Tensor self, int start_dim=0, int end_dim=-1) -> Tensor"""
    if self.ndim == 0:
        return self.reshape(1)
    first, last = one_dim(start_dim, self.ndim), one_dim(end_dim, self.ndim)
    merged = math.prod(self.shape[first : last + 1])
    return self.reshape(*self.shape[:first], merged, *self.shape[last + 1 :])


@lowers(aten.slice.Tensor)
def aten_slice(
    self: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    """slice.Tensor(Tensor self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1)"""
    axis = one_dim(dim, self.ndim)
    begin, stop, _ = slice(start, end, step).indices(self.shape[axis])
    return lax.slice_in_dim(self, begin, max(begin, stop), step, axis)


@lowers(aten.narrow.default)
def aten_narrow(self: Array, dim: int, start: int, length: int) -> Array:
    """narrow(Tensor self, int dim, SymInt start, SymInt length) -> Tensor"""
    axis = one_dim(dim, self.ndim)
    begin = start + self.shape[axis] if start < 0 else start
    return lax.slice_in_dim(self, begin, begin + length, 1, axis)


@lowers(aten.select.int)
def aten_select(self: Array, dim: int, index: int) -> Array:
    """select.int(Tensor self, int dim, SymInt index) -> Tensor"""
    return lax.index_in_dim(self, index, one_dim(dim, self.ndim), keepdims=False)


def _pieces(x: Array, sizes: Sequence[int], dim: int) -> list[Array]:
    axis = one_dim(dim, x.ndim)
    ends = np.cumsum(sizes)
    return [
        lax.slice_in_dim(x, int(end) - size, int(end), 1, axis)
        for size, end in zip(sizes, ends, strict=True)
    ]


@lowers(aten.split.Tensor)
def aten_split(self: Array, split_size: int, dim: int = 0) -> list[Array]:
    """split.Tensor(Tensor self, SymInt split_size, int dim=0) -> Tensor[]"""
    length = self.shape[one_dim(dim, self.ndim)]
    if length == 0:
        return [self]
    sizes = [min(split_size, length - begin) for begin in range(0, length, split_size)]
    return _pieces(self, sizes, dim)


@lowers(aten.split_with_sizes.default)
def aten_split_with_sizes(self: Array, split_sizes: Sequence[int], dim: int = 0) -> list[Array]:
    """split_with_sizes(Tensor self, SymInt[] split_sizes, int dim=0) -> Tensor[]"""
    return _pieces(self, split_sizes, dim)


@lowers(aten.split.sizes)
def aten_split_sizes(self: Array, split_size: Sequence[int], dim: int = 0) -> list[Array]:
    """split.sizes(Tensor self, SymInt[] split_size, int dim=0) -> Tensor[]"""
    return _pieces(self, split_size, dim)


@lowers(aten.chunk.default)
def aten_chunk(self: Array, chunks: int, dim: int = 0) -> list[Array]:
    """chunk(Tensor self, int chunks, int dim=0) -> Tensor[]"""
    length = self.shape[one_dim(dim, self.ndim)]
    if length == 0:
        return [self] * chunks
    return aten_split(self, -(-length // chunks), dim)


@lowers(aten.tensor_split.sections)
def aten_tensor_split(self: Array, sections: int, dim: int = 0) -> list[Array]:
    """tensor_split.sections(Tensor self, SymInt sections, int dim=0) -> Tensor[]"""
    return jnp.array_split(self, sections, axis=dim)


@lowers(aten.tensor_split.indices)
def aten_tensor_split_indices(self: Array, indices: Sequence[int], dim: int = 0) -> list[Array]:
    """tensor_split.indices(Tensor self, SymInt[] indices, int dim=0) -> Tensor[]"""
    axis = one_dim(dim, self.ndim)
    return [aten_slice(self, axis, a, b) for a, b in pairwise([None, *indices, None])]


@lowers(aten.unbind.int)
def aten_unbind(self: Array, dim: int = 0) -> list[Array]:
    """unbind.int(Tensor self, int dim=0) -> Tensor[]"""
    axis = one_dim(dim, self.ndim)
    return [lax.index_in_dim(self, i, axis, keepdims=False) for i in range(self.shape[axis])]


@lowers(aten.cat.default, aten.concat.default, aten.concatenate.default)
def aten_cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    dtype = result_dtype(*tensors)
    # torch lets an empty tensor of one dim join anything.
    full = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    return jnp.concatenate([x.astype(dtype) for x in full], axis=dim)


@lowers(aten.stack.default)
def aten_stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    """stack(Tensor[] tensors, int dim=0) -> Tensor"""
    dtype = result_dtype(*tensors)
    return jnp.stack([x.astype(dtype) for x in tensors], axis=dim)


@lowers(aten.repeat.default)
def aten_repeat(self: Array, repeats: Sequence[int]) -> Array:
    """repeat(Tensor self, SymInt[] repeats) -> Tensor"""
    return jnp.tile(self, tuple(repeats))


@lowers(aten.repeat_interleave.self_int)
def aten_repeat_interleave(
    self: Array, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Array:
    """repeat_interleave.self_int(Tensor self, SymInt repeats, int? dim=None, *, ...)"""
    return jnp.repeat(self, repeats, axis=dim)


def _needs_output_size(repeats: Array, output_size: int | None) -> None:
    if output_size is None and isinstance(repeats, Tracer):
        raise CaptureError(
            "repeat_interleave was given a tensor of repeats and no output_size; the result's "
            "shape depends on their values, which XLA cannot compile. Pass output_size."
        )


@lowers(aten.repeat_interleave.self_Tensor)
def aten_repeat_interleave_tensor(
    self: Array, repeats: Array, dim: int | None = None, *, output_size: int | None = None
) -> Array:
    """repeat_interleave.self_Tensor(Tensor self, Tensor repeats, int? dim=None, *, ...)"""
    _needs_output_size(repeats, output_size)
    return jnp.repeat(self, repeats, axis=dim, total_repeat_length=output_size)


@lowers(aten.repeat_interleave.Tensor)
def aten_repeat_interleave_counts(repeats: Array, *, output_size: int | None = None) -> Array:
    """repeat_interleave.Tensor(Tensor repeats, *, SymInt? output_size=None) -> Tensor"""
    _needs_output_size(repeats, output_size)
    places = jnp.arange(repeats.shape[0], dtype=repeats.dtype)
    return jnp.repeat(places, repeats, total_repeat_length=output_size)


@lowers(aten.roll.default)
def aten_roll(self: Array, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Array:
    """roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor"""
    if self.size == 0:
        return self
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    amounts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    if not axes:
        return jnp.roll(self, amounts[0])
    return jnp.roll(self, amounts, axes)


@lowers(aten.rot90.default)
def aten_rot90(self: Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> Array:
    """rot90(Tensor self, int k=1, int[] dims=[0, 1]) -> Tensor"""
    first, second = dims
    return jnp.rot90(self, k, (first, second))


@lowers(aten.unfold.default)
def aten_unfold(self: Array, dimension: int, size: int, step: int) -> Array:
    """unfold(Tensor self, int dimension, int size, int step) -> Tensor"""
    if self.ndim == 0:
        return jnp.broadcast_to(self, (size,))
    axis = one_dim(dimension, self.ndim)
    starts = np.arange(0, self.shape[axis] - size + 1, step)
    windows = jnp.take(self, starts[:, None] + np.arange(size)[None], axis=axis)
    return jnp.moveaxis(windows, axis + 1, -1)


@lowers(aten.as_strided.default)
def aten_as_strided(
    self: Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Array:
    """as_strided(Tensor self, SymInt[] size, SymInt[] stride, ...)"""
    return jnp.take(self.ravel(), strided_places(size, stride, storage_offset))


def strided_places(
    size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> np.ndarray:
    """The flat index of each element of a strided view."""
    places = np.asarray(storage_offset or 0)
    for length, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(length) * step
    return places


def _meshgrid(tensors: Sequence[Array], indexing: str) -> list[Array]:
    return list(jnp.meshgrid(*[jnp.ravel(x) for x in tensors], indexing=indexing))


@lowers(aten.meshgrid.indexing)
def aten_meshgrid(tensors: Sequence[Array], *, indexing: str) -> list[Array]:
    """meshgrid.indexing(Tensor[] tensors, *, str indexing) -> Tensor[]"""
    return _meshgrid(tensors, indexing)


@lowers(aten.resize.default)
def aten_resize(self: Array, size: Sequence[int]) -> Array:
    """resize(Tensor self, SymInt[] size, *, MemoryFormat? memory_format=None) -> Tensor"""
    wanted = math.prod(size)
    flat = jnp.ravel(self)[:wanted]
    # New elements are undefined in torch, 0 here.
    return jnp.pad(flat, (0, wanted - flat.size)).reshape(tuple(size))

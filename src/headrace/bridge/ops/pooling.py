"""Max and average pooling, fixed windows and adaptive, one to three spatial dims.

A maximum gives its derivative to the first element that attains it, as in torch. With
`ceil_mode` the last window may overhang the padded input, but must start inside it.

Shapes: spatial dims last; k = elements of one window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from headrace.bridge.dtypes import default_int
from headrace.bridge.ops.dims import spread
from headrace.bridge.ops.promotion import opmath_of
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten
Sizes = int | Sequence[int]


def _output_size(size: int, window: int, step: int, pad: int, gap: int, ceil: bool) -> int:
    span = size + 2 * pad - gap * (window - 1) - 1
    count = -(-span // step) + 1 if ceil else span // step + 1
    if ceil and (count - 1) * step >= size + pad:
        count -= 1
    return count


class _Windows:
    """Where the windows of one pooling lie; sizes per spatial dim."""

    def __init__(
        self,
        x: Array,
        dims: int,
        window: Sizes,
        stride: Sizes,
        padding: Sizes,
        dilation: Sizes,
        ceil_mode: bool,
    ) -> None:
        self.window = spread(window, dims)
        empty = not isinstance(stride, int) and len(stride) == 0
        self.stride = self.window if empty else spread(stride, dims)
        self.padding = spread(padding, dims)
        self.dilation = spread(dilation, dims)
        self.sizes = x.shape[-dims:]
        fields = (self.sizes, self.window, self.stride, self.padding, self.dilation)
        self.outputs = [_output_size(*each, ceil_mode) for each in zip(*fields, strict=True)]

    def pads(self) -> list[tuple[int, int]]:
        """Low and high padding that make exactly `outputs` windows fit (high may be negative)."""
        fields = zip(
            self.outputs,
            self.stride,
            self.dilation,
            self.window,
            self.sizes,
            self.padding,
            strict=True,
        )
        return [(p, (o - 1) * s + d * (k - 1) + 1 - n - p) for o, s, d, k, n, p in fields]


def _least(dtype: np.dtype) -> float | int:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else int(jnp.iinfo(dtype).min)


def _padded(x: Array, windows: _Windows, value: float | int) -> Array:
    lead = [(0, 0, 0)] * (x.ndim - len(windows.window))
    config = [*lead, *((low, high, 0) for low, high in windows.pads())]
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def _window_elements(x: Array, windows: _Windows, value: float | int) -> Array:
    """[..., outputs..., k]: the elements of each window, in row-major order."""
    padded = _padded(x, windows, value)
    dims = len(windows.window)
    slices = []
    for offset in itertools.product(*(range(k) for k in windows.window)):
        index: list[slice] = []
        for o, place, s, d in zip(
            windows.outputs, offset, windows.stride, windows.dilation, strict=True
        ):
            index.append(slice(place * d, place * d + (o - 1) * s + 1, s))
        slices.append(padded[(..., *index)])
    assert all(piece.ndim == x.ndim for piece in slices) and dims
    return jnp.stack(slices, axis=-1)


def _flat_places(windows: _Windows) -> np.ndarray:
    """[outputs..., k]: the flat input index of each window element."""
    dims = len(windows.window)
    flat = np.zeros((1,) * (2 * dims), np.int64)
    for axis in range(dims):
        starts = np.arange(windows.outputs[axis]) * windows.stride[axis] - windows.padding[axis]
        places = starts[:, None] + np.arange(windows.window[axis]) * windows.dilation[axis]
        shape = [1] * (2 * dims)
        shape[axis], shape[dims + axis] = places.shape
        flat = flat * windows.sizes[axis] + places.reshape(shape)
    return flat.reshape(*windows.outputs, math.prod(windows.window))


def _max_pool(x: Array, windows: _Windows) -> tuple[Array, Array]:
    elements = _window_elements(x, windows, _least(x.dtype))
    best = jnp.argmax(lax.stop_gradient(elements), -1, keepdims=True)
    values = jnp.take_along_axis(elements, best, -1)[..., 0]
    flat = jnp.broadcast_to(jnp.asarray(_flat_places(windows), default_int()), elements.shape)
    return values, jnp.take_along_axis(flat, best, -1)[..., 0]


def _max_pool_values(x: Array, windows: _Windows) -> Array:
    # XLA's own window reduction; its derivative takes no dilation.
    if any(gap != 1 for gap in windows.dilation):
        return _max_pool(x, windows)[0]
    lead = (1,) * (x.ndim - len(windows.window))
    return lax.reduce_window(
        _padded(x, windows, _least(x.dtype)),
        # A concrete start value: only then XLA knows the derivative of the reduction.
        np.asarray(_least(x.dtype), x.dtype),
        lax.max,
        (*lead, *windows.window),
        (*lead, *windows.stride),
        "VALID",
    )


def _register_max(dims: int) -> None:
    values_op = getattr(aten, f"max_pool{dims}d").default
    indices_op = getattr(aten, f"max_pool{dims}d_with_indices").default

    @lowers(values_op)
    def aten_max_pool(
        self: Array,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> Array:
        """max_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, ...)"""
        return _max_pool_values(
            self, _Windows(self, dims, kernel_size, stride, padding, dilation, ceil_mode)
        )

    @lowers(indices_op)
    def aten_max_pool_with_indices(
        self: Array,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> tuple[Array, Array]:
        """max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], ...)"""
        return _max_pool(
            self, _Windows(self, dims, kernel_size, stride, padding, dilation, ceil_mode)
        )


def _avg_pool(
    x: Array, windows: _Windows, count_include_pad: bool, divisor_override: int | None
) -> Array:
    compute = x.astype(opmath_of(x.dtype))
    lead = (1,) * (x.ndim - len(windows.window))
    total = lax.reduce_window(
        _padded(compute, windows, 0),
        np.zeros((), compute.dtype),
        lax.add,
        (*lead, *windows.window),
        (*lead, *windows.stride),
        "VALID",
    )
    if divisor_override is not None:
        return (total / divisor_override).astype(x.dtype)
    count = np.ones(())
    for axis in range(len(windows.window)):
        pad, size = windows.padding[axis], windows.sizes[axis]
        start = np.arange(windows.outputs[axis]) * windows.stride[axis] - pad
        end = np.minimum(start + windows.window[axis], size + pad)
        if not count_include_pad:
            start, end = np.maximum(start, 0), np.minimum(end, size)
        count = count[..., None] * (end - start)
    return (total / jnp.asarray(count, compute.dtype)).astype(x.dtype)


@lowers(aten.avg_pool1d.default)
def aten_avg_pool1d(
    self: Array,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Array:
    """avg_pool1d(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=0, ...)"""
    windows = _Windows(self, 1, kernel_size, stride, padding, 1, ceil_mode)
    return _avg_pool(self, windows, count_include_pad, None)


def _register_avg(dims: int) -> None:
    @lowers(getattr(aten, f"avg_pool{dims}d").default)
    def aten_avg_pool(
        self: Array,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        """avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, ...)"""
        windows = _Windows(self, dims, kernel_size, stride, padding, 1, ceil_mode)
        return _avg_pool(self, windows, count_include_pad, divisor_override)


for _dims in (1, 2, 3):
    _register_max(_dims)
for _dims in (2, 3):
    _register_avg(_dims)


def _adaptive_bounds(size: int, output: int) -> list[tuple[int, int]]:
    return [(i * size // output, -(-(i + 1) * size // output)) for i in range(output)]


def _adaptive_avg(x: Array, output_size: Sizes, dims: int) -> Array:
    """Separable: along each dim a matrix of ones over window lengths."""
    compute = x.astype(opmath_of(x.dtype))
    for axis, output in zip(range(-dims, 0), spread(output_size, dims), strict=True):
        weights = np.zeros((x.shape[axis], output))
        for place, (start, end) in enumerate(_adaptive_bounds(x.shape[axis], output)):
            weights[start:end, place] = 1 / (end - start)
        matrix = jnp.asarray(weights, compute.dtype)
        compute = jnp.moveaxis(jnp.moveaxis(compute, axis, -1) @ matrix, -1, axis)
    return compute.astype(x.dtype)


@lowers(aten.adaptive_avg_pool1d.default)
def aten_adaptive_avg_pool1d(self: Array, output_size: Sizes) -> Array:
    """adaptive_avg_pool1d(Tensor self, int[1] output_size) -> Tensor"""
    return _adaptive_avg(self, output_size, 1)


@lowers(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)
def aten_adaptive_avg_pool2d(self: Array, output_size: Sizes) -> Array:
    """adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor"""
    return _adaptive_avg(self, output_size, 2)


@lowers(aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)
def aten_adaptive_avg_pool3d(self: Array, output_size: Sizes) -> Array:
    """adaptive_avg_pool3d(Tensor self, SymInt[3] output_size) -> Tensor"""
    return _adaptive_avg(self, output_size, 3)


def _adaptive_max(x: Array, output_size: Sizes, dims: int) -> tuple[Array, Array]:
    sizes, outputs = x.shape[-dims:], spread(output_size, dims)
    if 0 in outputs:
        shape = (*x.shape[:-dims], *outputs)
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, default_int())
    flat = np.zeros((1,) * (2 * dims), np.int64)
    inside = np.ones((1,) * (2 * dims), np.bool_)
    for axis, (size, output) in enumerate(zip(sizes, outputs, strict=True)):
        bounds = np.asarray(_adaptive_bounds(size, output))
        places = bounds[:, :1] + np.arange((bounds[:, 1] - bounds[:, 0]).max())
        shape = [1] * (2 * dims)
        shape[axis], shape[dims + axis] = places.shape
        inside = inside & (places < bounds[:, 1:]).reshape(shape)
        flat = flat * size + np.minimum(places, size - 1).reshape(shape)
    flat = flat.reshape(*outputs, -1)
    elements = x.reshape(*x.shape[:-dims], -1)[..., flat]
    elements = jnp.where(inside.reshape(flat.shape), elements, _least(x.dtype))
    best = jnp.argmax(lax.stop_gradient(elements), -1, keepdims=True)
    indices = jnp.take_along_axis(
        jnp.broadcast_to(jnp.asarray(flat, default_int()), elements.shape), best, -1
    )
    return jnp.take_along_axis(elements, best, -1)[..., 0], indices[..., 0]


@lowers(aten.adaptive_max_pool1d.default)
def aten_adaptive_max_pool1d(self: Array, output_size: Sizes) -> tuple[Array, Array]:
    """adaptive_max_pool1d(Tensor self, int[1] output_size) -> (Tensor, Tensor)"""
    return _adaptive_max(self, output_size, 1)


@lowers(aten.adaptive_max_pool2d.default)
def aten_adaptive_max_pool2d(self: Array, output_size: Sizes) -> tuple[Array, Array]:
    """adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)"""
    return _adaptive_max(self, output_size, 2)


@lowers(aten.adaptive_max_pool3d.default)
def aten_adaptive_max_pool3d(self: Array, output_size: Sizes) -> tuple[Array, Array]:
    """adaptive_max_pool3d(Tensor self, int[3] output_size) -> (Tensor, Tensor)"""
    return _adaptive_max(self, output_size, 3)


def _fractional_starts(samples: Array, size: int, output: int, window: int) -> Array:
    """[..., output]: pseudo-random but increasing starts; the last window ends at the border."""
    alpha = (size - window) / (output - 1) if output > 1 else 0.0
    steps = jnp.arange(output - 1, dtype=samples.dtype)
    shifted = (steps + samples[..., None]) * alpha
    starts = shifted.astype(jnp.int32) - (samples[..., None] * alpha).astype(jnp.int32)
    last = jnp.full((*samples.shape, 1), size - window, jnp.int32)
    return jnp.concatenate([starts, last], axis=-1)


def _fractional_max(
    x: Array, kernel: Sizes, output_size: Sizes, samples: Array, dims: int
) -> tuple[Array, Array]:
    windows, outputs = spread(kernel, dims), spread(output_size, dims)
    batched = x.ndim == dims + 2
    lines = x if batched else x[None]
    lead, sizes = lines.shape[:2], lines.shape[2:]
    flat = jnp.zeros((*lead, *(1,) * (2 * dims)), jnp.int32)
    for axis in range(dims):
        # The samples come as (..., W, H, D): last spatial dim first.
        drawn = samples[..., dims - 1 - axis]
        starts = _fractional_starts(drawn, sizes[axis], outputs[axis], windows[axis])
        places = starts[..., None] + jnp.arange(windows[axis])
        shape = [*lead, *(1,) * (2 * dims)]
        shape[2 + axis], shape[2 + dims + axis] = outputs[axis], windows[axis]
        flat = flat * sizes[axis] + places.reshape(shape)
    flat = flat.reshape(*lead, math.prod(outputs), math.prod(windows))
    elements = jnp.take_along_axis(
        lines.reshape(*lead, math.prod(sizes)),
        flat.reshape(*lead, math.prod(outputs) * math.prod(windows)),
        axis=-1,
    ).reshape(flat.shape)
    best = jnp.argmax(lax.stop_gradient(elements), -1, keepdims=True)
    shape = (*lead, *outputs) if batched else (lead[1], *outputs)
    values = jnp.take_along_axis(elements, best, -1).reshape(shape)
    return values, jnp.take_along_axis(flat, best, -1).reshape(shape).astype(default_int())


@lowers(aten.fractional_max_pool2d.default)
def aten_fractional_max_pool2d(
    self: Array, kernel_size: Sizes, output_size: Sizes, random_samples: Array
) -> tuple[Array, Array]:
    """fractional_max_pool2d(Tensor self, int[2] kernel_size, int[2] output_size, ...)"""
    return _fractional_max(self, kernel_size, output_size, random_samples, 2)


@lowers(aten.fractional_max_pool3d.default)
def aten_fractional_max_pool3d(
    self: Array, kernel_size: Sizes, output_size: Sizes, random_samples: Array
) -> tuple[Array, Array]:
    """fractional_max_pool3d(Tensor self, int[3] kernel_size, int[3] output_size, ...)"""
    return _fractional_max(self, kernel_size, output_size, random_samples, 3)


@jax.custom_jvp
def _unpooled(x: Array, places: Array, empty: Array) -> Array:
    rows = jnp.arange(x.shape[0])[:, None]
    return empty.at[rows, places].set(x)


@_unpooled.defjvp
def _unpooled_jvp(
    primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    # As torch: every element reads the derivative of its place, also where several share one.
    x, places, empty = primals
    rows = jnp.arange(x.shape[0])[:, None]
    return _unpooled(*primals), empty.at[rows, places].add(tangents[0])


def _max_unpool(x: Array, indices: Array, output_size: Sizes, dims: int) -> Array:
    lead, outputs = x.shape[:-dims], spread(output_size, dims)
    rows = math.prod(lead)
    empty = jnp.zeros((rows, math.prod(outputs)), x.dtype)
    flat = _unpooled(x.reshape(rows, -1), indices.reshape(rows, -1), empty)
    return flat.reshape(*lead, *outputs)


@lowers(aten.max_unpool2d.default)
def aten_max_unpool2d(self: Array, indices: Array, output_size: Sizes) -> Array:
    """max_unpool2d(Tensor self, Tensor indices, SymInt[2] output_size) -> Tensor"""
    return _max_unpool(self, indices, output_size, 2)


@lowers(aten.max_unpool3d.default)
def aten_max_unpool3d(
    self: Array, indices: Array, output_size: Sizes, stride: Sizes, padding: Sizes
) -> Array:
    """max_unpool3d(Tensor self, Tensor indices, SymInt[3] output_size, int[3] stride, ...)"""
    return _max_unpool(self, indices, output_size, 3)

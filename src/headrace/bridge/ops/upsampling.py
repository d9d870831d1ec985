"""Interpolation: nearest, linear, cubic, with and without antialiasing, and pixel shuffles.

Every mode is separable. Along one dim each output is a weighted sum of a few inputs ("taps"),
whose places and weights are constants worked out in NumPy, in the float32 that torch uses for
them.

Shapes: O = outputs along a dim, k = taps of an output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch._ops import OpOverload

from headrace.bridge.ops.promotion import category, opmath_of
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten
Taps = tuple[np.ndarray, np.ndarray]


def _ratio(size: int, output: int, scale: float | None) -> float:
    return 1 / scale if scale is not None and scale > 0 else size / output


def _nearest_taps(size: int, output: int, scale: float | None, shift: float) -> Taps:
    ratio = np.float32(_ratio(size, output, scale))
    places = np.floor((np.arange(output, dtype=np.float32) + np.float32(shift)) * ratio)
    return np.minimum(places.astype(np.int64), size - 1)[:, None], np.ones((output, 1))


def _centres(
    size: int, output: int, scale: float | None, align_corners: bool, wide: bool
) -> np.ndarray:
    real = np.float64 if wide else np.float32
    steps = np.arange(output, dtype=real)
    if align_corners:
        return steps * real((size - 1) / (output - 1) if output > 1 else 0)
    return (steps + real(0.5)) * real(_ratio(size, output, scale)) - real(0.5)


def _linear_taps(
    size: int, output: int, scale: float | None, align_corners: bool, wide: bool
) -> Taps:
    centre = np.maximum(_centres(size, output, scale, align_corners, wide), 0)
    low = np.minimum(centre.astype(np.int64), size - 1)
    fraction = np.clip(centre - low, 0, 1)
    places = np.stack([low, np.minimum(low + 1, size - 1)], axis=1)
    return places, np.stack([1 - fraction, fraction], axis=1)


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _cubic_taps(
    size: int, output: int, scale: float | None, align_corners: bool, wide: bool
) -> Taps:
    centre = _centres(size, output, scale, align_corners, wide)
    low = np.floor(centre)
    offsets = np.arange(-1, 3)
    weights = _cubic((centre - low)[:, None] - offsets, -0.75)
    return np.clip(low.astype(np.int64)[:, None] + offsets, 0, size - 1), weights


def _antialias_taps(
    size: int, output: int, scale: float | None, align_corners: bool, cubic: bool
) -> Taps:
    """The kernel widens with the reduction, so that every input counts."""
    if align_corners:
        ratio = (size - 1) / (output - 1) if output > 1 else 0.0
    else:
        ratio = _ratio(size, output, scale)
    support = (2.0 if cubic else 1.0) * max(ratio, 1.0)
    centre = ratio * (np.arange(output) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + support + 0.5).astype(np.int64), size)
    places = first[:, None] + np.arange(max(int((last - first).max()), 1))
    distance = (places - centre[:, None] + 0.5) / max(ratio, 1.0)
    # torch's antialiased cubic is PIL's, a = -0.5.
    kernel = _cubic(distance, -0.5) if cubic else np.maximum(1 - np.abs(distance), 0)
    weights = np.where(places < last[:, None], kernel, 0)
    weights = weights / weights.sum(axis=1, keepdims=True)
    return np.minimum(places, size - 1), weights


def _interpolated(x: Array, taps: Sequence[Taps]) -> Array:
    compute = x.astype(opmath_of(x.dtype)) if category(x.dtype) >= 2 else x.astype(jnp.float32)
    for axis, (places, weights) in zip(range(-len(taps), 0), taps, strict=True):
        line = jnp.moveaxis(compute, axis, -1)
        factors = jnp.asarray(weights, compute.dtype)
        line = sum(line[..., places[:, i]] * factors[:, i] for i in range(places.shape[1]))
        compute = jnp.moveaxis(line, -1, axis)
    if category(x.dtype) < 2:
        compute = jnp.clip(jnp.round(compute), 0, 255)
    return compute.astype(x.dtype)


def _picked(x: Array, taps: Sequence[Taps]) -> Array:
    for axis, (places, _) in zip(range(-len(taps), 0), taps, strict=True):
        x = jnp.take(x, places[:, 0], axis=axis)
    return x


Make = Callable[[Array, Sequence[int], Sequence[float | None], bool], Array]


def _nearest(shift: float) -> Make:
    def make(
        x: Array, outputs: Sequence[int], scales: Sequence[float | None], align_corners: bool
    ) -> Array:
        sizes = x.shape[2:]
        taps = [_nearest_taps(*each, shift) for each in zip(sizes, outputs, scales, strict=True)]
        return _picked(x, taps)

    return make


def _weighted(tap_maker: Callable[..., Taps], extra: Callable[[Array], bool]) -> Make:
    def make(
        x: Array, outputs: Sequence[int], scales: Sequence[float | None], align_corners: bool
    ) -> Array:
        each = zip(x.shape[2:], outputs, scales, strict=True)
        return _interpolated(x, [tap_maker(*e, align_corners, extra(x)) for e in each])

    return make


def _is_wide(x: Array) -> bool:
    return x.dtype == np.float64


def _sizes(
    x: Array, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> tuple[Sequence[int], Sequence[float | None]]:
    dims = x.ndim - 2
    if output_size is not None:
        return output_size, (None,) * dims
    assert scale_factors is not None
    return [int(n * s) for n, s in zip(x.shape[2:], scale_factors, strict=True)], scale_factors


def _register(name: str, dims: int, make: Make, aligns: bool) -> None:
    """The overloads of one interpolation: `.default` with sizes, `.vec` with sizes or factors."""
    packet = getattr(aten, name)
    register_plain = (_plain_aligned if aligns else _plain)[dims - 1]
    register_plain(packet.default, make)
    if aligns:

        @lowers(packet.vec)
        def aten_vec_aligned(
            input: Array,
            output_size: Sequence[int] | None,
            align_corners: bool,
            scale_factors: Sequence[float] | None,
        ) -> Array:
            """upsample_bilinear2d.vec(Tensor input, SymInt[]? output_size, ...)"""
            return make(input, *_sizes(input, output_size, scale_factors), align_corners)

    else:

        @lowers(packet.vec)
        def aten_vec(
            input: Array, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
        ) -> Array:
            """upsample_nearest2d.vec(Tensor input, SymInt[]? output_size, ...)"""
            return make(input, *_sizes(input, output_size, scale_factors), False)


def _plain_1d(op: OpOverload, make: Make) -> None:
    @lowers(op)
    def aten_upsample(
        self: Array, output_size: Sequence[int], scales: float | None = None
    ) -> Array:
        """upsample_nearest1d(Tensor self, SymInt[1] output_size, float? scales=None) -> Tensor"""
        return make(self, output_size, (scales,), False)


def _plain_2d(op: OpOverload, make: Make) -> None:
    @lowers(op)
    def aten_upsample(
        self: Array,
        output_size: Sequence[int],
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Array:
        """upsample_nearest2d(Tensor self, SymInt[2] output_size, float? scales_h=None, ...)"""
        return make(self, output_size, (scales_h, scales_w), False)


def _plain_3d(op: OpOverload, make: Make) -> None:
    @lowers(op)
    def aten_upsample(
        self: Array,
        output_size: Sequence[int],
        scales_d: float | None = None,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Array:
        """upsample_nearest3d(Tensor self, SymInt[3] output_size, float? scales_d=None, ...)"""
        return make(self, output_size, (scales_d, scales_h, scales_w), False)


def _aligned_1d(op: OpOverload, make: Make) -> None:
    @lowers(op)
    def aten_upsample(
        self: Array, output_size: Sequence[int], align_corners: bool, scales: float | None = None
    ) -> Array:
        """upsample_linear1d(Tensor self, SymInt[1] output_size, bool align_corners, ...)"""
        return make(self, output_size, (scales,), align_corners)


def _aligned_2d(op: OpOverload, make: Make) -> None:
    @lowers(op)
    def aten_upsample(
        self: Array,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Array:
        """upsample_bilinear2d(Tensor self, SymInt[2] output_size, bool align_corners, ...)"""
        return make(self, output_size, (scales_h, scales_w), align_corners)


def _aligned_3d(op: OpOverload, make: Make) -> None:
    @lowers(op)
    def aten_upsample(
        self: Array,
        output_size: Sequence[int],
        align_corners: bool,
        scales_d: float | None = None,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Array:
        """upsample_trilinear3d(Tensor self, SymInt[3] output_size, bool align_corners, ...)"""
        return make(self, output_size, (scales_d, scales_h, scales_w), align_corners)


_plain = (_plain_1d, _plain_2d, _plain_3d)
_plain_aligned = (_aligned_1d, _aligned_2d, _aligned_3d)

for _dims in (1, 2, 3):
    _register(f"upsample_nearest{_dims}d", _dims, _nearest(0.0), False)
    _register(f"_upsample_nearest_exact{_dims}d", _dims, _nearest(0.5), False)
for _dims, _name in enumerate(("linear", "bilinear", "trilinear"), 1):
    _register(f"upsample_{_name}{_dims}d", _dims, _weighted(_linear_taps, _is_wide), True)
_register("upsample_bicubic2d", 2, _weighted(_cubic_taps, _is_wide), True)
_register("_upsample_bilinear2d_aa", 2, _weighted(_antialias_taps, lambda x: False), True)
_register("_upsample_bicubic2d_aa", 2, _weighted(_antialias_taps, lambda x: True), True)


@lowers(aten.pixel_shuffle.default)
def aten_pixel_shuffle(self: Array, upscale_factor: int) -> Array:
    """pixel_shuffle(Tensor self, int upscale_factor) -> Tensor"""
    *lead, channels, height, width = self.shape
    r = upscale_factor
    split = self.reshape(math.prod(lead), channels // (r * r), r, r, height, width)
    moved = split.transpose(0, 1, 4, 2, 5, 3)
    return moved.reshape(*lead, channels // (r * r), height * r, width * r)


@lowers(aten.pixel_unshuffle.default)
def aten_pixel_unshuffle(self: Array, downscale_factor: int) -> Array:
    """pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor"""
    *lead, channels, height, width = self.shape
    r = downscale_factor
    split = self.reshape(math.prod(lead), channels, height // r, r, width // r, r)
    moved = split.transpose(0, 1, 3, 5, 2, 4)
    return moved.reshape(*lead, channels * r * r, height // r, width // r)

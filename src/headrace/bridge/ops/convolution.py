"""Convolutions of one to three spatial dims, plain and transposed, batched or not.

Shapes: N = batch, C = channels in, O = channels out, g = groups; spatial dims last, as torch
lays them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array, lax

from headrace.bridge.ops.dims import spread
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten
Sizes = int | Sequence[int]

_SPATIAL = {1: "H", 2: "HW", 3: "HWD"}


def _convolved(x_NC: Array, weight: Array, pads: list[tuple[int, int]], **options: Any) -> Array:
    spatial = _SPATIAL[weight.ndim - 2]
    layout = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    return lax.conv_general_dilated(x_NC, weight, padding=pads, dimension_numbers=layout, **options)


def _biased(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias.reshape((1, -1) + (1,) * (y.ndim - 2))


def _batched(x: Array, weight: Array, run: Callable[[Array], Array]) -> Array:
    """Inputs without a batch dim get one for the time of the call."""
    return run(x) if x.ndim == weight.ndim else run(x[None])[0]


def convolve(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
) -> Array:
    """Cross-correlation, torch's convolution."""
    dims = weight.ndim - 2
    steps, gaps = spread(stride, dims), spread(dilation, dims)
    if isinstance(padding, str):
        totals = [gap * (k - 1) for gap, k in zip(gaps, weight.shape[2:], strict=True)]
        # "same" puts the odd element at the end.
        pads = [(t // 2, t - t // 2) if padding == "same" else (0, 0) for t in totals]
    else:
        pads = [(p, p) for p in spread(padding, dims)]

    def run(x: Array) -> Array:
        y = _convolved(
            x, weight, pads, window_strides=steps, rhs_dilation=gaps, feature_group_count=groups
        )
        return _biased(y, bias)

    return _batched(input, weight, run)


def convolve_transposed(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    output_padding: Sizes,
    groups: int,
    dilation: Sizes,
) -> Array:
    """The gradient of a convolution with respect to its input, as a layer."""
    dims = weight.ndim - 2
    steps, gaps = spread(stride, dims), spread(dilation, dims)
    edges = zip(
        gaps, weight.shape[2:], spread(padding, dims), spread(output_padding, dims), strict=True
    )
    pads = [(d * (k - 1) - p, d * (k - 1) - p + extra) for d, k, p, extra in edges]
    channels, per_group = weight.shape[0] // groups, weight.shape[1]
    # [C, O/g, ...] -> [O, C/g, ...], flipped in space.
    kernel = weight.reshape(groups, channels, per_group, *weight.shape[2:]).swapaxes(1, 2)
    kernel = kernel.reshape(groups * per_group, channels, *weight.shape[2:])
    kernel = jnp.flip(kernel, tuple(range(2, kernel.ndim)))

    def run(x: Array) -> Array:
        y = _convolved(
            x,
            kernel,
            pads,
            window_strides=(1,) * dims,
            lhs_dilation=steps,
            rhs_dilation=gaps,
            feature_group_count=groups,
        )
        return _biased(y, bias)

    return _batched(input, weight, run)


@lowers(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def aten_conv(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Array:
    """conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, ...) -> Tensor"""
    return convolve(input, weight, bias, stride, padding, dilation, groups)


@lowers(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def aten_conv_padding(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: str = "valid",
    dilation: Sizes = 1,
    groups: int = 1,
) -> Array:
    """conv2d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, ...)"""
    return convolve(input, weight, bias, stride, padding, dilation, groups)


@lowers(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def aten_conv_transpose(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Array:
    """conv_transpose2d.input(Tensor input, Tensor weight, Tensor? bias=None, ...)"""
    return convolve_transposed(
        input, weight, bias, stride, padding, output_padding, groups, dilation
    )


@lowers(aten.convolution.default)
def aten_convolution(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Array:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, ...)"""
    if transposed:
        return convolve_transposed(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return convolve(input, weight, bias, stride, padding, dilation, groups)


@lowers(aten._convolution.default)
def aten__convolution(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    benchmark: bool,
    deterministic: bool,
    cudnn_enabled: bool,
    allow_tf32: bool,
) -> Array:
    """_convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, ...)"""
    return aten_convolution(
        input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )

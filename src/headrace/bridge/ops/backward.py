"""Backward operators that PyTorch's autograd leaves in a traced training step.

A step that was traced with its `loss.backward()` holds `aten.*_backward` nodes. Most decompose
into forward operators by PyTorch's own tables; those here do not, and are the vector-Jacobian
product of the forward rule. `jax.vjp` recomputes nothing that XLA would keep: the forward value
is dead code.

Does not know: how the graph was traced. Shapes: N = batch, C = channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array

from headrace.bridge.ops.registry import aliases, lookup, lowers

aten = torch.ops.aten
_POINT = ("self", "input")


def _argument_names(op: Any) -> list[str]:
    return [a.name for a in op._schema.arguments]


def _forward(op: Any, given: dict[str, Any]) -> Callable[[Array], Array]:
    """The forward rule as a function of its tensor, its other arguments as the backward has them.

    With several results the first is the one that carries a gradient.
    """
    rule = lookup(op)
    assert rule is not None, f"{op} has a backward rule but no forward rule"
    point, *names = _argument_names(op)
    assert point in _POINT, f"{op} does not begin with its tensor"
    options = {n: given[n] for n in names if given.get(n) is not None}

    def run(x: Array) -> Array:
        result = rule.function(x, **options)
        return result if isinstance(result, jax.Array) else result[0]

    return run


def _vjp(forward: Any, backward: Any) -> Callable[..., Array]:
    """The backward operator as the transpose of the forward rule, arguments matched by name."""
    names = _argument_names(backward)

    def call(*values: Any) -> Array:
        given = dict(zip(names, values, strict=True))
        gradient = given[names[0]]  # grad_output or grad
        point = next((given[n] for n in _POINT if n in given), None)
        if point is None:  # a linear operator: the gradient is the same everywhere
            point = jnp.zeros(tuple(given["input_size"]), gradient.dtype)
        if "output_size" in _argument_names(forward) and given.get("output_size") is None:
            given["output_size"] = gradient.shape[2 if gradient.ndim == point.ndim else 1 :]
        return jax.vjp(_forward(forward, given), point)[1](gradient)[0]

    return call


# Forward operator (the form without indices where there is one) -> its backward.
_PAIRS: dict[Any, Any] = {
    aten.avg_pool2d.default: aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default: aten.avg_pool3d_backward.default,
    aten.max_pool2d.default: aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d.default: aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d.default: aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d.default: aten.adaptive_max_pool3d_backward.default,
    aten.replication_pad1d.default: aten.replication_pad1d_backward.default,
    aten.replication_pad2d.default: aten.replication_pad2d_backward.default,
    aten.replication_pad3d.default: aten.replication_pad3d_backward.default,
    aten.upsample_nearest1d.default: aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d.default: aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d.default: aten.upsample_nearest3d_backward.default,
    aten.upsample_linear1d.default: aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d.default: aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d.default: aten.upsample_bicubic2d_backward.default,
    aten.upsample_trilinear3d.default: aten.upsample_trilinear3d_backward.default,
}
aliases({b: _vjp(f, b) for f, b in _PAIRS.items() if lookup(f) is not None})


@lowers(aten._adaptive_avg_pool2d_backward.default)
def aten__adaptive_avg_pool2d_backward(grad_output: Array, self: Array) -> Array:
    """_adaptive_avg_pool2d_backward(Tensor grad_output, Tensor self) -> Tensor"""
    sizes = {"output_size": grad_output.shape[-2:]}
    forward = _forward(aten._adaptive_avg_pool2d.default, sizes)
    return jax.vjp(forward, self)[1](grad_output)[0]


@lowers(aten._adaptive_avg_pool3d_backward.default)
def aten__adaptive_avg_pool3d_backward(grad_output: Array, self: Array) -> Array:
    """_adaptive_avg_pool3d_backward(Tensor grad_output, Tensor self) -> Tensor"""
    sizes = {"output_size": grad_output.shape[-3:]}
    forward = _forward(aten._adaptive_avg_pool3d.default, sizes)
    return jax.vjp(forward, self)[1](grad_output)[0]


@lowers(aten.convolution_backward.default)
def aten_convolution_backward(
    grad_output: Array,
    input: Array,
    weight: Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, ...) -> 3 Tensors"""
    rule = lookup(aten.convolution.default)
    assert rule is not None
    options = (stride, padding, dilation, transposed, output_padding, groups)

    def forward(x: Array, w: Array) -> Array:
        return rule.function(x, w, None, *options)

    d_input, d_weight = jax.vjp(forward, input, weight)[1](grad_output)
    channels = 1 if grad_output.ndim == weight.ndim else 0
    others = tuple(i for i in range(grad_output.ndim) if i != channels)
    d_bias = jnp.sum(grad_output, others) if output_mask[2] else None
    return (d_input if output_mask[0] else None, d_weight if output_mask[1] else None, d_bias)


@lowers(aten._cdist_backward.default)
def aten__cdist_backward(grad: Array, x1: Array, x2: Array, p: float, cdist: Array) -> Array:
    """_cdist_backward(Tensor grad, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor"""
    rule = lookup(aten._cdist_forward.default)
    assert rule is not None
    return jax.vjp(lambda x: rule.function(x, x2, p, None), x1)[1](grad)[0]

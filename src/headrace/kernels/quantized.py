"""Weights that are stored in 8 or 4 bits and multiplied in full precision (weight-only).

    int8   one scale for every output: code * scale, code in -128..127
    int4   one scale for 64 inputs of an output: code * scale, code in -8..7
    nf4    one scale for 64 inputs of an output: NF4[code] * scale (QLoRA, arXiv:2305.14314)

Two codes of 4 bits share a byte: those of the first and of the second half of a block, so that
unpacking joins halves instead of interleaving numbers. (JAX's own int4 is packed too, but its
layouts differ between programs compiled ahead and arrays.) Codes keep the weight's order, so they
are divided over a mesh as the weight is. Scales of int8 are float32, those of 4 bits bfloat16.

Knows: formats, codes, scales. Does not know: which weights of a model are quantised, files.

Shapes: a weight is [..., out, in], or [..., in, out] where it is stored transposed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

# Appendix E of arXiv:2305.14314: quantiles of a normal distribution, scaled to -1..1.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCKS = (64, 32, 16)  # inputs that share a scale in 4-bit formats: the first that divides
DEQUANTIZE_NAME = "dequantize_weight"


@dataclass(frozen=True, kw_only=True)
class Format:
    """codes, scales: dtypes of the stored arrays. largest: the code that absmax is mapped to.

    Half a step more than the largest code uses all of the range (qwix does the same). packed: two
    codes a byte, and a scale for a block of inputs instead of all.
    """

    codes: Any
    scales: Any
    largest: float
    packed: bool


FORMATS: Mapping[str, Format] = {
    "int8": Format(codes=jnp.int8, scales=jnp.float32, largest=127.5, packed=False),
    "int4": Format(codes=jnp.uint8, scales=jnp.bfloat16, largest=7.5, packed=True),
    "nf4": Format(codes=jnp.uint8, scales=jnp.bfloat16, largest=1.0, packed=True),
}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How one weight is stored. axis: its input dim, -1 or -2 (GPT-2's Conv1D)."""

    format: str
    axis: int = -1

    def block(self, shape: tuple[int, ...]) -> int:
        """Inputs that share a scale; 0 when this weight cannot be stored in blocks."""
        size = shape[self.axis]
        if not FORMATS[self.format].packed:
            return size
        return next((block for block in BLOCKS if size % block == 0), 0)

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = list(shape)
        sizes[self.axis] //= 2 if FORMATS[self.format].packed else 1
        return tuple(sizes)

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = list(shape)
        sizes[self.axis] //= self.block(shape)
        return tuple(sizes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """codes: of the weight's shape, or half the inputs when packed. scales: one for a block.

    dtype: of the weight when it is used. used: its sharding then, on a mesh.

    A pytree of two arrays, so a stack of layers is sliced by a scan like an array.
    """

    codes: Any
    scales: Any
    quantization: Quantization = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})
    used: Any = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = list(self.codes.shape)
        sizes[self.quantization.axis] *= 2 if FORMATS[self.quantization.format].packed else 1
        return tuple(sizes)

    @property
    def ndim(self) -> int:
        return len(self.codes.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def quantize(weight: Array, quantization: Quantization) -> QuantizedWeight:
    """The nearest codes, by blocks' largest absolute values. Computes in float32."""
    chosen = FORMATS[quantization.format]
    values = _blocked(weight.astype(jnp.float32), quantization)
    axis = quantization.axis
    largest = jnp.abs(values).max(axis=axis, keepdims=True)
    scales = (largest / chosen.largest).astype(chosen.scales)
    # Codes are chosen for the rounded scale, the one they are multiplied with. A block of zeros
    # has no scale of its own.
    divisor = scales.astype(jnp.float32)
    scaled = values / jnp.where(divisor == 0, 1.0, divisor)
    if quantization.format == "nf4":
        # a value's code is the number of midpoints below it
        middle = [(low + high) / 2 for low, high in itertools.pairwise(NF4)]
        codes = sum(((scaled > m).astype(jnp.uint8) for m in middle), jnp.zeros((), jnp.uint8))
    else:
        half = chosen.largest + 0.5
        codes = jnp.clip(jnp.round(scaled), -half, half - 1)
        codes = (codes + 8 if chosen.packed else codes).astype(chosen.codes)
    if chosen.packed:
        low, high = jnp.split(codes, 2, axis=axis)
        codes = low | (high << 4)
    return QuantizedWeight(
        codes=codes.reshape(quantization.codes_shape(weight.shape)),
        scales=scales.reshape(quantization.scales_shape(weight.shape)),
        quantization=quantization,
        dtype=weight.dtype,
    )


def _blocked(values: Array, quantization: Quantization) -> Array:
    """[..., in] -> [..., blocks, block], or the same in front of the last dim."""
    shape, axis = values.shape, quantization.axis % values.ndim
    block = quantization.block(shape)
    assert block, f"{list(shape)} has no blocks of {BLOCKS[-1]} inputs"
    return values.reshape(*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])


def _unpacked(weight: QuantizedWeight) -> Array:
    """Codes as [..., blocks, block], one a number."""
    how = weight.quantization
    shape, axis = weight.shape, how.axis % weight.ndim
    block = how.block(shape)
    halves = (*shape[:axis], shape[axis] // block, block // 2, *shape[axis + 1 :])
    packed = weight.codes.reshape(halves)
    return jnp.concatenate([packed & 15, packed >> 4], axis=how.axis)


def dequantize(weight: QuantizedWeight) -> Array:
    """The weight that the codes stand for, in its own dtype.

    A function with a name that no remat policy keeps (`kernels.partition.save_but_weights`): in a
    loop over layers one layer is in full precision at a time, in the backward pass too.
    """
    return _decode(weight)


def _dequantize_weight(weight: QuantizedWeight) -> Array:
    how = weight.quantization
    if how.format == "nf4":
        values = _looked_up(_unpacked(weight).astype(jnp.int32))
    elif how.format == "int4":
        values = _unpacked(weight).astype(jnp.float32) - 8.0
    else:
        values = _blocked(weight.codes.astype(jnp.float32), how)
    scales = jnp.expand_dims(weight.scales, how.axis).astype(jnp.float32)
    made = (values * scales).reshape(weight.shape).astype(weight.dtype)
    return made if weight.used is None else jax.lax.with_sharding_constraint(made, weight.used)


def _looked_up(codes: Array, first: int = 0, count: int = len(NF4)) -> Array:
    """NF4 values by a tree of selections: a table lookup is a gather of one number a weight."""
    if count == 1:
        return jnp.float32(NF4[first])
    half = count // 2
    below, above = (_looked_up(codes, start, half) for start in (first, first + half))
    return jnp.where(codes < first + half, below, above)


def _no_gradient(*_: Any) -> Any:
    raise NotImplementedError("quantised weights are frozen; nothing is differentiated by them")


_dequantize_weight.__name__ = DEQUANTIZE_NAME
_decode = jax.custom_vjp(_dequantize_weight)
_decode.defvjp(lambda weight: (_dequantize_weight(weight), None), _no_gradient)


def quantized_shape(
    shape: tuple[int, ...], dtype: Any, quantization: Quantization, codes: Any, scales: Any
) -> QuantizedWeight:
    """The arrays of a quantised weight as shapes; codes, scales: their shardings."""
    chosen = FORMATS[quantization.format]
    return QuantizedWeight(
        codes=jax.ShapeDtypeStruct(quantization.codes_shape(shape), chosen.codes, sharding=codes),
        scales=jax.ShapeDtypeStruct(
            quantization.scales_shape(shape), chosen.scales, sharding=scales
        ),
        quantization=quantization,
        dtype=dtype,
    )


__all__ = [
    "FORMATS",
    "NF4",
    "Quantization",
    "QuantizedWeight",
    "dequantize",
    "quantize",
    "quantized_shape",
]

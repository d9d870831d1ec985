"""Codes and scales against the formulas in float64, and against qwix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from headrace.kernels.quantized import (
    NF4,
    Quantization,
    dequantize,
    quantize,
    quantized_shape,
)

# The table as printed in the appendix of arXiv:2305.14314.
PAPER = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip


def _weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _expected(weight: np.ndarray, name: str, block: int) -> np.ndarray:
    """In float64, except for the scale, whose stored dtype is part of the format. NaN where a
    value lies half-way between two codes: there the largest of a block is, either is right."""
    blocks = weight.astype(np.float64).reshape(*weight.shape[:-1], -1, block)
    absmax = np.abs(blocks).max(-1, keepdims=True)
    largest = {"int8": 127.5, "int4": 7.5, "nf4": 1.0}[name]
    dtype = jnp.float32 if name == "int8" else jnp.bfloat16
    scale = (absmax / largest).astype(np.float32).astype(dtype).astype(np.float64)
    scale[scale == 0] = 1.0
    if name == "nf4":
        nearest = np.abs(blocks[..., None] / scale[..., None] - np.array(PAPER)).argmin(-1)
        values = np.array(PAPER)[nearest]
    else:
        values = np.clip(np.round(blocks / scale), -largest - 0.5, largest - 0.5)
        halves = np.abs(np.abs(blocks / scale % 1) - 0.5) < 1e-4
        values[halves & (np.abs(blocks / scale) > 0.1)] = np.nan
    return (values * scale).reshape(weight.shape)


def test_the_table_is_the_papers() -> None:
    assert list(NF4) == PAPER


@pytest.mark.parametrize(
    ("name", "inputs", "block"), [("int8", 100, 100), ("int4", 192, 64), ("nf4", 96, 32)]
)
def test_values_are_those_of_the_formula(name: str, inputs: int, block: int) -> None:
    weight = _weight(3, 24, inputs)
    weight[1, 2] = 0.0  # a row without a scale
    made = jax.jit(quantize, static_argnums=1)(weight, Quantization(format=name))
    assert made.shape == weight.shape and made.scales.shape == (3, 24, inputs // block)
    found = np.asarray(dequantize(made), np.float64)
    expected = _expected(weight, name, block)
    clear = ~np.isnan(expected)
    assert clear.mean() > 0.95 and (found[1, 2] == 0).all()
    np.testing.assert_allclose(found[clear], expected[clear], rtol=1e-6, atol=1e-9)
    step = np.asarray(made.scales, np.float64).repeat(block, -1)
    assert (np.abs(found - weight)[~clear] <= 0.51 * step[~clear]).all()


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_codes_are_those_of_qwix(name: str) -> None:
    largest = {"int8": 127.5, "int4": 7.5, "nf4": 1.0}[name]
    weight = _weight(16, 128)
    # qwix keeps the scale in float32: an absmax whose scale bfloat16 holds makes both the same.
    weight *= largest / 16 / np.abs(weight).max()
    weight.reshape(-1, 64)[:, 0] = largest / 16
    tiles = {} if name == "int8" else {1: 64}
    kind = name if name == "nf4" else jnp.dtype(name)
    theirs = qwix.quantize(jnp.asarray(weight), kind, channelwise_axes=(0,), tiled_axes=tiles)
    ours = quantize(jnp.asarray(weight), Quantization(format=name))
    if name == "int8":
        np.testing.assert_array_equal(ours.codes, theirs.qvalue)
    np.testing.assert_allclose(dequantize(ours), qwix.dequantize(theirs), rtol=1e-6)


def test_a_transposed_weight_has_its_blocks_along_the_inputs() -> None:
    weight = _weight(64, 10)
    for name in ("int8", "nf4"):
        there = dequantize(quantize(jnp.asarray(weight), Quantization(format=name, axis=-2)))
        back = dequantize(quantize(jnp.asarray(weight.T), Quantization(format=name)))
        np.testing.assert_array_equal(there, back.T)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8.0625), ("int4", 4.25), ("nf4", 4.25)])
def test_bytes_in_memory(name: str, bits: float) -> None:
    how = Quantization(format=name)
    program = jax.jit(quantize, static_argnums=1).lower(_weight(512, 512), how).compile()
    used = program.memory_analysis().output_size_in_bytes
    assert abs(used - 512 * 512 * bits / 8) <= 64  # and a table of pointers
    shapes = quantized_shape((512, 512), jnp.float32, how, None, None)
    counted = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    assert counted == 512 * 512 * bits / 8


def test_dtype_is_the_weights() -> None:
    weight = jnp.asarray(_weight(8, 64), jnp.bfloat16)
    assert dequantize(quantize(weight, Quantization(format="nf4"))).dtype == jnp.bfloat16

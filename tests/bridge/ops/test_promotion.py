"""Promotion against torch.result_type, for every pair of kinds of operand."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from headrace.bridge.dtypes import (
    jax_to_tensor,
    tensor_to_jax,
    tensor_to_numpy,
    to_jax_dtype,
    to_torch_dtype,
)
from headrace.bridge.ops.promotion import opmath_of, result_dtype

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
SCALARS = (True, 2, 2.5, 1j)


def _operands() -> list[Any]:
    dimensioned = [torch.ones(2, dtype=d) for d in DTYPES]
    return [*dimensioned, *(torch.ones((), dtype=d) for d in DTYPES), *SCALARS]


def _ours(value: Any) -> Any:
    return tensor_to_jax(value) if isinstance(value, torch.Tensor) else value


def test_result_dtype_is_torch_result_type() -> None:
    with jax.enable_x64(True):
        pairs = [(operand, _ours(operand)) for operand in _operands()]
        for (left, our_left), (right, our_right) in itertools.product(pairs, repeat=2):
            promoted = torch.result_type(left, right)
            wanted = to_jax_dtype(promoted)
            assert result_dtype(our_left, our_right) == wanted, (left, right)


def test_without_x64_wide_types_become_32_bit() -> None:
    assert not jax.config.jax_enable_x64
    narrowed = {torch.int64: np.int32, torch.float64: np.float32, torch.complex128: np.complex64}
    for dtype, narrow in narrowed.items():
        assert to_jax_dtype(dtype) == narrow
    assert result_dtype(jnp.ones(2, jnp.int8), 3) == np.int8
    assert result_dtype(jnp.ones(2, jnp.bool_), 3) == np.int32
    assert result_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones((), jnp.float32)) == jnp.bfloat16


def test_opmath_is_float32_for_16_bits() -> None:
    assert opmath_of(np.dtype(jnp.bfloat16)) == np.float32
    assert opmath_of(np.dtype(np.float16)) == np.float32
    assert opmath_of(np.dtype(np.int8)) == np.int8


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_tensors_survive_the_round_trip(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    with jax.enable_x64(True):
        back = jax_to_tensor(tensor_to_jax(tensor))
    assert back.dtype == dtype
    assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))
    assert to_torch_dtype(to_jax_dtype(torch.bfloat16)) == torch.bfloat16


def test_zero_dim_and_empty_tensors_survive() -> None:
    for tensor in (torch.tensor(1.5, dtype=torch.bfloat16), torch.ones(0, 3, dtype=torch.bfloat16)):
        assert torch.equal(jax_to_tensor(tensor_to_jax(tensor)), tensor)


def test_transposed_bfloat16_keeps_its_values() -> None:
    tensor = torch.arange(6).reshape(2, 3).to(torch.bfloat16).T
    assert tensor_to_numpy(tensor).astype(np.float32).tolist() == tensor.float().tolist()


def test_dtype_without_counterpart_says_so() -> None:
    with pytest.raises(TypeError, match=r"bits8 was given; JAX has no such dtype"):
        to_jax_dtype(torch.bits8)

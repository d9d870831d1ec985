"""Torch dtypes and tensors to JAX and back: the one place where the dtype policy is written.

Policy: with `jax_enable_x64` every torch dtype keeps its width. Without it (JAX's default)
64-bit types become 32-bit ones: int64 -> int32, float64 -> float32, complex128 -> complex64,
uint64 -> uint32. bfloat16, float16, float8, the smaller integers and bool are the same in both
modes; complex32 is widened. Quantised and sub-byte dtypes have no counterpart.

Does not know: operators, graphs, devices beyond "JAX's default".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

_EXACT: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex32: np.dtype(np.complex64),  # does not exist in JAX: widened
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: np.dtype(ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: np.dtype(ml_dtypes.float8_e5m2fnuz),
    torch.float8_e8m0fnu: np.dtype(ml_dtypes.float8_e8m0fnu),
}
_TO_TORCH: dict[np.dtype, torch.dtype] = {
    exact: torch_dtype for torch_dtype, exact in _EXACT.items()
}
# torch cannot hand these types to NumPy: they travel as integers of the same width.
_CARRIER: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16}
_NATIVE = {t for t, e in _EXACT.items() if e.type.__module__ == "numpy"} - {torch.complex32}


def to_jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The JAX dtype that stands for a torch dtype under the current x64 setting.

    Raises TypeError for dtypes that JAX does not have (quantised, sub-byte).
    """
    exact = _EXACT.get(dtype)
    if exact is None:
        raise TypeError(
            f"{dtype} was given; JAX has no such dtype. Convert the tensor to one of "
            f"{', '.join(str(known).removeprefix('torch.') for known in _EXACT)} first."
        )
    return np.dtype(jax.dtypes.canonicalize_dtype(exact))


def to_torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of the same name and width; KeyError for dtypes torch does not have."""
    return _TO_TORCH[np.dtype(dtype)]


def default_float() -> np.dtype:
    """What torch makes of Python floats and of integers that must become floats."""
    return to_jax_dtype(torch.get_default_dtype())


def default_int() -> np.dtype:
    """int64 under the policy: the dtype of indices, counts and integer sums."""
    return to_jax_dtype(torch.int64)


def tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's values as NumPy, in its exact dtype; shares memory when it can."""
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    if tensor.dtype in _NATIVE:
        return tensor.numpy(force=True)
    exact = _EXACT.get(tensor.dtype)
    if exact is None:
        to_jax_dtype(tensor.dtype)
    assert exact is not None
    tensor = tensor.detach().cpu()
    return tensor.contiguous().view(_CARRIER[exact.itemsize]).numpy(force=True).view(exact)


def narrowed(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values in a policy dtype; integers that do not fit saturate instead of wrapping around.

    The least int64, which masks use as "never", stays the least integer.
    """
    if values.dtype.kind == "i" and dtype.kind == "i" and values.dtype.itemsize > dtype.itemsize:
        limits = np.iinfo(dtype)
        values = np.clip(values, limits.min, limits.max)
    if values.dtype == np.float16 and dtype in _TO_TORCH and values.flags.writeable:
        # NumPy converts float16 without vector instructions, ten times slower than torch.
        return tensor_to_numpy(torch.from_numpy(values).to(_TO_TORCH[dtype], copy=True))
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def scalar_to_jax(value: bool | int | float | complex, dtype: np.dtype) -> jax.Array:
    """A Python scalar as a zero-dim array: integers saturate, floats out of range become inf."""
    return jnp.asarray(narrowed(np.asarray(value), dtype))


def tensor_to_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy of the tensor on JAX's default device, in the policy's dtype."""
    return jnp.array(narrowed(tensor_to_numpy(tensor), to_jax_dtype(tensor.dtype)), copy=True)


def jax_to_tensor(array: jax.Array | np.ndarray) -> torch.Tensor:
    """A copy of the array as a CPU tensor of the same dtype."""
    values = np.array(array)
    if values.dtype.type.__module__ == "numpy":
        return torch.from_numpy(values)
    carrier = np.uint8 if values.dtype.itemsize == 1 else np.int16
    carried = torch.from_numpy(np.ascontiguousarray(values).view(carrier))
    return carried.view(to_torch_dtype(values.dtype)).reshape(values.shape)

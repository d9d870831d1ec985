"""Torch's type promotion, derived from its categories, for JAX values.

The kinds are those of `torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND`. Torch ranks
operands first by category (bool < integer < float < complex) and, inside one category, by kind
of operand: a tensor with dimensions wins over a zero-dim tensor, which wins over a Python
scalar. JAX's own lattice ranks zero-dim arrays as arrays, so no rule may leave promotion to
JAX.

Does not know: operators.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.bridge.dtypes import default_float, default_int

_BOOL, _INT, _FLOAT, _COMPLEX = range(4)


class Promotion(Enum):
    """How the dtype of an elementwise operator follows from its operands."""

    DEFAULT = "computes and returns the promoted dtype"
    INT_TO_FLOAT = "as DEFAULT, integers and bools become the default float"
    ALWAYS_BOOL = "operands are promoted, the result is bool"
    BOOL_TO_LONG = "as DEFAULT, bool becomes int64"
    COMPLEX_TO_FLOAT = "as DEFAULT, the result of complex operands is real"


def category(dtype: np.dtype) -> int:
    """0 bool, 1 integer, 2 float, 3 complex."""
    if dtype == np.bool_:
        return _BOOL
    if jnp.issubdtype(dtype, jnp.integer):
        return _INT
    return _COMPLEX if jnp.issubdtype(dtype, jnp.complexfloating) else _FLOAT


def is_float(dtype: np.dtype) -> bool:
    """True for real floating point, bfloat16 and float8 included."""
    return category(dtype) == _FLOAT


def complex_of(dtype: np.dtype) -> np.dtype:
    """The complex dtype whose parts have this float dtype (16-bit floats: complex64)."""
    return np.dtype(np.complex128 if dtype == np.float64 else np.complex64)


def real_of(dtype: np.dtype) -> np.dtype:
    """The float dtype of a complex dtype's parts; other dtypes unchanged."""
    return np.finfo(dtype).dtype if category(dtype) == _COMPLEX else dtype


def opmath_of(dtype: np.dtype) -> np.dtype:
    """The dtype torch computes in internally: float32 for 16-bit floats."""
    return np.dtype(np.float32) if dtype.itemsize < 4 and is_float(dtype) else dtype


def int_to_float(dtype: np.dtype) -> np.dtype:
    """The default float for integers and bool; others unchanged."""
    return default_float() if category(dtype) < _FLOAT else dtype


def is_number(value: Any, number: float) -> bool:
    """Whether a Scalar argument is this number, known now and not first when the program runs."""
    return isinstance(value, (bool, int, float)) and value == number


def _scalar_dtype(value: bool | int | float | complex) -> np.dtype:
    if isinstance(value, bool):
        return np.dtype(np.bool_)
    if isinstance(value, int):
        return default_int()
    return default_float() if isinstance(value, float) else complex_of(default_float())


def _combine(higher: np.dtype | None, lower: np.dtype | None) -> np.dtype | None:
    """`lower` changes the result only when its category is the greater one."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    above, below = category(higher), category(lower)
    if above == _FLOAT and below == _COMPLEX:
        return complex_of(higher)
    if below > above:
        return np.dtype(jnp.promote_types(higher, lower)) if above == _BOOL else lower
    return higher


def result_dtype(*values: Any) -> np.dtype:
    """`torch.result_type` over any number of arrays and Python scalars; None values are skipped."""
    dimensioned: np.dtype | None = None
    zero_dim: np.dtype | None = None
    scalar: np.dtype | None = None
    for value in values:
        if isinstance(value, (jax.Array, np.ndarray, np.generic)):
            if getattr(value, "weak_type", False) and not value.ndim:
                scalar = _promote(scalar, value.dtype)  # a number that enters at run time
            elif value.ndim:
                dimensioned = _promote(dimensioned, value.dtype)
            else:
                zero_dim = _promote(zero_dim, value.dtype)
        elif isinstance(value, (bool, int, float, complex)):
            scalar = _promote(scalar, _scalar_dtype(value))
    dtype = _combine(dimensioned, _combine(zero_dim, scalar))
    assert dtype is not None, "a promotion needs at least one operand"
    return dtype


def _promote(left: np.dtype | None, right: np.dtype) -> np.dtype:
    return np.dtype(right if left is None else jnp.promote_types(left, right))


def promoted_dtype(promotion: Promotion, *values: Any) -> np.dtype:
    """The dtype operands are cast to before a rule of this promotion kind runs."""
    dtype = result_dtype(*values)
    if promotion is Promotion.INT_TO_FLOAT:
        return int_to_float(dtype)
    if promotion is Promotion.BOOL_TO_LONG and category(dtype) == _BOOL:
        return default_int()
    return dtype

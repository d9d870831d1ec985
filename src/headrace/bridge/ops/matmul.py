"""Matrix products. Numbers of 16 bits are accumulated in float32 by XLA on every backend.

Shapes: M, N, K = rows, columns, contracted; E = experts (groups).
"""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import Array, lax

from headrace.bridge.dtypes import to_jax_dtype
from headrace.bridge.ops.promotion import category, is_number, result_dtype
from headrace.bridge.ops.registry import aliases, lowers
from headrace.kernels.attention import traced_platform
from headrace.kernels.partition import traced_on_mesh

aten = torch.ops.aten
Scalar = bool | int | float | complex

aliases(
    {
        aten.matmul.default: jnp.matmul,
        aten.linalg_matmul.default: jnp.matmul,
        aten.mm.default: jnp.matmul,
        aten.bmm.default: jnp.matmul,
        aten.mv.default: jnp.matmul,
        aten.dot.default: jnp.matmul,
        aten.inner.default: jnp.inner,
        aten.outer.default: jnp.outer,
        aten.ger.default: jnp.outer,
    }
)


@lowers(aten.kron.default)
def aten_kron(self: Array, other: Array) -> Array:
    """kron(Tensor self, Tensor other) -> Tensor"""
    dtype = result_dtype(self, other)
    if category(dtype) == 0:
        return jnp.kron(self.astype(jnp.uint8), other.astype(jnp.uint8)).astype(dtype)
    return jnp.kron(self.astype(dtype), other.astype(dtype))


@lowers(aten.linear.default)
def aten_linear(input: Array, weight: Array, bias: Array | None = None) -> Array:
    """linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"""
    rows = input
    if input.ndim > 2 and traced_platform() == "cpu" and not traced_on_mesh():
        # XLA's CPU backend transposes a 3-dim operand of the weight gradient element by element:
        # three times slower. Elsewhere batch and sequence stay apart, for they may be sharded.
        rows = input.reshape(-1, input.shape[-1])
    product = lax.dot_general(rows, weight, (((rows.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    product = product.reshape(*input.shape[:-1], *weight.shape[:-1])
    return product if bias is None else product + bias


@lowers(aten.mm.dtype, aten.bmm.dtype)
def aten_mm_dtype(self: Array, mat2: Array, out_dtype: torch.dtype) -> Array:
    """mm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor"""
    return jnp.matmul(self, mat2, preferred_element_type=to_jax_dtype(out_dtype))


def _affine(self: Array, product: Array, beta: Scalar, alpha: Scalar) -> Array:
    """beta * self + alpha * product; beta 0 ignores self, nan and all."""
    if not is_number(alpha, 1):
        product = product * jnp.asarray(alpha, product.dtype)
    if is_number(beta, 0):
        return product
    added = self if is_number(beta, 1) else self * jnp.asarray(beta, self.dtype)
    if category(product.dtype) == 0:
        return product | added
    return (product + added).astype(product.dtype)


@lowers(aten.addmm.default)
def aten_addmm(
    self: Array, mat1: Array, mat2: Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Array:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _affine(self, mat1 @ mat2, beta, alpha)


@lowers(aten.baddbmm.default)
def aten_baddbmm(
    self: Array, batch1: Array, batch2: Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Array:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1)"""
    return _affine(self, batch1 @ batch2, beta, alpha)


@lowers(aten.addbmm.default)
def aten_addbmm(
    self: Array, batch1: Array, batch2: Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Array:
    """addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1)"""
    return _affine(self, jnp.einsum("bmk,bkn->mn", batch1, batch2), beta, alpha)


@lowers(aten.addmv.default)
def aten_addmv(
    self: Array, mat: Array, vec: Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Array:
    """addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    product = _affine(self, mat @ vec, beta, alpha)
    return jnp.broadcast_to(product, mat.shape[:1])


@lowers(aten.addr.default)
def aten_addr(
    self: Array, vec1: Array, vec2: Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Array:
    """addr(Tensor self, Tensor vec1, Tensor vec2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _affine(self, jnp.outer(vec1, vec2), beta, alpha)


@lowers(aten.vdot.default)
def aten_vdot(self: Array, other: Array) -> Array:
    """vdot(Tensor self, Tensor other) -> Tensor"""
    return jnp.vdot(self, other)


@lowers(aten.einsum.default)
def aten_einsum(equation: str, tensors: list[Array], *, path: list[int] | None = None) -> Array:
    """einsum(str equation, Tensor[] tensors, *, int[]? path=None) -> Tensor"""
    return jnp.einsum(equation, *tensors)


@lowers(aten.tensordot.default)
def aten_tensordot(self: Array, other: Array, dims_self: list[int], dims_other: list[int]) -> Array:
    """tensordot(Tensor self, Tensor other, int[] dims_self, int[] dims_other) -> Tensor"""
    # A contracted dim of size 1 is broadcast against the other side's: sum that side first.
    for mine, theirs in zip(dims_self, dims_other, strict=True):
        if self.shape[mine] == 1:
            other = jnp.sum(other, theirs, keepdims=True)
        elif other.shape[theirs] == 1:
            self = jnp.sum(self, mine, keepdims=True)
    return jnp.tensordot(self, other, (tuple(dims_self), tuple(dims_other)))


@lowers(aten.bilinear.default)
def aten_bilinear(input1: Array, input2: Array, weight: Array, bias: Array | None = None) -> Array:
    """bilinear(Tensor input1, Tensor input2, Tensor weight, Tensor? bias=None) -> Tensor"""
    product = jnp.einsum("...i,oij,...j->...o", input1, weight, input2)
    return product if bias is None else product + bias


@lowers(aten._grouped_mm.default)
def aten__grouped_mm(
    self: Array,
    mat2: Array,
    offs: Array | None = None,
    bias: Array | None = None,
    out_dtype: torch.dtype | None = None,
) -> Array:
    """_grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ...) -> Tensor"""
    dtype = self.dtype if out_dtype is None else to_jax_dtype(out_dtype)
    if self.ndim == 3 and mat2.ndim == 3:
        product = jnp.matmul(self, mat2, preferred_element_type=dtype)
    elif offs is None:
        raise ValueError(
            "_grouped_mm of two-dim operands was given no `offs`; torch needs them too"
        )
    elif self.ndim == 2 and mat2.ndim == 3:
        product = lax.ragged_dot(self, mat2, _group_sizes(offs), preferred_element_type=dtype)
    elif self.ndim == 3:
        # The groups split mat2's columns: the transposed problem has ragged rows.
        flipped = lax.ragged_dot(
            mat2.T, self.swapaxes(1, 2), _group_sizes(offs), preferred_element_type=dtype
        )
        product = flipped.T
    else:
        product = _ragged_contraction(self, mat2, offs, dtype)
    return product if bias is None else product + bias


def _group_sizes(offs: Array) -> Array:
    return jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(jnp.int32)


def _ragged_contraction(self_MK: Array, mat2_KN: Array, offs: Array, dtype: jnp.dtype) -> Array:
    """Groups split the contracted dim: [E, M, N]."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (0,)), ((), ())),
        lhs_ragged_dimensions=[1],
        rhs_group_dimensions=[],
    )
    return lax.ragged_dot_general(
        self_MK, mat2_KN, _group_sizes(offs), numbers, preferred_element_type=dtype
    )

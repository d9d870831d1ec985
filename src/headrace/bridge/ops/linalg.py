"""Matrix factorisations and solvers: the operators that torch.linalg's composites end in.

Failures that torch reports in `info` give nan here and `info` 0: XLA cannot raise. Bases that
are free up to sign or phase (svd, eigh, qr) may differ from LAPACK's choice. Some derivatives
do not exist in JAX: full svd bases, complete qr.

Shapes: M, N = rows, columns; leading dims are batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import torch
from jax import Array, lax

from headrace.bridge.dtypes import default_int
from headrace.bridge.ops.promotion import opmath_of, real_of
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten


def _adjoint(x: Array) -> Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _no_info(x: Array) -> Array:
    return jnp.zeros(x.shape[:-2], jnp.int32)


def _empty(x: Array) -> Array:
    return jnp.zeros((0,), x.dtype)


@lowers(aten._linalg_check_errors.default)
def aten__linalg_check_errors(info: Array, api_name: str, *, is_matrix: bool) -> None:
    """_linalg_check_errors(Tensor info, str api_name, *, bool is_matrix) -> ()"""


def _hermitian(x: Array, upper: bool) -> Array:
    """The matrix that one triangle stands for; the derivative is shared by both, as in torch."""
    half = _adjoint(jnp.triu(x)) if upper else jnp.tril(x)
    hermitian = half + _adjoint(jnp.tril(half, -1))
    symmetric = (x + _adjoint(x)) / 2
    return symmetric + lax.stop_gradient(hermitian - symmetric)


def _cholesky(x: Array, upper: bool) -> Array:
    """Reads one triangle only; the derivative is symmetrised, as in torch."""
    lower = jnp.linalg.cholesky(_hermitian(x, upper), symmetrize_input=False)
    return _adjoint(lower) if upper else lower


@lowers(aten.linalg_cholesky_ex.default)
def aten_linalg_cholesky_ex(
    self: Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[Array, Array]:
    """linalg_cholesky_ex(Tensor self, *, bool upper=False, bool check_errors=False)"""
    return _cholesky(self, upper), _no_info(self)


@lowers(aten.cholesky.default)
def aten_cholesky(self: Array, upper: bool = False) -> Array:
    """cholesky(Tensor self, bool upper=False) -> Tensor"""
    return _cholesky(self, upper)


def _from_factor(factor: Array, upper: bool) -> Array:
    """The matrix of a Cholesky factor: one triangle is read, the derivative goes to both."""
    triangle = jnp.triu(factor) if upper else jnp.tril(factor)
    factor = factor + lax.stop_gradient(triangle - factor)
    return _adjoint(factor) @ factor if upper else factor @ _adjoint(factor)


@lowers(aten.cholesky_solve.default)
def aten_cholesky_solve(self: Array, input2: Array, upper: bool = False) -> Array:
    """cholesky_solve(Tensor self, Tensor input2, bool upper=False) -> Tensor"""
    return _solve(_from_factor(input2, upper), self, True)


@lowers(aten.cholesky_inverse.default)
def aten_cholesky_inverse(self: Array, upper: bool = False) -> Array:
    """cholesky_inverse(Tensor self, bool upper=False) -> Tensor"""
    return jnp.linalg.inv(_from_factor(self, upper))


def _triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, batch + a.shape[-2:])
    b = jnp.broadcast_to(b, batch + b.shape[-2:])
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@lowers(aten.linalg_solve_triangular.default)
def aten_linalg_solve_triangular(
    self: Array, B: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    """linalg_solve_triangular(Tensor self, Tensor B, *, bool upper, bool left=True, ...)"""
    return _triangular(self, B, upper=upper, left=left, unitriangular=unitriangular)


@lowers(aten.triangular_solve.default)
def aten_triangular_solve(
    self: Array,
    A: Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Array, Array]:
    """triangular_solve(Tensor self, Tensor A, bool upper=True, bool transpose=False, ...)"""
    matrix = jnp.swapaxes(A, -1, -2) if transpose else A
    solution = _triangular(matrix, self, upper=upper != transpose, unitriangular=unitriangular)
    return solution, jnp.broadcast_to(A, solution.shape[:-2] + A.shape[-2:])


def _is_vector(a: Array, b: Array) -> bool:
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])


def _solve(a: Array, b: Array, left: bool) -> Array:
    if _is_vector(a, b):
        return _solve(a, b[..., None], True)[..., 0]
    if not left:
        return jnp.swapaxes(_solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2), True), -1, -2)
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.linalg.solve(
        jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])
    )


@lowers(aten._linalg_solve_ex.default)
def aten__linalg_solve_ex(
    A: Array, B: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    """_linalg_solve_ex(Tensor A, Tensor B, *, bool left=True, bool check_errors=False)"""
    factors, pivots = _lu(A)
    return _solve(A, B, left), factors, pivots, _no_info(A)


def _lu(a: Array) -> tuple[Array, Array]:
    """Packed factors and LAPACK's one-based row swaps."""
    factors, pivots, _ = lax.linalg.lu(a)
    return factors, pivots + 1


@lowers(aten.linalg_lu_factor_ex.default)
def aten_linalg_lu_factor_ex(
    A: Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array]:
    """linalg_lu_factor_ex(Tensor A, *, bool pivot=True, bool check_errors=False)"""
    return (*_lu(A), _no_info(A))


@lowers(aten._lu_with_info.default)
def aten__lu_with_info(
    self: Array, pivot: bool = True, check_errors: bool = True
) -> tuple[Array, Array, Array]:
    """_lu_with_info(Tensor self, bool pivot=True, bool check_errors=True)"""
    return (*_lu(self), _no_info(self))


def _permutation(pivots: Array, rows: int) -> Array:
    """[..., M]: the row of A that stands at each row of LU."""
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)


def _unpacked(factors: Array) -> tuple[Array, Array]:
    rows, columns = factors.shape[-2:]
    k = min(rows, columns)
    lower = jnp.tril(factors[..., :, :k], -1) + jnp.eye(rows, k, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :k, :])


def _permutation_matrix(order: Array, dtype: jnp.dtype) -> Array:
    # P L U = A: column i of P has its one in the row that moved to i.
    return jnp.swapaxes(jax.nn.one_hot(order, order.shape[-1], dtype=dtype), -1, -2)


@lowers(aten.lu_unpack.default)
def aten_lu_unpack(
    LU_data: Array, LU_pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Array, Array, Array]:
    """lu_unpack(Tensor LU_data, Tensor LU_pivots, bool unpack_data=True, ...)"""
    order = _permutation(LU_pivots, LU_data.shape[-2])
    matrix = _permutation_matrix(order, LU_data.dtype) if unpack_pivots else _empty(LU_data)
    lower, upper = _unpacked(LU_data) if unpack_data else (_empty(LU_data),) * 2
    return matrix, lower, upper


@lowers(aten.linalg_lu.default)
def aten_linalg_lu(A: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    """linalg_lu(Tensor A, *, bool pivot=True) -> (Tensor P, Tensor L, Tensor U)"""
    factors, _, order = lax.linalg.lu(A)
    return (_permutation_matrix(order, A.dtype), *_unpacked(factors))


@lowers(aten.linalg_lu_solve.default)
def aten_linalg_lu_solve(
    LU: Array, pivots: Array, B: Array, *, left: bool = True, adjoint: bool = False
) -> Array:
    """linalg_lu_solve(Tensor LU, Tensor pivots, Tensor B, *, bool left=True, bool adjoint=False)"""
    lower, upper = _unpacked(LU)
    order = _permutation(pivots, LU.shape[-2])
    matrix = _permutation_matrix(order, LU.dtype)
    a = matrix @ lower @ upper
    return _solve(_adjoint(a) if adjoint else a, B, left)


@lowers(aten.lu_solve.default)
def aten_lu_solve(self: Array, LU_data: Array, LU_pivots: Array) -> Array:
    """lu_solve(Tensor self, Tensor LU_data, Tensor LU_pivots) -> Tensor"""
    return aten_linalg_lu_solve(LU_data, LU_pivots, self)


@lowers(aten._linalg_det.default)
def aten__linalg_det(A: Array) -> tuple[Array, Array, Array]:
    """_linalg_det(Tensor A) -> (Tensor result, Tensor LU, Tensor pivots)"""
    determinant = jnp.linalg.det(A) if A.shape[-1] else jnp.ones(A.shape[:-2], A.dtype)
    return (determinant, *_lu(A))


@lowers(aten._linalg_slogdet.default)
def aten__linalg_slogdet(A: Array) -> tuple[Array, Array, Array, Array]:
    """_linalg_slogdet(Tensor A) -> (Tensor sign, Tensor logabsdet, Tensor LU, Tensor pivots)"""
    sign, log = jnp.linalg.slogdet(A)
    return (sign, log, *_lu(A))


@lowers(aten.linalg_inv_ex.default)
def aten_linalg_inv_ex(A: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    """linalg_inv_ex(Tensor A, *, bool check_errors=False) -> (Tensor inverse, Tensor info)"""
    return jnp.linalg.inv(A), _no_info(A)


@lowers(aten._linalg_svd.default)
def aten__linalg_svd(
    A: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Array, Array, Array]:
    """_linalg_svd(Tensor A, bool full_matrices=False, bool compute_uv=True, *, str? driver=None)"""
    if not compute_uv:
        return _empty(A), jnp.linalg.svd(A, compute_uv=False), _empty(A)
    u, s, vh = jnp.linalg.svd(A, full_matrices=False)
    if not full_matrices or A.shape[-1] == A.shape[-2]:
        return u, s, vh
    wide_u, _, wide_vh = jnp.linalg.svd(lax.stop_gradient(A), full_matrices=True)
    return wide_u, s, wide_vh


@lowers(aten._linalg_eigh.default)
def aten__linalg_eigh(A: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    """_linalg_eigh(Tensor A, str UPLO='L', bool compute_v=True)"""
    matrix = _hermitian(A, UPLO.upper() == "U")
    values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
    return values, vectors if compute_v else _empty(A)


@lowers(aten.linalg_eig.default)
def aten_linalg_eig(self: Array) -> tuple[Array, Array]:
    """linalg_eig(Tensor self) -> (Tensor eigenvalues, Tensor eigenvectors)"""
    values, vectors = jnp.linalg.eig(self)
    return values, vectors


@lowers(aten._linalg_eigvals.default, aten.linalg_eigvals.default)
def aten__linalg_eigvals(self: Array) -> Array:
    """_linalg_eigvals(Tensor self) -> Tensor"""
    return jnp.linalg.eigvals(self)


@lowers(aten.linalg_qr.default)
def aten_linalg_qr(A: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """linalg_qr(Tensor A, str mode='reduced') -> (Tensor Q, Tensor R)"""
    if mode == "r":
        return _empty(A), jnp.linalg.qr(A, mode="r")
    q, r = jnp.linalg.qr(A, mode=mode)
    return q, r


@lowers(aten.linalg_householder_product.default)
def aten_linalg_householder_product(input: Array, tau: Array) -> Array:
    """linalg_householder_product(Tensor input, Tensor tau) -> Tensor"""
    rows, columns = input.shape[-2:]
    result = jnp.broadcast_to(jnp.eye(rows, columns, dtype=input.dtype), input.shape)
    for i in reversed(range(tau.shape[-1])):
        vector = jnp.concatenate(
            [
                jnp.zeros((*input.shape[:-2], i), input.dtype),
                jnp.ones((*input.shape[:-2], 1), input.dtype),
                input[..., i + 1 :, i],
            ],
            axis=-1,
        )
        row = jnp.einsum("...m,...mn->...n", jnp.conj(vector), result)
        result = result - tau[..., i, None, None] * vector[..., :, None] * row[..., None, :]
    return result


@lowers(aten.geqrf.default)
def aten_geqrf(self: Array) -> tuple[Array, Array]:
    """geqrf(Tensor self) -> (Tensor a, Tensor tau)"""
    packed, tau = jnp.linalg.qr(self, mode="raw")
    return jnp.swapaxes(packed, -1, -2), tau


@lowers(aten.linalg_matrix_exp.default)
def aten_linalg_matrix_exp(self: Array) -> Array:
    """linalg_matrix_exp(Tensor self) -> Tensor"""
    if self.size == 0:
        return self
    return jsl.expm(self.astype(opmath_of(self.dtype))).astype(self.dtype)


@lowers(aten.linalg_lstsq.default)
def aten_linalg_lstsq(
    self: Array, b: Array, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Array, Array, Array, Array]:
    """linalg_lstsq(Tensor self, Tensor b, float? rcond=None, *, str? driver=None)"""
    vector = _is_vector(self, b)
    right = b[..., None] if vector else b
    solution = jnp.linalg.pinv(self) @ right
    rows, columns = self.shape[-2:]
    gap = jnp.sum(jnp.abs(right - self @ solution) ** 2, axis=-2)
    residuals = gap if rows > columns else jnp.zeros((0,), real_of(self.dtype))
    rank = jnp.linalg.matrix_rank(self).astype(default_int())
    if driver == "gels":  # assumes full rank and reports none
        rank = jnp.zeros((0,), default_int())
    singular = jnp.linalg.svd(self, compute_uv=False)
    measured = driver in ("gelsd", "gelss")
    return (
        solution[..., 0] if vector else solution,
        residuals[..., 0] if vector and rows > columns else residuals,
        rank,
        singular if measured else jnp.zeros((0,), real_of(self.dtype)),
    )


@lowers(aten.ormqr.default)
def aten_ormqr(
    self: Array, input2: Array, input3: Array, left: bool = True, transpose: bool = False
) -> Array:
    """ormqr(Tensor self, Tensor input2, Tensor input3, bool left=True, bool transpose=False)"""
    rows = input3.shape[-2] if left else input3.shape[-1]
    reflectors = self[..., : input2.shape[-1]]
    padding = [(0, 0)] * (self.ndim - 1) + [(0, rows - reflectors.shape[-1])]
    q = aten_linalg_householder_product(jnp.pad(reflectors, padding), input2)
    q = _adjoint(q) if transpose else q
    return q @ input3 if left else input3 @ q


@lowers(aten.linalg_pinv.atol_rtol_tensor)
def aten_linalg_pinv(
    self: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False
) -> Array:
    """linalg_pinv.atol_rtol_tensor(Tensor self, *, Tensor? atol=None, Tensor? rtol=None, ...)"""
    if self.size == 0:
        return _adjoint(self)
    if hermitian:
        self = _hermitian(self, False)
    default = float(jnp.finfo(self.dtype).eps) * max(self.shape[-2:])
    largest = jnp.max(lax.stop_gradient(jnp.linalg.svd(self, compute_uv=False)), -1)
    absolute = jnp.zeros_like(largest) if atol is None else jnp.asarray(atol, largest.dtype)
    relative = jnp.asarray(default if rtol is None else rtol, largest.dtype)
    if atol is not None and rtol is None:
        relative = jnp.where(absolute > 0, 0, relative)
    cut = jnp.maximum(absolute / jnp.where(largest == 0, 1, largest), relative)
    return jnp.linalg.pinv(self, rtol=cut)

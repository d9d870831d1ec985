"""Distances between rows: cdist, pdist and their primitives. A distance of 0 has the derivative 0.

Shapes: P, R = rows of the first and second set, M = features.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from headrace.bridge.ops.reductions import vector_norm
from headrace.bridge.ops.registry import lowers

aten = torch.ops.aten


def _distances(x1: Array, x2: Array, p: float) -> Array:
    return vector_norm(x1[..., :, None, :] - x2[..., None, :, :], p, -1, False, None)


@lowers(aten._cdist_forward.default)
def aten__cdist_forward(x1: Array, x2: Array, p: float, compute_mode: int | None) -> Array:
    """_cdist_forward(Tensor x1, Tensor x2, float p, int? compute_mode) -> Tensor"""
    return _distances(x1, x2, p)


@lowers(aten.cdist.default)
def aten_cdist(x1: Array, x2: Array, p: float = 2.0, compute_mode: int | None = None) -> Array:
    """cdist(Tensor x1, Tensor x2, float p=2.0, int? compute_mode=None) -> Tensor"""
    return _distances(x1, x2, p)


@lowers(aten._euclidean_dist.default)
def aten__euclidean_dist(x1: Array, x2: Array) -> Array:
    """_euclidean_dist(Tensor x1, Tensor x2) -> Tensor"""
    return _distances(x1, x2, 2.0)


@lowers(aten.pdist.default, aten._pdist_forward.default)
def aten_pdist(self: Array, p: float = 2.0) -> Array:
    """pdist(Tensor self, float p=2.0) -> Tensor"""
    first, second = np.triu_indices(self.shape[0], 1)
    return vector_norm(self[first] - self[second], p, -1, False, None)


@lowers(aten.dist.default)
def aten_dist(self: Array, other: Array, p: int | float = 2) -> Array:
    """dist(Tensor self, Tensor other, Scalar p=2) -> Tensor"""
    return vector_norm(self - other, p, None, False, None)


@lowers(aten.linalg_cross.default)
def aten_linalg_cross(self: Array, other: Array, *, dim: int = -1) -> Array:
    """linalg_cross(Tensor self, Tensor other, *, int dim=-1) -> Tensor"""
    left, right = jnp.broadcast_arrays(self, other)
    return jnp.cross(left, right, axis=dim)

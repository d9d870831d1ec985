"""Loss functions. `reduction`: 0 none, 1 mean, 2 sum. 16-bit floats are computed in float32.

Shapes: N = batch, C = classes; class dim is 1, or 0 for an input of one dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import Array

from headrace.bridge.ops.promotion import category
from headrace.bridge.ops.registry import DEFAULT, lowers
from headrace.bridge.ops.unary import absolute

aten = torch.ops.aten


def _reduce(loss: Array, reduction: int) -> Array:
    if reduction == 0:
        return loss
    return jnp.mean(loss) if reduction == 1 else jnp.sum(loss)


def _nll(
    log_probs: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """Loss, and the total weight a mean divides by; nothing supervised gives nan, as in torch."""
    axis = 0 if log_probs.ndim == 1 else 1
    kept = target != ignore_index
    classes = jnp.where(kept, target, 0)
    chosen = jnp.take_along_axis(log_probs, jnp.expand_dims(classes, axis), axis, mode="fill")
    scale = kept.astype(log_probs.dtype) if weight is None else jnp.where(kept, weight[classes], 0)
    loss = jnp.where(kept, -jnp.squeeze(chosen, axis) * scale, 0)
    if reduction == 0:
        return loss, jnp.zeros((), loss.dtype)
    total = jnp.sum(scale)
    return (jnp.sum(loss) / total if reduction == 1 else jnp.sum(loss)), total


@lowers(aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default)
def aten_nll_loss(
    self: Array,
    target: Array,
    weight: Array | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Array:
    """nll_loss(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, ...)"""
    return _nll(self, target, weight, reduction, ignore_index)[0].astype(self.dtype)


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def aten_nll_loss_forward(
    self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """nll_loss_forward(Tensor self, Tensor target, Tensor? weight, int reduction, ...)"""
    loss, total = _nll(self, target, weight, reduction, ignore_index)
    return loss.astype(self.dtype), total.astype(self.dtype)


@lowers(aten.cross_entropy_loss.default, promotion=DEFAULT, over=("self",), opmath=True)
def aten_cross_entropy_loss(
    self: Array,
    target: Array,
    weight: Array | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Array:
    """cross_entropy_loss(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, ...)"""
    axis = 0 if self.ndim == 1 else 1
    log_probs = jax.nn.log_softmax(self, axis)
    weight = None if weight is None else weight.astype(self.dtype)
    if target.shape == self.shape and category(target.dtype) == 2:
        return _soft_targets(log_probs, target, weight, reduction, label_smoothing)
    loss, total = _nll(log_probs, target, weight, reduction, ignore_index)
    if label_smoothing == 0:
        return loss
    # The smooth part: the mean of -log p over classes, weighted by class.
    weighted = log_probs if weight is None else log_probs * _by_class(weight, self.ndim)
    smooth = jnp.where(target != ignore_index, -jnp.sum(weighted, axis), 0)
    if reduction == 1:
        smooth = jnp.sum(smooth) / total
    elif reduction == 2:
        smooth = jnp.sum(smooth)
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / self.shape[axis])


def _by_class(weight: Array, ndim: int) -> Array:
    return weight if ndim == 1 else weight.reshape((1, -1) + (1,) * (ndim - 2))


def _soft_targets(
    log_probs: Array, target: Array, weight: Array | None, reduction: int, smoothing: float
) -> Array:
    axis = 0 if log_probs.ndim == 1 else 1
    target = target.astype(log_probs.dtype)
    if smoothing > 0:
        target = target * (1 - smoothing) + smoothing / log_probs.shape[axis]
    if weight is not None:
        target = target * _by_class(weight, log_probs.ndim)
    loss = -jnp.sum(log_probs * target, axis)
    return jnp.sum(loss) / max(loss.size, 1) if reduction == 1 else _reduce(loss, reduction)


@lowers(aten.mse_loss.default, promotion=DEFAULT, opmath=True)
def aten_mse_loss(self: Array, target: Array, reduction: int = 1) -> Array:
    """mse_loss(Tensor self, Tensor target, int reduction=1) -> Tensor"""
    return _reduce(jnp.square(self - target), reduction)


@lowers(aten.l1_loss.default, promotion=DEFAULT, opmath=True)
def aten_l1_loss(self: Array, target: Array, reduction: int = 1) -> Array:
    """l1_loss(Tensor self, Tensor target, int reduction=1) -> Tensor"""
    return _reduce(absolute(self - target), reduction)


@lowers(aten.smooth_l1_loss.default, promotion=DEFAULT, opmath=True)
def aten_smooth_l1_loss(self: Array, target: Array, reduction: int = 1, beta: float = 1.0) -> Array:
    """smooth_l1_loss(Tensor self, Tensor target, int reduction=1, float beta=1.0) -> Tensor"""
    gap = absolute(self - target)
    if beta == 0:
        return _reduce(gap, reduction)
    return _reduce(jnp.where(gap < beta, 0.5 * gap * gap / beta, gap - 0.5 * beta), reduction)


@lowers(aten.huber_loss.default, promotion=DEFAULT, opmath=True)
def aten_huber_loss(self: Array, target: Array, reduction: int = 1, delta: float = 1.0) -> Array:
    """huber_loss(Tensor self, Tensor target, int reduction=1, float delta=1.0) -> Tensor"""
    gap = absolute(self - target)
    loss = jnp.where(gap < delta, 0.5 * gap * gap, delta * (gap - 0.5 * delta))
    return _reduce(loss, reduction)


@lowers(aten.binary_cross_entropy.default, promotion=DEFAULT, opmath=True)
def aten_binary_cross_entropy(
    self: Array, target: Array, weight: Array | None = None, reduction: int = 1
) -> Array:
    """binary_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=1)"""
    # torch bounds the logarithms at -100 and the derivative's denominator at 1e-12.
    loss = -(target * _bounded_log(self) + (1 - target) * _bounded_log(1 - self))
    return _reduce(loss if weight is None else loss * weight, reduction)


@jax.custom_jvp
def _bounded_log(x: Array) -> Array:
    return jnp.maximum(jnp.log(x), -100)


@_bounded_log.defjvp
def _bounded_log_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return _bounded_log(x), dx / jnp.maximum(x, 1e-12)


@lowers(aten.binary_cross_entropy_with_logits.default, promotion=DEFAULT, opmath=True)
def aten_binary_cross_entropy_with_logits(
    self: Array,
    target: Array,
    weight: Array | None = None,
    pos_weight: Array | None = None,
    reduction: int = 1,
) -> Array:
    """binary_cross_entropy_with_logits(Tensor self, Tensor target, Tensor? weight=None, ...)"""
    log_weight = 1 if pos_weight is None else (pos_weight - 1) * target + 1
    loss = (1 - target) * self - log_weight * jax.nn.log_sigmoid(self)
    return _reduce(loss if weight is None else loss * weight, reduction)


@lowers(aten.kl_div.default, promotion=DEFAULT, opmath=True)
def aten_kl_div(
    self: Array, target: Array, reduction: int = 1, *, log_target: bool = False
) -> Array:
    """kl_div(Tensor self, Tensor target, int reduction=1, *, bool log_target=False) -> Tensor"""
    if log_target:
        return _reduce(jnp.exp(target) * (target - self), reduction)
    return _reduce(jax.scipy.special.xlogy(target, target) - target * self, reduction)


@lowers(aten.soft_margin_loss.default, promotion=DEFAULT, opmath=True)
def aten_soft_margin_loss(self: Array, target: Array, reduction: int = 1) -> Array:
    """soft_margin_loss(Tensor self, Tensor target, int reduction=1) -> Tensor"""
    return _reduce(jnp.log1p(jnp.exp(-target * self)), reduction)

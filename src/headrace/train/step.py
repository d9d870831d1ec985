"""The training step as one program: micro-batches, gradients, clip, update, metrics.

    step(state, frozen, batches, learning_rate) -> (state, metrics)

`batches` holds arrays [A, B, ...]: A micro-batches go through a `lax.scan`, gradients of the *sum*
of the loss are added in float32 and divided once by the weight of all micro-batches. A step whose
loss or gradient is not finite changes nothing but the step counter, and says so in its metrics.

The two-program form (`make_gradient_step` for each micro-batch, then `make_update_step`) computes
the same; it holds gradients between programs but never has all micro-batches on the device at once.

Knows: gradients of `trainable` only, the clip rule. Does not know: the loss, files, logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from headrace.train.losses import Batch, Loss
from headrace.train.optimizers import Optimizer
from headrace.train.state import Params, TrainState, cast_params

Metrics = dict[str, Array]
StepFunction = Callable[[TrainState, Params, Batch, Array], tuple[TrainState, Metrics]]
EvalFunction = Callable[[Params, Params, Params, Batch], Metrics]


class StepSums(NamedTuple):
    """What micro-batches add up to: float32 gradients and loss, and counts."""

    grads: Params
    loss: Array
    weight: Array
    correct: Array | None
    num_tokens: Array
    means: dict[str, tuple[Array, Array]]


def count_tokens(batch: Batch) -> Array:
    """Real tokens (neither padding nor filler rows) of a batch, int32."""
    segments = [value for name, value in batch.items() if name.endswith("segment_ids")]
    if segments:
        counts = [(value > 0).sum(dtype=jnp.int32) for value in segments]
        return jnp.stack(counts).sum(dtype=jnp.int32)
    if "attention_mask" in batch:
        real = batch["attention_mask"] > 0
        if "weights" in batch:
            real = real & (batch["weights"] > 0)[:, None]
        return real.sum(dtype=jnp.int32)
    return jnp.asarray(batch["input_ids"].size, jnp.int32)


def grad_squares(grads: Params) -> Array:
    """Squared L2 norm of each gradient, in the order of the sorted keys. float32 [len(grads)]."""
    return jnp.stack([jnp.vdot(grads[key], grads[key]) for key in sorted(grads)])


def _micro_sums(
    loss: Loss, compute: Params, frozen: Params, buffers: Params, batch: Batch, key: Array
) -> tuple[StepSums, Params]:
    """Sums of one micro-batch, gradients taken at the compute copy, and the buffers after it."""

    def objective(trainable: Params) -> tuple[Array, Any]:
        sums = loss({**trainable, **frozen}, buffers, batch, rng=key, train=True)
        aside = (sums.weight, sums.correct, dict(sums.means or {}))
        return sums.loss, (aside, {**buffers, **sums.buffers})

    (total, (aside, after)), grads = jax.value_and_grad(objective, has_aux=True)(compute)
    sums = StepSums(
        grads={name: grad.astype(jnp.float32) for name, grad in grads.items()},
        loss=total.astype(jnp.float32),
        weight=aside[0],
        correct=aside[1],
        num_tokens=count_tokens(batch),
        means=aside[2],
    )
    return sums, after


def _all_sums(
    loss: Loss, compute: Params, frozen: Params, buffers: Params, batches: Batch, key: Array
) -> tuple[StepSums, Params]:
    """Sums over the leading axis of `batches`; one micro-batch needs no loop."""
    count = next(iter(batches.values())).shape[0]

    def micro(buffers: Params, batch: Batch, index: Array | int) -> tuple[StepSums, Params]:
        micro_key = jax.random.fold_in(key, index)
        return _micro_sums(loss, compute, frozen, buffers, batch, micro_key)

    first = {name: value[0] for name, value in batches.items()}
    if count == 1:
        return micro(buffers, first, 0)

    def body(
        carry: tuple[StepSums, Params], xs: tuple[Array, Batch]
    ) -> tuple[tuple[StepSums, Params], None]:
        total, buffers = carry
        added, buffers = micro(buffers, xs[1], xs[0])
        return (jax.tree.map(jnp.add, total, added), buffers), None

    shapes, _ = jax.eval_shape(lambda: micro(buffers, first, 0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (total, after), _ = jax.lax.scan(body, (zeros, buffers), (jnp.arange(count), dict(batches)))
    return total, after


def _apply_sums(
    state: TrainState,
    sums: StepSums,
    buffers: Params,
    learning_rate: Array,
    *,
    optimizer: Optimizer,
    max_grad_norm: float,
) -> tuple[TrainState, Metrics]:
    """Divide, clip, update; keep the old state when anything is not finite."""
    mean_loss = sums.loss / sums.weight  # 0/0 when nothing is supervised: NaN, and so reported
    grads = {name: grad / sums.weight for name, grad in sums.grads.items()}
    squares = grad_squares(grads)
    norm = jnp.sqrt(squares.sum())
    finite = jnp.isfinite(mean_loss) & jnp.isfinite(norm)
    if max_grad_norm > 0:
        scale = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_
        grads = {name: grad * scale for name, grad in grads.items()}
    trainable, opt_state = optimizer.update(grads, state.opt_state, state.trainable, learning_rate)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    new_state = TrainState(
        step=state.step + 1,
        rng=state.rng,
        trainable=keep(trainable, state.trainable),
        opt_state=keep(opt_state, state.opt_state),
        buffers=keep(buffers, state.buffers),
    )
    metrics = {
        "loss": mean_loss,
        "grad_norm": norm,
        "learning_rate": learning_rate,
        "num_tokens": sums.num_tokens,
        "num_supervised": sums.weight,
        "finite": finite,
        "grad_squares": squares,
    }
    if sums.correct is not None:
        metrics["accuracy"] = sums.correct / sums.weight
    metrics |= {name: total / count for name, (total, count) in sums.means.items()}
    return new_state, metrics


def make_train_step(
    loss: Loss,
    optimizer: Optimizer,
    *,
    dtypes: Mapping[str, Any],
    max_grad_norm: float = 1.0,
) -> StepFunction:
    """The step as a pure function; jit it with the state donated (shapes.CompiledFunction does).

    dtypes: compute dtype of each trainable key. max_grad_norm: 0 turns clipping off.
    Metrics are scalars: loss, grad_norm (before the clip), learning_rate, num_tokens (real),
    num_supervised (Σ of weights), finite (bool), accuracy where the loss counts it, and the means
    a loss names (NaN where nothing was counted); beside them grad_squares, the
    squared gradient norm of each trainable key in sorted order.
    """

    def train_step(
        state: TrainState, frozen: Params, batches: Batch, learning_rate: Array
    ) -> tuple[TrainState, Metrics]:
        compute = cast_params(state.trainable, dtypes)
        key = jax.random.fold_in(state.rng, state.step)
        sums, buffers = _all_sums(loss, compute, frozen, state.buffers, batches, key)
        return _apply_sums(
            state, sums, buffers, learning_rate, optimizer=optimizer, max_grad_norm=max_grad_norm
        )

    return train_step


def make_gradient_step(
    loss: Loss, *, dtypes: Mapping[str, Any]
) -> Callable[..., tuple[StepSums, Params]]:
    """First program of the two-program form.

    `(state, frozen, buffers, batch [B, ...], micro_index, sums | None) -> (sums, buffers)`.
    """

    def gradient_step(
        state: TrainState,
        frozen: Params,
        buffers: Params,
        batch: Batch,
        index: Array,
        total: StepSums | None,
    ) -> tuple[StepSums, Params]:
        compute = cast_params(state.trainable, dtypes)
        key = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), index)
        added, after = _micro_sums(loss, compute, frozen, buffers, batch, key)
        return (added if total is None else jax.tree.map(jnp.add, total, added)), after

    return gradient_step


def make_update_step(
    optimizer: Optimizer, *, max_grad_norm: float = 1.0
) -> Callable[[TrainState, StepSums, Params, Array], tuple[TrainState, Metrics]]:
    """Second program: `(state, sums, buffers, learning_rate) -> (state, metrics)`."""

    def update_step(
        state: TrainState, sums: StepSums, buffers: Params, learning_rate: Array
    ) -> tuple[TrainState, Metrics]:
        return _apply_sums(
            state, sums, buffers, learning_rate, optimizer=optimizer, max_grad_norm=max_grad_norm
        )

    return update_step


def make_eval_step(loss: Loss, *, dtypes: Mapping[str, Any]) -> EvalFunction:
    """`(trainable, frozen, buffers, batch [B, ...]) -> sums`: loss_sum, weight, num_tokens, and
    correct and logits where the loss has them, and its means as name:sum and name:count.
    Dropout is off and buffers stay as they are."""

    def eval_step(trainable: Params, frozen: Params, buffers: Params, batch: Batch) -> Metrics:
        params = {**cast_params(trainable, dtypes), **frozen}
        sums = loss(params, buffers, batch, rng=None, train=False)
        metrics = {
            "loss_sum": sums.loss.astype(jnp.float32),
            "weight": sums.weight,
            "num_tokens": count_tokens(batch),
        }
        if sums.correct is not None:
            metrics["correct"] = sums.correct
        if sums.logits is not None:
            metrics["logits"] = sums.logits
        for name, (total, count) in (sums.means or {}).items():
            metrics[f"{name}:sum"], metrics[f"{name}:count"] = total, count
        return metrics

    return eval_step

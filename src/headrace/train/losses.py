"""Losses as sums: a micro-batch gives Σ(nll·weight) and Σ(weight), and the step divides once.

That is what makes 8x1, 4x2 and 1x8 micro-batches the same step. Labels follow Hugging Face:
`labels[i]` is the token `input_ids[i]`, -100 is not supervised; the shift happens here.

Knows: batches' keys, the LM head split, the classification problem types. Does not know: gradients,
optimizers, data files. Not covered: the auxiliary load-balancing loss of mixture-of-experts models.
Shapes: B = rows, S = tokens in a row, T = B*S, D = hidden size, V = vocabulary, C = classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from headrace.errors import CaptureError, ConfigError
from headrace.kernels import linear_cross_entropy, linear_cross_entropy_on_mesh
from headrace.train.state import Params

IGNORE_INDEX = -100
Batch = Mapping[str, Array]
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


class JaxModule(Protocol):
    """The part of the bridge's module that training calls."""

    def apply(
        self, params: Mapping[str, Array], buffers: Mapping[str, Array], *args: Any, **kwargs: Any
    ) -> tuple[Any, Mapping[str, Array]]: ...

    @property
    def program(self) -> Any: ...

    def without_head(self) -> tuple[Any, Any]: ...


Means = Mapping[str, tuple[Array, Array]]


class LossSums(NamedTuple):
    """One micro-batch: float32 sums, the new buffers, and what evaluation may want to see.

    correct: supervised positions whose arg-max is the label, None where there are no classes.
    logits: [B, C] for classification, [B, S, C] for tokens, None for causal. means: other numbers
    to log, each as (sum, count).
    """

    loss: Array
    weight: Array
    buffers: Mapping[str, Array]
    correct: Array | None = None
    logits: Array | None = None
    means: Means | None = None


class Loss(Protocol):
    """`loss(params, buffers, batch, rng=key|None, train=bool) -> LossSums`, pure."""

    def __call__(
        self, params: Params, buffers: Params, batch: Batch, *, rng: Array | None, train: bool
    ) -> LossSums: ...


@dataclass(frozen=True, kw_only=True)
class CausalLoss:
    """Next-token loss; `notes` say how the head is computed, for the start screen.

    shift: False for masked language models, whose label stands at its own place.
    label_smoothing: as in torch, over the vocabulary; in training only.
    """

    module: Any
    head: Any | None
    remat: str = "none"
    head_trainable: bool = True
    shift: bool = True
    label_smoothing: float = 0.0
    model_inputs: tuple[str, ...] = ("input_ids", "position_ids")
    notes: tuple[str, ...] = field(default=())

    def __call__(
        self, params: Params, buffers: Params, batch: Batch, *, rng: Array | None, train: bool
    ) -> LossSums:
        inputs = {name: batch[name] for name in self.model_inputs if name in batch}
        segments = {"segment_ids": batch["segment_ids"]} if "segment_ids" in batch else {}
        outputs, new_buffers = self.module.apply(
            params, buffers, rng=rng, train=train, remat=self.remat, **segments, **inputs
        )
        targets_BS = batch["labels"]
        if self.shift:
            targets_BS = shift_labels(targets_BS, batch.get("segment_ids"))
        smoothing = self.label_smoothing if train else 0.0
        if self.head is None:
            return _token_loss(outputs.logits, targets_BS, new_buffers, smoothing)
        return self._fused(params, outputs.logits, targets_BS, new_buffers, smoothing)

    def _fused(
        self,
        params: Params,
        hidden_BSD: Array,
        targets_BS: Array,
        buffers: Mapping[str, Array],
        label_smoothing: float,
    ) -> LossSums:
        assert self.head is not None
        weight_key, bias_key = self.head.weight_key, self.head.bias_key
        options: dict[str, Any] = {
            "bias": params[bias_key] if bias_key is not None else None,
            "tail": self.head.tail,
            "ignore_index": IGNORE_INDEX,
            "label_smoothing": label_smoothing,
            "weight_grad": self.head_trainable,
        }
        partition = getattr(self.module, "partition", None)
        if partition is None:
            found = linear_cross_entropy(
                hidden_BSD.reshape(-1, hidden_BSD.shape[-1]),
                params[weight_key],
                targets_BS.reshape(-1),
                **options,
            )
        else:
            found = linear_cross_entropy_on_mesh(
                partition,
                hidden_BSD,
                params[weight_key],
                targets_BS,
                weight_spec=partition.weights[weight_key].stored,
                **options,
            )
        correct = found.correct.astype(jnp.float32)
        return LossSums(found.loss_sum, found.weight_sum, buffers, correct)


def causal_loss(
    module: JaxModule,
    *,
    trainable: frozenset[str],
    remat: str = "none",
    fused: bool = True,
    model_inputs: tuple[str, ...] = ("input_ids", "position_ids"),
    **options: Any,
) -> CausalLoss:
    """The causal loss of a captured model; without logits in memory when its head can be split.

    options: shift and label_smoothing of CausalLoss.
    """
    options |= {"remat": remat, "model_inputs": model_inputs}
    if not fused:
        return CausalLoss(module=module, head=None, **options)
    try:
        if not module.program.dynamic:
            raise CaptureError("the capture has static shapes and is made anew for each of them")
        backbone, head = module.without_head()
    except CaptureError as reason:
        note = f"loss computes all logits [B, S, V]: the LM head could not be split off ({reason})"
        return CausalLoss(module=module, head=None, notes=(note,), **options)
    return CausalLoss(
        module=backbone,
        head=head,
        **options,
        head_trainable=bool({head.weight_key, head.bias_key} & trainable),
    )


def shift_labels(labels_BS: Array, segment_ids_BS: Array | None) -> Array:
    """Targets: position i predicts labels[i + 1], never across segments, and the last nothing."""
    targets = jnp.pad(labels_BS[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)
    if segment_ids_BS is None:
        return targets
    following = jnp.pad(segment_ids_BS[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(following == segment_ids_BS, targets, IGNORE_INDEX)


def _token_loss(
    logits: Array, targets: Array, buffers: Mapping[str, Array], label_smoothing: float = 0.0
) -> LossSums:
    mask = targets != IGNORE_INDEX
    logits = logits.astype(jnp.float32)
    safe = jnp.where(mask, targets, 0)
    picked = jnp.take_along_axis(logits, safe[..., None], axis=-1)[..., 0]
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    nll = normaliser - picked
    if label_smoothing:
        uniform = normaliser - logits.mean(axis=-1)
        nll = (1 - label_smoothing) * nll + label_smoothing * uniform
    correct = (logits.argmax(axis=-1) == targets) & mask
    return LossSums(
        loss=jnp.where(mask, nll, 0.0).sum(),
        weight=mask.sum().astype(jnp.float32),
        buffers=buffers,
        correct=correct.sum().astype(jnp.float32),
    )


RowLoss = Callable[[Array, Array], Array]


def _mse_rows(logits_BC: Array, labels: Array) -> Array:
    return jnp.square(logits_BC - labels.reshape(logits_BC.shape)).mean(axis=-1)


def _cross_entropy_rows(logits_BC: Array, labels_B: Array) -> Array:
    picked = jnp.take_along_axis(logits_BC, labels_B[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits_BC, axis=-1) - picked


def _bce_rows(logits_BC: Array, labels_BC: Array) -> Array:
    # log(1 + e^-|x|) form: stable for large logits of either sign.
    softplus = jnp.maximum(logits_BC, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(logits_BC)))
    return (softplus - logits_BC * labels_BC).mean(axis=-1)


ROW_LOSSES: dict[str, RowLoss] = {
    "regression": _mse_rows,
    "single_label_classification": _cross_entropy_rows,
    "multi_label_classification": _bce_rows,
}


@dataclass(frozen=True, kw_only=True)
class ClassificationLoss:
    """Loss per row, weighted by `weights` (0 for filler rows); means over a row's outputs."""

    module: Any
    problem_type: ProblemType
    remat: str = "none"
    label_smoothing: float = 0.0
    model_inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")
    notes: tuple[str, ...] = field(default=())

    def __call__(
        self, params: Params, buffers: Params, batch: Batch, *, rng: Array | None, train: bool
    ) -> LossSums:
        inputs = {name: batch[name] for name in self.model_inputs if name in batch}
        outputs, new_buffers = self.module.apply(
            params, buffers, rng=rng, train=train, remat=self.remat, **inputs
        )
        logits_BC = outputs.logits.astype(jnp.float32)
        labels = batch["labels"]
        weights_B = batch.get("weights", jnp.ones(logits_BC.shape[0], jnp.float32))
        rows_B = ROW_LOSSES[self.problem_type](logits_BC, labels)
        if self.label_smoothing and train and self.problem_type == "single_label_classification":
            uniform_B = jax.nn.logsumexp(logits_BC, axis=-1) - logits_BC.mean(axis=-1)
            rows_B = (1 - self.label_smoothing) * rows_B + self.label_smoothing * uniform_B
        correct = None
        if self.problem_type == "single_label_classification":
            hit_B = (logits_BC.argmax(axis=-1) == labels) & (weights_B > 0)
            correct = hit_B.sum().astype(jnp.float32)
        # where, not a product: a filler row may hold a NaN, and NaN * 0 is NaN.
        return LossSums(
            loss=jnp.where(weights_B > 0, rows_B * weights_B, 0.0).sum(),
            weight=weights_B.sum().astype(jnp.float32),
            buffers=new_buffers,
            correct=correct,
            logits=logits_BC,
        )


@dataclass(frozen=True, kw_only=True)
class TokenClassificationLoss:
    """One label for each token that has one (labels [B, S], -100 elsewhere)."""

    module: Any
    remat: str = "none"
    label_smoothing: float = 0.0
    model_inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")
    notes: tuple[str, ...] = field(default=())

    def __call__(
        self, params: Params, buffers: Params, batch: Batch, *, rng: Array | None, train: bool
    ) -> LossSums:
        inputs = {name: batch[name] for name in self.model_inputs if name in batch}
        outputs, new_buffers = self.module.apply(
            params, buffers, rng=rng, train=train, remat=self.remat, **inputs
        )
        smoothing = self.label_smoothing if train else 0.0
        sums = _token_loss(outputs.logits, batch["labels"], new_buffers, smoothing)
        return sums._replace(logits=outputs.logits.astype(jnp.float32))


def infer_problem_type(num_labels: int, labels: Any, configured: str | None) -> ProblemType:
    """transformers' rule: one output: regression; integer labels: classes; else multi-label."""
    if configured is not None:
        if configured not in ROW_LOSSES:
            raise ConfigError(
                f"problem_type {configured!r} is not known; use one of {', '.join(ROW_LOSSES)}."
            )
        return configured  # pyright: ignore[reportReturnType]
    if num_labels == 1:
        return "regression"
    if jnp.issubdtype(labels.dtype, jnp.integer) and labels.ndim == 1:
        return "single_label_classification"
    return "multi_label_classification"

"""The LM head and its cross-entropy together, in chunks of supervised tokens.

The logits of all tokens never exist: a loop runs head, tail, loss and gradient for `chunk` tokens
at a time. Supervised tokens are brought to the front, so a batch in which 30 % of the tokens carry
a label costs 30 % of the chunks. The gradient is computed in the forward pass, while the logits
of the chunk are there, and only scaled in the backward pass.

Knows nothing of models or meshes: on a mesh run it inside shard_map over the token axes and sum
the results. Source of the idea: Liger Kernel, https://arxiv.org/abs/2410.10989, section 3.2.

Shapes: T = tokens (batch and sequence together), D = hidden size, V = vocabulary, C = chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace.errors import ConfigError
from headrace.kernels.attention_dense import accumulator_dtype

Tail = Callable[[Array], Array]

CHUNK_BYTES = 2**26  # float32 logits of one chunk
CHUNK_MULTIPLE = 128
LEAST_CHUNK = 512


class LinearCrossEntropy(NamedTuple):
    """Sums over the supervised tokens; the mean loss is loss_sum / weight_sum."""

    loss_sum: Array  # float32, sum of weight * loss
    weight_sum: Array  # float32
    correct: Array  # int32, tokens of weight > 0 whose largest logit is the label's


class _Settings(NamedTuple):
    tail: Tail | None
    label_smoothing: float
    chunk: int
    weight_grad: bool


class _Tokens(NamedTuple):
    """Supervised tokens first; positions past the last token are T."""

    order_T: Array
    labels_T: Array
    weights_T: Array
    num_supervised: Array


def linear_cross_entropy(
    hidden_TD: Array,
    weight_VD: Array,
    labels_T: Array,
    *,
    bias: Array | None = None,
    tail: Tail | None = None,
    weights_T: Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    weight_grad: bool = True,
) -> LinearCrossEntropy:
    """Cross-entropy of tail(hidden @ weight.T + bias) against labels, summed over tokens.

    Args:
      hidden_TD, weight_VD: one dtype; products accumulate in float32 (float64 for float64).
      labels_T: int [T]; `ignore_index` marks tokens without a loss. Already shifted.
      bias: [V].
      tail: token-wise function [C, V] -> [C, V] on float32 logits (soft-capping, casts),
        differentiated by JAX. It must not close over traced arrays.
      weights_T: float [T], weight of each token's loss; tokens of weight 0 are skipped. Data: it
        receives no gradient.
      label_smoothing: as in torch: (1 - e) * nll + e * the mean of -log p over the vocabulary.
      chunk: tokens whose logits exist at one time, see chunk_tokens for the default.
      weight_grad: False for a frozen head: no gradient is computed for weight and bias, and they
        are reported as zero.

    Memory beyond the arguments: chunk * V and, when differentiated, gradients of hidden (its
    dtype) and weight (float32). Reverse mode only.

    Raises ConfigError when the shapes do not fit, with all problems.
    """
    _check(hidden_TD, weight_VD, labels_T, bias, weights_T, label_smoothing, chunk)
    T, V = hidden_TD.shape[0], weight_VD.shape[0]
    wide = accumulator_dtype(hidden_TD.dtype)
    supervised_T = labels_T != ignore_index
    weights = jnp.ones(T, wide) if weights_T is None else weights_T.astype(wide)
    weights = lax.stop_gradient(jnp.where(supervised_T, weights, 0.0))
    settings = _Settings(tail, label_smoothing, chunk or chunk_tokens(T, V), weight_grad)
    order_T = jnp.argsort(weights == 0.0, stable=True).astype(jnp.int32)
    labels = jnp.where(supervised_T, labels_T, 0)
    tokens = _Tokens(order_T, labels, weights, jnp.sum(weights != 0.0, dtype=jnp.int32))
    sums: Any = _loss(settings, hidden_TD, weight_VD, bias, tokens)
    loss_sum, correct = sums
    return LinearCrossEntropy(loss_sum, weights.sum(), correct)


def chunk_tokens(num_tokens: int, vocabulary: int) -> int:
    """Tokens of a chunk unless one is asked for: 64 MiB of float32 logits, a multiple of 128, but
    at least 512 tokens. With fewer an accelerator waits for the head's weight, which every chunk
    reads (docs/experiments.md).
    """
    fitting = CHUNK_BYTES // (4 * vocabulary)
    chunk = max(fitting // CHUNK_MULTIPLE * CHUNK_MULTIPLE, LEAST_CHUNK)
    return min(chunk, max(num_tokens, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    settings: _Settings, hidden_TD: Array, weight_VD: Array, bias_V: Array | None, tokens: _Tokens
) -> tuple[Array, Array]:
    def step(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rows_C, labels_C, weights_C = _take(settings, tokens, c)
        logits_CV, _ = _logits(settings, _rows(hidden_TD, rows_C), weight_VD, bias_V)
        loss, correct, _ = _chunk_loss(settings, logits_CV, labels_C, weights_C)
        return carry[0] + loss, carry[1] + correct

    start = jnp.zeros((), tokens.weights_T.dtype), jnp.zeros((), jnp.int32)
    return lax.fori_loop(0, _num_chunks(settings, tokens), step, start)


def _loss_fwd(
    settings: _Settings, hidden_TD: Array, weight_VD: Array, bias_V: Array | None, tokens: _Tokens
) -> tuple[tuple[Array, Array], Any]:
    wide = tokens.weights_T.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=wide)

    def step(c: Array, carry: Any) -> Any:
        (loss_sum, num_correct), dhidden, dweight, dbias = carry
        rows_C, labels_C, weights_C = _take(settings, tokens, c)
        hidden_CD = _rows(hidden_TD, rows_C)
        logits_CV, pull_back = _logits(settings, hidden_CD, weight_VD, bias_V)
        loss, correct, log_sum_C = _chunk_loss(settings, logits_CV, labels_C, weights_C)
        dlogits_CV = pull_back(_dloss(settings, logits_CV, log_sum_C, labels_C, weights_C))
        low_CV = dlogits_CV.astype(hidden_TD.dtype)
        dhidden_CD = product("cv,vd->cd", low_CV, weight_VD).astype(dhidden.dtype)
        dhidden = dhidden.at[rows_C].set(dhidden_CD, mode="drop", unique_indices=True)
        if settings.weight_grad:
            dweight = dweight + product("cv,cd->vd", low_CV, hidden_CD)
            dbias = None if dbias is None else dbias + dlogits_CV.sum(axis=0)
        return (loss_sum + loss, num_correct + correct), dhidden, dweight, dbias

    # float16 would lose small gradients before they are scaled; bfloat16 has float32's range.
    narrow = wide if hidden_TD.dtype == jnp.float16 else hidden_TD.dtype
    dhidden = jnp.zeros(hidden_TD.shape, narrow)
    dweight = jnp.zeros(weight_VD.shape, wide) if settings.weight_grad else None
    dbias = None
    if bias_V is not None and settings.weight_grad:
        dbias = jnp.zeros(bias_V.shape, wide)
    sums = jnp.zeros((), wide), jnp.zeros((), jnp.int32)
    carry = sums, dhidden, dweight, dbias
    sums, *grads = lax.fori_loop(0, _num_chunks(settings, tokens), step, carry)
    like = [None if x is None else jnp.zeros((), x.dtype) for x in (hidden_TD, weight_VD, bias_V)]
    return sums, (grads, like)


def _loss_bwd(settings: _Settings, residuals: Any, cotangent: tuple[Array, Any]) -> tuple[Any, ...]:
    grads, like = residuals
    scale = cotangent[0]
    scaled = [
        None if grad is None else (grad.astype(scale.dtype) * scale).astype(x.dtype)
        for grad, x in zip(grads, like, strict=True)
    ]
    return (*scaled, None)


_loss.defvjp(_loss_fwd, _loss_bwd)


def _num_chunks(settings: _Settings, tokens: _Tokens) -> Array:
    return (tokens.num_supervised + settings.chunk - 1) // settings.chunk


def _take(settings: _Settings, tokens: _Tokens, c: Array) -> tuple[Array, Array, Array]:
    """Rows, labels and weights of chunk c; rows past the last token are T and weigh nothing."""
    at = c * settings.chunk + jnp.arange(settings.chunk)
    T = tokens.order_T.shape[0]
    rows_C = tokens.order_T.at[at].get(mode="fill", fill_value=T)
    labels_C = tokens.labels_T.at[rows_C].get(mode="fill", fill_value=0)
    weights_C = tokens.weights_T.at[rows_C].get(mode="fill", fill_value=0)
    # Distinct rows past the end, so that the scatter may be told that its indices are unique.
    return jnp.where(rows_C == T, at + T, rows_C), labels_C, weights_C


def _rows(hidden_TD: Array, rows_C: Array) -> Array:
    return hidden_TD.at[rows_C].get(mode="fill", fill_value=0)


def _logits(
    settings: _Settings, hidden_CD: Array, weight_VD: Array, bias_V: Array | None
) -> tuple[Array, Tail]:
    """Logits after the tail, in the accumulator dtype, and the tail's derivative."""
    wide = accumulator_dtype(hidden_CD.dtype)
    logits = jnp.einsum("cd,vd->cv", hidden_CD, weight_VD, preferred_element_type=wide)
    if bias_V is not None:
        logits = logits + bias_V.astype(wide)
    tail = settings.tail
    if tail is None:
        return logits, lambda dlogits: dlogits
    bent, pull_back = jax.vjp(lambda x: tail(x).astype(wide), logits)
    return bent, lambda dbent: pull_back(dbent)[0]


def _chunk_loss(
    settings: _Settings, logits_CV: Array, labels_C: Array, weights_C: Array
) -> tuple[Array, Array, Array]:
    """Weighted loss, number of right guesses, log-sum-exp of every token."""
    best_C = logits_CV.max(axis=-1)
    log_sum_C = best_C + jnp.log(jnp.exp(logits_CV - best_C[:, None]).sum(axis=-1))
    picked_C = jnp.take_along_axis(logits_CV, labels_C[:, None], axis=-1)[:, 0]
    losses_C = log_sum_C - picked_C
    smoothing = settings.label_smoothing
    if smoothing > 0.0:
        uniform_C = log_sum_C - logits_CV.mean(axis=-1)
        losses_C = (1.0 - smoothing) * losses_C + smoothing * uniform_C
    # argmax from the maximum at hand: XLA's own, a reduction of pairs, is slow on a CPU.
    V = logits_CV.shape[-1]
    first_C = jnp.where(logits_CV == best_C[:, None], jnp.arange(V), V).min(axis=-1)
    right_C = (first_C == labels_C) & (weights_C != 0.0)
    # A token of weight 0 must not spoil the sum with inf * 0.
    losses_C = jnp.where(weights_C == 0.0, 0.0, losses_C * weights_C)
    return losses_C.sum(), right_C.sum(dtype=jnp.int32), log_sum_C


def _dloss(
    settings: _Settings, logits_CV: Array, log_sum_C: Array, labels_C: Array, weights_C: Array
) -> Array:
    """Gradient of the weighted loss: weight * (softmax - target)."""
    smoothing, V = settings.label_smoothing, logits_CV.shape[-1]
    hit_CV = jnp.arange(V)[None, :] == labels_C[:, None]
    target_CV = jnp.where(hit_CV, 1.0 - smoothing, 0.0) + smoothing / V
    return weights_C[:, None] * (jnp.exp(logits_CV - log_sum_C[:, None]) - target_CV)


def _check(
    hidden_TD: Array,
    weight_VD: Array,
    labels_T: Array,
    bias: Array | None,
    weights_T: Array | None,
    label_smoothing: float,
    chunk: int | None,
) -> None:
    problems: list[str] = []

    def need(holds: bool, given: str, needed: str) -> None:
        if not holds:
            problems.append(f"{given}; needed: {needed}")

    shapes = f"hidden {hidden_TD.shape}, weight {weight_VD.shape}"
    fits = hidden_TD.ndim == weight_VD.ndim == 2 and hidden_TD.shape[1] == weight_VD.shape[1]
    need(fits, shapes, "[T, D] and [V, D]; join batch and sequence")
    dtypes = f"hidden {hidden_TD.dtype}, weight {weight_VD.dtype}"
    need(hidden_TD.dtype == weight_VD.dtype, dtypes, "one dtype; cast the float32 master weight")
    T, V = hidden_TD.shape[:1], weight_VD.shape[:1]
    integer = jnp.issubdtype(labels_T.dtype, jnp.integer)
    labels = f"labels {labels_T.dtype} {labels_T.shape}"
    need(labels_T.shape == T and integer, labels, f"integers {T}")
    need(bias is None or bias.shape == V, f"bias {getattr(bias, 'shape', None)}", f"{V}")
    given = f"weights {getattr(weights_T, 'shape', None)}"
    need(weights_T is None or weights_T.shape == T, given, f"{T}")
    need(0.0 <= label_smoothing < 1.0, f"label_smoothing={label_smoothing}", "0 <= value < 1")
    need(chunk is None or chunk > 0, f"chunk={chunk}", "a positive number of tokens, or None")
    if problems:
        raise ConfigError("linear_cross_entropy cannot run:\n  " + "\n  ".join(problems))

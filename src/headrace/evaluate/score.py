"""One pass over causal batches: summed losses, hits, rows that greedy decoding would get right.

A greedy decoder reproduces an answer exactly when the arg-max at every position of the answer, its
end token included, is the answer's own token given the tokens before. So one forward pass with the
reference in place decides the exact match of greedy decoding, token for token, without decoding.
(A decoder that spells the same text with other tokens counts as different.)

Logits [S, V] exist for one row at a time. Shapes: B = rows, S = tokens, D = hidden, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.evaluate.model import EvalModel

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class CausalScores:
    """Sums over all supervised tokens; exact: bool by row, in the order of the batches."""

    loss_sum: float
    num_tokens: int
    num_correct: int
    exact: np.ndarray

    @property
    def loss(self) -> float:
        """Mean negative log likelihood a supervised token, in nats."""
        return self.loss_sum / self.num_tokens if self.num_tokens else float("nan")


def score_causal(model: EvalModel, batches: Iterable[Mapping[str, np.ndarray]]) -> CausalScores:
    """Score batches of one example a row; filler rows (no supervised token) are left out.

    Compiles once for each batch shape.
    """
    step = jax.jit(lambda params, buffers, batch: causal_step(model, params, buffers, batch))
    loss, tokens, correct = 0.0, 0, 0
    exact: list[np.ndarray] = []
    for batch in batches:
        nll_B, count_B, hit_B = jax.device_get(step(model.params, model.buffers, dict(batch)))
        loss += float(np.sum(nll_B, dtype=np.float64))
        tokens, correct = tokens + int(count_B.sum()), correct + int(hit_B.sum())
        exact.append((hit_B == count_B)[count_B > 0])
    found = np.concatenate(exact) if exact else np.zeros(0, bool)
    return CausalScores(loss_sum=loss, num_tokens=tokens, num_correct=correct, exact=found)


def causal_step(
    model: EvalModel, params: Any, buffers: Any, batch: Mapping[str, Array]
) -> tuple[Array, Array, Array]:
    """By row: summed loss, supervised tokens, those whose arg-max is right."""
    inputs: dict[str, Any] = {name: batch[name] for name in model.inputs}
    if "segment_ids" in batch:
        inputs["segment_ids"] = batch["segment_ids"]
    outputs, _ = model.module.apply(params, buffers, train=False, **inputs)
    targets_BS = jnp.pad(batch["labels"][:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)

    def row(pair: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden_SD, targets_S = pair
        logits_SV = model.logits(params, hidden_SD).astype(jnp.float32)
        mask_S = targets_S != IGNORE_INDEX
        safe_S = jnp.where(mask_S, targets_S, 0)
        picked_S = jnp.take_along_axis(logits_SV, safe_S[:, None], axis=-1)[:, 0]
        nll_S = jax.nn.logsumexp(logits_SV, axis=-1) - picked_S
        hit_S = (logits_SV.argmax(axis=-1) == targets_S) & mask_S
        return jnp.where(mask_S, nll_S, 0.0).sum(), mask_S.sum(), hit_S.sum()

    return jax.lax.map(row, (outputs.logits, targets_BS))

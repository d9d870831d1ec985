"""A tiny language model written twice, in torch and in JAX, so that the step can be tested alone.

Shapes: B = rows, S = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from headrace.errors import CaptureError

V, D = 23, 8


class TorchTwin(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(V, D)
        self.hidden = torch.nn.Linear(D, D)
        self.norm = torch.nn.LayerNorm(D)
        self.head = torch.nn.Linear(D, V, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.hidden(self.embed(input_ids)))))


class JaxTwin:
    """The same model behind the bridge's protocol; dropout only when `dropout` > 0."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout
        self.program = SimpleNamespace(dynamic=True)

    def apply(
        self, params: Any, buffers: Any, *, input_ids: Any, rng: Any = None, train: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        x = params["embed.weight"][input_ids]
        x = jnp.tanh(x @ params["hidden.weight"].T + params["hidden.bias"])
        if train and self.dropout:
            keep = jax.random.bernoulli(rng, 1 - self.dropout, x.shape)
            x = jnp.where(keep, x / (1 - self.dropout), 0)
        centred = x - x.mean(-1, keepdims=True)
        x = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
        x = x * params["norm.weight"] + params["norm.bias"]
        seen = {"seen": buffers["seen"] + 1} if train and "seen" in buffers else {}
        return SimpleNamespace(logits=x @ params["head.weight"].T), seen

    def without_head(self) -> tuple[Any, Any]:
        raise CaptureError("the twin has no backbone of its own")


def jax_params(model: torch.nn.Module) -> dict[str, jax.Array]:
    return {n: jnp.asarray(p.detach().numpy()) for n, p in model.named_parameters()}


def batches(
    steps: int, *, rows: int = 8, length: int = 6, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Causal batches [rows, length]: ragged supervision, two segments a row, padding at the end."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(steps):
        input_ids = rng.integers(0, V, (rows, length), dtype=np.int32)
        segment_ids = np.ones((rows, length), np.int32)
        segment_ids[:, length // 2 :] = 2
        segment_ids[rows // 2 :, -1] = 0
        labels = np.where(rng.random((rows, length)) < 0.7, input_ids, -100).astype(np.int32)
        labels[segment_ids == 0] = -100
        made.append({"input_ids": input_ids, "labels": labels, "segment_ids": segment_ids})
    return made


def micro(batch: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """[B, ...] -> [count, B / count, ...]."""
    return {n: v.reshape(count, v.shape[0] // count, *v.shape[1:]) for n, v in batch.items()}

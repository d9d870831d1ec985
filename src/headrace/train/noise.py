"""NEFTune: uniform noise on the embeddings while training (Jain et al. 2023).

A forward hook on the model's input embedding puts one operator of its own into the captured graph;
its `train` flag is turned off when the program evaluates, as dropout's is. The noise is scaled by
alpha / sqrt(S * D), S the row length, as in transformers.

Knows: hooks, the operator and its rule. Does not know: losses, the loop.
Shapes: B = rows, S = row length, D = hidden size.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import torch
from jax import Array
from torch import nn

from headrace.bridge.ops.registry import lowers
from headrace.errors import ConfigError


@torch.library.custom_op("headrace::embedding_noise", mutates_args=())
def embedding_noise(x: torch.Tensor, alpha: float, train: bool) -> torch.Tensor:
    """x plus uniform noise in +-alpha / sqrt(S * D) when `train`, else a copy of x."""
    if not train:
        return x.clone()
    size = alpha / math.sqrt(x.shape[-2] * x.shape[-1])
    return x + torch.empty_like(x).uniform_(-size, size)


@embedding_noise.register_fake
def _(x: torch.Tensor, alpha: float, train: bool) -> torch.Tensor:
    return torch.empty_like(x)


@lowers(torch.ops.headrace.embedding_noise.default, draws=True)
def headrace_embedding_noise(x: Array, alpha: float, train: bool, *, key: Array) -> Array:
    """embedding_noise(Tensor x, float alpha, bool train) -> Tensor"""
    if not train:
        return x
    size = alpha / math.sqrt(x.shape[-2] * x.shape[-1])
    return x + jax.random.uniform(key, x.shape, x.dtype, -size, size)


def add_embedding_noise(model: nn.Module, alpha: float) -> Any:
    """Put noise behind the input embedding; returns the hook's handle (`remove()` undoes it).

    Raises ConfigError when the model has no input embedding.
    """
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    if embedding is None:
        raise ConfigError(
            f"neftune_noise_alpha: {type(model).__name__} names no input embedding; remove it"
        )

    def noisy(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return embedding_noise(output, alpha, module.training)

    return embedding.register_forward_hook(noisy)

"""Linear layers of a step that holds few tokens, on a CPU.

XLA's CPU matmul packs its right operand at every call. With few tokens the weight is much the
larger one, so packing it costs more than the product; with the weight on the left the tokens are
packed.

Knows: matmuls. Does not know: layers, adapters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from headrace.kernels.attention import traced_platform

Array = jax.Array

FEW_TOKENS = 32


def weight_first(num_tokens: int) -> bool:
    """Whether few tokens on a CPU make the weight the better left operand."""
    return traced_platform() == "cpu" and 1 < num_tokens <= FEW_TOKENS


def linear_weight_first(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x @ weight.T + bias with the weight as the left operand."""
    flat = x.reshape(-1, x.shape[-1])
    # Without the barrier XLA turns the product round again.
    out_FT = jax.lax.optimization_barrier(jnp.einsum("fd,td->ft", weight, flat))
    out = out_FT.T.reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias

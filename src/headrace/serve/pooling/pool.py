"""Hidden states of padded texts -> one embedding each, as sentence-transformers computes it.

Texts are padded on the right. Sums are float32 whatever the model's dtype is.

Shapes: B = texts, S = tokens, D = hidden size, E = size of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from headrace.serve.pooling.recipe import Dense, Recipe

Array = jax.Array

EXACT = jax.lax.Precision.HIGHEST  # these products are small; TPUs would round them to bfloat16

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "Sigmoid": jax.nn.sigmoid,
}


def embed(hidden_BSD: Array, mask_BS: Array, recipe: Recipe) -> Array:
    """float32 [B, E], not normalised: a shortened embedding is normalised after it was cut."""
    hidden_BSD, mask_BS = hidden_BSD.astype(jnp.float32), mask_BS.astype(jnp.float32)
    out_BE = jnp.concatenate([_pool(hidden_BSD, mask_BS, mode) for mode in recipe.modes], axis=-1)
    for layer in recipe.dense:
        out_BE = _dense(out_BE, layer)
    return out_BE


def _pool(hidden_BSD: Array, mask_BS: Array, mode: str) -> Array:
    count_B1 = mask_BS.sum(axis=1, keepdims=True)
    if mode == "cls":
        return hidden_BSD[:, 0]
    if mode == "lasttoken":
        last_B = count_B1[:, 0].astype(jnp.int32) - 1
        return jnp.take_along_axis(hidden_BSD, last_B[:, None, None], axis=1)[:, 0]
    if mode == "max":
        return jnp.where(mask_BS[..., None] > 0, hidden_BSD, -jnp.inf).max(axis=1)
    weights_BS = mask_BS
    if mode == "weightedmean":
        weights_BS = mask_BS * jnp.arange(1, mask_BS.shape[1] + 1)
        count_B1 = weights_BS.sum(axis=1, keepdims=True)
    total_BD = jnp.einsum("bsd,bs->bd", hidden_BSD, weights_BS, precision=EXACT)
    return total_BD / (jnp.sqrt(count_B1) if mode == "mean_sqrt_len_tokens" else count_B1)


def _dense(x_BD: Array, layer: Dense) -> Array:
    weight_ED = jnp.asarray(layer.weight_ED, jnp.float32)
    out_BE = jnp.einsum("bd,ed->be", x_BD, weight_ED, precision=EXACT)
    if layer.bias_E is not None:
        out_BE = out_BE + jnp.asarray(layer.bias_E, jnp.float32)
    return _ACTIVATIONS[layer.activation](out_BE)

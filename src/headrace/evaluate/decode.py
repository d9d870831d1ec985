"""Greedy generation with a fixed buffer: one whole forward pass for every new token.

Simple and exact, meant for evaluation of short answers. It keeps no key/value cache, so its cost
grows with the square of the length; the serving engine is the fast way. The interface (token ids
in, token ids out, end ids and a limit) is the one that engine will keep.

Rows are padded on the right; with causal attention what is right of a token cannot change it.
Shapes: B = prompts, S = buffer length, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.errors import ConfigError
from headrace.evaluate.model import EvalModel

BUFFER_MULTIPLE = 32  # buffers are rounded up to it, so that few shapes are compiled


def greedy_generate(
    model: EvalModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """The most likely continuation of each prompt, token by token, without the prompt.

    max_new_tokens: most tokens to add to a prompt. eos_token_ids: ids that end an answer (kept out
    of it); None takes the generation configuration's, else the tokenizer's.
    Compiles once for each (B, S). Raises ConfigError for an empty prompt, no prompts, or a prompt
    that leaves no room in the model's positions.
    """
    _check(model, prompts, max_new_tokens)
    ends = default_eos_token_ids(model) if eos_token_ids is None else tuple(eos_token_ids)
    longest = max(len(prompt) for prompt in prompts)
    size = -(-(longest + max_new_tokens) // BUFFER_MULTIPLE) * BUFFER_MULTIPLE
    tokens_BS = np.zeros((len(prompts), size), np.int32)
    for row, prompt in zip(tokens_BS, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths_B = np.asarray([len(prompt) for prompt in prompts], np.int32)
    run = jax.jit(
        lambda params, buffers, tokens, lengths: decode_greedy(
            model, params, buffers, tokens, lengths, ends, max_new_tokens
        )
    )
    out_BS, stop_B = jax.device_get(run(model.params, model.buffers, tokens_BS, lengths_B))
    spans = zip(out_BS, lengths_B, stop_B, strict=True)
    return [row[start:stop].tolist() for row, start, stop in spans]


def default_eos_token_ids(model: EvalModel) -> tuple[int, ...]:
    """End tokens of the generation configuration and the tokenizer together."""
    generation = getattr(model.torch_model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    listed: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found]
    listed.append(model.tokenizer.eos_token_id)
    return tuple(sorted({int(each) for each in listed if each is not None}))


def _check(model: EvalModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if not prompts or not all(prompts):
        raise ConfigError("a prompt is empty, or there is none; each needs at least one token")
    config: Any = model.torch_model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    longest = max(len(prompt) for prompt in prompts)
    if positions is not None and longest + max_new_tokens > positions:
        raise ConfigError(
            f"the longest prompt has {longest:,} tokens and {max_new_tokens:,} new ones are asked "
            f"for; the model has {positions:,} positions. Shorten the prompt or max_new_tokens"
        )


def decode_greedy(
    model: EvalModel,
    params: Any,
    buffers: Any,
    tokens_BS: Array,
    lengths_B: Array,
    ends: tuple[int, ...],
    max_new_tokens: int,
) -> tuple[Array, Array]:
    """The filled buffer, and where each row's answer stops."""
    rows_B = jnp.arange(tokens_BS.shape[0])
    position_ids = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
    end_ids = jnp.asarray(ends or (-1,), jnp.int32)

    def keep_going(carry: tuple[Array, Array, Array, Array]) -> Array:
        _, _, done_B, step = carry
        return (step < max_new_tokens) & ~done_B.all()

    def advance(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        tokens, at_B, done_B, step = carry
        outputs, _ = model.module.apply(
            params, buffers, train=False, input_ids=tokens, position_ids=position_ids
        )
        logits_BV = model.logits(params, outputs.logits[rows_B, at_B - 1])
        next_B = logits_BV.argmax(axis=-1).astype(tokens.dtype)
        done_B = done_B | (next_B[:, None] == end_ids).any(axis=-1)
        kept_B = jnp.where(done_B, tokens[rows_B, at_B], next_B)
        tokens = tokens.at[rows_B, at_B].set(kept_B)
        return tokens, jnp.where(done_B, at_B, at_B + 1), done_B, step + 1

    start = (tokens_BS, lengths_B, jnp.zeros(len(rows_B), bool), jnp.asarray(0))
    tokens, stop_B, _, _ = jax.lax.while_loop(keep_going, advance, start)
    return tokens, stop_B

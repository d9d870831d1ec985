"""One token a row from logits, on the device.

Three variants, cheapest first: `greedy`; `drawn` (temperature, top-k, top-p, min-p); `shaped`,
which also has penalties, biases and grammar masks and keeps counts of what each sequence wrote.
A row draws with a key of its own seed and the number of the token, so its answer does not depend
on who shares the batch. The order is that of transformers: penalties, bias and mask, temperature,
top-k, top-p, min-p. Reported log-probabilities are those of the model, before all of it.

Shapes: O = rows, V = vocabulary, A = sequences that may run, W = ceil(V / 32) words.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.serve.params import MAX_LOGPROBS

Variant = Literal["greedy", "drawn", "shaped"]
VARIANTS: tuple[Variant, ...] = ("greedy", "drawn", "shaped")
NUM_INTEGERS = 6
NUM_FLOATS = 6


class Rows(NamedTuple):
    """What each row asks for; the first six are rows of one int32 array, the rest of a float32.

    seeds: two halves of 64 bits. counter: tokens written so far.
    slot: where its counts are. describe: whether any row wants log-probabilities.
    """

    seed_low: Array
    seed_high: Array
    counter: Array
    top_k: Array
    slot: Array
    describe: Array
    temperature: Array
    top_p: Array
    min_p: Array
    repetition: Array
    presence: Array
    frequency: Array


class Sampled(NamedTuple):
    """token [O]; its log-probability [O]; the most likely ids and their log-probabilities."""

    token: Array
    logprob: Array
    top_ids: Array
    top_logprobs: Array


class Shaping(NamedTuple):
    """What penalties and biases need of every running sequence."""

    counts_AV: Array  # int32, how often the answer has the token
    seen_AV: Array  # bool, whether the prompt has it
    bias_AV: Array  # float32


def unpack(integers: Array, floats: Array) -> Rows:
    """Rows from the two packed arrays."""
    return Rows(*integers, *floats)


def empty_shaping(num_seqs: int, vocab_size: int) -> Shaping:
    """No counts, nothing seen, no bias."""
    size = (num_seqs, vocab_size)
    return Shaping(jnp.zeros(size, jnp.int32), jnp.zeros(size, bool), jnp.zeros(size, jnp.float32))


@jax.jit
def set_shaping(
    shaping: Shaping, slot: np.int32, counts_V: np.ndarray, seen_V: np.ndarray, bias_V: np.ndarray
) -> Shaping:
    """The state with one sequence's row replaced."""
    return Shaping(
        shaping.counts_AV.at[slot].set(counts_V),
        shaping.seen_AV.at[slot].set(seen_V),
        shaping.bias_AV.at[slot].set(bias_V),
    )


def sample(logits_OV: Array, rows: Rows, variant: Variant) -> Sampled:
    """A token a row, without penalties or masks."""
    greedy_O = jnp.argmax(logits_OV, axis=-1).astype(jnp.int32)
    token_O = greedy_O
    if variant != "greedy":
        token_O = jnp.where(rows.temperature > 0, _draw(logits_OV, rows), greedy_O)
    return _described(logits_OV, token_O, rows)


def sample_shaped(
    logits_OV: Array, rows: Rows, shaping: Shaping, bits_OW: Array
) -> tuple[Sampled, Shaping]:
    """A token a row with penalties, biases and masks; the counts grow by it."""
    shaped = _shape(logits_OV, rows, shaping, bits_OW)
    greedy_O = jnp.argmax(shaped, axis=-1).astype(jnp.int32)
    drawn_O = jax.lax.cond(
        (rows.temperature > 0).any(), lambda: _draw(shaped, rows), lambda: greedy_O
    )
    token_O = jnp.where(rows.temperature > 0, drawn_O, greedy_O)
    counts = shaping.counts_AV.at[rows.slot, token_O].add(1, mode="drop")
    return _described(logits_OV, token_O, rows), shaping._replace(counts_AV=counts)


def _shape(logits_OV: Array, rows: Rows, shaping: Shaping, bits_OW: Array) -> Array:
    counts, seen, bias = (x.at[rows.slot].get(mode="clip") for x in shaping)
    penalty = rows.repetition[:, None]
    met = seen | (counts > 0)
    scaled = jnp.where(logits_OV > 0, logits_OV / penalty, logits_OV * penalty)
    x = jnp.where(met, scaled, logits_OV)
    x = x - rows.frequency[:, None] * counts - rows.presence[:, None] * (counts > 0)
    ids = jnp.arange(logits_OV.shape[-1])
    allowed = (bits_OW[:, ids // 32] >> (ids % 32)) & 1
    return jnp.where(allowed == 1, x + bias, -jnp.inf)


def _draw(logits_OV: Array, rows: Rows) -> Array:
    """Gumbel-max over what top-k, top-p and min-p leave; noise belongs to the token id."""
    x_OV = logits_OV / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    noise_OV = jax.vmap(_noise, in_axes=(0, 0, 0, None))(
        rows.seed_low, rows.seed_high, rows.counter, logits_OV.shape[-1]
    )

    def plain() -> Array:
        floor = x_OV.max(-1) + jnp.log(rows.min_p)
        kept = jnp.where(x_OV >= floor[:, None], x_OV, -jnp.inf)
        return jnp.argmax(kept + noise_OV, axis=-1).astype(jnp.int32)

    def ranked() -> Array:
        ids = jnp.broadcast_to(jnp.arange(x_OV.shape[-1], dtype=jnp.int32), x_OV.shape)
        negative, ids = jax.lax.sort((-x_OV, ids), num_keys=1, is_stable=True)
        sorted_OV = -negative
        rank = jnp.arange(x_OV.shape[-1])
        limit = jnp.where(rows.top_k > 0, rows.top_k, x_OV.shape[-1])
        kept = jnp.where(rank < limit[:, None], sorted_OV, -jnp.inf)
        probs = jax.nn.softmax(kept, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        kept = jnp.where((before < rows.top_p[:, None]) | (rank == 0), kept, -jnp.inf)
        floor = kept[:, :1] + jnp.log(rows.min_p)[:, None]
        kept = jnp.where(kept >= floor, kept, -jnp.inf)
        best = jnp.argmax(kept + jnp.take_along_axis(noise_OV, ids, -1), axis=-1)
        return jnp.take_along_axis(ids, best[:, None], -1)[:, 0]

    return jax.lax.cond(((rows.top_k > 0) | (rows.top_p < 1)).any(), ranked, plain)


def _noise(low: Array, high: Array, counter: Array, size: int) -> Array:
    key = jax.random.fold_in(jax.random.key(low.astype(jnp.uint32)), high.astype(jnp.uint32))
    return jax.random.gumbel(jax.random.fold_in(key, counter.astype(jnp.uint32)), (size,))


def _described(logits_OV: Array, token_O: Array, rows: Rows) -> Sampled:
    def nothing() -> Sampled:
        wide = (token_O.shape[0], min(MAX_LOGPROBS, logits_OV.shape[-1]))
        return Sampled(
            token_O,
            jnp.zeros(token_O.shape, jnp.float32),
            jnp.zeros(wide, jnp.int32),
            jnp.zeros(wide, jnp.float32),
        )

    return jax.lax.cond(rows.describe.any(), lambda: describe(logits_OV, token_O), nothing)


def describe(logits: Array, token: Array) -> Sampled:
    """Log-probability of `token` under logits [..., V] and the most likely tokens."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, token[..., None], -1)[..., 0]
    top, ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    return Sampled(token, own, ids.astype(jnp.int32), top)

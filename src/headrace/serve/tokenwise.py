"""Whether a model mixes tokens anywhere but in its attention.

A step of the engine holds tokens of many requests side by side, and only attention knows which of
them belong together. A convolution or a recurrence over the sequence would mix strangers and lose
its state between steps, without an error. So the captured program runs once with attention that
sees its own token only: changing one token must then change nothing at all other positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.bridge.intercept import AttentionCall, Intercept
from headrace.bridge.module import JaxModule
from headrace.errors import CaptureError

Array = jax.Array
LENGTH, CHANGED = 16, 5


class _OwnTokenOnly(Intercept):
    """Attention in which every token sees itself alone: the result is its own value."""

    def __init__(self, turn: Array | None = None) -> None:
        self.value: Any = {}
        self.turn = turn

    def inside(self, value: Any, turn: Array) -> _OwnTokenOnly:
        del value
        return _OwnTokenOnly(turn)

    def attention(self, call: AttentionCall) -> Array:
        groups = call.query.shape[1] // call.value.shape[1]
        return jnp.repeat(call.value, groups, axis=1).astype(call.query.dtype)


def require_tokenwise(
    module: JaxModule,
    params: Mapping[str, Array],
    buffers: Mapping[str, Array],
    *,
    vocab_size: int,
    name: str,
) -> None:
    """Raise CaptureError when tokens meet outside of attention.

    module: takes input_ids and position_ids [B, S], gives `logits` [B, S, ...]. Costs one compiled
    forward of 2 x 16 tokens. Rounding is allowed for: 1e-5 of the largest value, 1e-2 in 16 bits.
    """

    def forward(params: Any, buffers: Any, ids: Any) -> Array:
        outputs, _ = module.apply(
            params,
            buffers,
            train=False,
            intercept=_OwnTokenOnly(),
            input_ids=ids,
            position_ids=jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), ids.shape),
        )
        return outputs.logits

    ids = np.arange(3, 3 + LENGTH, dtype=np.int32) % vocab_size
    changed = ids.copy()
    changed[CHANGED] = (ids[CHANGED] + vocab_size // 2) % vocab_size
    out = jax.jit(forward)(dict(params), dict(buffers), np.stack([ids, changed]))
    before, after = np.asarray(out[0], np.float32), np.asarray(out[1], np.float32)
    others = np.arange(LENGTH) != CHANGED
    moved = float(np.abs(after - before)[others].max())
    tolerance = 1e-5 if out.dtype.itemsize >= 4 else 1e-2
    if moved > tolerance * float(np.abs(before).max()):
        where = np.flatnonzero(np.abs(after - before).max(axis=-1) > 0).tolist()
        raise CaptureError(
            f"{name} cannot be served with a paged key/value cache: it mixes tokens outside of its "
            f"attention (changing token {CHANGED} changed positions {where} with attention turned "
            "off), as convolutions and recurrences over the sequence do; their state is not "
            "cached here.\n`headrace eval` and greedy generation without a cache still work for it."
        )

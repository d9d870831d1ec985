"""Whether a model mixes tokens anywhere but in its attention.

A step of the engine holds tokens of many requests side by side, and only attention knows which of
them belong together. A convolution or a recurrence over the sequence would mix strangers and lose
its state between steps, without an error. So the captured program runs once with attention that
sees its own token only: changing one token must then change nothing at all other positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.fx as fx

from headrace.bridge.intercept import AttentionCall, Intercept
from headrace.bridge.module import JaxModule
from headrace.bridge.program import Program, place
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
    """Raise CaptureError when tokens meet outside of attention, with the first operator that does
    so when the program has no loops.

    module: takes input_ids and position_ids [B, S], gives `logits` [B, S, ...]. Costs one compiled
    forward of 2 x 16 tokens. Rounding is allowed for: 1e-5 of the largest value, 1e-2 in 16 bits.
    """
    watched: list[fx.Node] = []

    def forward(params: Any, buffers: Any, ids: Any) -> tuple[Array, list[Array]]:
        moved: list[Array] = []

        def observe(node: fx.Node, value: Any) -> None:
            axis = _token_axis(node, module.program, value)
            if axis is not None:
                watched.append(node)
                moved.append(_moved(value, axis))

        outputs, _ = module.apply(
            params,
            buffers,
            train=False,
            intercept=_OwnTokenOnly(),
            observe=observe,
            input_ids=ids,
            position_ids=jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), ids.shape),
        )
        return outputs.logits, moved

    ids = np.arange(3, 3 + LENGTH, dtype=np.int32) % vocab_size
    changed = ids.copy()
    changed[CHANGED] = (ids[CHANGED] + vocab_size // 2) % vocab_size
    out, moved = jax.jit(forward)(dict(params), dict(buffers), np.stack([ids, changed]))
    tolerance = 1e-5 if out.dtype.itemsize >= 4 else 1e-2
    if float(_moved(out, 1)) <= tolerance:
        return
    first = next((n for n, m in zip(watched, moved, strict=True) if float(m) > tolerance), None)
    first = _source(first, watched)
    where = f", first with {first.target} {place(first)}" if first is not None else ""
    raise CaptureError(
        f"{name} cannot be served: it mixes tokens outside of its attention{where}.\n"
        "Convolutions and recurrences over the sequence (Mamba, RWKV, linear attention) carry a "
        "state from token to token that is no key/value cache, and the engine keeps no other.\n"
        "`headrace eval` and greedy generation without a cache still work for it."
    )


def _source(node: fx.Node | None, watched: Sequence[fx.Node]) -> fx.Node | None:
    """The operator behind a result that was watched: a padded convolution, not the cut after it."""
    while node is not None:
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if len(inputs) != 1 or inputs[0].op != "call_function" or inputs[0] in watched:
            break
        node = inputs[0]
    return node


def _token_axis(node: fx.Node, program: Program, value: Any) -> int | None:
    """The axis of a floating result [B, ..., S, ...] along which tokens lie, None when there is
    none, or it is not known. Turns of a loop are not looked into.
    """
    record = node.meta.get("val")
    if node.graph is not program.graph or not isinstance(record, torch.Tensor):
        return None
    if not (isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)):
        return None
    inputs = zip(program.placeholders, program.inputs, strict=True)
    length = next(n for n, i in inputs if i.kind == "user").meta["val"].shape[1]
    axes = [
        i
        for i, size in enumerate(record.shape)
        if i and str(size) == str(length) and value.shape[i] == LENGTH
    ]
    return axes[0] if len(axes) == 1 and value.shape[0] == 2 else None


def _moved(value: Array, axis: int) -> Array:
    """How far the second row is from the first at tokens other than the changed one, relative to
    the largest value."""
    wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    apart = jnp.abs(wide[1] - wide[0])
    others = jnp.delete(apart, CHANGED, axis=axis - 1)
    return others.max() / jnp.maximum(jnp.abs(wide[0]).max(), 1e-30)

"""A running average of the trained weights (EMA), kept beside the optimizer's own state.

    average = d * average + (1 - d) * weights,  d = min(decay, (1 + n) / (10 + n)) after n updates

The ramp lets the average follow the fast first steps. It lives in the optimizer state, so it is
sharded, checkpointed and resumed with it. Costs one float32 copy of what is trained.

Knows: optimizers' interface. Does not know: when weights are evaluated or saved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from headrace.train.optimizers import Optimizer, Tree
from headrace.train.state import TrainState


class AveragedState(NamedTuple):
    """inner: the optimizer's own state; average: float32, as the trainable parameters."""

    inner: Any
    average: dict[str, Array]
    updates: Array


def with_average(optimizer: Optimizer, decay: float) -> Optimizer:
    """The same optimizer, which also keeps the average of what it makes."""

    def init(params: Tree) -> AveragedState:
        copies = {key: jnp.array(value, copy=True) for key, value in params.items()}
        return AveragedState(optimizer.init(params), copies, jnp.zeros((), jnp.int32))

    def update(
        grads: Tree, state: AveragedState, params: Tree, learning_rate: Array
    ) -> tuple[Tree, AveragedState]:
        new, inner = optimizer.update(grads, state.inner, params, learning_rate)
        count = state.updates.astype(jnp.float32)
        keep = jnp.minimum(decay, (1 + count) / (10 + count))
        average = {key: keep * old + (1 - keep) * new[key] for key, old in state.average.items()}
        return new, AveragedState(inner, average, state.updates + 1)

    return replace(optimizer, init=init, update=update)


def averaged(state: TrainState) -> TrainState:
    """The state with averaged weights in the place of the last ones, where they are kept."""
    if not isinstance(state.opt_state, AveragedState):
        return state
    return replace(state, trainable=state.opt_state.average)

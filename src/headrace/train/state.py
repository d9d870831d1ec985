"""What a training run changes from step to step, and what it never changes.

`TrainState` is everything a step reads and replaces; it is donated, and a checkpoint is exactly it.
Frozen parameters are a separate dict that is never donated nor copied, so adapters can share it.

Knows: the split of parameters, float32 masters. Does not know: losses, optimizers' rules, files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.errors import AdapterError
from headrace.train.optimizers import Optimizer

Params = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The donated half of a run.

    step: int32 scalar, optimizer steps tried so far. rng: the run's key; step and micro-batch are
    folded into it, it never changes. trainable: float32 masters. buffers: BatchNorm statistics etc.
    """

    step: Array
    rng: Array
    trainable: Params
    opt_state: Any
    buffers: Params


def create_state(
    params: Mapping[str, Array],
    buffers: Mapping[str, Array],
    *,
    trainable: Iterable[str],
    optimizer: Optimizer,
    seed: int,
) -> tuple[TrainState, Params]:
    """Split `params` into a fresh state and the frozen rest.

    Masters and buffers are copies: the step donates them, and the originals may share memory with
    PyTorch tensors. Raises AdapterError when nothing is trainable.
    """
    keys = set(trainable)
    assert keys <= set(params), f"trainable keys without a parameter: {sorted(keys - set(params))}"
    if not keys:
        raise AdapterError(
            f"0 of {len(params)} parameters are trainable. Set requires_grad on what is to be "
            "trained, or give a peft_config."
        )
    masters = {key: jnp.array(params[key], jnp.float32, copy=True) for key in sorted(keys)}
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        rng=jax.random.key(seed),
        trainable=masters,
        opt_state=optimizer.init(masters),
        buffers={key: jnp.array(value, copy=True) for key, value in buffers.items()},
    )
    return state, {key: value for key, value in params.items() if key not in keys}


def compute_dtypes(params: Mapping[str, Array], trainable: Iterable[str]) -> dict[str, jnp.dtype]:
    """The dtype the model computes with, for each trainable key (its dtype before the master)."""
    return {key: params[key].dtype for key in trainable}


def cast_params(trainable: Mapping[str, Array], dtypes: Mapping[str, jnp.dtype]) -> Params:
    """Float32 masters in the model's dtype."""
    return {key: value.astype(dtypes[key]) for key, value in trainable.items()}


def host_copy(state: TrainState) -> TrainState:
    """The same state as NumPy arrays in memory of their own; the next step may donate the original.

    Costs the state's bytes in host memory and waits for the last step. The rng stays a key.
    """
    leaves = jax.tree.leaves(state)
    for leaf in leaves:
        leaf.copy_to_host_async()

    def copied(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = np.array(jax.random.key_data(leaf), copy=True)
            return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaf))
        return np.array(leaf, copy=True)  # on a CPU np.asarray would be the array's own memory

    return jax.tree.map(copied, state)

"""The state of a run as shapes and shardings: all that compiling a step needs, and no weight.

Also the layout of a real state on a mesh, which is the same thing. Knows: TrainState, sharding
plans. Does not know: weights' values, losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.bridge.dtypes import to_jax_dtype
from headrace.bridge.module import JaxModule
from headrace.sharding import MeshConfig, ParamPlan, abstract_params, batch_spec, plan_params
from headrace.sharding.place import like_params
from headrace.train.optimizers import Optimizer
from headrace.train.state import TrainState
from headrace.weights.quantization import quantizations, quantized_weight

Shape: Any = jax.ShapeDtypeStruct


def abstract_state(
    module: JaxModule,
    *,
    optimizer: Optimizer,
    mesh: Mesh | None = None,
    plans: Mapping[str, ParamPlan] | None = None,
    quantization: str | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """`(state, frozen)` of shapes, with shardings when there is a mesh.

    module may be on the meta device. Masters are float32, frozen parameters have their own dtype,
    or the codes and scales of `quantization`.
    """
    plans = plan_params(module, MeshConfig()) if plans is None else plans
    trainable = {
        key: Shape(plan.shape, jnp.float32) for key, plan in plans.items() if plan.trainable
    }
    frozen: dict[str, Any]
    if mesh is None:
        frozen = {k: Shape(p.shape, p.dtype) for k, p in plans.items() if not p.trainable}
    else:
        stored = abstract_params(mesh, plans)
        frozen = {key: stored[key] for key, plan in plans.items() if not plan.trainable}
    for key, wanted in quantizations(module, quantization).items():
        whole = frozen[key]
        frozen[key] = quantized_weight(whole.shape, whole.dtype, wanted, whole.sharding)
    state = TrainState(
        step=Shape((), jnp.int32),
        rng=jax.eval_shape(lambda: jax.random.key(0)),  # pyright: ignore[reportArgumentType]
        trainable={key: trainable[key] for key in sorted(trainable)},
        opt_state=jax.eval_shape(optimizer.init, trainable),
        buffers=abstract_buffers(module),
    )
    if mesh is None:
        return state, frozen
    shardings = state_shardings(state, mesh, plans)
    placed = jax.tree.map(lambda x, s: Shape(x.shape, x.dtype, sharding=s), state, shardings)
    return placed, frozen


def abstract_batch(
    batch: Mapping[str, Any], mesh: Mesh | None = None, *, micro_batches: bool = True
) -> dict[str, Any]:
    """Shapes of a batch of arrays (or shapes) [A, B, ...], with shardings when there is a mesh.

    micro_batches: False for [B, ...].
    """
    skipped = 0 if micro_batches else 1
    found: dict[str, Any] = {}
    for name, value in batch.items():
        shape, dtype = tuple(value.shape), jax.dtypes.canonicalize_dtype(value.dtype)
        sharding = None
        if mesh is not None:
            spec = batch_spec(mesh, rank=len(shape) + skipped)
            sharding = NamedSharding(mesh, PartitionSpec(*spec[skipped:]))
        found[name] = Shape(shape, dtype, sharding=sharding)
    return found


def state_shardings(state: TrainState, mesh: Mesh, plans: Mapping[str, ParamPlan]) -> TrainState:
    """Where every array of a state lies: moments beside their parameter, the rest everywhere."""
    specs = {key: plans[key].spec for key in state.trainable}
    shapes = {key: plans[key].shape for key in state.trainable}
    tree = like_params(state, specs, shapes)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def keep_layout(step: Callable[..., Any], shardings: TrainState) -> Callable[..., Any]:
    """A step whose new state lies where the old one lay, so that donation can reuse its memory."""

    def kept(state: TrainState, *args: Any) -> tuple[TrainState, Any]:
        new_state, metrics = step(state, *args)
        return jax.lax.with_sharding_constraint(new_state, shardings), metrics

    return kept


def placed_step(step: Callable[..., Any], shardings: TrainState, mesh: Mesh) -> Callable[..., Any]:
    """The step as a run on a mesh compiles it: the new state where the old one lay, metrics whole
    on every device. Plans lower the same function.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    kept = keep_layout(step, shardings)

    def function(state: TrainState, *args: Any) -> tuple[TrainState, Any]:
        new_state, metrics = kept(state, *args)
        return new_state, jax.lax.with_sharding_constraint(metrics, whole)

    return function


def abstract_buffers(module: JaxModule) -> dict[str, Any]:
    """Shapes of a module's buffers in stored form."""
    tensors = dict(module.module.named_buffers(remove_duplicate=False))
    found: dict[str, Any] = {}
    for key, names in module.buffer_layout.keys.items():
        tensor = tensors[names[0]]
        stack = (len(names),) if len(names) > 1 else ()
        found[key] = Shape((*stack, *tensor.shape), to_jax_dtype(tensor.dtype))
    return found

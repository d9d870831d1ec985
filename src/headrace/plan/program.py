"""The exact training or evaluation step of a configuration as an abstract program for a slice.

No weights and no TPU are needed. The model is built on the meta device from its config.json and
captured with the run's own code; the run's own step is lowered with shapes in place of arrays. One
thing differs from a run: repeated layers are captured three times over, and their loop is then
stretched to the real count, since a loop's program does not depend on its length.

Knows: bridge, train, sharding. Does not know: compiling, time, money.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import nn

from headrace.bridge.module import JaxModule, Layout, to_jax
from headrace.bridge.program import Loop, Program
from headrace.config import TrainConfig, peft_config
from headrace.errors import ConfigError
from headrace.kernels import chunk_tokens, target_platform
from headrace.plan.candidate import Candidate
from headrace.plan.topology import topology_devices
from headrace.sharding import MeshConfig, ParamPlan, make_mesh, make_partition, plan_params
from headrace.train.abstract import abstract_batch, abstract_state, placed_step, state_shardings
from headrace.train.lora import apply_lora
from headrace.train.losses import CausalLoss, ClassificationLoss, Loss, causal_loss
from headrace.train.optimizers import Optimizer, decay_parameter_names, make_optimizer
from headrace.train.step import make_eval_step, make_train_step
from headrace.weights import meta_model

KEPT_PERIODS = 3  # the roll pass may set the first layer apart and still needs two alike
PLANNED_TASKS = ("causal", "sequence-classification")


@dataclass(frozen=True, kw_only=True)
class CapturedModel:
    """A model of full depth, captured. trainable: stored keys. num_params: of the whole model."""

    module: JaxModule
    config: TrainConfig
    num_params: int
    num_trainable: int
    notes: tuple[str, ...]


def capture_model(
    config: TrainConfig, *, num_labels: int = 2, whole: bool = False
) -> CapturedModel:
    """Build on the meta device and capture. Costs seconds to a minute; reads config.json only.

    whole: capture every layer, as a run does: names of stacked weights and the numbering of random
    draws are then the run's too, and with them the program's place in a compilation cache.

    Raises ConfigError for a task that cannot be planned, CaptureError as a run would.
    """
    if config.task not in PLANNED_TASKS:
        raise ConfigError(
            f"task {config.task} has only the analytic plan; compiled are {PLANNED_TASKS}"
        )
    module, notes = capture_deep(
        config, lambda found: _captured(_model(found, config, num_labels), config), whole=whole
    )
    sizes = _stored_sizes(module)
    return CapturedModel(
        module=module,
        config=config,
        num_params=sum(sizes.values()),
        num_trainable=sum(sizes[key] for key in module.layout.trainable),
        notes=notes,
    )


def capture_deep(
    config: TrainConfig, capture: Callable[[Any], JaxModule], *, whole: bool = False
) -> tuple[JaxModule, tuple[str, ...]]:
    """`capture` of the model's configuration, its repeated layers three times over and their loop
    stretched; of all layers where they do not run as one loop, which the notes then say.
    """
    found = _model_config(config)
    text = found.get_text_config() if hasattr(found, "get_text_config") else found
    depth, period = _repeats(text)
    if whole or depth <= KEPT_PERIODS:
        return capture(found), ()
    _shorten(text, depth, period)
    stretched = _stretch(capture(found), depth - KEPT_PERIODS)
    if stretched is not None:
        return stretched, ()
    note = "every layer was captured: they do not run as one loop"
    return capture(_model_config(config)), (note,)


def _model_config(config: TrainConfig) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(
        str(config.model_name_or_path),
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
    )


def _stored_sizes(module: JaxModule) -> dict[str, int]:
    tensors = dict(module.module.named_parameters(remove_duplicate=False))
    return {k: len(names) * tensors[names[0]].numel() for k, names in module.layout.keys.items()}


def _repeats(text: Any) -> tuple[int, int]:
    """(how often the period of layers repeats, layers in a period); (0, 1) when layers differ in
    ways that a shorter model would not show."""
    layers = getattr(text, "num_hidden_layers", 0)
    types = list(getattr(text, "layer_types", None) or [])
    uneven = ("num_kv_shared_layers", "first_k_dense_replace", "mlp_only_layers")
    if not layers or any(getattr(text, name, None) for name in uneven):
        return 0, 1
    values: dict[str, Any] = text.to_dict()
    lists = [k for k, v in values.items() if isinstance(v, list) and len(v) == layers]
    if [name for name in lists if name != "layer_types"]:
        return 0, 1
    period = next(
        (
            size
            for size in range(1, layers // 2 + 1)
            if all(kind == types[i % size] for i, kind in enumerate(types))
        ),
        0,
    )
    if types and not period:
        return 0, 1
    if not types and getattr(text, "_sliding_window_pattern", 0):
        return 0, 1
    period = period or 1
    return layers // period, period


def _shorten(text: Any, depth: int, period: int) -> None:
    layers = text.num_hidden_layers - (depth - KEPT_PERIODS) * period
    if getattr(text, "layer_types", None):
        # from the end: a last layer that must be of one kind stays so
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers


def _model(found: Any, config: TrainConfig, num_labels: int) -> nn.Module:
    labels = {} if config.task == "causal" else {"num_labels": num_labels}
    if getattr(found, "pad_token_id", None) is None and labels:
        found.pad_token_id = 0
    if labels:
        found.num_labels = num_labels
    model = meta_model(
        found,
        task=config.task,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    wanted = peft_config(config)
    if wanted is not None:
        adapted, _ = apply_lora(model, wanted)
        model = adapted.get_base_model()
        if config.dtype != "auto":
            model.to(getattr(torch, config.dtype))
    return model.train()


def _captured(model: nn.Module, config: TrainConfig) -> JaxModule:
    names = ("input_ids", "position_ids" if config.task == "causal" else "attention_mask")
    return to_jax(model, {name: torch.zeros(2, 128, dtype=torch.int64) for name in names})


def _stretch(module: JaxModule, more: int) -> JaxModule | None:
    """The module with `more` further turns of its loop; None when it has not just one."""
    program = module.program
    loops = [n for n in program.graph.nodes if isinstance(n.target, Loop) and n.target.length > 1]
    if len(loops) != 1:
        return None
    node, loop = loops[0], loops[0].target
    stacked = node.args[loop.num_carries : loop.num_carries + loop.num_stacked]
    if any(not hasattr(n, "op") or n.op != "placeholder" for n in stacked):
        return None
    length = loop.length + more
    names = {n.name for n in stacked}
    inputs = tuple(
        replace(each, names=_longer(each.names, length, known=each.kind == "constant"))
        if each.node in names
        else each
        for each in program.inputs
    )
    node.target = replace(loop, length=length)
    changed = replace(program, inputs=inputs)
    found = replace(
        module,
        program=changed,
        layout=_relayout(changed, "parameter"),
        buffer_layout=_relayout(changed, "buffer"),
        recapture=None,
    )
    for each in inputs:
        value = found._constants.get(each.key)  # pyright: ignore[reportPrivateUsage]
        if each.kind == "constant" and each.node in names and value is not None:
            found._constants[each.key] = np.resize(value, (length, *value.shape[1:]))  # pyright: ignore[reportPrivateUsage]
    return found


def _relayout(program: Program, kind: str) -> Layout:
    keys = {i.key: i.names for i in program.inputs if i.kind == kind}
    trained = frozenset(
        key for key, names in keys.items() if kind == "parameter" and names[0] in program.trainable
    )
    return Layout(keys=keys, tied=program.tied, trainable=trained)


def _longer(names: Sequence[str], length: int, *, known: bool) -> tuple[str, ...]:
    """Names of repeated layers carried on: `layers.0.w, layers.6.w` -> ..., `layers.54.w`."""
    if known:
        return tuple(names[i % len(names)] for i in range(length))
    first, second = (re.split(r"(\d+)", name) for name in names[:2])
    found: list[str] = []
    for turn in range(length):
        parts = [
            str(int(a) + (int(b) - int(a)) * turn) if a.isdigit() and a != b else a
            for a, b in zip(first, second, strict=True)
        ]
        found.append("".join(parts))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class LoweredStep:
    """A step that can be compiled. arguments: the shapes with shardings that it takes, by cause.

    loss_tokens, loss_chunk: tokens of a micro-batch whose loss one device computes, and how many
    of them at a time; 0 without a fused head.
    """

    lowered: Any
    arguments: Mapping[str, Any]
    loss_tokens: int = 0
    loss_chunk: int = 0


def lower_step(captured: CapturedModel, candidate: Candidate) -> LoweredStep:
    """The training or evaluation step on the candidate's mesh, lowered for its slice. Seconds.

    Raises ConfigError when the mesh does not fit the model, PlanError without a TPU compiler.
    """
    config, module = captured.config, captured.module
    mesh_config = MeshConfig(**candidate.mesh)
    mesh = make_mesh(mesh_config, topology_devices(candidate.hardware))
    plans = plan_params(module, mesh_config, config.sharding_overrides)
    if mesh_config.size > 1:
        module = module.on_mesh(make_partition(mesh, plans))
    optimizer = _optimizer(captured)
    state, frozen = abstract_state(
        module, optimizer=optimizer, mesh=mesh, plans=plans, quantization=config.quantization
    )
    loss = _loss(module, config, candidate)
    dtypes = {key: plans[key].dtype for key in module.layout.trainable}
    batch = abstract_batch(_batch(config, candidate), mesh, micro_batches=candidate.trains)
    everywhere = NamedSharding(mesh, PartitionSpec())
    tokens, chunk = _loss_chunk(loss, plans, candidate)
    arguments = {
        "frozen weights": frozen,
        "trained weights (float32)": state.trainable,
        "optimizer": state.opt_state,
        "batch and buffers": (batch, state.buffers, state.step),
    }
    if not candidate.trains:
        evaluated = make_eval_step(loss, dtypes=dtypes)
        with target_platform("tpu"):
            lowered = jax.jit(evaluated, out_shardings=everywhere).lower(
                state.trainable, frozen, state.buffers, batch
            )
        del arguments["optimizer"]
        return LoweredStep(
            lowered=lowered, arguments=arguments, loss_tokens=tokens, loss_chunk=chunk
        )
    step: Any = make_train_step(loss, optimizer, dtypes=dtypes, max_grad_norm=config.max_grad_norm)
    step = placed_step(step, state_shardings(state, mesh, plans), mesh)
    rate = jax.ShapeDtypeStruct((), jnp.float32)  # a number of the host, as in a run
    with target_platform("tpu"):
        lowered = jax.jit(step, donate_argnums=(0,)).lower(state, frozen, batch, rate)
    return LoweredStep(lowered=lowered, arguments=arguments, loss_tokens=tokens, loss_chunk=chunk)


def _loss_chunk(
    loss: Loss, plans: Mapping[str, ParamPlan], candidate: Candidate
) -> tuple[int, int]:
    """(tokens, tokens at a time) of the fused head on one device, see linear_cross_entropy."""
    head = loss.head if isinstance(loss, CausalLoss) else None
    if head is None:
        return 0, 0
    tensor, context = candidate.axis("tensor"), candidate.axis("context")
    shared = tensor if candidate.length % (tensor * context) == 0 else 1
    tokens = candidate.device_tokens // shared
    return tokens, chunk_tokens(tokens, plans[head.weight_key].shape[0])


def _loss(module: JaxModule, config: TrainConfig, candidate: Candidate) -> Loss:
    if config.task == "causal":
        return causal_loss(module, trainable=module.layout.trainable, remat=candidate.remat)
    return ClassificationLoss(
        module=module,
        problem_type="single_label_classification",
        remat=candidate.remat,
        model_inputs=("input_ids", "attention_mask"),
    )


def _optimizer(captured: CapturedModel) -> Optimizer:
    config, module = captured.config, captured.module
    decay_names = decay_parameter_names(module.module)
    layout = module.layout
    return make_optimizer(
        config.optim,
        stacked=frozenset(key for key, names in layout.keys.items() if len(names) > 1),
        decay=frozenset(k for k in layout.trainable if layout.keys[k][0] in decay_names),
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
    )


def _batch(config: TrainConfig, candidate: Candidate) -> dict[str, jax.ShapeDtypeStruct]:
    """Arrays of the kind that the loader gives: [A, B, S], or [B, S] to evaluate."""
    rows = (candidate.accumulation, candidate.rows) if candidate.trains else (candidate.rows,)
    tokens = jax.ShapeDtypeStruct((*rows, candidate.length), jnp.int32)
    if config.task == "causal":
        return dict.fromkeys(("input_ids", "labels", "position_ids", "segment_ids"), tokens)
    return {
        "input_ids": tokens,
        "attention_mask": tokens,
        "labels": jax.ShapeDtypeStruct(rows, jnp.int32),
        "weights": jax.ShapeDtypeStruct(rows, jnp.float32),
    }


__all__ = [
    "PLANNED_TASKS",
    "CapturedModel",
    "LoweredStep",
    "capture_deep",
    "capture_model",
    "lower_step",
]

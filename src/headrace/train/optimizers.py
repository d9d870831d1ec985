"""Optimizers by their Hugging Face `optim` names, with transformers' semantics.

The learning rate is an argument of `update`, never a constant of the program. A stored parameter
may hold many layers stacked on a leading axis; every rule treats each layer as its own parameter,
so a stacked run equals an unstacked one (adafactor is where this takes work: factoring, RMS).

Knows: update rules and which parameters decay. Does not know: schedules, clipping, the loop.
Shapes: L = stacked layers, R/C = the last two dims of a parameter.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch
from jax import Array

from headrace.errors import ConfigError

Tree = dict[str, Array]

# The same update rule under the names transformers gives its implementations.
ALIASES: dict[str, str] = {
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion": "lion",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
}

# nn.LayerNorm is excluded by type, the rest by name: the rule of transformers' Trainer.
NO_DECAY_PATTERNS = [
    r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """`init(params) -> state`; `update(grads, state, params, learning_rate) -> (params, state)`."""

    name: str
    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree, Array], tuple[Tree, Any]]


def decay_parameter_names(model: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay applies to, as transformers' Trainer picks them."""
    from transformers.trainer_pt_utils import get_parameter_names

    return frozenset(get_parameter_names(model, [torch.nn.LayerNorm], NO_DECAY_PATTERNS))


def decay_keys(
    stored_keys: Iterable[str],
    *,
    layout_keys: Mapping[str, tuple[str, ...]],
    decay_names: frozenset[str],
) -> frozenset[str]:
    """Stored keys whose Hugging Face names all decay; a stack with mixed answers is our mistake."""
    chosen: set[str] = set()
    for key in stored_keys:
        answers = {name in decay_names for name in layout_keys[key]}
        assert len(answers) == 1, f"layers of {key} disagree about weight decay"
        if answers.pop():
            chosen.add(key)
    return frozenset(chosen)


class AdafactorLeaf(NamedTuple):
    """Second moments of one parameter: `row`/`col` when factored, `full` otherwise (others [0])."""

    row: Array
    col: Array
    full: Array


class AdafactorState(NamedTuple):
    steps: Array
    leaves: dict[str, AdafactorLeaf]


def _per_layer(function: Callable[..., Any], stacked: bool, *args: Any) -> Any:
    """`function` once for a plain parameter, once per layer for a stacked one."""
    return jax.vmap(function)(*args) if stacked else function(*args)


def _adafactor_init_leaf(param: Array) -> AdafactorLeaf:
    empty = jnp.zeros((0,), jnp.float32)
    if param.ndim < 2:
        return AdafactorLeaf(empty, empty, jnp.zeros(param.shape, jnp.float32))
    row = jnp.zeros(param.shape[:-1], jnp.float32)
    col = jnp.zeros(param.shape[:-2] + param.shape[-1:], jnp.float32)
    return AdafactorLeaf(row, col, empty)


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _adafactor_leaf(
    grad: Array, leaf: AdafactorLeaf, beta2: Array, eps: float
) -> tuple[Array, AdafactorLeaf]:
    """The clipped direction of one parameter (Shazeer & Stern 2018, algorithms 4 and 5)."""
    square = jnp.square(grad) + eps
    if grad.ndim < 2:
        full = beta2 * leaf.full + (1.0 - beta2) * square
        direction = grad * jax.lax.rsqrt(full)
        leaf = leaf._replace(full=full)
    else:
        row = beta2 * leaf.row + (1.0 - beta2) * square.mean(axis=-1)
        col = beta2 * leaf.col + (1.0 - beta2) * square.mean(axis=-2)
        row_RC = jax.lax.rsqrt(row / row.mean(axis=-1, keepdims=True))[..., :, None]
        direction = grad * row_RC * jax.lax.rsqrt(col)[..., None, :]
        leaf = leaf._replace(row=row, col=col)
    return direction / jnp.maximum(1.0, _rms(direction)), leaf


def scale_by_hf_adafactor(
    stacked: frozenset[str], *, eps: float = 1e-30, decay_rate: float = -0.8
) -> optax.GradientTransformation:
    """transformers' Adafactor as its Trainer calls it: scale_parameter and relative_step off.

    optax's own adafactor leaves small matrices unfactored and scales by parameter, so its numbers
    are not those of the recipes people have.
    """

    def init(params: Tree) -> AdafactorState:
        leaves = {
            key: _per_layer(_adafactor_init_leaf, key in stacked, param)
            for key, param in params.items()
        }
        return AdafactorState(jnp.zeros((), jnp.int32), leaves)

    def update(grads: Tree, state: AdafactorState, params: Tree | None = None) -> Any:
        del params
        count = state.steps + 1
        beta2 = 1.0 - count.astype(jnp.float32) ** decay_rate
        directions: Tree = {}
        leaves: dict[str, AdafactorLeaf] = {}
        for key, grad in grads.items():

            def one(grad: Array, leaf: AdafactorLeaf) -> tuple[Array, AdafactorLeaf]:
                return _adafactor_leaf(grad, leaf, beta2, eps)

            directions[key], leaves[key] = _per_layer(one, key in stacked, grad, state.leaves[key])
        return directions, AdafactorState(count, leaves)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _resolve(optim: str) -> str:
    if optim in ALIASES:
        return ALIASES[optim]
    bits = " 8-bit and 4-bit states are not supported." if "bit" in optim else ""
    near = difflib.get_close_matches(optim, ALIASES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"optim {optim!r} is not supported.{bits} Use one of {', '.join(ALIASES)}.{hint}"
    )


def _direction(
    rule: str, stacked: frozenset[str], beta1: float, beta2: float, eps: float, momentum: float
) -> optax.GradientTransformation:
    if rule == "adamw":
        return optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps)
    if rule == "lion":
        return optax.scale_by_lion(b1=beta1, b2=beta2)
    if rule == "adafactor":
        return scale_by_hf_adafactor(stacked)
    return optax.trace(decay=momentum) if momentum else optax.identity()


def make_optimizer(
    optim: str,
    *,
    stacked: frozenset[str] = frozenset(),
    decay: frozenset[str] = frozenset(),
    weight_decay: float = 0.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_epsilon: float = 1e-8,
    momentum: float = 0.0,
) -> Optimizer:
    """The optimizer an HF `optim` name means, over float32 parameters.

    stacked: stored keys with a leading layer axis. decay: stored keys weight decay applies to.
    Raises ConfigError for a name without an exact counterpart.
    """
    rule = _resolve(optim)
    direction = _direction(rule, stacked, adam_beta1, adam_beta2, adam_epsilon, momentum)
    transform: Any = direction.update  # optax's own types are wider than our dict of arrays

    def decayed(updates: Tree, params: Tree) -> Tree:
        if not weight_decay:
            return updates
        return {
            key: update + weight_decay * params[key] if key in decay else update
            for key, update in updates.items()
        }

    def update(grads: Tree, state: Any, params: Tree, learning_rate: Array) -> tuple[Tree, Any]:
        if rule == "sgd":  # torch.optim.SGD: weight decay is part of the gradient
            updates, state = transform(decayed(grads, params), state, params)
        else:  # decoupled: p - lr * (direction + wd * p)
            updates, state = transform(grads, state, params)
            updates = decayed(updates, params)
        return {key: params[key] - learning_rate * updates[key] for key in params}, state

    return Optimizer(name=rule, init=direction.init, update=update)  # pyright: ignore[reportArgumentType]

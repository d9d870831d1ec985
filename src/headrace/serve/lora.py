"""Several LoRA adapters on one base in one batch.

The A and B of all adapters lie in stacks of fixed size, one slot an adapter, so that loading one
changes an argument of the compiled step and recompiles nothing. Slot 0 is the base, which has no
place in the stacks. The rows that decode and the prompts of a step are two groups. Where a group
uses one adapter, the program multiplies with that one. Otherwise a token multiplies with all A at
once, keeps the part of its own slot and goes through all B: the weights of every loaded adapter are
read once, as they must be when all are in use.

Knows: PEFT's adapter files and names, the graph's linear nodes. Does not know: requests.

Shapes: T = tokens, L = turns of a loop, A = adapters (slots 1..A), R = largest rank, D = inputs of
a layer, F = its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.fx as fx

from headrace.bridge.program import Loop, Program
from headrace.errors import AdapterError
from headrace.serve.linear import linear_weight_first, weight_first

Array = jax.Array
Stacks = dict[str, tuple[Array, Array]]  # key -> A [L, A, R, D], B [L, A, R, F]

_LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True, kw_only=True)
class LoraTarget:
    """A linear layer that may carry adapters: its weights' names (one a turn) and sizes."""

    key: str
    names: tuple[str, ...]
    num_inputs: int
    num_outputs: int


def lora_targets(program: Program) -> dict[fx.Node, LoraTarget]:
    """The linear nodes of the program whose weight is a parameter [F, D]."""
    inputs = {i.node: i for i in program.inputs}
    found: dict[fx.Node, LoraTarget] = {}

    def add(node: fx.Node, weight: Any) -> None:
        spec = inputs.get(getattr(weight, "name", ""))
        if spec is None or spec.kind != "parameter":
            return
        inner: Any = node.args[1]
        record = inner.meta.get("val")
        if record is not None and len(record.shape) == 2:
            rows, columns = (int(s) for s in record.shape)
            found[node] = LoraTarget(
                key=spec.key, names=spec.names, num_inputs=columns, num_outputs=rows
            )

    for node in program.graph.nodes:
        if node.target is _LINEAR:
            add(node, node.args[1])
        if isinstance(node.target, Loop):
            body = node.target.body
            outer = dict(zip((n for n in body.nodes if n.op == "placeholder"), node.args))  # noqa: B905
            for inner in body.nodes:
                if inner.target is _LINEAR and inner.args[1] in outer:
                    add(inner, outer[inner.args[1]])
    return found


@dataclass(frozen=True, kw_only=True)
class LoraStacks:
    """The adapters of one step. slots_T: the slot of every token, rows that decode first."""

    targets: Mapping[fx.Node, LoraTarget]
    stacks: Stacks
    slots_T: Array
    num_decode: int

    def added(self, node: fx.Node, inputs: Array, outputs: Array, turn: Array | None) -> Array:
        """The layer's outputs [1, T, F] with each token's adapter added."""
        target = self.targets.get(node)
        if target is None or target.key not in self.stacks:
            return outputs
        a_LARD, b_LARF = self.stacks[target.key]
        index = 0 if turn is None else turn
        a_ARD, b_ARF = a_LARD[index], b_LARF[index]
        x_TD, n = inputs.reshape(-1, inputs.shape[-1]), self.num_decode
        groups = [(x_TD[:n], self.slots_T[:n]), (x_TD[n:], self.slots_T[n:])]
        deltas = [_delta(x, slots, a_ARD, b_ARF) for x, slots in groups if x.shape[0]]
        delta = deltas[0] if len(deltas) == 1 else jnp.concatenate(deltas)
        return outputs + delta.reshape(outputs.shape).astype(outputs.dtype)


def _delta(x_TD: Array, slots_T: Array, a_ARD: Array, b_ARF: Array) -> Array:
    """What the adapters add to a group of tokens [T, F]."""
    if a_ARD.shape[0] == 1:
        return _of_one(x_TD, slots_T, a_ARD, b_ARF)
    alone = ((slots_T == slots_T.max()) | (slots_T == 0)).all()
    return jax.lax.cond(alone, _of_one, _of_all, x_TD, slots_T, a_ARD, b_ARF)


def _of_one(x_TD: Array, slots_T: Array, a_ARD: Array, b_ARF: Array) -> Array:
    """Tokens of the base and of one adapter."""
    at = jnp.maximum(slots_T.max() - 1, 0)
    h_TR = jnp.where(slots_T[:, None] > 0, _times(x_TD, a_ARD[at]), 0)
    return h_TR @ b_ARF[at]


def _of_all(x_TD: Array, slots_T: Array, a_ARD: Array, b_ARF: Array) -> Array:
    """Tokens of any adapters."""
    adapters, rank, _ = a_ARD.shape
    h = _times(x_TD, a_ARD.reshape(adapters * rank, -1)).reshape(-1, adapters, rank)
    own = slots_T[:, None] == 1 + jnp.arange(adapters)
    h = jnp.where(own[:, :, None], h, 0).reshape(-1, adapters * rank)
    return h @ b_ARF.reshape(adapters * rank, -1)


def _times(x_TD: Array, a_RD: Array) -> Array:
    return linear_weight_first(x_TD, a_RD) if weight_first(x_TD.shape[0]) else x_TD @ a_RD.T


def empty_stacks(
    targets: Mapping[fx.Node, LoraTarget], *, slots: int, rank: int, dtype: Any
) -> Stacks:
    """Stacks of zeros for all linear layers; the base, slot 0, has no place in them."""
    return {
        t.key: (
            jnp.zeros((len(t.names), slots, rank, t.num_inputs), dtype),
            jnp.zeros((len(t.names), slots, rank, t.num_outputs), dtype),
        )
        for t in targets.values()
    }


@dataclass(frozen=True, kw_only=True)
class LoraWeights:
    """One adapter read from its folder: base weight name -> (A [r, D], scale * B [F, r])."""

    rank: int
    layers: Mapping[str, tuple[np.ndarray, np.ndarray]]


def read_lora(folder: str | Path) -> LoraWeights:
    """Read a PEFT LoRA folder (adapter_config.json, adapter_model.safetensors).

    Raises AdapterError, all reasons at once, for what cannot run as low-rank additions to linear
    layers; such an adapter is served merged. CheckpointError when SHA256SUMS beside them names
    other files than these.
    """
    from peft import PeftConfig
    from safetensors.numpy import load_file

    from headrace.weights.adapter import ADAPTER_WEIGHTS, find_adapter
    from headrace.weights.checksums import check_sums

    folder = Path(folder)
    config: Any = find_adapter(folder)
    if config is None:
        raise AdapterError(
            f"{folder.name} holds no adapter_config.json; give a PEFT adapter folder"
        )
    assert isinstance(config, PeftConfig)
    check_sums(folder)
    problems = _config_problems(config)
    tensors = _load(folder / ADAPTER_WEIGHTS, load_file)
    layers: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    foreign: list[str] = []
    rank = 0
    for name in sorted(tensors):
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            a, b = tensors[name], tensors.get(layer + ".lora_B.weight")
            if b is None:
                problems.append(f"{layer} has lora_A and no lora_B")
                continue
            base = layer.removeprefix("base_model.model.") + ".weight"
            layers[base] = (a, b * _scale(config, layer, a.shape[0]))
            rank = max(rank, a.shape[0])
        elif not name.endswith(".lora_B.weight"):
            foreign.append(name)
    if foreign:
        problems.append(f"tensors that are no LoRA A or B: {', '.join(foreign[:4])}")
    if not layers and not problems:
        problems.append("no LoRA tensors")
    if problems:
        raise AdapterError(
            f"the adapter {folder.name} cannot be loaded into a slot: {'; '.join(problems)}. "
            "Serve it merged (--merge)"
        )
    return LoraWeights(rank=rank, layers=layers)


def _load(path: Path, load_file: Any) -> dict[str, np.ndarray]:
    """Tensors as float32 arrays; bfloat16 goes through torch, which NumPy does not know."""
    from safetensors.torch import load_file as load_torch

    del load_file
    try:
        tensors = load_torch(str(path))
    except Exception as error:
        raise AdapterError(f"the weights of adapter {path.parent.name} are damaged") from error
    return {name: t.float().numpy() for name, t in tensors.items()}


def _config_problems(config: Any) -> list[str]:
    found: list[str] = []
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        found.append(f"its method is {kind}")
    if getattr(config, "use_dora", False):
        found.append("it uses DoRA")
    if getattr(config, "modules_to_save", None):
        found.append(f"it replaces whole modules ({', '.join(config.modules_to_save)})")
    if getattr(config, "bias", "none") != "none":
        found.append("it trains biases")
    if getattr(config, "fan_in_fan_out", False):
        found.append("its layers are transposed (Conv1D)")
    return found


def _scale(config: Any, layer: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r), with PEFT's patterns by layer."""
    from peft.utils.other import get_pattern_key

    short = layer.removeprefix("base_model.model.")
    patterns: Any = getattr(config, "alpha_pattern", None) or {}
    key: Any = get_pattern_key(patterns.keys(), short)
    alpha = patterns.get(key, config.lora_alpha)
    return alpha / (rank**0.5 if getattr(config, "use_rslora", False) else rank)


def place_lora(
    stacks: Stacks,
    weights: LoraWeights | None,
    targets: Mapping[fx.Node, LoraTarget],
    slot: int,
    *,
    name: str,
) -> Stacks:
    """The stacks with one slot (from 1 on) replaced; None empties it. Only the first compiles.

    Raises AdapterError when the adapter's rank or layers do not fit.
    """
    places = {n: (t, turn) for t in targets.values() for turn, n in enumerate(t.names)}
    layers = {} if weights is None else dict(weights.layers)
    problems = _fit_problems(layers, places, stacks)
    if problems:
        raise AdapterError(f"the adapter {name} does not fit the base: " + "; ".join(problems[:5]))
    new: Stacks = {}
    for target in {t.key: t for t in targets.values()}.values():
        a, b = stacks[target.key]
        fresh_a = np.zeros((a.shape[0], *a.shape[2:]), np.float32)
        fresh_b = np.zeros((b.shape[0], *b.shape[2:]), np.float32)
        for turn, layer in enumerate(target.names):
            if layer in layers:
                low, high = layers[layer]
                fresh_a[turn, : low.shape[0]] = low
                fresh_b[turn, : low.shape[0]] = high.T
        new[target.key] = _set_slot(a, b, fresh_a, fresh_b, np.int32(slot - 1))
    return new


@jax.jit
def _set_slot(
    a: Array, b: Array, new_a: np.ndarray, new_b: np.ndarray, at: np.int32
) -> tuple[Array, Array]:
    return a.at[:, at].set(new_a.astype(a.dtype)), b.at[:, at].set(new_b.astype(b.dtype))


def _fit_problems(
    layers: Mapping[str, tuple[np.ndarray, np.ndarray]],
    places: Mapping[str, tuple[LoraTarget, int]],
    stacks: Stacks,
) -> list[str]:
    found: list[str] = []
    for name, (low, high) in layers.items():
        if name not in places or places[name][0].key not in stacks:
            found.append(f"{name} is no linear layer of the base that can carry an adapter")
            continue
        target = places[name][0]
        most = stacks[target.key][0].shape[2]
        if low.shape[0] > most:
            found.append(f"{name} has rank {low.shape[0]}; the engine was started for {most}")
        if (low.shape[1], high.shape[0]) != (target.num_inputs, target.num_outputs):
            found.append(
                f"{name} is {high.shape[0]} x {low.shape[1]}; the base has "
                f"{target.num_outputs} x {target.num_inputs}"
            )
    return found

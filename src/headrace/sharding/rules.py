"""Where every parameter lies: one ParamPlan a stored key, with a reason wherever it is not divided.

    [out, in] column      (tensor, fsdp)          lora_a [rank, in]   (-, axes of in)
    [out, in] row         (fsdp, tensor)          lora_b [out, rank]  (axes of out, -)
    [vocab, features]     (tensor, fsdp)          vectors             whole; column biases tensor
    [experts, out, in]    (expert, tensor, fsdp)  layer axis of a stack: never divided

A dim that an axis does not divide stays whole, and the plan says so. Nothing here touches a device.

Knows: roles, mesh sizes. Does not know: arrays, files.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jax.sharding import PartitionSpec
from torch import nn

from headrace.bridge.dtypes import to_jax_dtype
from headrace.bridge.module import JaxModule
from headrace.errors import ConfigError
from headrace.kernels.partition import AXES, EXPERT, FSDP, TENSOR, WeightSpec
from headrace.sharding.mesh import MeshConfig
from headrace.sharding.roles import Meaning, Roles

Entries = list[tuple[str, ...]]  # for every dim the axes that divide it
Override = tuple[str, Sequence[str | Sequence[str] | None] | str]


@dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """One stored parameter on a mesh.

    spec: of the stored array, layer axis included. weight: without it. shape: stored, global.
    bytes, bytes_per_device: of the stored array in `dtype`. reason: why it is whole or divided
    less than the mesh allows; empty when nothing is to be explained.
    """

    key: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    weight: WeightSpec
    role: str
    source: str
    bytes: int
    bytes_per_device: int
    trainable: bool
    reason: str = ""

    @property
    def stacked(self) -> bool:
        return len(self.names) > 1


def plan_params(
    module: JaxModule, mesh: MeshConfig, overrides: Sequence[Override] | Mapping[str, Any] = ()
) -> dict[str, ParamPlan]:
    """A plan for every stored parameter, in stored order.

    overrides: pattern -> spec, later ones win. A pattern is a PyTorch name with `*`; a spec is a
    list with one entry a dim of a single layer's weight (an axis, several, or null), or
    "replicated". Raises ConfigError for what does not divide heads or experts, and for overrides
    that match nothing or do not fit, all at once.
    """
    model = module.module
    check_model(model, mesh)
    roles = Roles(model)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    plans: dict[str, ParamPlan] = {}
    given = list(overrides.items()) if isinstance(overrides, Mapping) else list(overrides)
    chosen, problems = _match_overrides(given, module, tensors, mesh)
    for key, names in module.layout.keys.items():
        tensor = tensors[names[0]]
        meaning = roles(names[0])
        if key in chosen:
            entries, reason, source = chosen[key], "", "override"
        else:
            entries, reason = _entries(meaning, tensor, tensors, roles, mesh)
            source = meaning.source
        plans[key] = _plan(key, names, tensor, entries, mesh, meaning.role, source, reason, module)
    if problems:
        raise ConfigError("sharding overrides do not fit:\n  " + "\n  ".join(problems))
    return plans


def check_model(model: nn.Module, mesh: MeshConfig) -> None:
    """Refuse a mesh that does not divide attention heads or experts."""
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    problems: list[str] = []
    heads = getattr(text, "num_attention_heads", None)
    if isinstance(heads, int) and heads % mesh.tensor:
        problems.append(
            f"tensor: {mesh.tensor} does not divide the {heads} attention heads; use a divisor of "
            f"{heads}, and fsdp for the other devices"
        )
    experts = _num_experts(text)
    if mesh.expert > 1 and experts is None:
        problems.append(
            f"expert: {mesh.expert}, but {type(model).__name__} has no experts; use fsdp or data"
        )
    elif experts is not None and experts % mesh.expert:
        problems.append(f"expert: {mesh.expert} does not divide the {experts} experts")
    if problems:
        raise ConfigError(f"mesh ({mesh}) does not fit the model:\n  " + "\n  ".join(problems))


def _num_experts(config: Any) -> int | None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _plan(
    key: str,
    names: tuple[str, ...],
    tensor: torch.Tensor,
    entries: Entries,
    mesh: MeshConfig,
    role: str,
    source: str,
    reason: str,
    module: JaxModule,
) -> ParamPlan:
    dtype = to_jax_dtype(tensor.dtype)
    stored = _spec(entries)
    keep_experts = role.startswith("experts")
    used = entries if keep_experts else [tuple(a for a in e if a != FSDP) for e in entries]
    shape = tuple(tensor.shape)
    stack = (len(names),) if len(names) > 1 else ()
    total = math.prod(stack + shape) * dtype.itemsize
    parts = math.prod(mesh.sizes[axis] for entry in entries for axis in entry)
    return ParamPlan(
        key=key,
        names=names,
        shape=stack + shape,
        dtype=dtype,
        spec=PartitionSpec(*([None] if stack else []), *stored),
        weight=WeightSpec(stored=stored, compute=_spec(used)),
        role=role,
        source=source,
        bytes=total,
        bytes_per_device=total // parts,
        trainable=key in module.layout.trainable,
        reason=reason,
    )


def _spec(entries: Entries) -> PartitionSpec:
    return PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in entries))


def _entries(
    meaning: Meaning,
    tensor: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    roles: Roles,
    mesh: MeshConfig,
) -> tuple[Entries, str]:
    """The axes of every dim of one layer's weight, and why they are not more."""
    shape = tuple(tensor.shape)
    match meaning.role:
        case "column" | "row" | "embedding" | "experts_column" | "experts_row":
            return _matrix(meaning, shape, mesh)
        case "lora_a" | "lora_b" | "lora_magnitude":
            assert meaning.base is not None
            base, _ = _entries(roles(meaning.base), tensors[meaning.base], tensors, roles, mesh)
            if roles(meaning.base).transposed:
                base = base[::-1]
            return _adapter(meaning.role, base, shape)
        case "vector":
            if meaning.base == "column":
                return _bias(meaning, shape, mesh)
            return [() for _ in shape], _whole_reason(mesh, "a vector")
        case "matrix":
            return _largest_dim(shape, mesh)
        case _:
            return [() for _ in shape], _whole_reason(mesh, meaning.source)


def _matrix(meaning: Meaning, shape: tuple[int, ...], mesh: MeshConfig) -> tuple[Entries, str]:
    """tensor on one of the last two dims and fsdp on the other; experts on the first."""
    by_in = meaning.role in ("row", "experts_row")
    if meaning.transposed:
        by_in = not by_in
    tensor_dim, other = (-1, -2) if by_in else (-2, -1)
    entries: Entries = [() for _ in shape]
    reasons: list[str] = []
    if meaning.role.startswith("experts") and mesh.expert > 1:
        entries[0] = (EXPERT,)
    if mesh.tensor > 1:
        why = _tensor_obstacle(meaning, shape[tensor_dim], mesh.tensor)
        if why:
            reasons.append(why)
        else:
            entries[tensor_dim] = (TENSOR,)
    if mesh.fsdp > 1:
        reasons += _place_fsdp(entries, shape, mesh, other, tensor_dim)
    return entries, "; ".join(reasons)


def _tensor_obstacle(meaning: Meaning, size: int, tensor: int) -> str | None:
    if meaning.head_size is not None:
        heads = size // meaning.head_size
        if heads % tensor:
            return f"{heads} key/value heads over tensor {tensor}: whole, used in groups"
    if size % tensor:
        return f"dim of {size} is not divided by tensor {tensor}"
    return None


def _place_fsdp(
    entries: Entries, shape: tuple[int, ...], mesh: MeshConfig, first: int, second: int
) -> list[str]:
    """fsdp on the first dim it divides; both dims are tried."""
    for dim in (first, second):
        taken = math.prod(mesh.sizes[axis] for axis in entries[dim])
        if shape[dim] % (taken * mesh.fsdp) == 0:
            entries[dim] = (*entries[dim], FSDP)
            return []
    return [f"dims {shape[first]} and {shape[second]} are not divided by fsdp {mesh.fsdp}"]


def _adapter(role: str, base: Entries, shape: tuple[int, ...]) -> tuple[Entries, str]:
    out, inner = base[-2], base[-1]
    entries = {"lora_a": [(), inner], "lora_b": [out, ()], "lora_magnitude": [out]}[role]
    entries = [tuple(a for a in e if a != FSDP) for e in entries] if len(shape) == 1 else entries
    return list(entries), "" if any(entries) else "its base has this dim whole"


def _bias(meaning: Meaning, shape: tuple[int, ...], mesh: MeshConfig) -> tuple[Entries, str]:
    if mesh.tensor == 1:
        return [()], _whole_reason(mesh, "a vector")
    why = _tensor_obstacle(meaning, shape[0], mesh.tensor)
    return ([()], why) if why else ([(TENSOR,)], "")


def _largest_dim(shape: tuple[int, ...], mesh: MeshConfig) -> tuple[Entries, str]:
    """No plan: fsdp on the largest dim it divides."""
    entries: Entries = [() for _ in shape]
    if mesh.fsdp == 1:
        return entries, _whole_reason(mesh, "no plan for tensor")
    for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
        if shape[dim] % mesh.fsdp == 0:
            entries[dim] = (FSDP,)
            return entries, "no plan for tensor" if mesh.tensor > 1 else ""
    return entries, f"no dim of {list(shape)} is divided by fsdp {mesh.fsdp}"


def _whole_reason(mesh: MeshConfig, reason: str) -> str:
    return reason if max(mesh.fsdp, mesh.tensor) > 1 else ""


def _match_overrides(
    overrides: Sequence[Override],
    module: JaxModule,
    tensors: Mapping[str, torch.Tensor],
    mesh: MeshConfig,
) -> tuple[dict[str, Entries], list[str]]:
    chosen: dict[str, Entries] = {}
    problems: list[str] = []
    names = [n for group in module.layout.keys.values() for n in group]
    for pattern, spec in overrides:
        hits = [
            key
            for key, group in module.layout.keys.items()
            if fnmatch.fnmatchcase(key, pattern)
            or any(fnmatch.fnmatchcase(n, pattern) for n in group)
        ]
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            problems.append(f"{pattern!r} matches no parameter; one is {(near or names)[0]}")
        for key in hits:
            shape = tuple(tensors[module.layout.keys[key][0]].shape)
            entries, problem = _override_entries(spec, shape, mesh)
            if problem:
                problems.append(f"{pattern!r} on {key} {list(shape)}: {problem}")
            chosen[key] = entries
    return chosen, problems


def _override_entries(spec: Any, shape: tuple[int, ...], mesh: MeshConfig) -> tuple[Entries, str]:
    entries: Entries = [() for _ in shape]
    if spec == "replicated":
        return entries, ""
    if isinstance(spec, str) or len(spec) != len(shape):
        return entries, f"{spec!r} needs one entry for each of {len(shape)} dims, or 'replicated'"
    for dim, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            return entries, f"no axis {', '.join(unknown)}; the axes are {', '.join(AXES)}"
        parts = math.prod(mesh.sizes[axis] for axis in axes)
        if shape[dim] % parts:
            return entries, f"dim of {shape[dim]} is not divided by {' x '.join(axes)} = {parts}"
        entries[dim] = tuple(axis for axis in axes if mesh.sizes[axis] > 1)
    used = [axis for entry in entries for axis in entry]
    return entries, "an axis is used twice" if len(used) != len(set(used)) else ""

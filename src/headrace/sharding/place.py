"""Plans -> shardings of parameters, optimizer state and batches; batches onto their devices.

Knows: NamedSharding, several processes. Does not know: models' names, training.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.errors import ConfigError
from headrace.kernels.partition import BATCH_AXES, Partition
from headrace.sharding.mesh import batch_spec
from headrace.sharding.rules import ParamPlan


def make_partition(mesh: Mesh, plans: Mapping[str, ParamPlan]) -> Partition:
    """What the lowering needs to divide a program over the mesh."""
    return Partition(mesh=mesh, weights={key: plan.weight for key, plan in plans.items()})


def param_shardings(mesh: Mesh, plans: Mapping[str, ParamPlan]) -> dict[str, NamedSharding]:
    """The sharding of every stored parameter."""
    return {key: NamedSharding(mesh, plan.spec) for key, plan in plans.items()}


def abstract_params(mesh: Mesh, plans: Mapping[str, ParamPlan]) -> dict[str, jax.ShapeDtypeStruct]:
    """Stored parameters as shapes with shardings, for compiling without weights."""
    return {
        key: jax.ShapeDtypeStruct(plan.shape, plan.dtype, sharding=NamedSharding(mesh, plan.spec))
        for key, plan in plans.items()
    }


def like_params(tree: Any, specs: Mapping[str, PartitionSpec], shapes: Mapping[str, Any]) -> Any:
    """Specs for a tree that holds one array a parameter (optimizer moments), by key and shape.

    A leaf under a parameter's key takes its spec; one that lacks dims (factored moments) takes the
    spec of the dims it has; everything else is whole.
    """

    def one(path: Any, leaf: Any) -> PartitionSpec:
        for entry in path:
            key = getattr(entry, "key", None)
            if isinstance(key, str) and key in specs:
                return _matching(tuple(leaf.shape), tuple(shapes[key]), specs[key])
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(one, tree)


def _matching(shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
    entries = [*spec, *[None] * (len(whole) - len(spec))]
    if shape == whole:
        return PartitionSpec(*entries)
    for dropped in range(len(whole) - 1, -1, -1):
        if shape == whole[:dropped] + whole[dropped + 1 :]:
            return PartitionSpec(*entries[:dropped], *entries[dropped + 1 :])
    return PartitionSpec()


def check_batch(mesh: Mesh, shape: tuple[int, ...]) -> None:
    """Refuse a [A, B, T] batch (B over all processes) that the mesh does not divide."""
    partition = Partition(mesh=mesh)
    rows, tokens = partition.size(BATCH_AXES), partition.size("context")
    problems: list[str] = []
    if shape[1] % rows:
        problems.append(f"{shape[1]} rows over data x fsdp x expert = {rows}; needs a multiple")
    if len(shape) > 2 and shape[2] % tokens:
        problems.append(
            f"rows of {shape[2]} tokens over context = {tokens}; needs a multiple: set "
            f"pad_to_multiple_of or max_length to one"
        )
    if problems:
        raise ConfigError("the batch does not fit the mesh: " + "; ".join(problems))


def row_shares(mesh: Mesh) -> tuple[int, int]:
    """(share, shares): the rows of a batch that this process's devices need.

    Shares are equal and in order, so each process reads its own rows and no others; processes
    whose devices hold parts of the same rows (tensor or context across hosts) share a share.
    """
    rows = Partition(mesh=mesh).size(BATCH_AXES)
    sharding = NamedSharding(mesh, PartitionSpec(batch_spec(mesh)[1]))
    parts: dict[int, set[int]] = {}
    for device, index in sharding.devices_indices_map((rows,)).items():
        first, last, _ = index[0].indices(rows)
        parts.setdefault(device.process_index, set()).update(range(first, last))
    groups = sorted({tuple(sorted(held)) for held in parts.values()})
    if [row for group in groups for row in group] != list(range(rows)) or len(
        {len(group) for group in groups}
    ) != 1:
        raise ConfigError(
            f"mesh {dict(mesh.shape)} gives the processes rows that overlap in parts: {groups}. "
            "Make tensor x context divide the devices of one process."
        )
    return groups.index(tuple(sorted(parts[jax.process_index()]))), len(groups)


def put_batch(
    mesh: Mesh, batch: Mapping[str, np.ndarray], *, whole: bool = False
) -> dict[str, jax.Array]:
    """This process's rows [A, B of the process, T] as arrays over the whole mesh.

    whole: every process has all rows.
    """
    placed: dict[str, jax.Array] = {}
    shares = 1 if whole else row_shares(mesh)[1]
    for name, value in batch.items():
        sharding = NamedSharding(mesh, batch_spec(mesh, rank=value.ndim))
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
        if jax.process_count() == 1:
            placed[name] = jax.device_put(value, sharding)
            continue
        shape = (value.shape[0], value.shape[1] * shares, *value.shape[2:])
        first = 0 if whole else row_shares(mesh)[0] * value.shape[1]
        placed[name] = jax.make_array_from_callback(
            shape, sharding, functools.partial(_own_part, value, first, shape[1])
        )
    return placed


def _own_part(value: np.ndarray, first: int, rows: int, index: Any) -> np.ndarray:
    """Part `index` of a global batch of which this process holds the rows from `first` on."""
    start, stop, _ = index[1].indices(rows)
    return value[(index[0], slice(start - first, stop - first), *index[2:])]


def count_collectives(text: str) -> dict[str, int]:
    """How many collectives of each kind stand in the text of a compiled program."""
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    found = {kind: len(re.findall(rf"= [^=]*? {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in found.items() if count}

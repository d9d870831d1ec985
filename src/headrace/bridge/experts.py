"""Mixture-of-experts layers on a mesh: every device sorts and multiplies its own tokens.

Left to XLA, the sort by expert runs over the tokens of the whole batch: router numbers are gathered
over all devices of the batch axes and the sorted rows summed over them. Inside `shard_map` a device
sees its own tokens only, and what `passes/experts.py` proved makes that the same function.

With a divided `expert` axis, and for layers that were not proved, XLA's partitioner still decides.

Knows: proved layers, meshes. Does not know: how a node is evaluated (given), models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
import torch.fx as fx
from jax.sharding import PartitionSpec

from headrace.bridge.divide import Division
from headrace.bridge.passes.experts import Experts, find_experts
from headrace.bridge.program import Loop, Program
from headrace.kernels.partition import BATCH_AXES, CONTEXT, EXPERT, TENSOR, Partition

Evaluate = Callable[[Sequence[fx.Node], Mapping[fx.Node, Any], Mapping[Any, int]], Any]


def divided_experts(
    graph: fx.Graph, division: Division | None, symbols: Mapping[Any, int]
) -> dict[fx.Node, Experts]:
    """Proved layers of a graph by each of their nodes; empty where tokens are not divided."""
    if division is None or _local_symbols(division, symbols) is None:
        return {}
    return {node: experts for experts in find_experts(graph)[0] for node in experts.nodes}


def expert_notes(program: Program, partition: Partition) -> tuple[str, ...]:
    """What to say about expert layers whose tokens are not divided over the batch axes."""
    if partition.size(BATCH_AXES) * partition.size(CONTEXT) == 1:
        return ()
    loops = [node.target.body for node in program.graph.nodes if isinstance(node.target, Loop)]
    graphs = dict.fromkeys([program.graph, *loops])
    found = [find_experts(graph) for graph in graphs]
    if partition.size(EXPERT) > 1:
        divided = any(layers or reasons for layers, reasons in found)
        why = ["the `expert` axis is divided"] if divided else []
    else:
        why = [reason for _, reasons in found for reason in reasons]
    return tuple(
        f"tokens are sorted by expert over the whole batch, not on each device: {reason}"
        for reason in why
    )


def run_experts(
    experts: Experts,
    tokens: Sequence[Any],
    others: Mapping[fx.Node, Any],
    division: Division,
    symbols: Mapping[Any, int],
    evaluate: Evaluate,
) -> Any:
    """The layer's result, each device computing its own rows.

    tokens: values of `experts.inputs`. others: values from outside that all devices share; those
    that are sizes are worked out again for one device's tokens. evaluate: (nodes, values from
    outside, sizes of the batch) -> the last node's value.
    """
    partition = division.partition
    local = _local_symbols(division, symbols)
    assert local is not None
    axes = partition.axes(*BATCH_AXES, CONTEXT)
    sizes = {node: _size_of(node, local) for node in others if _is_size(node)}
    shared = [node for node in others if node not in sizes]

    def own(rows: Sequence[Any], whole: Sequence[Any]) -> Any:
        outside = dict(zip(experts.inputs, rows, strict=True)) | sizes
        outside |= dict(zip(shared, whole, strict=True))
        return evaluate(experts.nodes, outside, local)

    names = set(partition.mesh.axis_names)
    return jax.shard_map(
        own,
        mesh=partition.mesh,
        in_specs=(PartitionSpec(axes), PartitionSpec()),
        out_specs=PartitionSpec(axes),
        axis_names=names - {TENSOR} if partition.size(TENSOR) > 1 else names,
        check_vma=False,  # what every device computes alike is not declared so
    )(list(tokens), [others[node] for node in shared])


def _local_symbols(division: Division, symbols: Mapping[Any, int]) -> dict[Any, int] | None:
    """Sizes of batch and sequence on one device; None when the tokens are not to be divided."""
    partition = division.partition
    rows, parts = partition.size(BATCH_AXES), partition.size(CONTEXT)
    if rows * parts == 1 or partition.size(EXPERT) > 1:
        return None
    local = dict(symbols)
    for symbol, count in symbols.items():
        by = rows if symbol in division.batch else parts if symbol in division.sequence else 1
        if count % by:
            return None
        local[symbol] = count // by
    return local


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _size_of(node: fx.Node, symbols: Mapping[Any, int]) -> int:
    record: Any = node.meta["val"]
    return int(record.node.expr.subs(symbols))

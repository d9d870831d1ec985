"""`as_strided` reads memory, and memory lies as PyTorch laid it out.

A transposed tensor's elements stand in another order than its dims. The exporter records strides,
so the tensor is permuted to the order of its memory first; the rule reads it as contiguous then.
A tensor that is a part of a larger memory is refused: what lies around it is not in the graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from headrace.bridge.program import Program, copy_graph, place
from headrace.errors import CaptureError

aten = torch.ops.aten
_READS = (aten.as_strided.default, aten.as_strided_copy.default)


def follow_memory(program: Program) -> tuple[Program, list[str]]:
    """Program -> Program whose `as_strided` nodes read contiguous tensors. Raises CaptureError."""
    if not any(n.target in _READS for n in program.graph.nodes):
        return program, []
    graph, _ = copy_graph(program.graph)
    permute_sources(graph)
    return replace(program, graph=graph), []


def permute_sources(graph: fx.Graph) -> None:
    """What `as_strided` reads, contiguous, in this very graph. Raises CaptureError."""
    for node in list(graph.nodes):
        if node.target in _READS:
            _permute(graph, node)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _permute(graph: fx.Graph, node: fx.Node) -> None:
    source: Any = node.args[0]
    record = source.meta["val"]
    sizes, strides = [_hint(n) for n in record.shape], [_hint(n) for n in record.stride()]
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != expected:
            raise CaptureError(
                f"{node.target} ({node.name}, {place(node)}) reads the memory around a tensor of "
                f"shape {sizes} and strides {strides}.\n"
                "Needed: as_strided of a whole tensor; call .contiguous() before it."
            )
        expected *= sizes[dim]
    if order == list(range(len(sizes))):
        return
    with graph.inserting_before(node):
        permuted = graph.call_function(aten.permute.default, (source, order))
    kept = ("nn_module_stack", "stack_trace")
    permuted.meta = {k: source.meta[k] for k in kept if k in source.meta}
    permuted.meta["val"] = record.permute(order)
    node.args = (permuted, *node.args[1:])

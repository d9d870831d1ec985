"""Clean a captured graph: drop assertions and dead code, lift size arithmetic, forget empty
segments.

After this pass every node that only computes sizes stands before the first layer and stands once,
so that repeated layers look alike to the roll pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch._ops import OpOverload

import headrace.bridge.bounds  # noqa: F401  registers operators  # pyright: ignore[reportUnusedImport]
from headrace.bridge.program import Program, behind, copy_graph

_CHECKS = ("_assert", "sym_constrain", "_assert_tensor_metadata", "_assert_scalar")
_MASK = torch.ops.headrace.mask.default
_KEPT = (torch.ops.headrace.turn.default, torch.ops.headrace.require.default)
_SEGMENTS = 6  # argument of headrace::mask


def simplify(program: Program) -> tuple[Program, list[str]]:
    """Program -> Program with the same results and fewer nodes."""
    graph, _ = copy_graph(program.graph)
    removed = _drop_checks(graph)
    _number_draws(graph)
    notes = _drop_constant_segments(graph)
    _lift_sizes(graph)
    graph.eliminate_dead_code(_is_impure)
    if removed:
        notes.append(f"{removed} run-time assertions dropped")
    return replace(program, graph=graph), notes


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target in _KEPT


def _drop_checks(graph: fx.Graph) -> int:
    checks = [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and not node.users
        and _name(node).split(".")[-1].startswith(_CHECKS)
    ]
    for node in reversed(checks):
        graph.erase_node(node)
    return len(checks)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target.name().split("::")[-1].split(".")[0]
    return getattr(target, "__name__", str(target))


def _number_draws(graph: fx.Graph) -> None:
    """Give every node an ordinal from which its random key is derived; loops keep it and add the
    layer.
    """
    for ordinal, node in enumerate(graph.nodes):
        node.meta = {**node.meta, "draw": ordinal}


def is_size(node: fx.Node) -> bool:
    """Whether a node gives an integer about shapes, not a tensor."""
    value = node.meta.get("val")
    return (
        isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat, int))
        and node.op == "call_function"
    )


def _lift_sizes(graph: fx.Graph) -> None:
    """Move size arithmetic to the top and merge nodes of the same value.

    The exporter knows each size as an expression of the inputs' sizes, so a size read from an inner
    tensor is replaced by the equal one read from an input.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    if not placeholders:
        return
    lifted = _Lifted(graph, placeholders)
    for node in list(graph.nodes):
        if not is_size(node):
            continue
        same = lifted.find(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        else:
            lifted.add(node)


class _Lifted:
    """Size nodes that stand at the top of the graph, by the expression they compute."""

    def __init__(self, graph: fx.Graph, placeholders: list[fx.Node]) -> None:
        self._graph = graph
        self._anchor = placeholders[-1]
        self._ready = set(placeholders)
        self._nodes: dict[str, fx.Node] = {}
        self._sources: dict[str, tuple[fx.Node, int, Any]] = {}
        for node in placeholders:
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, torch.Tensor) else ()
            for dim, size in enumerate(sizes):
                if isinstance(size, torch.SymInt):
                    self._sources.setdefault(str(size.node.expr), (node, dim, size))

    def find(self, node: fx.Node) -> fx.Node | None:
        key = _expression(node)
        if key in self._nodes:
            return self._nodes[key]
        if key in self._sources:
            source, dim, size = self._sources[key]
            with self._graph.inserting_after(self._anchor):
                new = self._graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
            new.meta = {"val": size}
            self._keep(key, new)
            return new
        return None

    def add(self, node: fx.Node) -> None:
        if all(n in self._ready for n in node.all_input_nodes):
            self._anchor.append(node)
            self._keep(_expression(node), node)

    def _keep(self, key: str, node: fx.Node) -> None:
        # It belongs to no layer any more.
        node.meta = {k: v for k, v in node.meta.items() if k != "nn_module_stack"}
        self._nodes[key] = node
        self._ready.add(node)
        self._anchor = node


def _expression(node: fx.Node) -> str:
    value = node.meta["val"]
    return str(value.node.expr) if hasattr(value, "node") else repr(value)


def _drop_constant_segments(graph: fx.Graph) -> list[str]:
    """Forget segments that hold no information.

    While tracing, transformers derives segments from `position_ids` even when the model made those
    itself as 0, 1, 2, …; then all tokens are one segment. Such a value depends on sizes alone: it
    is computed
    here, for two different sizes, and dropped when it is constant along the sequence.
    """
    dropped = 0
    for node in graph.nodes:
        if node.target is not _MASK or len(node.args) <= _SEGMENTS or node.args[_SEGMENTS] is None:
            continue
        segments = node.args[_SEGMENTS]
        needed = _ancestors(segments)
        if any(n.op == "placeholder" for n in needed):
            continue
        if all(_is_constant(segments, needed, size) for size in (5, 8)):
            node.args = (*node.args[:_SEGMENTS], None)
            dropped += 1
    return [f"{dropped} masks: positions are the default ones, so no segments"] if dropped else []


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """Tensor-value ancestors in graph order; sizes are leaves, for their value is only a number."""
    size = torch.ops.aten.sym_size.int
    return behind(node, lambda n: () if n.target is size else n.all_input_nodes)


def _is_constant(node: fx.Node, needed: list[fx.Node], size: int) -> bool:
    env: dict[fx.Node, Any] = {}
    for current in needed:
        if current.target is torch.ops.aten.sym_size.int:
            env[current] = size
        else:
            args, kwargs = fx.map_arg((current.args, current.kwargs), lambda n: env[n])
            env[current] = current.target(*args, **kwargs)  # pyright: ignore
    value = env[node]
    return bool((value == value[..., :1]).all())

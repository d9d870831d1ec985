"""Inline the regions that torch.export wraps: `no_grad`, disabled autocast.

`torch.no_grad()` becomes a submodule in the exported graph. Its results carry no gradient, which is
kept by an `aten.detach` on each of them; the same for `torch.enable_grad`, without it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch._ops import HigherOrderOperator

from headrace.errors import CaptureError

_HOPS = torch.ops.higher_order


def inline_regions(module: fx.GraphModule) -> fx.Graph:
    """A flat copy of the module's graph."""
    graph = fx.Graph()
    results = _copy_into(module, graph, {})
    output = graph.output(tuple(results))
    output.meta = dict(next(iter(reversed(module.graph.nodes))).meta)
    return graph


def _copy_into(module: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, Any]) -> Any:
    """Copy all nodes but the output, whose value is returned; placeholders already in `env` are
    bound.
    """

    def load(arg: Any) -> Any:
        return fx.map_arg(arg, lambda n: env[n])

    for node in module.graph.nodes:
        if node in env:
            continue
        if node.op == "output":
            return load(node.args[0])
        if node.op == "get_attr":
            env[node] = _submodule(module, node)
        elif node.target in _REGIONS:
            env[node] = _inline(node, graph, env)
        elif node.target is operator.getitem and isinstance(env[node.args[0]], tuple):
            env[node] = env[node.args[0]][node.args[1]]
        elif isinstance(node.target, HigherOrderOperator):
            raise CaptureError(
                f"the model uses the control-flow operator {node.target.name()}, which has no "
                f"rule yet.\n"
                "Needed: a forward without torch.cond, torch.while_loop or autocast regions."
            )
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
    raise AssertionError("a graph ends with an output node")


def _submodule(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, fx.GraphModule), (
        f"export lifts all tensors, but {node.target} was left"
    )
    return value


def _inline(node: fx.Node, graph: fx.Graph, env: dict[fx.Node, Any]) -> tuple[Any, ...]:
    inner, operands, stops = _REGIONS[node.target](
        tuple(env[a] if isinstance(a, fx.Node) else a for a in node.args)
    )
    placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
    env.update(zip(placeholders, operands, strict=True))
    results = _copy_into(inner, graph, env)
    return tuple(_detach(graph, r) if stops and isinstance(r, fx.Node) else r for r in results)


def _detach(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return node
    result = graph.call_function(torch.ops.aten.detach.default, (node,))
    result.meta = dict(node.meta)
    return result


def _grad_region(args: Any) -> tuple[Any, tuple[Any, ...], bool]:
    enabled, inner, *operands = args
    return inner, tuple(operands), not enabled


def _autocast_region(args: Any) -> tuple[Any, tuple[Any, ...], bool]:
    device_type, dtype, enabled, _cache, inner, *operands = args
    if enabled:
        raise CaptureError(
            f"the model turns on autocast ({device_type}, {dtype}) inside its forward, which has "
            f"no rule.\n"
            "Load the model in the dtype you want to compute in instead."
        )
    return inner, tuple(operands), False


_REGIONS: dict[Any, Any] = {
    _HOPS.wrap_with_set_grad_enabled: _grad_region,
    _HOPS.wrap_with_autocast: _autocast_region,
}

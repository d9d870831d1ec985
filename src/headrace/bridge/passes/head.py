"""Cut the graph at the LM head, so that the loss need not build [tokens, vocabulary].

The head is the last `aten.linear` before the `logits` output. What follows it must be token-wise:
casts, scaling, soft-capping (tanh); this is proved node by node. Everything else is refused with
the operator's name.

Shapes: D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from headrace.bridge.program import Input, Program, copy_graph, verify
from headrace.errors import CaptureError

aten = torch.ops.aten
Array = jax.Array

_SAME_SHAPE = {
    aten.tanh.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """The LM head: logits = tail(hidden @ weight.T + bias).

    weight_key, bias_key: stored keys; weight is [V, D].
    tail: token-wise function of logits [..., V], None when nothing follows the linear.
    """

    weight_key: str
    bias_key: str | None
    tail: Callable[[Array], Array] | None

    def logits(self, params: Mapping[str, Array], hidden: Array) -> Array:
        """Logits [..., V] of hidden states [..., D] in the model's own order of operations."""
        logits = jnp.einsum("...d,vd->...v", hidden, params[self.weight_key])
        if self.bias_key is not None:
            logits = logits + params[self.bias_key]
        return logits if self.tail is None else self.tail(logits)


def split_head(program: Program) -> tuple[Program, Head]:
    """The program with its last hidden state [B, S, D] in the place of `logits`, and the head."""
    graph, _ = copy_graph(program.graph)
    index = _logits_index(program)
    results = list(next(iter(reversed(graph.nodes))).args[0])
    node, tail = results[index], []
    by_node = {i.node: i for i in program.inputs}
    while isinstance(node, fx.Node) and node.target is not aten.linear.default:
        if not _token_wise(node):
            raise CaptureError(
                f"the logits of {program.name} go through {node.target} after the LM head, which "
                f"is not known to be "
                "token-wise; the loss is computed from whole logits"
            )
        tail.insert(0, node)
        node = node.args[0]
    assert isinstance(node, fx.Node)
    hidden, *weights = node.args
    keys = [_stored_key(w, by_node) for w in weights]
    if any(k is None for k, w in zip(keys, weights, strict=True) if w is not None):
        raise CaptureError(
            f"the LM head of {program.name} is not a plain weight (an adapter or computation is "
            f"on it); "
            "the loss is computed from whole logits"
        )
    function = _tail_function(node, tail)
    results[index] = hidden
    next(iter(reversed(graph.nodes))).args = (tuple(results),)
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    cut = replace(program, graph=graph)
    verify(cut)
    bias = keys[1] if len(keys) > 1 else None
    assert keys[0] is not None
    return cut, Head(weight_key=keys[0], bias_key=bias, tail=function)


def _logits_index(program: Program) -> int:
    """Position of `logits` among the graph's results."""
    user = [k for k, o in enumerate(program.outputs) if o.kind == "user"]
    tree = pytree.tree_unflatten(list(range(len(user))), program.out_spec)
    place = tree.get("logits") if isinstance(tree, Mapping) else None
    if not isinstance(place, int):
        raise CaptureError(
            f"{program.name} has no output named logits; the loss is computed from its outputs"
        )
    return user[place]


def _token_wise(node: fx.Node) -> bool:
    return (
        node.target in _SAME_SHAPE
        and isinstance(node.args[0], fx.Node)
        and len(node.all_input_nodes) == 1
        and len(node.args[0].users) == 1
    )


def _stored_key(value: Any, by_node: Mapping[str, Input]) -> str | None:
    if not isinstance(value, fx.Node) or value.op != "placeholder":
        return None
    spec = by_node[value.name]
    return spec.key if spec.kind == "parameter" and not spec.stacked else None


def _tail_function(linear: fx.Node, tail: list[fx.Node]) -> Callable[[Array], Array] | None:
    if not tail:
        return None
    graph = fx.Graph()
    env = {linear: graph.placeholder("logits")}
    for node in tail:
        env[node] = graph.node_copy(node, lambda n: env[n])
        # Recorded shapes are those of whole logits; the function also sees chunks of tokens.
        env[node].meta = {k: v for k, v in node.meta.items() if k != "val"}
    graph.output(env[tail[-1]])

    def function(logits: Array) -> Array:
        from headrace.bridge.lower import Settings, interpret

        return interpret(graph, [logits], Settings())

    return function

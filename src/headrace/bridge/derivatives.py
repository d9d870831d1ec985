"""Backwards that a model brings along, as JAX derivatives.

In the graph a backward stands behind its forward: nodes that lead from `headrace::cotangent` to
`headrace::own_backward` (`functions.py`). They are not run forward; they become the `bwd` of a
`jax.custom_vjp` that is the identity on the forward's results.

Does not know: how one node is evaluated; the caller gives a function for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
import torch.fx as fx

import headrace.bridge.functions  # noqa: F401  registers the operators  # pyright: ignore[reportUnusedImport]
from headrace.errors import CaptureError

_COTANGENT = torch.ops.headrace.cotangent.default
OWN_BACKWARD = torch.ops.headrace.own_backward.default
Evaluate = Callable[[Sequence[fx.Node], dict[fx.Node, Any], Any], None]


def backward_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that belong to a backward, none of which is needed forward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is OWN_BACKWARD or node.op != "call_function":
            continue
        if node.target is _COTANGENT or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def own_backward(
    node: fx.Node,
    env: Mapping[fx.Node, Any],
    deferred: frozenset[fx.Node],
    rng: Any,
    evaluate: Evaluate,
) -> tuple[Any, ...]:
    """The results of an `own_backward` node: its outputs, with the derivative that it brings.

    evaluate: puts the values of nodes into an environment, with a key for those that draw.
    """
    outputs, inputs, cotangents, gradients, refused = node.args
    body = _body(gradients, deferred)  # pyright: ignore[reportArgumentType]
    inside = set(body)
    outside = {n for b in body for n in b.all_input_nodes if n not in inside}
    outside |= {g for g in gradients if g not in inside}  # pyright: ignore
    # Arrays are operands: a derivative rule must not close over values that are being traced.
    arrays = {n: env[n] for n in node.graph.nodes if n in outside and _is_array(env[n])}
    static = {n: env[n] for n in outside if n not in arrays}
    stands = list(cotangents)  # pyright: ignore

    @jax.custom_vjp
    def joined(results: Any, differentiated: Any, read: Any, key: Any) -> Any:
        return tuple(results)

    def forward(results: Any, differentiated: Any, read: Any, key: Any) -> Any:
        return tuple(results), (read, key)

    def backward(residuals: Any, grads: Any) -> Any:
        if refused:
            raise CaptureError(
                f"A gradient is needed through a torch.autograd.Function whose backward could not "
                f"be captured.\n  {refused}\nNeeded: a backward of tensor operations that returns "
                "all its gradients, or a model option that avoids this Function."
            )
        read, key = residuals
        values = {**static, **dict(zip(arrays, read, strict=True))}
        values |= dict(zip(stands, grads, strict=True))
        evaluate([n for n in body if n not in values], values, key)
        return None, [values[g] for g in gradients], None, None  # pyright: ignore

    joined.defvjp(forward, backward)
    differentiated = [env[n] for n in inputs]  # pyright: ignore
    return joined([env[n] for n in outputs], differentiated, list(arrays.values()), rng)  # pyright: ignore


def _is_array(value: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(value)
    return bool(leaves) and all(hasattr(leaf, "dtype") for leaf in leaves)


def _body(gradients: Sequence[fx.Node], deferred: frozenset[fx.Node]) -> list[fx.Node]:
    """What leads to the gradients, in graph order."""
    needed: set[fx.Node] = set()
    queue = [g for g in gradients if g in deferred]
    while queue:
        node = queue.pop()
        if node not in needed:
            needed.add(node)
            queue += [n for n in node.all_input_nodes if n in deferred]
    return [n for n in gradients[0].graph.nodes if n in needed] if gradients else []

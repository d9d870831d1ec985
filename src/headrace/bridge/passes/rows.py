"""Which operators keep rows apart: the dims of its inputs that an operator mixes.

A row is a slice of a tensor along a dim. An operator keeps rows apart when row i of its result
depends on row i of its input only. What is not known to do so counts as mixing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten
Padded = Callable[[Any], dict[int, Any]]


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """An input dim whose rows are mixed, and how."""

    operand: fx.Node
    dim: int
    why: str


# Elementwise without the tag, or a rearrangement that moves whole dims.
_APART = frozenset(
    """
    to _to_copy type_as contiguous clone alias detach dropout native_dropout lift_fresh_copy
    unsqueeze squeeze transpose permute t movedim swapaxes expand expand_as zeros_like
    ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full
    new_empty sym_size where masked_fill rsub float_power one_hot relu6 hardtanh
    """.split()  # noqa: SIM905
)
# They work along the dims that they name, or along all when they name none.
_ALONG = frozenset(
    """
    select slice split split_with_sizes chunk unbind softmax log_softmax _softmax
    _log_softmax cat stack cumsum glu topk sort argmax argmin amax amin max min sum mean any
    all prod logsumexp norm linalg_vector_norm var std flip narrow unflatten flatten
    """.split()  # noqa: SIM905
)
_NORMALISED = {"layer_norm": 1, "native_layer_norm": 1, "rms_norm": 1, "_fused_rms_norm": 1}
_VIEWS = frozenset(["view", "reshape", "_unsafe_view", "flatten", "unflatten"])
_PRODUCTS = frozenset(["matmul", "mm", "bmm"])


def mixed_dims(node: fx.Node, padded: Padded) -> list[Mixing]:
    """The padded dims of the node's inputs that it mixes; empty when all rows stay apart."""
    target: Any = node.target
    name = target._schema.name.split("::")[1]
    return list(_mixed(node, name, padded))


def _mixed(node: fx.Node, name: str, padded: Padded) -> Iterator[Mixing]:
    target: Any = node.target
    if torch.Tag.pointwise in target.tags or name in _APART:
        return
    args: Any = node.args
    if name in _VIEWS:
        yield from _view(node, args[0], padded)
    elif name in _ALONG:
        yield from _along(node, padded)
    elif name in _NORMALISED:
        ndim = args[0].meta["val"].ndim
        last = range(ndim - len(args[1]), ndim)
        yield from _crossing(node, args[0], last, padded, "normalises over them")
    elif name == "linear":
        yield from _crossing(node, args[0], [-1], padded, "sums over them")
        for weight in args[1:]:
            yield from _crossing(node, weight, range(8), padded, "uses them as a weight")
    elif name in _PRODUCTS:
        yield from _crossing(node, args[0], [-1], padded, "sums over them")
        rank = args[1].meta["val"].ndim
        yield from _crossing(node, args[1], [-2 if rank > 1 else -1], padded, "sums over them")
    elif name == "addmm":
        yield from _crossing(node, args[1], [-1], padded, "sums over them")
        yield from _crossing(node, args[2], [-2], padded, "sums over them")
    elif name == "index":
        read = [d for d, i in enumerate(args[1]) if i is not None]
        yield from _crossing(node, args[0], read, padded, "reads them by index")
    elif name in ("embedding", "index_select", "gather"):
        yield from _crossing(node, args[0], range(8), padded, "reads them by index")
    else:
        for operand in node.all_input_nodes:
            yield from _crossing(node, operand, range(8), padded, "is not known to keep them apart")


def _crossing(node: fx.Node, operand: Any, dims: Any, padded: Padded, why: str) -> Iterator[Mixing]:
    found = padded(operand)
    if not found:
        return
    ndim = operand.meta["val"].ndim
    for dim in {d % ndim for d in dims if -ndim <= d < ndim} & found.keys():
        yield Mixing(operand=operand, dim=dim, why=why)


def _along(node: fx.Node, padded: Padded) -> Iterator[Mixing]:
    arguments = node.target._schema.arguments  # pyright: ignore
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
    dims: Any = given.get("dim", given.get("dims"))
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if dims is None or dims == []:
            over = range(value.ndim)
        else:
            over = list(dims) if isinstance(dims, (list, tuple)) else [dims]
        if _is_whole(given):
            continue
        yield from _crossing(node, operand, over, padded, "works along them")


def _is_whole(given: dict[str, Any]) -> bool:
    """`x[:]` along a dim."""
    return (
        "end" in given
        and given.get("start") in (None, 0)
        and (given["end"] is None or given["end"] == 2**63 - 1)
        and given.get("step", 1) == 1
    )


def _view(node: fx.Node, operand: Any, padded: Padded) -> Iterator[Mixing]:
    """Rows stay in front when nothing before their dim changes."""
    before, after = padded(operand), padded(node)
    if not before:
        return
    if len(before) == 1 and len(after) == 1:
        (i,), (j,) = before, after
        shapes = operand.meta["val"].shape[:i], node.meta["val"].shape[:j]
        if _long(shapes[0]) == _long(shapes[1]):
            return
    yield Mixing(operand=operand, dim=next(iter(before)), why="rearranges them")


def _long(sizes: Any) -> list[str]:
    return [str(size) for size in sizes if str(size) != "1"]

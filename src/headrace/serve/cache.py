"""The key/value cache of a captured model, as its graph asks for it.

Every attention node that computes its own keys and values gets a cache of their shape; nodes that
read the keys and values of an earlier layer (Gemma's shared layers) read that layer's cache. Layers
that run as a loop share one array, a stretch of pages a turn. Nothing here knows an architecture.

Knows: the program, paged attention. Does not know: requests, pages in use, sampling.

Shapes: T = tokens of the step, N = query heads, K = key/value heads, H = head size, P = pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import jax
import torch
import torch.fx as fx
from jax.sharding import Mesh, PartitionSpec

from headrace.bridge.dtypes import to_jax_dtype
from headrace.bridge.intercept import AttentionCall, Intercept
from headrace.bridge.program import Loop, Program
from headrace.errors import CaptureError
from headrace.kernels.paged import KVCacheDtype, PagedForm, PagedRows, PagedShape, paged_attention
from headrace.kernels.paged_sharded import paged_attention_on_mesh
from headrace.serve.linear import linear_weight_first, weight_first
from headrace.serve.lora import LoraStacks

Array = jax.Array
Pages = dict[str, tuple[Array, ...]]

_ATTENTION = torch.ops.headrace.attention.default
_MASK = torch.ops.headrace.mask.default


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """One attention node's cache. source: the entry whose pages it reads; its own name if it
    writes. window: keys that a query sees, itself included; None for all before it.
    """

    name: str
    source: str
    layers: int
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: Any
    has_sinks: bool
    window: int | None

    @property
    def writes(self) -> bool:
        return self.name == self.source

    def shape(self, *, num_pages: int, page_size: int, kv_cache_dtype: KVCacheDtype) -> PagedShape:
        """Pages of this entry, every layer of a loop counted."""
        return PagedShape(
            layers=self.layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.num_kv_heads,
            key_size=self.key_size,
            value_size=self.value_size,
            dtype=self.dtype,
            kv_cache_dtype=kv_cache_dtype,
        )


def cache_entries(program: Program) -> dict[fx.Node, CacheEntry]:
    """The cache that each attention node of the program needs.

    Raises CaptureError, all reasons at once, for models whose next token depends on more than
    causal attention of the kind a page table can serve.
    """
    entries: dict[fx.Node, CacheEntry] = {}
    owners: dict[tuple[fx.Node, fx.Node], str] = {}
    problems: list[str] = []
    for node, loop in _attention_nodes(program):
        mask = _mask(node, loop, program)
        problems += _obstacles(node, mask)
        key, value = node.args[1], node.args[2]
        assert isinstance(key, fx.Node)
        assert isinstance(value, fx.Node)
        name = f"{loop.__name__}.{node.name}" if loop is not None else node.name
        kept, read = key.meta["val"], value.meta["val"]
        entries[node] = CacheEntry(
            name=name,
            source=owners.setdefault((_origin(key), _origin(value)), name),
            layers=loop.length if loop is not None else 1,
            num_heads=int(node.args[0].meta["val"].shape[1]),  # pyright: ignore
            num_kv_heads=int(kept.shape[1]),
            key_size=int(kept.shape[3]),
            value_size=int(read.shape[3]),
            dtype=to_jax_dtype(kept.dtype),
            has_sinks=node.args[5] is not None,
            window=_window(mask),
        )
    if not entries:
        problems.append(
            "its graph has no attention operator: it keeps its state in another way (a recurrent "
            "or convolutional model), or computes attention with code of its own"
        )
    if problems:
        raise CaptureError(
            f"{program.name} cannot be served with a paged key/value cache:\n  "
            + "\n  ".join(dict.fromkeys(problems))
            + "\n`headrace eval` and greedy generation without a cache still work for it."
        )
    return entries


def has_attention(program: Program) -> bool:
    """Whether the graph has an attention operator at all."""
    return bool(_attention_nodes(program))


def shares_across_loop(program: Program) -> bool:
    """Whether a looped layer reads keys or values from outside of its own turn.

    Such a program is captured again without loops, where sharing can be seen.
    """
    for node, loop in _attention_nodes(program):
        operands = [_origin(x) for x in node.args[1:3] if isinstance(x, fx.Node)]
        if loop is not None and any(x.op == "placeholder" for x in operands):
            return True
    return False


def _attention_nodes(program: Program) -> list[tuple[fx.Node, Loop | None]]:
    found: list[tuple[fx.Node, Loop | None]] = []
    for node in program.graph.nodes:
        if isinstance(node.target, Loop):
            loop = node.target
            found += [(n, loop) for n in loop.body.nodes if n.target is _ATTENTION]
        elif node.target is _ATTENTION:
            found.append((node, None))
    return found


_SAME_VALUE = {
    torch.ops.aten.alias.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}


def _origin(node: fx.Node) -> fx.Node:
    """The node a value comes from, through operators that change nothing."""
    while node.op == "call_function" and _keeps_value(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _keeps_value(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target in _SAME_VALUE:
        return True
    before, after = source.meta.get("val"), node.meta.get("val")
    cast = str(node.target).startswith("aten.to.")
    return cast and getattr(before, "dtype", None) == getattr(after, "dtype", 0)


def _mask(node: fx.Node, loop: Loop | None, program: Program) -> Any:
    """What gives an attention node its mask: a node of the mask operator, another node, or None."""
    mask: Any = node.args[3]
    while isinstance(mask, fx.Node):
        source = _outside(mask, loop, program)
        if source is mask and mask.target is torch.ops.aten.slice.Tensor:
            # Layers with shared keys cut the mask to the keys' length, which changes nothing here.
            start = mask.args[2] if len(mask.args) > 2 else 0
            source = mask.all_input_nodes[0] if start in (0, None) else mask
        if source is mask:
            break
        mask = source
    return mask


def _is_pattern(mask: Any) -> TypeGuard[fx.Node]:
    return isinstance(mask, fx.Node) and mask.target is _MASK


def _window(mask: Any) -> int | None:
    if not _is_pattern(mask):
        return None
    width: Any = mask.args[4]
    return int(width) or None


def _obstacles(node: fx.Node, mask: Any) -> list[str]:
    bias, causal = node.args[4], bool(node.args[6])
    found: list[str] = []
    if bias is not None:
        found.append("its attention adds a position bias to the scores (T5, MPT, ALiBi)")
    if mask is None and not causal:
        found.append("its attention is not causal: an encoder, or attention to another sequence")
    if isinstance(mask, fx.Node) and not _is_pattern(mask):
        found.append("its attention mask has a pattern other than causal or a sliding window")
    if _is_pattern(mask) and not mask.args[3]:
        found.append("its attention mask is not causal: it reads tokens to the right")
    return found


def _outside(node: fx.Node, loop: Loop | None, program: Program) -> Any:
    """The node of the main graph behind a placeholder of a loop's body."""
    if loop is None or node.op != "placeholder":
        return node
    index = [n for n in loop.body.nodes if n.op == "placeholder"].index(node)
    outer = next(n for n in program.loops if n.target is loop)
    return outer.args[index]


class PagedIntercept(Intercept):
    """Attention against the pages, and adapters on linear layers, for one step.

    page_specs: how every cache's arrays lie on `mesh`; empty without one.
    """

    def __init__(
        self,
        *,
        pages: Pages,
        entries: Mapping[fx.Node, CacheEntry],
        rows: PagedRows,
        num_pages: int,
        forms: Mapping[str, PagedForm],
        page_specs: Mapping[str, PartitionSpec],
        mesh: Mesh | None = None,
        lora: LoraStacks | None = None,
        turn: Array | None = None,
    ) -> None:
        self.value: Pages = dict(pages)
        self.turn = turn
        self._mesh, self._page_specs = mesh, page_specs
        self._entries, self._rows, self._num_pages = entries, rows, num_pages
        self._forms, self._lora = forms, lora

    def inside(self, value: Any, turn: Array) -> PagedIntercept:
        return PagedIntercept(
            pages=value,
            entries=self._entries,
            rows=self._rows,
            num_pages=self._num_pages,
            forms=self._forms,
            page_specs=self._page_specs,
            mesh=self._mesh,
            lora=self._lora,
            turn=turn,
        )

    def attention(self, call: AttentionCall) -> Array:
        entry = self._entries[call.node]
        first = 0 if self.turn is None else self.turn.astype("int32") * self._num_pages
        attend: Any = paged_attention
        if self._mesh is not None:
            attend = partial(paged_attention_on_mesh, self._mesh, self._page_specs[entry.source])
        out_TNH, self.value[entry.source] = attend(
            self.value[entry.source],
            call.query[0].swapaxes(0, 1),
            call.key[0].swapaxes(0, 1) if entry.writes else None,
            call.value[0].swapaxes(0, 1) if entry.writes else None,
            self._rows,
            scale=call.scale,
            window=entry.window,
            softcap=call.softcap or None,
            sinks_N=call.sinks,
            first_page=first,
            form=self._forms[entry.source],
        )
        return out_TNH.swapaxes(0, 1)[None].astype(call.query.dtype)

    def linear(self, node: fx.Node, operands: Sequence[Any], outputs: Array) -> Array:
        if self._mesh is None and weight_first(operands[0].size // operands[0].shape[-1]):
            outputs = linear_weight_first(*operands).astype(outputs.dtype)
        if self._lora is None:
            return outputs
        return self._lora.added(node, operands[0], outputs, self.turn)

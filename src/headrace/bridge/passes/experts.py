"""Find mixture-of-experts layers whose tokens can be divided over devices, and prove it.

The grouped form sorts all (token, expert) pairs by expert, multiplies each group with its expert's
matrix, and brings the rows back into the tokens' order. Sorting the tokens of a part of the batch
alone gives the same rows, when every value in between is one of few kinds (`Kind`) and every
operator keeps the rows of its kind apart. That is what is proved here, from operators and shapes;
whatever is not known to do so ends the proof, with the reason.

Knows: graphs, ATen. Does not know: models, devices.

Shapes: T = tokens, K = experts a token, S = T * K pairs, E = experts.
"""

from __future__ import annotations

import enum
import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._ops import OpOverload

from headrace.bridge.ops.registry import lookup
from headrace.bridge.passes.rows import mixed_dims
from headrace.bridge.program import place

aten = torch.ops.aten
_SORTS = (aten.sort.default, aten.sort.stable)
_CASTS = (aten._to_copy.default, aten.to.dtype)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


_BY_DIM = (aten.gather.default, aten.scatter.src, aten.scatter.value)


class Kind(enum.Enum):
    """What the rows of a value (its first dim) are."""

    TOKENS = "[T, ...] in the tokens' order"
    PAIRS = "[S, ...] token by token"
    SORTED = "[S, ...] expert by expert"
    IDS = "[S] the expert of each sorted row"
    ORDER = "[S] the pair of each sorted row"
    TOKEN_OF = "[S] the token of each sorted row"
    PLACES = "[S] the sorted row of each pair"
    MEMORY = "[S] without values"
    NUMBERS = "[S] 0, 1, 2, ..."
    COUNTS = "[E] rows of each expert"
    OFFSETS = "[E] where each expert's rows end"


_ROWS = (Kind.TOKENS, Kind.PAIRS, Kind.SORTED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Experts:
    """One layer. inputs: what comes from outside and has a row for each token; other values from
    outside have no rows of tokens. nodes: in graph order, the last one is the result [T, ...]."""

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]

    @property
    def output(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def others(self) -> tuple[fx.Node, ...]:
        """Values from outside that are whole for every device: weights, sizes."""
        inside = {*self.nodes, *self.inputs}
        used = (operand for node in self.nodes for operand in node.all_input_nodes)
        return tuple(dict.fromkeys(operand for operand in used if operand not in inside))


class _Unproved(Exception):
    pass


@functools.lru_cache(maxsize=256)
def find_experts(graph: fx.Graph) -> tuple[tuple[Experts, ...], tuple[str, ...]]:
    """The layers of a graph that were proved, and for each that was not, why."""
    found: list[Experts] = []
    reasons: list[str] = []
    for node in graph.nodes:
        if node.target in _SORTS and _sorts_experts(node):
            try:
                found.append(_Proof(node).experts())
            except _Unproved as reason:
                reasons.append(f"experts {place(node)}: {reason}")
    return tuple(found), tuple(reasons)


def _sorts_experts(node: fx.Node) -> bool:
    """Whether grouped products depend on what is sorted."""
    reached: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if _is_grouped(user):
                return True
            if user not in reached:
                reached.add(user)
                waiting.append(user)
    return False


def _is_grouped(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and "grouped_mm" in node.target.name()


def _sizes(node: Any) -> tuple[Any, ...] | None:
    """A tensor's sizes, numbers or expressions; None for anything else."""
    return _recorded(node.meta.get("val")) if isinstance(node, fx.Node) else None


def _recorded(record: Any) -> tuple[Any, ...] | None:
    if not isinstance(record, torch.Tensor):
        return None
    sizes: Any = record.shape
    return tuple(size if isinstance(size, int) else size.node.expr for size in sizes)


def _is_fixed(sizes: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) for size in sizes)


class _Proof:
    """Kinds of the values from one sort on."""

    def __init__(self, sort: fx.Node) -> None:
        self._kinds: dict[fx.Node, Kind] = {}
        self._inputs: dict[fx.Node, None] = {}
        self._sort = sort
        self._experts = 0
        ids: Any = sort.args[0]
        options = sort.args[1:]
        if any(options[1:]) or sort.kwargs.get("descending"):
            raise _Unproved("it sorts downwards")
        sizes, before = _sizes(ids), _sizes(ids.args[0]) if ids.target in _VIEWS else None
        if sizes is None or len(sizes) != 1 or before is None or len(before) != 2:
            raise _Unproved("what is sorted is not a list of experts for each token")
        self._tokens, self._choices, self._pairs = before[0], before[1], sizes[0]
        if isinstance(self._tokens, int) or not isinstance(self._choices, int):
            raise _Unproved("it was captured for one number of tokens")

    def experts(self) -> Experts:
        order = {node: i for i, node in enumerate(self._sort.graph.nodes)}
        for node in [n for n in order if order[n] >= order[self._sort]]:
            inside = [n for n in node.all_input_nodes if n in self._kinds]
            if node.op != "call_function" or (node is not self._sort and not inside):
                continue
            if inside and all(self._kinds[n] is Kind.TOKENS for n in inside):
                if self._goes_on(node, inside):
                    self._kinds[node] = Kind.TOKENS
                continue
            self._kinds[node] = self._kind_of(node)
        leaving = [n for n in self._kinds if any(user not in self._kinds for user in n.users)]
        nodes = sorted(self._kinds, key=order.__getitem__)
        if leaving != nodes[-1:] or self._kinds[nodes[-1]] is not Kind.TOKENS:
            names = ", ".join(node.name for node in leaving)
            raise _Unproved(f"not one result with a row for each token leaves it, but {names}")
        while self._pull():
            pass
        nodes = sorted(self._kinds, key=order.__getitem__)
        return Experts(inputs=tuple(self._inputs), nodes=tuple(nodes))

    def _pull(self) -> bool:
        """Take in one more operator whose results nothing else uses: of the router, so that its
        numbers are not gathered for `topk`; of weights, so that an adapter's gradient is summed
        over devices and not that of the weight it changes.
        """
        operands = (operand for node in self._kinds for operand in node.all_input_nodes)
        for node in dict.fromkeys(n for n in operands if n not in self._kinds):
            of_tuple = node.target is operator.getitem
            source: Any = node.args[0] if of_tuple else node
            made = list(source.users) if of_tuple else [node]
            used = [user for each in made for user in each.users]
            if source.op != "call_function" or not all(user in self._kinds for user in used):
                continue
            records = source.meta.get("val")
            sizes = [_recorded(r) for r in records] if of_tuple else [_sizes(source)]
            if None in sizes or not self._apart(source):
                continue
            of_tokens = all(self._has_rows(each, Kind.TOKENS) for each in sizes)
            before = [each for n in source.all_input_nodes if (each := _sizes(n)) is not None]
            rows = [each for each in before if not _is_fixed(each)]
            if of_tokens and all(self._has_rows(each, Kind.TOKENS) for each in rows):
                self._inputs |= dict.fromkeys(
                    n for n in source.all_input_nodes if not _is_fixed(_sizes(n) or ())
                )
            elif rows or not all(_is_fixed(each or ()) for each in sizes) or not before:
                continue
            for each in dict.fromkeys([source, *made]):
                self._inputs.pop(each, None)
                self._kinds[each] = Kind.TOKENS
            return True
        return False

    def _goes_on(self, node: fx.Node, inside: list[fx.Node]) -> bool:
        """Whether a node that takes the tokens' rows alone is the only one that does."""
        if len(node.all_input_nodes) > 1 or list(inside[0].users) != [node]:
            return False
        return self._apart(node) and self._has_rows(_sizes(node), Kind.TOKENS)

    # -- kinds -----------------------------------------------------------------------------------

    def _kind_of(self, node: fx.Node) -> Kind:
        target, args = node.target, node.args
        first: Any = args[0] if args else None
        if node is self._sort:
            self._operand(first)
            return Kind.ORDER  # of the pair; its parts are told apart below
        if target is operator.getitem:
            if first is self._sort:
                return Kind.ORDER if args[1] == 1 else Kind.IDS
            return self._kinds[first]
        kind = self._operand(first)
        if target in _CASTS and kind is Kind.IDS:
            exact = (torch.int32, torch.int64, torch.float32, torch.float64)
            if node.meta["val"].dtype not in exact:
                raise self._unknown(node)
            return kind
        if kind is Kind.IDS and target is aten.histc.default:
            return self._counts(node)
        if kind is Kind.COUNTS:
            return self._offsets(node)
        if kind is Kind.ORDER:
            return self._of_order(node)
        if target is aten.index.Tensor:
            return self._indexed(node, kind)
        if target is aten.index_put.default:
            return self._places(node)
        if _is_grouped(node):
            return self._product(node)
        return self._of_rows(node)

    def _counts(self, node: fx.Node) -> Kind:
        bins, low, high = (*node.args[1:], *[None] * 3)[:3]
        if not isinstance(bins, int) or low != 0 or high != bins - 1:
            raise self._unknown(node)
        self._experts = bins
        return Kind.COUNTS

    def _offsets(self, node: fx.Node) -> Kind:
        if node.target in _CASTS:
            return Kind.COUNTS
        if node.target is aten.cumsum.default and node.args[1] in (0, -1):
            return Kind.OFFSETS
        raise self._unknown(node)

    def _of_order(self, node: fx.Node) -> Kind:
        target = node.target
        if target is aten.floor_divide.default and node.args[1] == self._choices:
            return Kind.TOKEN_OF
        if target in (aten.empty_like.default, aten.zeros_like.default):
            return Kind.MEMORY
        if target is aten.argsort.default and len(node.args) == 1:
            return Kind.PLACES
        raise self._unknown(node)

    def _indexed(self, node: fx.Node, kind: Kind | None) -> Kind:
        indices: Any = node.args[1]
        by = self._kinds.get(indices[0]) if len(indices) == 1 else None
        found = {
            (Kind.TOKENS, Kind.TOKEN_OF): Kind.SORTED,
            (Kind.PAIRS, Kind.ORDER): Kind.SORTED,
            (Kind.SORTED, Kind.PLACES): Kind.PAIRS,
            (None, Kind.IDS): Kind.SORTED,  # something that each expert has, such as a bias
        }.get((kind, by))  # pyright: ignore
        if found is None:
            raise self._unknown(node)
        return found

    def _places(self, node: fx.Node) -> Kind:
        """`places[order] = arange(S)`, the inverse of the order."""
        memory, indices, values, *accumulate = node.args
        kinds = [self._kinds.get(n) for n in (memory, *indices)]  # pyright: ignore
        if kinds != [Kind.MEMORY, Kind.ORDER] or any(accumulate):
            raise self._unknown(node)
        if self._operand(values) is not Kind.NUMBERS:
            raise self._unknown(node)
        return Kind.PLACES

    def _product(self, node: fx.Node) -> Kind:
        rows, weight, offsets, *more = (*node.args, node.kwargs.get("offs"))[:4]
        sizes = _sizes(weight)
        kinds = [self._operand(n) for n in (rows, weight, offsets)]
        if kinds != [Kind.SORTED, None, Kind.OFFSETS] or sizes is None or len(sizes) != 3:
            raise self._unknown(node)
        if sizes[0] != self._experts or any(each is not None for each in more):
            raise self._unknown(node)
        return Kind.SORTED

    def _of_rows(self, node: fx.Node) -> Kind:
        """An operator that keeps the rows of its operands, all of one kind, apart."""
        kinds = {self._operand(n) for n in node.all_input_nodes} - {None}
        kind = next(iter(kinds), None)
        if len(kinds) != 1 or kind not in _ROWS:
            raise self._unknown(node)
        records = node.meta.get("val")
        several = isinstance(records, (tuple, list))
        sizes = [_recorded(r) for r in records] if several else [_sizes(node)]
        if node.target in _VIEWS and kind is not Kind.SORTED:
            if self._has_rows(sizes[0], Kind.TOKENS):
                return Kind.TOKENS
            before = _sizes(node.args[0]) or ()
            if kind is Kind.TOKENS and before[1:2] != (self._choices,):
                raise self._unknown(node)
            kind = Kind.PAIRS
        elif node.target not in _VIEWS and not self._apart(node):
            raise self._unknown(node)
        if not all(self._has_rows(each, kind) for each in sizes):
            raise self._unknown(node)
        return kind

    def _apart(self, node: fx.Node) -> bool:
        rule = lookup(node.target) if isinstance(node.target, OpOverload) else None
        if rule is None or rule.draws:  # one key would give every device the same numbers
            return False
        if node.target in _BY_DIM:
            return node.args[1] % len(_sizes(node) or (0,)) != 0  # pyright: ignore

        def rows(operand: Any) -> dict[int, Any]:
            first = next(iter(_sizes(operand) or ()), None)
            return {0: first} if first in (self._tokens, self._pairs) else {}

        return not mixed_dims(node, rows)

    def _has_rows(self, sizes: tuple[Any, ...] | None, kind: Kind) -> bool:
        """Whether the first size is that of `kind` and no other one depends on the batch."""
        first = self._tokens if kind is Kind.TOKENS else self._pairs
        if not sizes or sizes[0] != first:
            return False
        return _is_fixed(sizes[1:])

    def _operand(self, node: Any) -> Kind | None:
        """The kind of an operand; None for a value that no size of the batch is in."""
        if not isinstance(node, fx.Node):
            return None
        if node in self._kinds or node in self._inputs:
            return self._kinds.get(node, Kind.TOKENS)
        sizes = _sizes(node)
        if sizes is None or _is_fixed(sizes):
            return None
        if node.target in _VIEWS and self._has_rows(sizes, Kind.PAIRS):
            before: Any = node.args[0]
            if (_sizes(before) or ())[:2] == (self._tokens, self._choices):
                self._operand(before)
                self._kinds[node] = Kind.PAIRS
                return Kind.PAIRS
        if node.target is aten.arange.default and sizes == (self._pairs,):
            self._kinds[node] = Kind.NUMBERS
            return Kind.NUMBERS
        if not self._has_rows(sizes, Kind.TOKENS):
            raise _Unproved(f"{node.name} has no row for each token")
        self._inputs[node] = None
        return Kind.TOKENS

    def _unknown(self, node: fx.Node) -> _Unproved:
        return _Unproved(f"{node.target} ({node.name}) is not known to keep tokens apart there")

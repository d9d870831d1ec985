"""Sizes that depend on values get their largest value, by proof that the rest does no harm.

`nonzero`, `torch.where(mask)` and `x[mask]` give u rows, u known only when the program runs. Here
they give as many rows as the mask has elements. The first u are the real ones; the others hold
finite numbers that must reach no result:

- operators that treat rows alone (elementwise, linear, softmax over another dim) keep them apart;
- writes by row (`index_add`, `index_put`, `scatter`), sums, means and losses over rows are given
  the rows that count, through a mask made from the true number;
- `rows.view(n, -1, ..)`, the same number of rows for each of n, is read from where each begins, and
  one place of them, the last say, is chosen by the true number;
- every other operator that would mix rows, a size used as a number, and a result of the model with
  such rows are refused, with the node and its line.

What leaves a turn of a loop over `nonzero` (`bounds.py`) must be a write by row with the rows that
the turn itself selects, so that a turn of a place that is not hit changes nothing.

Cost: a mask of n elements costs n rows of work, however few are selected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from headrace.bridge.passes.rows import Mixing, mixed_dims
from headrace.bridge.program import Program, copy_graph, place
from headrace.errors import CaptureError

aten = torch.ops.aten
_HEADRACE = torch.ops.headrace
_TURN = _HEADRACE.turn.default
SELECTING = (aten.nonzero.default, aten.nonzero_numpy.default, aten.where.default)
_ADDS = (aten.index_add.default, aten.scatter_add.default)
INDEX_OF = {
    aten.index_add.default: 2,
    aten.index_copy.default: 2,
    aten.scatter_add.default: 2,
    aten.scatter.src: 2,
    aten.scatter.value: 2,
}
PUTS = (aten.index_put.default, aten._unsafe_index_put.default)
_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default)
_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_VIEWS = (aten.view.default, aten.reshape.default)
_NUMBER = aten._local_scalar_dense.default
_REQUIRE = _HEADRACE.require.default
_ENDS = ("placeholder", "output")
_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class _Selection:
    """Rows that one mask selects."""

    mask: fx.Node
    places: fx.Node
    count: fx.Node
    turns: tuple[int, ...]


def bound_sizes(program: Program) -> tuple[Program, list[str]]:
    """Program -> Program without sizes that depend on values. Raises CaptureError."""
    if not any(_is_open(n) for n in program.graph.nodes):
        return program, []
    graph, _ = copy_graph(program.graph)
    bounds = _Bounds(program.name, graph)
    bounds.run()
    note = f"{len(bounds.selections)} masks select rows: computed for the most rows there can be"
    return replace(program, graph=graph), [note]


def _is_open(node: fx.Node) -> bool:
    return node.target is _TURN or any(map(free_unbacked_symbols, _parts(node)))


def _parts(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    return [p for p in parts if isinstance(p, (torch.Tensor, torch.SymInt, torch.SymBool))]


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


class _Bounds:
    """One walk over the graph; the exporter's records keep the symbols until its end."""

    def __init__(self, name: str, graph: fx.Graph) -> None:
        self._name, self._graph = name, graph
        self.selections: dict[Any, _Selection] = {}
        self._largest: dict[Any, Any] = {}
        self._turns: dict[fx.Node, tuple[int, ...]] = {}
        self._bases: dict[fx.Node, fx.Node] = {}
        self._shared: dict[fx.Node, fx.Node] = {}  # rows shared equally -> how many each has
        self._numbers: dict[Any, fx.Node] = {}  # a size read from a tensor -> that tensor

    def run(self) -> None:
        """Rewrite, prove, and write the largest sizes into the records."""
        opened: tuple[int, ...] = ()
        nodes = list(self._graph.nodes)
        for node in nodes:
            if node.target is _TURN:
                _, number, begins = node.args
                opened = (*opened, number) if begins else tuple(t for t in opened if t != number)  # pyright: ignore
            self._turns[node] = opened
            if node.op == "call_function":
                self._visit(node)
        self._check_results()
        self._check_turns()
        for node in nodes:
            if node.target is _TURN:
                node.replace_all_uses_with(node.args[0])  # pyright: ignore
        self._graph.eliminate_dead_code(lambda n: n.op in _ENDS or n.target is _REQUIRE)
        for node in self._graph.nodes:
            node.meta = {**node.meta, "val": self._bounded(node.meta.get("val"))}

    def _padded(self, node: Any) -> dict[int, Any]:
        """The dims of a node's tensor whose size depends on values."""
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            return {}
        sizes = {d: _expression(s) for d, s in enumerate(value.shape) if free_unbacked_symbols(s)}
        # All pieces of something split are as long as that.
        joined = (d for d, size in sizes.items() if isinstance(size, sympy.Add))
        whole = {d for d in joined if sizes[d] in self._largest}
        return {d: size for d, size in sizes.items() if d not in whole}

    def _visit(self, node: fx.Node) -> None:
        if node.target in SELECTING:
            self._select(node)
            return
        if node.target is _NUMBER:
            self._numbers[_expression(node.meta["val"])] = node.args[0]  # pyright: ignore
            return
        if node.target is aten.split_with_sizes.default and self._split(node):
            return
        if node.target is aten.cat.default and self._join(node):
            return
        if node.target is aten.index.Tensor and self._reads_by_mask(node):
            return
        if not isinstance(node.target, OpOverload):
            return  # arithmetic on sizes; getitem
        self._check_numbers(node)
        if not any(self._padded(n) for n in node.all_input_nodes):
            return
        if node.target in _LOSSES and self._loss(node):
            return
        if node.target in _SUMS and self._sum(node):
            return
        if node.target in PUTS or node.target in INDEX_OF:
            self._write(node)
            return
        if node.target in _VIEWS and self._share(node):
            return
        if node.target is aten.select.int and self._select_shared(node):
            return
        self._check_rows(node)

    # Selecting.

    def _selection(self, node: fx.Node, mask: fx.Node, size: Any) -> _Selection:
        if self._padded(mask):
            self._refuse(node, "selects among rows whose number depends on values already")
        symbol = _expression(size)
        known = self.selections.get(symbol)
        if known is not None and known.mask is mask:
            return known
        with self._graph.inserting_before(node):
            places = self._call(node, _HEADRACE.places.default, (mask,))
            count = self._call(node, aten.count_nonzero.default, (mask,))
        found = _Selection(mask=mask, places=places, count=count, turns=self._turns[node])
        if not isinstance(symbol, sympy.Symbol):
            self._refuse(node, "selects a number of rows that the model fixes elsewhere")
        if known is None:
            self.selections[symbol] = found
            self._largest[symbol] = _elements(mask)
        return found

    def _select(self, node: fx.Node) -> None:
        mask: Any = node.args[0]
        record = node.meta["val"]
        first = record if isinstance(record, torch.Tensor) else record[0]
        selection = self._selection(node, mask, first.shape[0])
        if isinstance(record, torch.Tensor):
            node.replace_all_uses_with(selection.places)
            selection.places.meta["val"] = record
            return
        for user in list(node.users):
            with self._graph.inserting_before(user):
                args = (selection.places, 1, user.args[1])
                column = self._call(node, aten.select.int, args)
            column.meta["val"] = user.meta["val"]
            user.replace_all_uses_with(column)

    def _reads_by_mask(self, node: fx.Node) -> bool:
        """`x[:, mask]` as a read by the places of the mask."""
        indices: Any = node.args[1]
        masks = [i for i in indices if isinstance(i, fx.Node) and _is_mask(i)]
        if not masks:
            return False
        if len(masks) > 1 or any(self._padded(m) for m in masks):
            self._refuse(node, "is indexed with masks in a way that is not known")
        new = [s for d, s in enumerate(node.meta["val"].shape) if d in self._padded(node)]
        if len(new) != 1:
            self._refuse(node, "selects a number of rows that the model fixes elsewhere")
        selection = self._selection(node, masks[0], new[0])
        columns: list[Any] = []
        with self._graph.inserting_before(node):
            for index in indices:
                if index is not masks[0]:
                    columns.append(index)
                    continue
                for k in range(index.meta["val"].ndim):
                    column = self._call(node, aten.select.int, (selection.places, 1, k))
                    columns.append(column)
        node.args = (node.args[0], columns)
        return True

    def _split(self, node: fx.Node) -> bool:
        """`x.split(sizes)` with sizes read from a tensor: each piece as long as x."""
        tensor, sizes, dim = node.args[0], node.args[1], _argument(node, "dim", 0)
        if not all(isinstance(n, fx.Node) and _is_open_number(n) for n in sizes):  # pyright: ignore
            return False
        symbols = [_expression(n.meta["val"]) for n in sizes]  # pyright: ignore
        if not all(s in self._numbers for s in symbols):
            return False
        if self._padded(tensor):
            self._refuse(node, "splits rows whose number depends on values already")
        counts = [self._numbers[s] for s in symbols]
        with self._graph.inserting_before(node):
            pieces = self._call(node, _HEADRACE.pieces.default, (tensor, counts, dim))
        pieces.meta["val"] = node.meta["val"]
        largest = _expression(tensor.meta["val"].shape[dim])  # pyright: ignore
        for symbol, count in zip(symbols, counts, strict=True):
            turns = self._turns[node]
            found = _Selection(mask=count, places=count, count=count, turns=turns)
            self.selections[symbol], self._largest[symbol] = found, largest
        self._largest[sympy.Add(*symbols)] = largest
        node.replace_all_uses_with(pieces)
        return True

    def _join(self, node: fx.Node) -> bool:
        """`torch.cat` of all pieces of something split, in their order."""
        tensors: Any = node.args[0]
        dim = _argument(node, "dim", 0) % tensors[0].meta["val"].ndim
        if any(list(self._padded(t)) != [dim] for t in tensors):
            return False
        symbols = [self._padded(t)[dim] for t in tensors]
        if not all(s in self._numbers for s in symbols) or len(set(symbols)) != len(symbols):
            return False
        if sympy.Add(*symbols) not in self._largest:
            return False
        counts = [self.selections[s].count for s in symbols]
        with self._graph.inserting_before(node):
            joined = self._call(node, _HEADRACE.joined.default, (list(tensors), counts, dim))
        joined.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(joined)
        return True

    def _share(self, node: fx.Node) -> bool:
        """`rows.view(n, -1, ..)`: as many of the selected rows for each of n."""
        tensor, sizes = node.args
        assert isinstance(tensor, fx.Node)
        own, shares = self._padded(tensor), sizes[0]  # pyright: ignore
        rest = tensor.meta["val"].shape[1:], node.meta["val"].shape[2:]
        if list(own) != [0] or list(self._padded(node)) != [1] or shares == -1:
            return False
        if own[0] not in self.selections or [*map(str, rest[0])] != [*map(str, rest[1])]:
            return False
        count = self.selections[own[0]].count
        floor = {"rounding_mode": "floor"}
        with self._graph.inserting_before(node):
            over = self._call(node, aten.remainder.Scalar, (count, shares))
            equal = self._call(node, aten.eq.Scalar, (over, 0))
            self._require(node, equal, "shares the selected rows equally")
            each = self._call(node, aten.div.Scalar_mode, (count, shares), floor)
            shared = self._call(node, _HEADRACE.shared.default, (tensor, each, shares))
        shared.meta["val"] = node.meta["val"]
        self._shared[shared] = each
        node.replace_all_uses_with(shared)
        return True

    def _select_shared(self, node: fx.Node) -> bool:
        """One place of the rows that each has, counted from the end when it is negative."""
        tensor, dim, index = node.args
        source: Any = tensor
        while source.target is aten.slice.Tensor:  # of other dims: these rows stay whole
            source = source.args[0]
        each = self._shared.get(source)
        if each is None or dim not in (1, 1 - tensor.meta["val"].ndim):  # pyright: ignore
            return False
        needed = index + 1 if index >= 0 else -index  # pyright: ignore
        with self._graph.inserting_before(node):
            enough = self._call(node, aten.ge.Scalar, (each, needed))
            self._require(node, enough, f"needs {needed} selected rows for each")
            if index >= 0:  # pyright: ignore
                return True
            place_ = self._call(node, aten.add.Scalar, (each, index))
            column = self._call(node, aten.view.default, (place_, [1]))
            rows = self._call(node, aten.index_select.default, (tensor, 1, column))
            found = self._call(node, aten.squeeze.dim, (rows, 1))
        found.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(found)
        return True

    def _require(self, node: fx.Node, holds: fx.Node, why: str) -> None:
        message = f"{self._name}: {place(node)} {why}"
        self._call(node, _REQUIRE, (holds, message))

    # Proof.

    def _check_numbers(self, node: fx.Node) -> None:
        """A size is fine where a shape is given; as a number it would be the largest size."""
        if node.target is aten.sym_size.int or str(node.target).startswith(
            ("aten.sym_constrain", "aten._assert")
        ):
            return
        schema = node.target._schema  # pyright: ignore
        names = (a.name for a in schema.arguments)
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        for name, value in given.items():
            single = isinstance(value, fx.Node) and _is_open_number(value)
            if single and name not in ("end", "size"):
                self._refuse(node, f"takes a size that depends on values as a number ({name})")

    def _check_rows(self, node: fx.Node) -> None:
        mixing = mixed_dims(node, self._padded)
        for mixed in mixing:
            self._refuse_mixing(node, mixed)

    def _refuse_mixing(self, node: fx.Node, mixed: Mixing) -> None:
        self._refuse(node, f"mixes rows whose number depends on values ({mixed.why})")

    def _check_results(self) -> None:
        output = next(iter(reversed(self._graph.nodes)))
        for result in output.all_input_nodes:
            if self._padded(result) or _is_open_number(result):
                self._refuse(result, "is a result of the model, and its size depends on values")

    def _check_turns(self) -> None:
        """Only writes by row leave a turn, with the rows of one mask of that turn."""
        used: dict[int, set[fx.Node]] = {}
        for node, turns in list(self._turns.items()):
            value = node.meta.get("val")
            if node.target is _TURN or not isinstance(value, (torch.Tensor, tuple, list)):
                continue
            for turn in turns:
                outside = [u for u in node.users if turn not in self._turns.get(u, turns)]
                outside = [u for u in outside if u.target is not _TURN]
                if outside:
                    self._check_leaving(node, turn, used.setdefault(turn, set()))

    def _check_leaving(self, node: fx.Node, turn: int, used: set[fx.Node]) -> None:
        while turn in self._turns.get(node, ()):
            base = node.args[0] if node.args else None
            if node in self._bases:
                used.add(self._bases[node])
                inside = turn in self._turns.get(self._bases[node], ())
                if not inside or len(used) > 1:
                    self._refuse(node, "writes by row in a loop, with rows of more than one mask")
            elif node.target not in _COPIES:
                self._refuse(
                    node, "leaves a loop over the places of a mask without being a write by row"
                )
            assert isinstance(base, fx.Node)
            node = base

    # What uses up the rows.

    def _valid(self, node: fx.Node, tensor: fx.Node, dim: int, size: Any) -> tuple[fx.Node, Any]:
        """A mask [1, .., n, .., 1] of the real rows of `tensor`, and whose rows they are."""
        symbols = [s for s in size.free_symbols if s in self.selections]
        times: Any = size / symbols[0] if len(symbols) == 1 else sympy.nan
        if not times.is_Integer:
            self._refuse(node, f"has rows in a number that is not known ({size})")
        selection = self.selections[symbols[0]]
        args = (tensor, dim, selection.count, int(times))
        return self._call(node, _HEADRACE.valid.default, args), selection

    def _only_valid(
        self, node: fx.Node, tensor: fx.Node, dims: Iterable[int], filler: Any
    ) -> tuple[fx.Node, list[_Selection]]:
        """`tensor` with `filler` in the rows that are not real."""
        found: list[_Selection] = []
        for dim in dims:
            valid, selection = self._valid(node, tensor, dim, self._padded(tensor)[dim])
            args = (valid, tensor, filler)
            record = tensor.meta["val"]
            tensor = self._call(node, aten.where.ScalarOther, args)
            tensor.meta["val"] = record
            found.append(selection)
        return tensor, found

    def _write(self, node: fx.Node) -> None:
        """Rows that are not real add 0; a plain write of them goes nowhere."""
        target: Any = node.target
        args: list[Any] = list(node.args)
        if self._padded(args[0]):
            self._refuse(node, "writes into rows whose number depends on values")
        if target in PUTS:
            self._put(node, args)
            return
        index, dims = args[2], self._padded(args[2])
        if not isinstance(index, fx.Node) or len(dims) != 1:
            self._refuse(node, "writes with an index of unknown rows")
        with self._graph.inserting_before(node):
            if target in _ADDS:
                own = self._padded(args[3])
                args[3], found = self._only_valid(node, args[3], own, 0)
            else:
                args[2], found = self._only_valid(node, index, dims, NOWHERE)
        node.args = tuple(args)
        if len(found) == 1:
            self._bases[node] = found[0].places

    def _put(self, node: fx.Node, args: list[Any]) -> None:
        indices, values = args[1], args[2]
        masks = [i for i in indices if isinstance(i, fx.Node) and _is_mask(i)]
        if masks:
            # values [u, ..] are taken in the order of the mask's places: the first u are read.
            if len(indices) > 1 or set(self._padded(values)) - {0}:
                self._refuse(node, "writes by mask in a way that is not known")
            self._note_mask(node, masks[0])
            return
        new = list(indices)
        with self._graph.inserting_before(node):
            for k, index in enumerate(indices):
                dims = self._padded(index)
                if dims and index.meta["val"].ndim != 1:
                    self._refuse(node, "writes with an index of unknown rows")
                if dims:
                    new[k], found = self._only_valid(node, index, dims, NOWHERE)
                    self._bases[node] = found[0].places
        if node not in self._bases:
            self._refuse(node, "writes rows whose number depends on values to fixed places")
        node.args = (args[0], new, *args[2:])

    def _note_mask(self, node: fx.Node, mask: fx.Node) -> None:
        found = [s for s in self.selections.values() if s.mask is mask]
        if found:
            self._bases[node] = found[0].places

    def _loss(self, node: fx.Node) -> bool:
        """Targets of rows that are not real are ignored."""
        logits, target = node.args[0], node.args[1]
        dims = self._padded(target)
        if not isinstance(target, fx.Node) or target.meta["val"].is_floating_point():
            return False
        if not dims or self._padded(logits).keys() != dims.keys() or set(dims) != {0}:
            return False
        ignored = node.kwargs.get("ignore_index", _argument(node, "ignore_index", _IGNORED))
        with self._graph.inserting_before(node):
            masked, _ = self._only_valid(node, target, dims, ignored)
        node.args = (logits, masked, *node.args[2:])
        return True

    def _sum(self, node: fx.Node) -> bool:
        """Sums and means over rows count the real ones."""
        tensor: Any = node.args[0]
        dims, padded = _reduced(node), self._padded(tensor)
        over = [d for d in padded if d in dims]
        if not over:
            return True
        if len(over) > 1:
            return False
        with self._graph.inserting_before(node):
            masked, (selection,) = self._only_valid(node, tensor, over, 0)
            node.args = (masked, *node.args[1:])
        if node.target in (aten.mean.default, aten.mean.dim):
            self._mean(node, tensor, dims, over[0], selection)
        return True

    def _mean(
        self, node: fx.Node, tensor: fx.Node, dims: list[int], over: int, selection: _Selection
    ) -> None:
        shape = tensor.meta["val"].shape
        rest = 1
        for d in dims:
            size = _expression(shape[d])
            rest *= size / next(iter(size.free_symbols)) if d == over else size
        if not sympy.sympify(rest).is_Integer:
            self._refuse(node, "is a mean over more than one size that is not fixed")
        target = aten.sum.default if node.target is aten.mean.default else aten.sum.dim_IntList
        with self._graph.inserting_before(node):
            total = self._call(node, target, node.args, dict(node.kwargs))
            number = self._call(node, aten.mul.Scalar, (selection.count, int(rest)))
            mean = self._call(node, aten.div.Tensor, (total, number))
        mean.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(mean)
        self._graph.erase_node(node)

    # Nodes and records.

    def _call(
        self, like: fx.Node, target: Any, args: Any, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        node = self._graph.call_function(target, tuple(args), kwargs or {})
        kept = ("nn_module_stack", "stack_trace")
        node.meta = {k: like.meta[k] for k in kept if k in like.meta}
        self._turns[node] = self._turns[like]
        return node

    def _bounded(self, value: Any) -> Any:
        """A record with the largest sizes."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._bounded(v) for v in value)
        if isinstance(value, torch.Tensor) and any(map(free_unbacked_symbols, value.shape)):
            mode: Any = value.fake_mode  # pyright: ignore[reportAttributeAccessIssue]
            with mode:
                return torch.empty([self._size(s) for s in value.shape], dtype=value.dtype)
        if isinstance(value, torch.SymInt) and free_unbacked_symbols(value):
            return self._size(value)
        return value

    def _size(self, size: Any) -> Any:
        if not free_unbacked_symbols(size):
            return size
        largest = size.node.expr.xreplace(self._largest)
        if largest.is_Integer:
            return int(largest)
        if free_unbacked_symbols(largest):
            return size  # the number itself is read from a tensor: no rule for that operator
        env = size.node.shape_env
        return env.create_symintnode(largest, hint=int(env.guarding_hint_or_throw(largest)))

    def _refuse(self, node: fx.Node, why: str) -> None:
        raise CaptureError(
            f"{self._name}: {node.target} ({node.name}, {place(node)}) {why}.\n"
            "XLA computes with fixed sizes; rows that a mask selects may be written by index, "
            "summed, averaged or given to a loss.\n"
            "Needed: torch.where or a multiplication by the mask at that line."
        )


NOWHERE = 2**31 - 1  # an index outside of every tensor: JAX drops what is written there
_COPIES = (
    aten.view.default,
    aten.reshape.default,
    aten.clone.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.to.dtype,
    aten._to_copy.default,
)


def _is_mask(node: fx.Node) -> bool:
    return node.meta["val"].dtype in (torch.bool, torch.uint8)


def _is_open_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(value, numbers) and bool(free_unbacked_symbols(value))


def _elements(mask: fx.Node) -> Any:
    total: Any = sympy.Integer(1)
    for size in mask.meta["val"].shape:
        total = total * _expression(size)
    return total


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    names = [a.name for a in node.target._schema.arguments]  # pyright: ignore
    place_ = names.index(name)
    return node.args[place_] if place_ < len(node.args) else default


def _reduced(node: fx.Node) -> list[int]:
    ndim = node.args[0].meta["val"].ndim  # pyright: ignore
    dims: Any = node.args[1] if node.target in (aten.sum.dim_IntList, aten.mean.dim) else None
    return [d % ndim for d in dims] if dims else list(range(ndim))

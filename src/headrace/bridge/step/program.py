"""A traced step -> compiled JAX functions, and what each of their inputs and outputs stands for.

The graph is cleaned (numbers of the host become inputs, dead code goes), cut at the optimizers'
steps when two programs are wanted, and each piece becomes one jitted function that donates what
nobody reads after it. Small tensors that are used alike go in and out as one array (`packs`).

Does not know: PyTorch modules, when the step is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.fx as fx
from torch._ops import OpOverload

from headrace.bridge import lower
from headrace.bridge.dtypes import tensor_to_numpy, to_jax_dtype
from headrace.bridge.ops.registry import lookup
from headrace.bridge.passes.strides import permute_sources
from headrace.bridge.step import packs
from headrace.bridge.step.numbers import compiled, needs_only
from headrace.bridge.step.packs import Pack
from headrace.bridge.step.state import Inventory, Key
from headrace.bridge.step.trace import LIVE, Traced
from headrace.errors import UnsupportedOpsError

_SYMBOLIC: dict[Any, Callable[..., Any]] = {
    torch.sym_max: jnp.maximum,
    torch.sym_min: jnp.minimum,
    torch.sym_float: lambda x: x,
    torch.sym_not: jnp.logical_not,
    torch.ops.aten._local_scalar_dense.default: lambda x: x,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram:
    """One compiled form of a step.

    `read` and `written` are packs of tensors: those the program takes, those it gives back (the
    first `num_donated` of both are the same, and donated). `run` takes
    `(donated, kept + inputs + externals, numbers, seed)` and returns `written + results`.
    `written_dtypes` are torch's, by key.
    `numbers` maps the host's symbols to the program's numbers, `counters` to counters afterwards,
    `guards` to booleans that must all be true. `results` says what each leaf of the step's own
    result is: `("array", i, shape, dtype)`, `("number", i)` of `host_results`, `("fixed", value)`.
    """

    read: tuple[Pack, ...]
    written: tuple[Pack, ...]
    num_donated: int
    run: Callable[..., list[Any]]
    numbers: Callable[..., tuple[float, ...]]
    counters: Callable[..., tuple[float, ...]]
    host_results: Callable[..., tuple[Any, ...]]
    guards: Callable[..., tuple[bool, ...]]
    results: tuple[tuple[Any, ...], ...]
    out_spec: Any
    draws: bool
    reads_grads: bool
    input_dtypes: tuple[np.dtype, ...]
    externals: tuple[torch.Tensor, ...]
    num_pieces: int
    num_operators: int
    written_dtypes: Mapping[Key, torch.dtype]


def build(
    traced: Traced, inventory: Inventory, counter_exits: Sequence[Any], *, pieces: bool
) -> StepProgram:
    """Compile-ready form of a traced step; XLA compiles at the first call.

    Args:
        counter_exits: for each counter among the inventory's numbers, its symbol after the step.
        pieces: one jitted function before, in and after each optimizer step instead of one.

    Raises UnsupportedOpsError listing every operator without a rule.
    """
    nodes = _Nodes(traced, inventory)
    symbols = traced.number_symbols
    host = _lift_numbers(traced.graph, nodes, frozenset(symbols))
    _clean(traced.graph)
    permute_sources(traced.graph)
    _check_supported(traced.graph)
    exits = nodes.exits()
    outs = nodes.results()
    kept_same = {key for key, node in exits.items() if node is nodes.entries.get(key)}
    written = [k for k in exits if k not in kept_same]
    used = {k for k, n in nodes.entries.items() if n.users}
    donated = [k for k in written if k in nodes.entries and (k in used)]
    written = donated + [k for k in written if k not in donated]
    kept = [k for k in nodes.entries if k in used and k not in donated]
    arrays = [r for r in outs if isinstance(r, fx.Node)]
    segments = _segments(traced.graph, nodes.cuts(traced.boundaries) if pieces else ())
    label = _Labels(nodes.entries, exits, arrays, segments)
    in_place = packs.partition(donated, label)
    taken = in_place + packs.partition(kept, label)
    given = in_place + packs.partition(written[len(donated) :], label)
    body = _Body(
        traced,
        segments,
        [_group(keys, nodes.entries) for keys in in_place],
        [_group(keys, nodes.entries) for keys in taken[len(in_place) :]]
        + [(n,) for n in nodes.inputs + nodes.externals],
        list(host.values()),
        [_group(keys, exits) for keys in given] + [(n,) for n in arrays],
    )
    host_outs = [r for r in outs if not isinstance(r, fx.Node) and r[0] == "number"]
    return StepProgram(
        read=tuple(_pack(keys, nodes.entries) for keys in taken),
        written=tuple(_pack(keys, exits) for keys in given),
        num_donated=len(in_place),
        run=body.runner(),
        numbers=compiled(symbols, list(host)),
        counters=compiled(symbols, list(counter_exits)),
        host_results=compiled(symbols, [r[1] for r in host_outs]),
        guards=compiled(symbols, list(traced.guards)),
        results=_describe(outs, traced.fixed),
        out_spec=traced.out_spec,
        draws=any(lower.draws(n) for n in traced.graph.nodes if n.op == "call_function"),
        reads_grads=any(k[0] == "grad" for k in donated + kept),
        input_dtypes=tuple(to_jax_dtype(n.meta["val"].dtype) for n in nodes.inputs),
        externals=traced.externals,
        num_pieces=len(segments),
        num_operators=sum(n.op == "call_function" for n in traced.graph.nodes),
        written_dtypes={k: exits[k].meta["val"].dtype for k in written},
    )


class _Nodes:
    """Which placeholder and which result of the traced graph is what."""

    def __init__(self, traced: Traced, inventory: Inventory) -> None:
        self._traced = traced
        self._inventory = inventory
        graph = traced.graph
        self._order = {n: i for i, n in enumerate(graph.nodes)}
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        rest = iter(placeholders)
        self.entries: dict[Key, fx.Node] = {s.key: next(rest) for s in inventory.slots}
        params = inventory.slots
        for i in traced.entry_grads:
            self.entries["grad", params[i].name] = next(rest)
        self.inputs = [next(rest) for _ in range(traced.num_inputs)]
        self.numbers = [next(rest) for _ in traced.number_symbols]
        self.externals = list(rest)

    def _outputs(self) -> list[Any]:
        node = next(iter(reversed(self._traced.graph.nodes)))
        return list(node.args[0])  # pyright: ignore

    def exits(self) -> dict[Key, fx.Node]:
        """Exit value of everything owned."""
        traced, slots = self._traced, self._inventory.slots
        keys: list[Key] = [s.key for s in slots]
        keys += [("grad", slots[i].name) for i in traced.exit_grads]
        keys += [("state", o, slots[i].name, key) for o, i, key in traced.new_state]
        keys += [("skipped", o) for o in traced.skipped]
        outputs = self._outputs()
        return dict(zip(keys, outputs, strict=False))

    def results(self) -> list[Any]:
        """The step's own results: a node, or `("number", expression)` known on the host."""
        traced = self._traced
        owned = (self._inventory.slots, traced.exit_grads, traced.new_state, traced.skipped)
        skip = sum(map(len, owned))
        symbols = frozenset(traced.number_symbols)
        found: list[Any] = []
        for value in self._outputs()[skip:]:
            if isinstance(value, fx.Node):
                expression = _expression(value)
                if expression is not None and needs_only(expression, symbols):
                    value = ("number", expression)
            else:
                value = ("number", value)
            found.append(value)
        return found

    def cuts(self, boundaries: Sequence[int]) -> list[fx.Node]:
        """Nodes that stand first after each boundary of the trace."""
        by_order = sorted(self._order.items(), key=lambda x: x[1])
        alive = set(self._traced.graph.nodes)
        found: list[fx.Node] = []
        for boundary in boundaries:
            after = (n for n, i in by_order if i >= boundary and n in alive)
            node = next((n for n in after if n.op == "call_function"), None)
            if node is not None and node not in found:
                found.append(node)
        return found


def _expression(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (torch.SymFloat, torch.SymInt, torch.SymBool)):
        return value.node.expr
    return None


def _lift_numbers(graph: fx.Graph, nodes: _Nodes, symbols: frozenset[Any]) -> dict[Any, fx.Node]:
    """Replace numbers known on the host by placeholders, one an expression."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    lifted: dict[Any, fx.Node] = {}
    host = [n for n in graph.nodes if (e := _expression(n)) is not None and needs_only(e, symbols)]
    for node in host:
        users = [u for u in node.users if u not in set(host) and u.op != "output"]
        if not users:
            continue
        expression = _expression(node)
        if expression not in lifted:
            with graph.inserting_after(last):
                lifted[expression] = graph.placeholder(f"number_{len(lifted)}")
            lifted[expression].meta = dict(node.meta)
            last = lifted[expression]
        for user in users:
            user.replace_input_with(node, lifted[expression])
    return lifted


def _clean(graph: fx.Graph) -> None:
    for ordinal, node in enumerate(graph.nodes):
        node.meta["draw"] = ordinal
    for node in reversed(list(graph.nodes)):
        target = str(node.target)
        if node.op == "call_function" and ("_record_function" in target or "_assert" in target):
            if not node.users:
                graph.erase_node(node)
            continue
        if node.target in _SYMBOLIC:
            node.target = _SYMBOLIC[node.target]
        elif node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))


def _check_supported(graph: fx.Graph) -> None:
    missing: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        own = node.op == "call_function" and isinstance(node.target, OpOverload)
        if own and lookup(node.target) is None:
            missing.setdefault(str(node.target), []).append(node)
    if missing:
        lines = [
            f"  {name}  {len(found)} uses, first {lower.place(found[0])}"
            for name, found in sorted(missing.items())
        ]
        raise UnsupportedOpsError(
            f"{len(missing)} operators of the training step have no JAX rule.\n"
            + "\n".join(lines)
            + "\nNothing was run. To add a rule see docs/adding-an-op.md."
        )


def _describe(outs: Sequence[Any], fixed: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    live = iter(outs)
    described: list[tuple[Any, ...]] = []
    arrays = numbers = 0
    for value in fixed:
        if value is not LIVE:
            described.append(("fixed", value))
            continue
        out = next(live)
        if isinstance(out, fx.Node):
            record = out.meta["val"]
            tensor = isinstance(record, torch.Tensor)
            kind = (tuple(record.shape), record.dtype) if tensor else (None, None)
            described.append(("array", arrays, *kind))
            arrays += 1
        else:
            described.append(("number", numbers))
            numbers += 1
    return tuple(described)


_Group = tuple[fx.Node, ...]  # values that go in or out as one array


def _group(keys: Sequence[Key], values: Mapping[Key, fx.Node]) -> _Group:
    return tuple(values[k] for k in keys)


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _pack(keys: tuple[Key, ...], values: Mapping[Key, fx.Node]) -> Pack:
    return Pack(keys, tuple(_shape(values[k]) for k in keys))


def _small(node: fx.Node) -> np.dtype | None:
    """The dtype of a tensor that is small enough to be packed."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    dtype = to_jax_dtype(value.dtype)
    return dtype if value.numel() * dtype.itemsize <= packs.LIMIT else None


def _segments(graph: fx.Graph, cuts: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The nodes that are computed, cut before each of `cuts`."""
    found: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        if node in cuts and found[-1]:
            found.append([])
        found[-1].append(node)
    return found


def _readers(node: fx.Node, where: Mapping[fx.Node, int]) -> frozenset[int]:
    """The segments that read a value."""
    return frozenset(where[u] for u in node.users if u in where)


class _Labels:
    """What the tensors of one pack have in common; None for those that stay alone."""

    def __init__(
        self,
        entries: Mapping[Key, fx.Node],
        exits: Mapping[Key, fx.Node],
        results: Sequence[fx.Node],
        segments: Sequence[Sequence[fx.Node]],
    ) -> None:
        self._entries = entries
        self._exits = exits
        self._where = {n: i for i, segment in enumerate(segments) for n in segment}
        moved = {n for k, n in exits.items() if n is not entries.get(k)} | set(results)
        # values that only change their place
        self._alone = {n for n in entries.values() if n in moved}

    def __call__(self, key: Key) -> Hashable:
        entry, exit_ = self._entries.get(key), self._exits.get(key)
        values = [v for v in (entry, exit_) if v is not None]
        dtypes = {_small(v) for v in values}
        if key[0] not in ("param", "buffer", "grad", "state") or self._alone & set(values):
            return None
        if len(dtypes) > 1 or None in dtypes or len({_shape(v) for v in values}) > 1:
            return None
        part = (key[0], key[1], key[3]) if key[0] == "state" else key[0]
        maker = None if exit_ is None else self._where.get(exit_)
        return (part, *dtypes, None if entry is None else _readers(entry, self._where), maker)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """Nodes that one jitted function computes: `donated` and `kept` values in, `gives` out."""

    nodes: tuple[fx.Node, ...]
    donated: tuple[_Group, ...]
    kept: tuple[_Group, ...]
    gives: tuple[_Group, ...]


class _Body:
    """The cleaned graph as one jitted function, or as several that run one after the other."""

    def __init__(
        self,
        traced: Traced,
        segments: Sequence[Sequence[fx.Node]],
        donated: Sequence[_Group],
        kept: Sequence[_Group],
        numbers: Sequence[fx.Node],
        results: Sequence[_Group],
    ) -> None:
        self._segments = segments
        self._constants = {
            name: tensor_to_numpy(t).astype(to_jax_dtype(t.dtype))
            for name, t in traced.constants.items()
        }
        self._donated = tuple(donated)
        self._kept = tuple(kept)
        self._numbers = tuple(numbers)
        self._results = tuple(results)

    def pieces(self) -> list[_Piece]:
        """One for each segment, with what flows between."""
        groups = self._flowing()
        home = {n: g for g in reversed(groups) for n in g}
        numbers = set(self._numbers)
        reads: list[dict[_Group, None]] = []
        for segment in self._segments:
            inside = numbers.union(segment)
            outside = (a for n in segment for a in n.all_input_nodes if a not in inside)
            reads.append(dict.fromkeys(home[a] for a in outside))
        found: list[_Piece] = []
        made = set(self._donated)
        for i, segment in enumerate(self._segments):
            later = set(self._results).union(*reads[i + 1 :])
            donated = tuple(g for g in reads[i] if g in made and g not in later)
            own = set(segment)
            gives = tuple(dict.fromkeys(g for g in groups if g in later and g[0] in own))
            found.append(
                _Piece(
                    nodes=tuple(segment),
                    donated=donated,
                    kept=tuple(g for g in reads[i] if g not in donated),
                    gives=gives,
                )
            )
            made.update(gives)
        return found

    def _flowing(self) -> list[_Group]:
        """Everything that goes into or out of a segment: state, results, and what is between."""
        where = {n: i for i, segment in enumerate(self._segments) for n in segment}
        ends = [*self._donated, *self._kept, *self._results]
        known = {n for group in ends for n in group}

        def label(node: fx.Node) -> Hashable:
            dtype = _small(node)
            return None if dtype is None else (dtype, where[node], _readers(node, where))

        between = [
            n
            for n, i in where.items()
            if n not in known and any(where.get(u, i) != i for u in n.users)
        ]
        return ends + packs.partition(between, label)

    def whole(self) -> _Piece:
        """Everything as one piece, with its inputs and outputs in the caller's order."""
        return _Piece(
            nodes=tuple(self._segments[0]),
            donated=self._donated,
            kept=self._kept,
            gives=self._results,
        )

    def jitted(self, piece: _Piece) -> Callable[..., list[Any]]:
        """`f(donated, kept, numbers, seed) -> gives`."""
        draws = any(n.op == "call_function" and lower.draws(n) for n in piece.nodes)
        takes = [(group, [_shape(n) for n in group]) for group in piece.donated + piece.kept]

        def call(donated: Any, kept: Any, numbers: Any, seed: Any) -> list[Any]:
            # Python floats at the call, so weakly typed: like numbers in torch they do not change
            # the dtype of the tensors they meet
            env: dict[fx.Node, Any] = dict(zip(self._numbers, numbers, strict=True))
            for (group, shapes), array in zip(takes, [*donated, *kept], strict=True):
                env.update(zip(group, packs.parts(array, shapes), strict=True))
            settings = lower.Settings(rng=jax.random.key(seed) if draws else None)
            for node in piece.nodes:
                if node.op == "get_attr":
                    env[node] = jnp.asarray(self._constants[str(node.target)])
                else:
                    env[node] = lower.call_node(node, env, settings)
            return [packs.joined([env[n] for n in group]) for group in piece.gives]

        return _quiet_first(jax.jit(call, donate_argnums=0))

    def runner(self) -> Callable[..., list[Any]]:
        """`run(donated, kept, numbers, seed) -> results`."""
        if len(self._segments) == 1:
            return self.jitted(self.whole())
        pieces = self.pieces()
        functions = [self.jitted(p) for p in pieces]

        def run(donated: Any, kept: Any, numbers: Any, seed: Any) -> list[Any]:
            env: dict[_Group, Any] = dict(zip(self._donated, donated, strict=True))
            env.update(zip(self._kept, kept, strict=True))
            for piece, function in zip(pieces, functions, strict=True):
                given = [env.pop(n) for n in piece.donated]
                values = function(given, [env[n] for n in piece.kept], numbers, seed)
                env.update(zip(piece.gives, values, strict=True))
            return [env[n] for n in self._results]

        return run


def _quiet_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """At compilation XLA warns of donated arrays it found no use for, which is no one's mistake."""
    compiled_once = False

    def call(*args: Any) -> Any:
        nonlocal compiled_once
        if compiled_once:
            return function(*args)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            result = function(*args)
        compiled_once = True
        return result

    return call

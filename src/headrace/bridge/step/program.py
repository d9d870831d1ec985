"""A traced step -> compiled JAX functions, and what each of their inputs and outputs stands for.

The graph is cleaned (numbers of the host become inputs, dead code goes), cut at the optimizers'
steps when two programs are wanted, and each piece becomes one jitted function that donates what
nobody reads after it.

Does not know: PyTorch modules, when the step is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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
from headrace.bridge.step.numbers import compiled, needs_only
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

    `read` and `written` are keys of device arrays: those the program takes, those it gives back
    (the first `num_donated` of both are the same, and donated). `run` takes
    `(donated, kept + inputs + externals, numbers, seed)` and returns `written + results`.
    `numbers` maps the host's symbols to the program's numbers, `counters` to counters afterwards,
    `guards` to booleans that must all be true. `results` says what each leaf of the step's own
    result is: `("array", i, shape, dtype)`, `("number", i)` of `host_results`, `("fixed", value)`.
    """

    read: tuple[Key, ...]
    written: tuple[Key, ...]
    num_donated: int
    run: Callable[..., Sequence[Any]]
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
    written_dtypes: tuple[torch.dtype, ...]


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
    results = [exits[k] for k in written] + arrays
    body = _Body(
        traced,
        [nodes.entries[k] for k in donated],
        [nodes.entries[k] for k in kept] + nodes.inputs + nodes.externals,
        list(host.values()),
        results,
    )
    run, num_pieces = body.runner(nodes.cuts(traced.boundaries) if pieces else ())
    host_outs = [r for r in outs if not isinstance(r, fx.Node) and r[0] == "number"]
    return StepProgram(
        read=tuple(donated + kept),
        written=tuple(written),
        num_donated=len(donated),
        run=run,
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
        num_pieces=num_pieces,
        num_operators=sum(n.op == "call_function" for n in traced.graph.nodes),
        written_dtypes=tuple(exits[k].meta["val"].dtype for k in written),
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """Nodes that one jitted function computes: `donated` and `kept` values in, `gives` out."""

    nodes: tuple[fx.Node, ...]
    donated: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


class _Body:
    """The cleaned graph as one jitted function, or as several that run one after the other."""

    def __init__(
        self,
        traced: Traced,
        donated: Sequence[fx.Node],
        kept: Sequence[fx.Node],
        numbers: Sequence[fx.Node],
        results: Sequence[fx.Node],
    ) -> None:
        self._nodes = [n for n in traced.graph.nodes if n.op in ("call_function", "get_attr")]
        self._constants = {
            name: tensor_to_numpy(t).astype(to_jax_dtype(t.dtype))
            for name, t in traced.constants.items()
        }
        self._donated = tuple(donated)
        self._kept = tuple(kept)
        self._numbers = tuple(numbers)
        self._results = tuple(results)

    def pieces(self, cuts: Sequence[fx.Node]) -> list[_Piece]:
        """The nodes cut before each of `cuts`, with what flows between."""
        groups: list[list[fx.Node]] = [[]]
        for node in self._nodes:
            if node in cuts and groups[-1]:
                groups.append([])
            groups[-1].append(node)
        found: list[_Piece] = []
        for i, group in enumerate(groups):
            own = set(group)
            needed_later = {
                a for later in groups[i + 1 :] for n in later for a in n.all_input_nodes
            }
            needed_later |= set(self._results)
            reads = dict.fromkeys(a for n in group for a in n.all_input_nodes if a not in own)
            values = [a for a in reads if a not in self._numbers]
            free = set(self._donated) | {n for g in groups[:i] for n in g}
            donated = tuple(a for a in values if a in free and a not in needed_later)
            found.append(
                _Piece(
                    nodes=tuple(group),
                    donated=donated,
                    kept=tuple(a for a in values if a not in donated),
                    gives=tuple(n for n in group if n in needed_later),
                )
            )
        return found

    def whole(self) -> _Piece:
        """Everything as one piece, with its inputs and outputs in the caller's order."""
        return _Piece(
            nodes=tuple(self._nodes), donated=self._donated, kept=self._kept, gives=self._results
        )

    def jitted(self, piece: _Piece) -> Callable[..., list[Any]]:
        """`f(donated, kept, numbers, seed) -> gives`."""
        draws = any(n.op == "call_function" and lower.draws(n) for n in piece.nodes)

        def call(donated: Any, kept: Any, numbers: Any, seed: Any) -> list[Any]:
            env: dict[fx.Node, Any] = dict(zip(piece.donated, donated, strict=True))
            env.update(zip(piece.kept, kept, strict=True))
            # Python floats at the call, so weakly typed: like numbers in torch they do not change
            # the dtype of the tensors they meet
            env.update(zip(self._numbers, numbers, strict=True))
            settings = lower.Settings(rng=jax.random.key(seed) if draws else None)
            for node in piece.nodes:
                if node.op == "get_attr":
                    env[node] = jnp.asarray(self._constants[str(node.target)])
                else:
                    env[node] = lower.call_node(node, env, settings)
            return [env[n] for n in piece.gives]

        return _quiet_first(jax.jit(call, donate_argnums=0))

    def runner(self, cuts: Sequence[fx.Node]) -> tuple[Callable[..., Sequence[Any]], int]:
        """`run(donated, kept, numbers, seed) -> results`, and how many programs it is."""
        if not cuts:
            return self.jitted(self.whole()), 1
        pieces = self.pieces(cuts)
        functions = [self.jitted(p) for p in pieces]

        def run(donated: Any, kept: Any, numbers: Any, seed: Any) -> list[Any]:
            env: dict[fx.Node, Any] = dict(zip(self._donated, donated, strict=True))
            env.update(zip(self._kept, kept, strict=True))
            for piece, function in zip(pieces, functions, strict=True):
                given = [env.pop(n) for n in piece.donated]
                values = function(given, [env[n] for n in piece.kept], numbers, seed)
                env.update(zip(piece.gives, values, strict=True))
            return [env[n] for n in self._results]

        return run, len(pieces)


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

"""Repeated layers become loops, by proof.

Nodes are grouped by the numbered containers in `nn_module_stack` (`model.layers.3`). A run of items
rolls into one `Loop` when every repeat is the same graph node by node: same operators, same
constants, same recorded shapes and dtypes, and each value from outside the layer is one of

    shared    the same node in every repeat (rotary tables, masks),
    stacked   a different tensor in each, equal in shape and dtype (the weights),
    carried   the value that the previous repeat computed at the same place (the hidden state).

The shortest period that covers most items wins: Gemma's five sliding layers and a full one roll as
one body of six. Anything else stays unrolled and the reason is in the pass's notes.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from headrace.bridge.passes.regions import Region, containers, find_regions, hoist_between
from headrace.bridge.program import Input, Loop, Program, copy_graph

log = logging.getLogger(__name__)

_MAX_PERIOD = 16
_ATTENTION = torch.ops.headrace.attention.default
_MASK = torch.ops.headrace.mask.default
_REQUIRE = torch.ops.headrace.require.default
_MIN_NODES = (
    6  # smaller regions (an activation in an nn.Sequential) are not worth a loop of their own
)


def roll_layers(program: Program) -> tuple[Program, list[str]]:
    """Program -> Program whose repeated layers are `Loop` nodes.

    Notes say what rolled and what did not. Layers that stay alone become loops of one turn, so that
    a remat policy applies to them too.
    """
    notes: list[str] = []
    done: list[str] = []
    while True:
        pending = [c for c in containers(program.graph) if c not in done]
        if not pending:
            break
        done.append(pending[0])
        program = _roll_container(program, pending[0], notes)
    for container in reversed(done):  # inner containers first: a stage's blocks, not the stage
        program = _outline(program, container)
    return program, notes


def _roll_container(program: Program, container: str, notes: list[str]) -> Program:
    graph, _ = copy_graph(program.graph)
    if len(find_regions(graph, container)) < 2:
        return program
    hoist_between(graph, container, find_regions(graph, container))
    regions = find_regions(graph, container)
    descriptions = _descriptions(regions)
    signatures = _signatures(descriptions)
    program = replace(program, graph=graph)
    reasons: list[str] = []
    rolled: list[tuple[_Run, _Plan]] = []
    stretches = [(0, len(regions))]
    while stretches:
        first, stop = stretches.pop()
        run, plan = _longest_run(signatures, first, stop), None
        while run is not None:
            plan = _plan(program, regions[run.start : run.stop], run.period, reasons)
            if plan is not None:
                break
            run = run.shorter()
        if run is None or plan is None:
            continue
        program = _rewrite(program, container, regions, run, plan)
        rolled.append((run, plan))
        stretches += [(first, run.start), (run.stop, stop)]
    reasons = reasons or [_difference(regions, descriptions)]
    _report(container, regions, sorted(rolled, key=lambda x: x[0].start), reasons, notes)
    return program


def _outline(program: Program, container: str) -> Program:
    """Each remaining item of the container as a loop of one turn, if only tensors leave it."""
    graph, _ = copy_graph(program.graph)
    program = replace(program, graph=graph)
    for region in find_regions(graph, container):
        inner = [n for n in region.nodes if isinstance(n.target, Loop)]
        if inner or len(region.nodes) < _MIN_NODES:
            continue
        plan = _plan(program, [region], 1, [])
        if plan is not None:
            run = _Run(start=0, stop=1, period=1)
            program = _rewrite(program, container, [region], run, plan)
    return program


def _report(
    container: str,
    regions: Sequence[Region],
    rolled: list[Any],
    reasons: list[str],
    notes: list[str],
) -> None:
    covered = sum(run.stop - run.start for run, _ in rolled)
    for run, _ in rolled:
        notes.append(
            f"{container}: items {run.start}..{run.stop - 1} run as a loop of {run.repeats}"
            + (f" with {run.period} layers a turn" if run.period > 1 else "")
        )
    if covered < len(regions) and regions and len(regions[0].nodes) >= _MIN_NODES:
        left = [r.index for r in regions if not any(x.start <= r.order < x.stop for x, _ in rolled)]
        notes.append(f"{container}: items {left} are not rolled: {reasons[0]}")
        log.info("not rolled: %s", notes[-1])


def _difference(regions: Sequence[Region], descriptions: Sequence[list[tuple[Any, ...]]]) -> str:
    """Where the first two neighbouring items that differ part."""
    for i in range(1, len(regions)):
        left, right = descriptions[i - 1], descriptions[i]
        a, b = regions[i - 1].index, regions[i].index
        for k, (x, y) in enumerate(zip(left, right, strict=False)):
            if x != y:
                return _parted(k, (a, x), (b, y))
        if len(left) != len(right):
            return f"item {a} has {len(left)} operators, item {b} has {len(right)}"
    return "too few equal items follow each other"


def _parted(k: int, left: tuple[int, Any], right: tuple[int, Any]) -> str:
    """What differs first: the operator, its result, what it reads, or its other arguments."""
    (a, x), (b, y) = left, right
    if x[0] != y[0]:
        return f"operator {k} is {y[0]} in item {b}, {x[0]} in item {a}"
    for part, verb in ((3, "gives"), (1, "reads"), (2, "takes")):
        if x[part] != y[part]:
            return f"{x[0]} {verb} {_plain(y[part])} in item {b}, {_plain(x[part])} in item {a}"
    return f"operator {k} differs in items {a} and {b}"


def _plain(text: str) -> str:
    return re.sub(r"torch\.|'", "", str(text))[:100]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Items `start..stop` repeat with `period`."""

    start: int
    stop: int
    period: int

    @property
    def repeats(self) -> int:
        return (self.stop - self.start) // self.period

    def shorter(self) -> _Run | None:
        """The run without its first item: the first layer is the one that is often special."""
        stop = self.start + 1 + (self.stop - self.start - 1) // self.period * self.period
        run = _Run(start=self.start + 1, stop=stop, period=self.period)
        return run if run.repeats >= 2 else None


def _descriptions(regions: Sequence[Region]) -> list[list[tuple[Any, ...]]]:
    common = _read_by_several(regions)
    return [_describe(region, common) for region in regions]


def _signatures(descriptions: Sequence[list[tuple[Any, ...]]]) -> list[int]:
    known: dict[str, int] = {}
    return [known.setdefault(repr(d), len(known)) for d in descriptions]


def _read_by_several(regions: Sequence[Region]) -> set[fx.Node]:
    """Outside nodes that more than one region reads: they are shared, so their identity matters."""
    readers: dict[fx.Node, set[int]] = {}
    for region in regions:
        for node in region.nodes:
            for source in node.all_input_nodes:
                readers.setdefault(source, set()).add(region.order)
    return {node for node, orders in readers.items() if len(orders) > 1}


def _longest_run(signatures: Sequence[int], first: int, last: int) -> _Run | None:
    """The run within `first..last` that covers most items, with the shortest period."""
    best: _Run | None = None
    for start in range(first, last):
        for period in range(1, min(_MAX_PERIOD, (last - start) // 2) + 1):
            stop = start + period
            while stop < last and signatures[stop] == signatures[stop - period]:
                stop += 1
            stop = start + (stop - start) // period * period
            run = _Run(start=start, stop=stop, period=period)
            if run.repeats >= 2 and (best is None or run.stop - run.start > best.stop - best.start):
                best = run
    return best


def _describe(region: Region, common: set[fx.Node]) -> list[tuple[Any, ...]]:
    """The region node by node: references by position inside, by order of appearance outside.

    Outside nodes in `common` keep their name, so that alternating masks make alternating layers.
    """
    inside = {node: i for i, node in enumerate(region.nodes)}
    outside: dict[fx.Node, int] = {}

    def name(node: fx.Node) -> str:
        if node in inside:
            return f"%{inside[node]}"
        if node in common and node not in inside:
            return f"@{node.name}"
        return f"@{outside.setdefault(node, len(outside))}:{_record(node)}"

    return [
        (str(n.target), _render(_without_layer(n), name), _render(n.kwargs, name), _record(n))
        for n in region.nodes
    ]


def _without_layer(node: fx.Node) -> tuple[Any, ...]:
    """Arguments without the attention operator's layer index, which may differ between repeats."""
    return node.args[:-1] if node.target is _ATTENTION else node.args


def _render(value: Any, name: Any) -> str:
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (tuple, list)):
        return "[" + ",".join(_render(v, name) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_render(v, name)}" for k, v in value.items()) + "}"
    return repr(value)


def _record(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{[str(s) for s in value.shape]}"
    if isinstance(value, (tuple, list)):
        return str([str(getattr(v, "shape", v)) for v in value])
    return str(value)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How the values from outside enter one run; every entry is a list over the repeats."""

    blocks: list[list[fx.Node]]
    carried: list[tuple[fx.Node, int]] = field(default_factory=list)
    stacked: list[list[fx.Node]] = field(default_factory=list)
    shared: list[fx.Node] = field(default_factory=list)
    role: dict[fx.Node, tuple[str, int]] = field(default_factory=dict)
    collected: list[int] = field(default_factory=list)


def _plan(
    program: Program, items: Sequence[Region], period: int, reasons: list[str]
) -> _Plan | None:
    """Sort the outside values of a run, or say why that is impossible."""
    blocks = [
        [node for item in items[i : i + period] for node in item.nodes]
        for i in range(0, len(items), period)
    ]
    asking = next((n for block in blocks for n in block if n.target is _REQUIRE), None)
    if asking is not None:
        reasons.append(f"{asking.name} is a condition on the batch: {asking.args[1]}")
        return None
    position = {node: (r, k) for r, block in enumerate(blocks) for k, node in enumerate(block)}
    plan = _Plan(blocks=blocks)
    seen: set[tuple[fx.Node, ...]] = set()
    for k in range(len(blocks[0])):
        for refs in _references(blocks, k):
            key = tuple(refs)
            if key in seen:
                continue
            seen.add(key)
            why = _place_reference(plan, refs, position, program)
            if why:
                reasons.append(why)
                return None
    inside = set(position)
    carried = {k for _, k in plan.carried}
    for k in range(len(blocks[0])):
        if any(
            _leaves_run(blocks[r][k], inside, r == len(blocks) - 1 and k in carried)
            for r in range(len(blocks))
        ):
            node = blocks[0][k]
            if not isinstance(node.meta.get("val"), torch.Tensor) or node.target is _MASK:
                reasons.append(f"{node.name}, read outside of its layer, is not a tensor")
                return None
            plan.collected.append(k)
    return plan


def _leaves_run(node: fx.Node, inside: set[fx.Node], is_final_carry: bool) -> bool:
    return not is_final_carry and any(user not in inside for user in node.users)


def _references(blocks: list[list[fx.Node]], k: int) -> Iterable[list[fx.Node]]:
    """For node k of the body: its input nodes, each as a list over the repeats."""
    inputs = [_input_nodes(block[k]) for block in blocks]
    return ([column[i] for column in inputs] for i in range(len(inputs[0])))


def _input_nodes(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)
    return found


def _place_reference(
    plan: _Plan, refs: list[fx.Node], position: dict[fx.Node, tuple[int, int]], program: Program
) -> str | None:
    """Put one reference into the plan; a string is the reason why it has no place."""
    where = [position.get(node) for node in refs]
    if all(w is not None and w[0] == r for r, w in enumerate(where)):
        return None  # inside its own repeat
    first = refs[0]
    if all(node is first for node in refs) and where[0] is None:
        plan.role[first] = ("shared", len(plan.shared))
        plan.shared.append(first)
        return None
    if where[0] is None and all(w is not None and w[0] == r - 1 for r, w in enumerate(where) if r):
        offsets = {w[1] for w in where[1:] if w is not None}
        if len(offsets) == 1:
            return _carry(plan, first, offsets.pop())
    if all(w is None for w in where):
        if first in plan.role and plan.role[first][0] == "shared":
            return f"{first.name} is the same tensor for some uses and different for others"
        if any(not isinstance(n.meta.get("val"), torch.Tensor) for n in refs):
            return f"{first.name} is a number that differs between the layers"
        plan.role[first] = ("stacked", len(plan.stacked))
        plan.stacked.append(refs)
        return None
    later = next(r for r, w in enumerate(where) if w is not None)
    return (
        f"repeat {later} reads {refs[later].name}, a value of another repeat than the one before it"
    )


def _carry(plan: _Plan, initial: fx.Node, offset: int) -> str | None:
    produced = plan.blocks[0][offset]
    if _record(produced) != _record(initial):
        return (
            f"{initial.name} {_record(initial)} changes into {_record(produced)} along the layers"
        )
    role = plan.role.get(initial)
    if role is not None and not (role[0] == "carried" and plan.carried[role[1]][1] == offset):
        return f"{initial.name} enters the first layer in two roles"
    plan.role[initial] = ("carried", len(plan.carried))
    plan.carried.append((initial, offset))
    return None


def _rewrite(
    program: Program, container: str, regions: Sequence[Region], run: _Run, plan: _Plan
) -> Program:
    graph = program.graph
    layers = tuple(f"{container}.{r.index}" for r in regions[run.start : run.stop])
    name = f"{container}_{regions[run.start].index}_{regions[run.stop - 1].index}"
    with graph.inserting_before(plan.blocks[0][0]):
        stacked, inputs, constants = _stack_inputs(program, container, regions, run, plan)
        loop = Loop(
            name=name,
            body=_body(plan),
            length=run.repeats,
            num_carries=len(plan.carried),
            num_stacked=len(stacked),
            num_collected=len(plan.collected),
            layers=layers,
        )
        node = graph.call_function(loop, (*(n for n, _ in plan.carried), *stacked, *plan.shared))
        results = _results(graph, node, plan)
    rolled = set(_flat(plan))
    for old, new in results.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in rolled)
    for old in reversed(_flat(plan)):
        graph.erase_node(old)
    inputs = _drop_unused(graph, inputs)
    return replace(program, inputs=tuple(inputs), constants=constants)


def _flat(plan: _Plan) -> list[fx.Node]:
    return [node for block in plan.blocks for node in block]


def _results(graph: fx.Graph, loop: fx.Node, plan: _Plan) -> dict[fx.Node, fx.Node]:
    """Old nodes that are used after the run -> nodes that read the loop's results."""
    found: dict[fx.Node, fx.Node] = {}
    last = plan.blocks[-1]
    for i, (_, offset) in enumerate(plan.carried):
        item = graph.call_function(operator.getitem, (loop, i))
        item.meta = {"val": last[offset].meta.get("val")}
        found[last[offset]] = item
    for j, offset in enumerate(plan.collected):
        whole = graph.call_function(operator.getitem, (loop, len(plan.carried) + j))
        for r, block in enumerate(plan.blocks):
            if block[offset] in found:
                continue
            if len(plan.blocks) == 1:
                whole.meta = {"val": block[offset].meta.get("val")}
                found[block[offset]] = whole
                continue
            item = graph.call_function(torch.ops.aten.select.int, (whole, 0, r))
            item.meta = {k: v for k, v in block[offset].meta.items() if k in ("val", "draw")}
            found[block[offset]] = item
    return found


def _body(plan: _Plan) -> fx.Graph:
    body = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    entering = [*(n for n, _ in plan.carried), *(refs[0] for refs in plan.stacked), *plan.shared]
    for old in entering:
        new = body.placeholder(old.name)
        new.meta = dict(old.meta)
        env[old] = new
    for old in plan.blocks[0]:
        env[old] = body.node_copy(old, lambda n: env[n])
    outputs = [env[plan.blocks[0][k]] for _, k in plan.carried]
    outputs += [env[plan.blocks[0][k]] for k in plan.collected]
    body.output(tuple(outputs))
    return body


def _stack_inputs(
    program: Program, container: str, regions: Sequence[Region], run: _Run, plan: _Plan
) -> tuple[list[fx.Node], list[Input], dict[str, torch.Tensor]]:
    """One value a stacked reference: a stacked placeholder for weights, `aten.stack` for computed
    values.
    """
    graph, inputs = program.graph, list(program.inputs)
    by_node = {i.node: i for i in inputs}
    values: list[fx.Node] = []
    for refs in plan.stacked:
        kinds = {by_node[n.name].kind for n in refs if n.name in by_node}
        uniform = len(kinds) == 1 and all(n.name in by_node for n in refs) and kinds != {"user"}
        if not uniform or not _stackable(refs, by_node, program):
            node = graph.call_function(torch.ops.aten.stack.default, (list(refs), 0))
            values.append(node)
            continue
        names = tuple(n for ref in refs for n in by_node[ref.name].names)
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(f"stack_{refs[0].name}")
        node.meta = {}
        key, kind = _stack_key(container, regions, run, names), by_node[refs[0].name].kind
        spec = Input(node=node.name, kind=kind, names=names, key=key)
        inputs.insert(_placeholder_index(graph, node), spec)
        values.append(node)
    return values, inputs, dict(program.constants)


def _placeholder_index(graph: fx.Graph, node: fx.Node) -> int:
    return [n for n in graph.nodes if n.op == "placeholder"].index(node)


def _stackable(refs: list[fx.Node], by_node: dict[str, Input], program: Program) -> bool:
    """Parameters stack only if none is stacked already and all or none are trained."""
    specs = [by_node[n.name] for n in refs]
    if any(s.stacked for s in specs) or len({s.names for s in specs}) != len(specs):
        return False
    return len({s.names[0] in program.trainable for s in specs}) == 1


def _stack_key(container: str, regions: Sequence[Region], run: _Run, names: tuple[str, ...]) -> str:
    """`model.layers.[0:24:6].mlp.up_proj.weight`: the container's items as a Python slice."""
    first = names[0]
    for offset in range(run.period):
        prefix = f"{container}.{regions[run.start + offset].index}."
        if first.startswith(prefix):
            items = [regions[run.start + offset + r * run.period].index for r in range(run.repeats)]
            step = f":{run.period}" if run.period > 1 else ""
            return f"{container}.[{items[0]}:{items[-1] + 1}{step}].{first.removeprefix(prefix)}"
    return f"[{len(names)}].{first}"


def _drop_unused(graph: fx.Graph, inputs: list[Input]) -> list[Input]:
    """Forget single weights that now live in a stack and are read nowhere else."""
    stacked = {name for i in inputs if i.stacked for name in i.names}
    kept: list[Input] = []
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    for node, spec in zip(nodes, inputs, strict=True):
        single = not spec.stacked and spec.kind != "user" and spec.names[0] in stacked
        if single and not node.users:
            graph.erase_node(node)
        else:
            kept.append(spec)
    return _unstack_shared(graph, kept)


def _unstack_shared(graph: fx.Graph, inputs: list[Input]) -> list[Input]:
    """A weight that is stacked and also read alone is read from its stack."""
    nodes = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    stacks = {name: (i, r) for i in inputs if i.stacked for r, name in enumerate(i.names)}
    kept: list[Input] = []
    for spec in inputs:
        if not spec.stacked and spec.kind != "user" and spec.names[0] in stacks:
            stack, index = stacks[spec.names[0]]
            old = nodes[spec.node]
            last = [n for n in graph.nodes if n.op == "placeholder"][-1]
            with graph.inserting_after(last):
                item = graph.call_function(torch.ops.aten.select.int, (nodes[stack.node], 0, index))
            item.meta = dict(old.meta)
            old.replace_all_uses_with(item)
            graph.erase_node(old)
        else:
            kept.append(spec)
    return kept

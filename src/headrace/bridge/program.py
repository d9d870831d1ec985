"""A captured model: one functional graph with named inputs and outputs.

Knows: the graph, what each placeholder stands for, which outputs are new buffer values. Does not
know: JAX, weights' values, training. A pass takes a `Program` and returns a `Program`.

The graph is a `torch.fx.Graph` over ATen overloads, plus `Loop` nodes made by the roll pass. Every
tensor node keeps the exporter's record of its shape and dtype in `node.meta["val"]`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.fx as fx

InputKind = Literal["parameter", "buffer", "constant", "user"]


@dataclass(frozen=True, kw_only=True)
class Input:
    """What one placeholder stands for.

    `names` are PyTorch names: one for an ordinary tensor, several for a stack of repeated layers
    (axis 0 in that order). For `kind="user"` it is the path of the argument, `input_ids` or
    `args[0]`.
    """

    node: str
    kind: InputKind
    names: tuple[str, ...]
    key: str = ""

    @property
    def stacked(self) -> bool:
        """Whether the value carries a leading layer axis."""
        return len(self.names) > 1


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one result stands for: a leaf of the model's output, or the new value of a buffer."""

    kind: Literal["user", "buffer"]
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """Which pass ran, how long it took (seconds), and what it has to say."""

    name: str
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Loop:
    """`length` repeats of one body, as the target of a graph node.

    The node's arguments are `carries + stacked + shared`; its result is a tuple of the final
    carries followed by one stacked value for each entry of `num_collected`. The body takes the
    carries, one
    slice of each stacked value and the shared values, and returns `carries + collected`. With one
    turn nothing is stacked: such a loop is a layer on its own, kept apart for the remat policies.
    """

    name: str
    body: fx.Graph
    length: int
    num_carries: int
    num_stacked: int
    num_collected: int
    layers: tuple[str, ...] = ()

    @property
    def __name__(self) -> str:
        return f"loop_{self.name}".replace(".", "_").replace("[", "_").replace("]", "")

    def __call__(self, *args: Any) -> Any:
        """Never run by torch: the lowering interprets the body."""
        raise NotImplementedError("a Loop node is interpreted by headrace.bridge.lower")


@dataclass(frozen=True, kw_only=True)
class Program:
    """One captured graph and the meaning of its inputs and outputs.

    `in_spec` and `out_spec` are torch pytree specs of `(args, kwargs)` and of the result.
    `constants` holds tensors that the graph refers to but the module does not own.
    `tied` maps a further name of a tied parameter to the name that is stored.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_spec: Any
    out_spec: Any
    constants: dict[str, torch.Tensor]
    tied: dict[str, str] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()
    history: tuple[PassRecord, ...] = ()
    dynamic: bool = True

    @property
    def placeholders(self) -> list[fx.Node]:
        """Placeholders in the order of `inputs`."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def output_node(self) -> fx.Node:
        """The graph's single output node."""
        return next(iter(reversed(self.graph.nodes)))

    @property
    def loops(self) -> list[fx.Node]:
        """Nodes that run a `Loop`."""
        return [n for n in self.graph.nodes if isinstance(n.target, Loop)]

    def nodes(self) -> list[fx.Node]:
        """All operator nodes, those inside loops included."""
        found: list[fx.Node] = []
        for node in self.graph.nodes:
            if isinstance(node.target, Loop):
                found += [n for n in node.target.body.nodes if n.op == "call_function"]
            elif node.op == "call_function":
                found.append(node)
        return found

    def __str__(self) -> str:
        lines = [f"# {self.name}: {len(self.nodes())} operators, {len(self.inputs)} inputs"]
        lines += [
            f"# {r.name}: {r.seconds:.2f} s" + "".join(f"\n#   {n}" for n in r.notes)
            for r in self.history
        ]
        for loop_node in self.loops:
            loop = loop_node.target
            assert isinstance(loop, Loop)
            lines.append(f"\n# {loop.__name__}: {loop.length} times ({', '.join(loop.layers)})")
            lines.append(_code(loop.body))
        lines.append(_code(self.graph))
        return "\n".join(lines)


def _code(graph: fx.Graph) -> str:
    return "\n".join(
        line for line in str(graph.python_code("self").src).splitlines() if line.strip()
    )


def run_pass(
    program: Program, name: str, transform: Callable[[Program], tuple[Program, list[str]]]
) -> Program:
    """Apply `transform`, verify the result, and record its name, time and notes."""
    start = time.perf_counter()
    after, notes = transform(program)
    verify(after)
    record = PassRecord(name=name, seconds=time.perf_counter() - start, notes=tuple(notes))
    return replace(after, history=(*after.history, record))


def verify(program: Program) -> None:
    """Check what every pass must keep: a well-formed functional graph whose inputs are all
    explained.

    Raises `AssertionError`: a failure is our own mistake, never the user's.
    """
    program.graph.lint()
    names = [node.name for node in program.placeholders]
    assert names == [i.node for i in program.inputs], "inputs do not match the placeholders"
    results = program.output_node.args[0]
    assert isinstance(results, (tuple, list)), "the graph returns a flat tuple"
    assert len(results) == len(program.outputs), "outputs do not match the results"
    for node in program.nodes():
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, f"{node.target} mutates its input"
    for node in program.loops:
        loop = node.target
        assert isinstance(loop, Loop)
        loop.body.lint()
        for user in node.users:
            assert user.target is operator.getitem, "a loop's results are taken apart one by one"


def behind(node: fx.Node, parents: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    """A node and all that `parents` leads to from it, in graph order."""
    found: set[fx.Node] = set()
    queue = [node]
    while queue:
        current = queue.pop()
        if current not in found:
            found.add(current)
            queue += parents(current)
    return [n for n in node.graph.nodes if n in found]


def place(node: fx.Node) -> str:
    """Module path, class and source line of a node."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "the model")
    kind = kind if isinstance(kind, str) else kind.__name__
    line = (node.meta.get("stack_trace") or "").strip().splitlines()
    where = next((text.strip() for text in reversed(line) if text.strip().startswith("File")), "")
    return f"in {path or 'the model'} ({kind.rsplit('.', 1)[-1]}) {where}".strip()


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Copy of a graph with the map from old to new nodes; node meta is shared."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = new.graph_copy(graph, mapping, return_output_node=True)
    assert isinstance(result, tuple)
    value: Any
    old_output: Any
    value, old_output = result
    output = new.output(value)
    output.meta = dict(old_output.meta)
    return new, mapping

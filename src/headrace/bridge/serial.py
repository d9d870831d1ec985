"""A `Program` <-> JSON and tensors: no pickle, and nothing in a file can name code to run.

Operators are named as torch names them and looked up among ATen's, Headrace's and Python's
arithmetic; sizes are expression trees over a fixed list of functions.

Does not know: where files lie, what makes a capture the same (`cache.py`).
"""

# The names of an operator are private attributes in torch.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._dynamo.source import ConstantSource
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions as sympy_functions

from headrace.bridge.program import Input, Loop, Output, PassRecord, Program

_NAMESPACES = ("aten", "headrace", "prims")
_PYTHON: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "getitem",
                    "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "not_")),
        (math, ("ceil", "floor", "sqrt", "trunc")),
        (torch, ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite", "sym_sum")),
    )
    for name in names
}  # fmt: skip
_PYTHON_NAMES = {id(function): name for name, function in _PYTHON.items()}
_FUNCTIONS: dict[str, Any] = {
    **{f.__name__: f for f in (sympy.Add, sympy.Mul, sympy.Pow)},
    **{
        name: getattr(sympy_functions, name)
        for name in ("FloorDiv", "CleanDiv", "Mod", "PythonMod", "ModularIndexing", "Max", "Min",
                     "CeilToInt", "FloorToInt", "IntTrueDiv", "FloatTrueDiv", "PowByNatural",
                     "FloatPow", "ToFloat", "TruncToInt", "RoundToInt", "Where")
        if hasattr(sympy_functions, name)
    },
}  # fmt: skip
_RELATIONS: dict[str, Any] = {
    "Equality": sympy.Eq, "Unequality": sympy.Ne, "StrictLessThan": sympy.Lt,
    "LessThan": sympy.Le, "StrictGreaterThan": sympy.Gt, "GreaterThan": sympy.Ge,
    "And": sympy.And, "Or": sympy.Or, "Not": sympy.Not,
}  # fmt: skip


class NotSerialisable(TypeError):
    """The program holds something that has no written form; it is used, and not kept."""


def dump(program: Program) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The program as JSON values, and its constants. Raises NotSerialisable."""
    hints: dict[str, int] = {}
    for node in program.placeholders:
        record = node.meta.get("val")
        for size in record.shape if isinstance(record, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                hints[str(size.node.expr)] = int(size.node.hint)
    try:
        specs = [pytree.treespec_dumps(s) for s in (program.in_spec, program.out_spec)]
    except (TypeError, NotImplementedError, KeyError) as error:
        raise NotSerialisable(str(error)) from error
    written = {
        "name": program.name,
        "graph": _graph(program.graph),
        "inputs": [[i.node, i.kind, list(i.names), i.key] for i in program.inputs],
        "outputs": [[o.kind, o.name] for o in program.outputs],
        "specs": specs,
        "tied": program.tied,
        "trainable": sorted(program.trainable),
        "history": [[r.name, r.seconds, list(r.notes)] for r in program.history],
        "dynamic": program.dynamic,
        "hints": hints,
    }
    return written, {k: v.detach().clone().contiguous() for k, v in program.constants.items()}


def load(written: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> Program:
    """The program that `dump` wrote. Raises NotSerialisable for what it would not have written."""
    reader = _Reader(written["hints"])
    in_spec, out_spec = (pytree.treespec_loads(s) for s in written["specs"])
    return Program(
        name=written["name"],
        graph=reader.graph(written["graph"]),
        inputs=tuple(
            Input(node=node, kind=kind, names=tuple(names), key=key)
            for node, kind, names, key in written["inputs"]
        ),
        outputs=tuple(Output(kind=kind, name=name) for kind, name in written["outputs"]),
        in_spec=in_spec,
        out_spec=out_spec,
        constants=dict(constants),
        tied=dict(written["tied"]),
        trainable=frozenset(written["trainable"]),
        history=tuple(
            PassRecord(name=name, seconds=seconds, notes=tuple(notes))
            for name, seconds, notes in written["history"]
        ),
        dynamic=written["dynamic"],
    )


def _graph(graph: fx.Graph) -> list[Any]:
    return [_node(node) for node in graph.nodes]


def _node(node: fx.Node) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    if "val" in node.meta:
        meta["val"] = _record(node.meta["val"])
    if "draw" in node.meta:
        meta["draw"] = node.meta["draw"]
    if node.meta.get("stack_trace"):
        meta["stack_trace"] = node.meta["stack_trace"]
    stack = node.meta.get("nn_module_stack")
    if stack:
        meta["stack"] = [[k, path, _kind(kind)] for k, (path, kind) in stack.items()]
    return {
        "op": node.op,
        "name": node.name,
        "target": _target(node),
        "args": _value(node.args),
        "kwargs": {k: _value(v) for k, v in node.kwargs.items()},
        "meta": meta,
    }


def _kind(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _target(node: fx.Node) -> Any:
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        return str(target)
    if isinstance(target, Loop):
        fields = ("name", "length", "num_carries", "num_stacked", "num_collected")
        return {
            "loop": {f: getattr(target, f) for f in fields}
            | {"layers": list(target.layers), "body": _graph(target.body)}
        }
    if isinstance(target, OpOverload) and target.namespace in _NAMESPACES:
        return {"op": [target.namespace, target._schema.name.split("::")[1], target._overloadname]}
    if id(target) in _PYTHON_NAMES:
        return {"python": _PYTHON_NAMES[id(target)]}
    raise NotSerialisable(f"the operator {target} of {node.name}")


_TORCH_KINDS: tuple[tuple[str, type], ...] = (
    ("dtype", torch.dtype),
    ("layout", torch.layout),
    ("memory_format", torch.memory_format),
)


def _value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [_value(v) for v in value]}
    if isinstance(value, slice):
        return {"slice": [_value(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for name, kind in _TORCH_KINDS:
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise NotSerialisable(f"an argument of type {type(value).__name__}")


def _record(record: Any) -> Any:
    if isinstance(record, torch.Tensor):
        dtype = str(record.dtype).removeprefix("torch.")
        return {"tensor": [dtype, [_size(s) for s in record.shape]]}
    if isinstance(record, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"symbol": [type(record).__name__, _expression(record.node.expr)]}
    if isinstance(record, (list, tuple)):
        return {"records": [_record(r) for r in record]}
    if record is None or type(record) in (bool, int, float, str):
        return {"value": record}
    raise NotSerialisable(f"a record of type {type(record).__name__}")


def _size(size: Any) -> Any:
    return size if isinstance(size, int) else _expression(size.node.expr)


def _expression(expression: Any) -> Any:
    if isinstance(expression, sympy.Symbol):
        return {"name": str(expression)}
    if isinstance(expression, (sympy.logic.boolalg.BooleanTrue, sympy.logic.boolalg.BooleanFalse)):
        return {"truth": bool(expression)}
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Rational):
        return {"ratio": [int(expression.p), int(expression.q)]}
    if isinstance(expression, sympy.Float):
        return {"float": float(expression)}
    name = type(expression).__name__
    if name in _FUNCTIONS or name in _RELATIONS:
        return {"call": [name, [_expression(a) for a in expression.args]]}
    raise NotSerialisable(f"a size with {name}")


class _Reader:
    """Rebuilds nodes with records over fresh symbols."""

    def __init__(self, hints: Mapping[str, int]) -> None:
        self._env = ShapeEnv()
        self._fake = FakeTensorMode(shape_env=self._env)
        self._symbols = {
            name: self._env.create_symbol(
                hint,
                source=ConstantSource(name),
                dynamic_dim=DimDynamic.DYNAMIC,
                do_not_specialize_zero_one=True,
            )
            for name, hint in hints.items()
        }
        self._hints = {self._symbols[name]: hint for name, hint in hints.items()}

    def graph(self, nodes: list[Any]) -> fx.Graph:
        graph = fx.Graph()
        env: dict[str, fx.Node] = {}
        for written in nodes:
            args, kwargs = self._value(written["args"], env), written["kwargs"]
            if written["op"] == "output":
                node = graph.output(args[0])
            else:
                node = graph.create_node(
                    written["op"],
                    self._target(written),
                    args,
                    {k: self._value(v, env) for k, v in kwargs.items()},
                    name=written["name"],
                )
            if node.name != written["name"]:
                raise NotSerialisable(f"{written['name']} became {node.name}")
            node.meta = self._meta(written["meta"])
            env[node.name] = node
        return graph

    def _target(self, written: Mapping[str, Any]) -> Any:
        target = written["target"]
        if isinstance(target, str):
            return target
        if "loop" in target:
            loop = dict(target["loop"])
            body, layers = self.graph(loop.pop("body")), tuple(loop.pop("layers"))
            return Loop(body=body, layers=layers, **loop)
        if "python" in target:
            return _PYTHON[target["python"]]
        namespace, name, overload = target["op"]
        if namespace not in _NAMESPACES:
            raise NotSerialisable(f"an operator of {namespace}")
        packet = getattr(getattr(torch.ops, namespace), name)
        return getattr(packet, overload or "default")

    def _meta(self, written: Mapping[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = {k: written[k] for k in ("draw", "stack_trace") if k in written}
        if "val" in written:
            meta["val"] = self._record(written["val"])
        if "stack" in written:
            meta["nn_module_stack"] = {k: (path, kind) for k, path, kind in written["stack"]}
        return meta

    def _value(self, value: Any, env: Mapping[str, fx.Node]) -> Any:
        if not isinstance(value, dict):
            return value
        (kind, inner), *rest = value.items()
        assert not rest
        if kind == "node":
            return env[inner]
        if kind in ("list", "tuple"):
            found = [self._value(v, env) for v in inner]
            return tuple(found) if kind == "tuple" else found
        if kind == "slice":
            return slice(*(self._value(v, env) for v in inner))
        if kind == "device":
            return torch.device(inner)
        if kind == "complex":
            return complex(*inner)
        known = dict(_TORCH_KINDS)
        found = getattr(torch, inner) if kind in known else None
        if not isinstance(found, known.get(kind, ())):
            raise NotSerialisable(f"an argument of kind {kind}")
        return found

    def _record(self, written: Mapping[str, Any]) -> Any:
        (kind, inner), *_ = written.items()
        if kind == "value":
            return inner
        if kind == "records":
            return tuple(self._record(r) for r in inner)
        if kind == "symbol":
            return self._symbol(*inner)
        dtype, sizes = inner
        found = getattr(torch, dtype)
        if not isinstance(found, torch.dtype):
            raise NotSerialisable(f"a dtype {dtype}")
        shape = [s if isinstance(s, int) else self._symbol("SymInt", s) for s in sizes]
        with self._fake:
            return torch.empty(shape, dtype=found, device="cpu")

    def _symbol(self, kind: str, written: Any) -> Any:
        expression = self._expression(written)
        known = expression.free_symbols <= set(self._hints)
        hint = expression.xreplace(self._hints) if known else None
        if kind == "SymInt":
            whole = int(hint) if hint is not None else None  # pyright: ignore
            return self._env.create_symintnode(expression, hint=whole)
        if kind == "SymFloat":
            real = float(hint) if hint is not None else None  # pyright: ignore
            return self._env.create_symfloatnode(expression, hint=real)
        return self._env.create_symboolnode(expression)

    def _expression(self, written: Any) -> Any:
        if isinstance(written, int):
            return sympy.Integer(written)
        (kind, inner), *_ = written.items()
        if kind == "name":
            return self._symbols[inner]
        if kind == "truth":
            return sympy.true if inner else sympy.false
        if kind == "ratio":
            return sympy.Rational(*inner)
        if kind == "float":
            return sympy.Float(inner)
        name, args = inner
        function = _FUNCTIONS.get(name) or _RELATIONS[name]
        return function(*(self._expression(a) for a in args))

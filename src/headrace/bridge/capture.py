"""A module and example inputs -> a functional `Program`, through torch.export.

Knows: torch.export, dynamic dims, tied weights, which operators must be decomposed. Does not know:
JAX values, loops. The module may live on the meta device; no weight is read here.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import time
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._ops import OpOverload
from torch.distributions import Distribution
from torch.export.graph_signature import InputKind as TorchInputKind
from torch.export.graph_signature import OutputKind
from torch.overrides import TorchFunctionMode

from headrace.bridge.attention import attention_as_operator, without_cache
from headrace.bridge.bounds import answered_sizes, bounded_sizes
from headrace.bridge.branches import Branches
from headrace.bridge.functions import own_backwards
from headrace.bridge.ops.decompositions import exporter_table
from headrace.bridge.ops.registry import lookup
from headrace.bridge.passes.bounded import SELECTING
from headrace.bridge.program import Input, Output, PassRecord, Program
from headrace.errors import CaptureError

log = logging.getLogger(__name__)


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool = True,
    attention: bool = True,
) -> Program:
    """Capture `module(*args, **kwargs)` in its present train/eval mode.

    Batch (dim 0 of every tensor) and sequence (dim 1 of token-like tensors) stay symbolic when the
    model allows it; otherwise the shapes of the example are fixed and the log says why. Costs one
    trace (about
    0.3 s a transformer layer on one core) and no weight memory.

    Raises:
        CaptureError: torch.export cannot follow the module's Python; the message has its reason.
        TypeError: an input is not a tensor, number, bool, string or None.
    """
    start = time.perf_counter()
    arguments = _without_cache(module, dict(kwargs or {}))
    args = tuple(_example(a) for a in args)
    arguments = pytree.tree_map(_example, arguments)
    _check_inputs(module, args, arguments)
    notes: list[str] = []
    with _stand_ins(module):
        exported = _export(module, args, arguments, dynamic, attention, notes)
        exported = _functional(exported)
        program = _program(module, exported, notes)
    record = PassRecord(name="capture", seconds=time.perf_counter() - start, notes=tuple(notes))
    return replace(program, history=(record,))


@contextlib.contextmanager
def _stand_ins(module: nn.Module) -> Generator[None]:
    """Tensors on the meta device as CPU tensors without memory, while the module is traced.

    One value stretched to the shape: so constants of the forward are made on the CPU as always.
    """
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    places.append((tensors, name, tensor))
    try:
        for tensors, name, tensor in places:
            if id(tensor) not in made:  # tied tensors stay tied
                value = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                made[id(tensor)] = value
            tensors[name] = made[id(tensor)]
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor


def _example(value: Any) -> Any:
    # Distinct storage: export gives one placeholder to two arguments that are the same tensor.
    # Two rows: a size of 1 would be taken for a constant.
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:  # a model without weights is captured on stand-ins that are not meta
        value = torch.zeros(value.shape, dtype=value.dtype)
    value = value.detach().clone()
    return torch.cat([value, value]) if value.ndim and value.shape[0] == 1 else value


def _check_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    problems = [
        f"  {pytree.keystr(path)}: {type(leaf).__name__}"
        for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]
        if not isinstance(leaf, (torch.Tensor, int, float, bool, str, type(None)))
    ]
    problems += [
        f"  {pytree.keystr(path)}: {leaf.layout if leaf.layout != torch.strided else leaf.dtype} "
        f"tensor"
        for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]
        if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_quantized)
    ]
    if problems:
        raise TypeError(
            f"{type(module).__name__} got example inputs that cannot be captured:\n"
            + "\n".join(problems)
            + "\nInputs are dense torch tensors, numbers, strings, None, or dicts and lists of "
            "them."
        )


def _without_cache(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Ask Hugging Face models for no key/value cache: it is no part of a training program."""
    has_cache = getattr(getattr(module, "config", None), "use_cache", None)
    if has_cache and "use_cache" not in kwargs and "use_cache" in _parameters(module):
        return {**kwargs, "use_cache": False}
    return kwargs


def _parameters(module: nn.Module) -> set[str]:
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module  # pyright: ignore
    return set(inspect.signature(inner.forward).parameters)  # pyright: ignore


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic: bool,
    attention: bool,
    notes: list[str],
) -> torch.export.ExportedProgram:
    """Export with as much freedom as the model allows: ours first, then the model's own attention,
    then static.
    """
    attempts = [
        (a, d)
        for d in ([True, False] if dynamic else [False])
        for a in ([True, False] if attention else [False])
    ]
    errors: list[str] = []
    last: Exception | None = None
    for use_attention, use_dynamic in attempts:
        try:
            with (
                attention_as_operator(module, enabled=use_attention) as reason,
                without_cache(module),
                _named_arguments(module, kwargs),
                _tracing(),
                _ParameterData(notes),
                Branches(module, args, kwargs, notes),
                own_backwards(notes),
                bounded_sizes(notes),
                _modules_stay(),
            ):
                shapes = _dynamic_shapes(module, args, kwargs) if use_dynamic else None
                exported = torch.export.export(
                    module,
                    args,
                    kwargs,
                    dynamic_shapes=shapes,
                    strict=False,
                    prefer_deferred_runtime_asserts_over_guards=True,
                )
        except Exception as error:
            errors.append(_first_lines(error))
            last = error
            continue
        if reason:
            notes.append(reason + "; its own attention is captured operator by operator")
        if errors:
            how = ("our attention operator" if use_attention else "its own attention") + (
                ", dynamic shapes" if use_dynamic else ", shapes fixed to the example"
            )
            notes.append(f"captured with {how} because: {errors[0]}")
            log.info("%s: %s", type(module).__name__, notes[-1])
        return exported
    raise CaptureError(
        f"{type(module).__name__} could not be captured by torch.export.\n"
        f"  {errors[0]}\n"
        f"{_advice(errors[0])}"
    ) from last


def _advice(reason: str) -> str:
    """What to do about the exporter's reason."""
    if "cuda" in reason.lower():
        return (
            "Needed: code that leaves tensors where they are. Drop .cuda() and device='cuda' from "
            "the model; XLA puts everything on JAX's device."
        )
    if reason.startswith(("RuntimeError: ", "TypeError: ")) and "data-dependent" not in reason:
        return (
            "That may be the model's own error: call it in eager PyTorch with these inputs and "
            "look at their shapes and dtypes."
        )
    return (
        "Needed: a forward whose Python does not branch on tensor values. "
        "Run `headrace check` on the model for where it happens, or set the option that avoids "
        "that branch."
    )


def _first_lines(error: BaseException) -> str:
    """The exporter's reason and, where it names one, the model's own line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: " + (lines[0] if lines else "")
    own = [x for x in lines if x.startswith("File ") and "/torch/" not in x]
    return reason[:400] + (f"\n  at {own[-1]}" if own else "")


@contextlib.contextmanager
def _tracing() -> Generator[None]:
    # A failed attempt makes the exporter print its whole graph; the reason is in the exception.
    noisy = logging.getLogger("torch")
    level = noisy.level
    noisy.setLevel(logging.CRITICAL)
    # Distributions assert their parameters' values, which are no part of a program.
    validate = Distribution._validate_args  # pyright: ignore[reportPrivateUsage]
    Distribution.set_default_validate_args(False)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), _ConstantDraws():
            warnings.simplefilter("ignore")
            yield
    finally:
        noisy.setLevel(level)
        Distribution.set_default_validate_args(validate)


@contextlib.contextmanager
def _named_arguments(module: nn.Module, kwargs: Mapping[str, Any]) -> Generator[None]:
    """Give arguments that `forward` takes as **kwargs (PEFT's wrappers) a name of their own.

    torch.export 2.13 mixes up dynamic shapes of arguments that arrive through **kwargs.
    """
    signature = inspect.signature(module.forward)
    hidden = [name for name in kwargs if name not in signature.parameters]
    if not hidden:
        yield
        return
    original, own = module.forward, module.__dict__.get("forward")

    def forward(*args: Any, **given: Any) -> Any:
        return original(*args, **given)

    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in hidden]
    forward.__signature__ = signature.replace(parameters=kept + named)  # pyright: ignore
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


class _ConstantDraws(TorchFunctionMode):
    """`torch.rand([]) < 0.0` is False for every draw.

    Encoder-decoders skip layers with `if torch.rand([]) < self.layerdrop`; with layerdrop = 0 the
    branch never depends on the draw, but the exporter cannot know.
    """

    def __init__(self) -> None:
        super().__init__()
        self._draws: set[int] = set()
        self._keep: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.__lt__, torch.Tensor.lt, torch.lt) and len(args) == 2:
            left, right = args
            if id(left) in self._draws and isinstance(right, (int, float)) and right <= 0:
                return False
        result = func(*args, **kwargs)
        if func is torch.rand and isinstance(result, torch.Tensor) and result.ndim == 0:
            self._draws.add(id(result))
            self._keep.append(result)
        return result


@contextlib.contextmanager
def _modules_stay() -> Generator[None]:
    """`module.to(dtype)` inside a forward is nothing when the module is of that dtype already.

    The exporter cannot follow the swap of parameters by themselves (routers that compute in
    float32).
    """
    original = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
        tensors = [*module.parameters(), *module.buffers()]
        same = all(
            (device is None or t.device.type == device.type)
            and (dtype is None or not t.is_floating_point() or t.dtype == dtype)
            for t in tensors
        )
        return module if same else original(module, *args, **kwargs)

    nn.Module.to = to  # pyright: ignore
    try:
        yield
    finally:
        nn.Module.to = original


class _ParameterData(TorchFunctionMode):
    """`parameter.data` is the detached parameter; what is written into it is left out, with a note.

    The exporter loses sight of `.data`. Gemma 3n clamps coefficients there before each use.
    """

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes
        self._data: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA:
            data = args[0].detach()
            self._data[id(data)] = data
            return data
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place and args and id(args[0]) in self._data:
            note = f"the forward writes into a parameter (.data.{name}); the program does not"
            if note not in self._notes:
                self._notes.append(note)
            return args[0]
        return func(*args, **(kwargs or {}))


_DATA = torch.Tensor.data.__get__  # pyright: ignore


def _dynamic_shapes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Dim.AUTO` for the batch of every tensor and the sequence of integer and boolean ones."""
    auto = torch.export.Dim.AUTO

    def dims(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            return None
        token_like = not leaf.dtype.is_floating_point and not leaf.dtype.is_complex
        return {0: auto, 1: auto} if leaf.ndim == 2 and token_like else {0: auto}

    # Keyed as the exporter wants it: by the names of forward, PEFT's **kwargs included.
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return pytree.tree_map(dims, dict(bound))


def _functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Rewrite mutation away and decompose what has no rule; a graph that needs neither is left
    alone.
    """
    for _ in range(4):
        table = _decompositions(exported)
        if not (table or _mutates(exported)):
            return exported
        with warnings.catch_warnings(), answered_sizes():
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions(table)
    return exported


def _calls(exported: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    return [
        node
        for graph_module in exported.graph_module.modules()
        if isinstance(graph_module, torch.fx.GraphModule)
        for node in graph_module.graph.nodes
        if node.op == "call_function" and isinstance(node.target, OpOverload)
    ]


def _mutates(exported: torch.export.ExportedProgram) -> bool:
    return any(
        node.target._schema.is_mutable or _updates_statistics(node)  # pyright: ignore
        for node in _calls(exported)
    )


def _updates_statistics(node: torch.fx.Node) -> bool:
    """Batch norm in training mode writes its running statistics although its schema does not say
    so.
    """
    flags: dict[Any, int] = {
        torch.ops.aten.batch_norm.default: 5,
        torch.ops.aten.instance_norm.default: 5,
    }
    return node.target in flags and bool(node.args[flags[node.target]]) and node.args[3] is not None


def _decompositions(exported: torch.export.ExportedProgram) -> dict[Any, Any]:
    used: set[Any] = {n.target for n in _calls(exported)}
    missing = {
        op
        for op in used
        if lookup(op) is None
        and op not in SELECTING  # what they give is bounded by a pass
        and not op._schema.is_mutable
        and op.namespace in ("aten", "prims")
    }
    missing.discard(torch.ops.aten.sym_size.int)  # the lowering reads sizes itself
    return dict(exporter_table(missing)) if missing else {}


def _program(
    module: nn.Module, exported: torch.export.ExportedProgram, notes: list[str]
) -> Program:
    signature = exported.graph_signature
    tied = _tied_names(module)
    kinds = {
        TorchInputKind.PARAMETER: "parameter",
        TorchInputKind.BUFFER: "buffer",
        TorchInputKind.CONSTANT_TENSOR: "constant",
        TorchInputKind.USER_INPUT: "user",
    }
    paths = _user_paths(exported)
    inputs: list[Input] = []
    constants: dict[str, torch.Tensor] = {}
    owned = dict(module.named_buffers(remove_duplicate=False))
    graph = _flat_graph(exported)
    # fx renames a placeholder called like a Python builtin (`input`), so names come from the graph.
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for spec, node in zip(signature.input_specs, placeholders, strict=True):
        if spec.kind not in kinds:
            raise CaptureError(
                f"{type(module).__name__}: inputs of kind {spec.kind.name} are not supported"
            )
        name = spec.target if spec.target is not None else next(paths)
        name = tied.get(name, name)
        kind = kinds[spec.kind]
        if kind == "constant" or (kind == "buffer" and name not in owned):
            kind = "constant"
            constants[name] = exported.constants[spec.target]  # pyright: ignore
        key = name
        inputs.append(Input(node=node.name, kind=kind, names=(name,), key=key))  # pyright: ignore
    outputs = [
        Output(kind="buffer", name=spec.target or "")
        if spec.kind is OutputKind.BUFFER_MUTATION
        else Output(kind="user")
        for spec in signature.output_specs
        if spec.kind is not OutputKind.USER_INPUT_MUTATION
    ]
    if len(outputs) != len(signature.output_specs):
        notes.append("the module writes into its inputs; those writes are not returned")
        _drop_outputs(
            graph, [s.kind is OutputKind.USER_INPUT_MUTATION for s in signature.output_specs]
        )
    return Program(
        name=type(module).__name__,
        graph=graph,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        in_spec=exported.call_spec.in_spec,
        out_spec=exported.call_spec.out_spec,
        constants=constants,
        tied=tied,
        trainable=frozenset(n for n, p in module.named_parameters() if p.requires_grad),
        dynamic=any(
            isinstance(d, torch.SymInt)
            for n in graph.nodes
            if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)
            for d in n.meta["val"].shape
        ),
    )


def _drop_outputs(graph: torch.fx.Graph, drop: list[bool]) -> None:
    node = next(iter(reversed(graph.nodes)))
    node.args = (tuple(v for v, out in zip(node.args[0], drop, strict=True) if not out),)


def _user_paths(exported: torch.export.ExportedProgram) -> Iterator[str]:
    spec: Any = exported.call_spec.in_spec
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    for path, _ in pytree.tree_flatten_with_path(tree)[0]:
        yield _path_name(path)


def _path_name(path: tuple[Any, ...]) -> str:
    head, rest = path[0], path[1:]
    if head == pytree.SequenceKey(0):
        return "args" + pytree.keystr(rest)
    first = rest[0]
    name = str(first.key) if isinstance(first, pytree.MappingKey) else pytree.keystr((first,))
    return name + pytree.keystr(rest[1:])


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Further names of a tied parameter or buffer -> the first one, which is the name that is
    stored.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    everything = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in everything:
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return tied


def _flat_graph(exported: torch.export.ExportedProgram) -> torch.fx.Graph:
    from headrace.bridge.passes.inline import inline_regions

    return inline_regions(exported.graph_module)

"""A PyTorch training step -> one functional graph of ATen operators, autograd's included.

The step runs once, with fake tensors in the places of parameters, buffers and optimizer state,
under PyTorch's own autograd and functionalisation: `loss.backward()`, hooks, custom autograd
functions and in-place updates mean what they mean in eager mode. Hyperparameters and optimizer
counters are symbols (`SymFloat`), so that no value of theirs is part of the graph.

What PyTorch cannot record is refused with the line of the user's that did it: branches on tensor
values, tensors that outlive the step in a Python list, in-place writes to tensors that no module
owns.

Does not know: JAX, how the graph is run.
"""

# Fake tensors, functional tensors and proxies have no public door in torch.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch import nn
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.overrides import TorchFunctionMode

from headrace.bridge.ops.registry import lookup, rules
from headrace.bridge.step import scaler as scaling
from headrace.bridge.step.state import Inventory, installed, is_counter
from headrace.errors import CaptureError

_IN_PLACE_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "__iadd__": lambda a, b: a + b,
    "add_": lambda a, b: a + b,
    "__isub__": lambda a, b: a - b,
    "sub_": lambda a, b: a - b,
    "__imul__": lambda a, b: a * b,
    "mul_": lambda a, b: a * b,
    "copy_": lambda _, b: b,
    "fill_": lambda _, b: b,
    "zero_": lambda _, __: 0.0,
}
_TORCH_FOLDER = str(torch.__path__[0])
_OWN_FOLDER = __file__.rsplit("/", 1)[0]
LIVE = object()  # stands for a traced leaf of the step's result


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """One traced step.

    Placeholders of `graph` stand, in order, for the inventory's slots, the entry gradients (slot
    indices `entry_grads`), the input tensors, the numbers, and `externals` (tensors of nobody's).
    Its results are the exit values of the slots, exit gradients (`exit_grads`), new optimizer state
    (`new_state`: optimizer index, slot index of the parameter, key), and then the step's own
    results, put together by `out_spec` with `fixed` for the leaves that are no tensors.
    `counters` maps the id of a counter's tensor to its symbol after the step; `guards` are what the
    step's Python found true of the symbols; `boundaries` are where optimizer steps begin and end.
    `skipped` are the optimizers (indices) whose step a loss scaler may leave out; after the new
    state the graph gives for each of them a number that is above zero when it has.
    `modes` are the modules whose `training` flag the step looked at, with its value before.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    entry_grads: tuple[int, ...]
    exit_grads: tuple[int, ...]
    new_state: tuple[tuple[int, int, str], ...]
    num_inputs: int
    externals: tuple[torch.Tensor, ...]
    number_symbols: tuple[Any, ...]
    counters: dict[int, Any]
    guards: tuple[Any, ...]
    out_spec: Any
    fixed: tuple[Any, ...]
    boundaries: tuple[int, ...] = field(default=())
    modes: tuple[tuple[nn.Module, bool], ...] = field(default=())
    skipped: tuple[int, ...] = field(default=())


@dataclass(kw_only=True)
class _Found:
    """What is known only once the step has run."""

    exit_grads: tuple[int, ...] = ()
    new_state: tuple[tuple[int, int, str], ...] = ()
    out_spec: Any = None
    fixed: tuple[Any, ...] = ()
    counters: dict[int, Any] = field(default_factory=dict)
    boundaries: list[int] = field(default_factory=list)
    modes: dict[nn.Module, bool] = field(default_factory=dict)
    skipped: tuple[int, ...] = ()


def trace_step(
    train_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inventory: Inventory,
    entry_grads: Sequence[int],
) -> Traced:
    """Run `train_step(*args, **kwargs)` once on fake tensors and return what it did.

    `entry_grads` are the slots whose `.grad` exists when the step begins. Nothing of the user's is
    changed: modules and optimizers hold their own tensors again when this returns or raises.

    Raises CaptureError as the module's head says; errors of the step's own are passed on.
    """
    shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    fake = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    found = _Found()

    def to_fake(tensor: torch.Tensor) -> torch.Tensor:
        return fake.from_tensor(tensor.detach(), static_shapes=True)

    state = [to_fake(s.tensor) for s in inventory.slots]
    grads = [to_fake(inventory.slots[i].tensor) for i in entry_grads]
    tensors = [to_fake(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    values = [n.read() for n in inventory.numbers]
    values += [leaf for leaf in leaves if type(leaf) is float]
    symbols = [_symbol(shape_env, v, i) for i, v in enumerate(values)]
    names = tuple(s.node.expr for s in symbols)  # now: a guard of equality replaces a symbol
    substitute = _Substitute(fake)

    def run(*flat: Any) -> list[Any]:
        rest = iter(flat)
        with FunctionalTensorMode():
            twins = [FunctionalTensor.to_functional(next(rest)) for _ in state]
            twin_grads = [FunctionalTensor.to_functional(next(rest)) for _ in grads]
            inputs = [FunctionalTensor.to_functional(next(rest)) for _ in tensors]
            numbers = list(rest)
            _mirror(inventory, twins)
            call_args, call_kwargs = _inputs(leaves, spec, inputs, numbers, inventory)
            substitute.start(inventory, twins, numbers)
            skips: dict[int, torch.Tensor] = {}
            by_slot = dict(zip(entry_grads, twin_grads, strict=True))
            with installed(inventory, twins, numbers[: len(inventory.numbers)], by_slot):
                with (
                    _marks(inventory, found),
                    _symbolic_bounds(inventory),
                    _no_seeds(),
                    _modes(found),
                    scaling.traceable(inventory.scalers, inventory.optimizers, skips),
                    substitute,
                    torch.enable_grad(),
                ):
                    result = train_step(*call_args, **call_kwargs)
                return _results(inventory, twins, result, found, substitute, skips)

    with fake, enable_python_dispatcher(), _quiet(), _portable_kernels():
        try:
            module = make_fx(
                run,
                decomposition_table=_decompositions(),
                tracing_mode="real",
                _allow_non_fake_inputs=True,
                _error_on_data_dependent_ops=False,
                record_stack_traces=True,
            )(*state, *grads, *tensors, *symbols)
        except (
            GuardOnDataDependentSymNode,
            DataDependentOutputException,
            DynamicOutputShapeException,
        ) as error:
            raise _data_dependent(error) from error
        except Exception as error:
            if "cuda" not in str(error).lower() or isinstance(error, CaptureError):
                raise
            raise CaptureError(
                f"the step's code asks for a GPU of torch's.\n  {_place(error)}\n"
                "Needed: code that leaves tensors where they are. Drop .cuda() and "
                "device='cuda'; XLA puts the whole step on JAX's device."
            ) from error
    substitute.finish()
    _refuse_leaks(substitute)
    graph = _placeholders_first(module.graph)
    return Traced(
        graph=graph,
        constants=_constants(module),
        entry_grads=tuple(entry_grads),
        exit_grads=found.exit_grads,
        new_state=found.new_state,
        num_inputs=len(tensors),
        externals=tuple(substitute.externals),
        number_symbols=names,
        counters=found.counters,
        guards=tuple(g.expr for g in shape_env.guards),
        out_spec=found.out_spec,
        fixed=found.fixed,
        boundaries=tuple(found.boundaries),
        modes=tuple(found.modes.items()),
        skipped=found.skipped,
    )


def _symbol(shape_env: ShapeEnv, value: float, index: int) -> Any:
    source = ConstantSource(f"number{index}")
    # DYNAMIC, so that 0.0 and 1.0 are symbols too
    symbol = shape_env.create_unspecified_symbol(
        value, source=source, dynamic_dim=DimDynamic.DYNAMIC
    )
    return shape_env.create_symfloatnode(symbol, hint=value, source=source)


def _mirror(inventory: Inventory, twins: Sequence[Any]) -> None:
    """Twins are leaves of autograd, parameters and have hooks where the user's tensors do."""
    for slot, twin in zip(inventory.slots, twins, strict=True):
        if slot.tensor.requires_grad:
            twin.requires_grad_(True)
        if isinstance(slot.tensor, nn.Parameter):
            twin._is_param = True
        for hook in (slot.tensor._backward_hooks or {}).values():
            twin.register_hook(hook)
        for hook in (getattr(slot.tensor, "_post_accumulate_grad_hooks", None) or {}).values():
            twin.register_post_accumulate_grad_hook(hook)


def _inputs(
    leaves: Sequence[Any], spec: Any, inputs: Sequence[Any], numbers: Sequence[Any], inventory: Any
) -> tuple[Any, Any]:
    tensors, floats = iter(inputs), iter(numbers[len(inventory.numbers) :])
    traced = [
        next(tensors) if isinstance(x, torch.Tensor) else next(floats) if type(x) is float else x
        for x in leaves
    ]
    return pytree.tree_unflatten(traced, spec)


@contextlib.contextmanager
def _marks(inventory: Inventory, found: _Found) -> Generator[None]:
    """Note in the graph where each `optimizer.step()` begins and ends."""

    def mark(*_: Any, **__: Any) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        found.boundaries.append(len(mode.tracer.graph.nodes))

    handles = [o.register_step_pre_hook(mark) for o in inventory.optimizers]
    handles += [o.register_step_post_hook(mark) for o in inventory.optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _modes(found: _Found) -> Generator[None]:
    """Note which modules' `training` is looked at: a program depends on no other's."""

    def read(module: nn.Module) -> bool:
        found.modes.setdefault(module, vars(module)["training"])
        return vars(module)["training"]

    def write(module: nn.Module, value: bool) -> None:
        if "training" in vars(module):  # not while the module is being made
            found.modes.setdefault(module, vars(module)["training"])
        vars(module)["training"] = value

    # a property goes before what stands in the module's own __dict__
    nn.Module.training = property(read, write)  # pyright: ignore
    try:
        yield
    finally:
        del nn.Module.training


@contextlib.contextmanager
def _symbolic_bounds(inventory: Inventory) -> Generator[None]:
    """`max` and `min` in optimizers' code on numbers of the device (Adafactor's scales)."""
    scopes = {id(s): s for o in inventory.optimizers for s in [_scope(type(o))]}
    changed = [s for s in scopes.values() if "max" not in s and "min" not in s]

    def bound(builtin: Any, symbolic: Any) -> Any:
        def choose(*args: Any, **kwargs: Any) -> Any:
            two = len(args) == 2 and not kwargs
            if two and any(isinstance(a, torch.SymFloat) for a in args):
                return symbolic(*args)
            return builtin(*args, **kwargs)

        return choose

    for scope in changed:
        scope.update(max=bound(max, torch.sym_max), min=bound(min, torch.sym_min))
    try:
        yield
    finally:
        for scope in changed:
            del scope["max"], scope["min"]


@contextlib.contextmanager
def _no_seeds() -> Generator[None]:
    """Seeding inside the step would happen once and never again."""
    names = ("manual_seed", "seed", "set_rng_state")

    def refusing(name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise CaptureError(
                f"the step calls torch.{name} ({user_line()}).\n"
                "Needed: randomness from outside, so that each call draws anew. Call it before "
                "the step."
            )

        return refuse

    before = {name: getattr(torch, name) for name in names}
    try:
        for name in names:
            setattr(torch, name, refusing(name))
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


def _scope(kind: type) -> dict[str, Any]:
    """Globals of the module that an optimizer's code stands in."""
    step: Any = inspect.unwrap(kind.step)  # pyright: ignore
    return step.__globals__


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _portable_kernels() -> Generator[None]:
    """No kernels of one device in the graph: attention and recurrent layers as plain operators."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):  # pyright: ignore
        yield


def _decompositions() -> dict[Any, Any]:
    """PyTorch's own decompositions for what has no rule; operators with a rule stay whole."""
    core: dict[Any, Any] = dict(core_aten_decompositions().items())
    known: dict[Any, Any] = {**decomposition_table, **core}
    table = {op: rule for op, rule in core.items() if lookup(op) is None}
    for name in ("batch_norm_backward", "rrelu_with_noise_backward"):
        op = getattr(torch.ops.aten, name).default
        if op in known:
            table[op] = known[op]
    return table | _foreach()


def _foreach() -> dict[Any, Any]:
    """`torch._foreach_*` as the operator on each tensor of the list."""
    table: dict[Any, Any] = {}
    for name in dir(torch.ops.aten):
        if not name.startswith("_foreach_") or name.endswith("_"):
            continue
        function = getattr(torch, name.removeprefix("_foreach_"), None)
        function = torch.linalg.vector_norm if name == "_foreach_norm" else function
        if function is None:
            continue
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            if "out" not in overload:
                table[getattr(packet, overload)] = _each(function)
    return table


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> list[Any]:
        count = len(args[0])
        rows = [
            [a[i] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args]
            for i in range(count)
        ]
        named = [
            {
                k: v[i] if isinstance(v, (list, tuple)) and len(v) == count else v
                for k, v in kwargs.items()
            }
            for i in range(count)
        ]
        return [function(*row, **more) for row, more in zip(rows, named, strict=True)]

    return call


class _Substitute(TorchFunctionMode):
    """Between the step's Python and torch: real tensors become their twins, counters numbers.

    A real tensor that no module owns becomes one more input of the graph (`externals`), so that its
    value is never a constant.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.externals: list[torch.Tensor] = []
        self.counters: dict[int, Any] = {}
        self._fake = fake
        self._twins: dict[int, Any] = {}
        self._keep: list[Any] = []
        self._external: set[int] = set()
        self._made: list[tuple[Any, str]] = []

    def start(self, inventory: Inventory, twins: Sequence[Any], numbers: Sequence[Any]) -> None:
        self._twins = {id(s.tensor): t for s, t in zip(inventory.slots, twins, strict=True)}
        for number, value in zip(inventory.numbers, numbers, strict=False):
            for tensor in number.tensors:
                self.counters[id(tensor)] = value
                self._keep.append(tensor)

    def finish(self) -> None:
        self._twins, self._keep = {}, []

    def alive(self) -> list[tuple[Any, str]]:
        """Traced tensors that something still holds, with the line that made each."""
        return [(ref(), line) for ref, line in self._made if ref() is not None]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], torch.Tensor) and id(args[0]) in self.counters:
            handled = self._counter(name, args)
            if handled is not NotImplemented:
                return handled
        traced, named = pytree.tree_map_only(torch.Tensor, self._twin, (args, kwargs))
        self._refuse_lost_write(name, args, kwargs)
        result = func(*traced, **named)
        if isinstance(result, FunctionalTensor):
            self._made.append((weakref.ref(result), user_line()))
        return result

    def _twin(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, FunctionalTensor):
            return tensor
        if id(tensor) in self._twins:
            return self._twins[id(tensor)]
        if id(tensor) in self.counters:
            return torch.scalar_tensor(self.counters[id(tensor)], dtype=tensor.dtype)
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return tensor
        return self._external_twin(tensor)

    def _external_twin(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad:
            raise CaptureError(
                f"the step uses a tensor of shape {list(tensor.shape)} that requires a gradient "
                f"but belongs to no module or optimizer given ({user_line()}).\n"
                "Needed: every model and optimizer of the step. Pass them as model=[...] and "
                "optimizer=[...]."
            )
        mode = get_proxy_mode()
        assert mode is not None
        fake = self._fake.from_tensor(tensor.detach(), static_shapes=True)
        proxy = mode.tracer.create_proxy("placeholder", f"external_{len(self.externals)}", (), {})
        proxy.node.meta["val"] = fake
        track_tensor_tree(fake, proxy, constant=None, tracer=mode.tracer)
        twin = FunctionalTensor.to_functional(fake)
        self.externals.append(tensor)
        self._external.add(id(tensor))
        self._twins[id(tensor)] = twin
        return twin

    def _refuse_lost_write(self, name: str, args: Any, kwargs: Any) -> None:
        in_place = name.endswith("_") and not name.startswith("_")
        in_place |= name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        written = [args[0]] if in_place and args else []
        written += [kwargs["out"]] if isinstance(kwargs.get("out"), torch.Tensor) else []
        for tensor in written + ([args[0]] if name == "__setitem__" else []):
            if id(tensor) in self._external:
                raise CaptureError(
                    f"the step writes into a tensor of shape {list(tensor.shape)} that no module "
                    f"owns, by `{name}` ({user_line()}).\n"
                    "Needed: state that lives between calls in a module or an optimizer. Register "
                    "the tensor: model.register_buffer(name, tensor)."
                )

    def _counter(self, name: str, args: Any) -> Any:
        tensor = args[0]
        value = self.counters[id(tensor)]
        if name in ("item", "__float__"):
            return value
        if name not in _IN_PLACE_NUMBERS:
            return NotImplemented
        operand = args[1] if len(args) > 1 else None
        if isinstance(operand, torch.Tensor):
            if id(operand) not in self.counters:
                raise CaptureError(
                    f"an optimizer counts with a tensor: `{name}` ({user_line()}) writes a traced "
                    "value into a number it keeps on the host.\n"
                    "Needed: an optimizer whose counters change by Python numbers, as those of "
                    "torch.optim but ASGD do."
                )
            operand = self.counters[id(operand)]
        self.counters[id(tensor)] = _IN_PLACE_NUMBERS[name](value, operand)
        return tensor


def user_line() -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH_FOLDER, _OWN_FOLDER)) and "contextlib" not in file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"


def _results(
    inventory: Inventory,
    twins: Sequence[Any],
    result: Any,
    found: _Found,
    substitute: Any,
    skips: Mapping[int, torch.Tensor],
) -> list[Any]:
    """Exit values of everything owned, then the step's own results, as plain traced tensors."""
    first: dict[int, Any] = {}
    for container, key, i in inventory.places:
        first.setdefault(i, container.get(key))
    exits = [first.get(i, twin) for i, twin in enumerate(twins)]
    exits = [t if e is None else e for e, t in zip(exits, twins, strict=True)]
    states, found.new_state = _state_results(inventory, twins)
    exits[inventory.num_params :] = [
        states.get(s.key, e)
        for s, e in zip(
            inventory.slots[inventory.num_params :], exits[inventory.num_params :], strict=True
        )
    ]
    params = range(inventory.num_params)
    found.exit_grads = tuple(i for i in params if twins[i].grad is not None)
    grads = [twins[i].grad for i in found.exit_grads]
    new = [states[o, i, key] for o, i, key in found.new_state]
    new += skips.values()
    found.skipped = tuple(skips)
    leaves, found.out_spec = pytree.tree_flatten(result)
    live = [_is_traced(leaf) for leaf in leaves]
    found.fixed = tuple(
        LIVE if is_live else leaf for leaf, is_live in zip(leaves, live, strict=True)
    )
    found.counters = dict(substitute.counters)
    own = [x for x, is_live in zip(leaves, live, strict=True) if is_live]
    return [_plain(x) for x in (*exits, *grads, *new, *own)]


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, torch.SymFloat, torch.SymInt, torch.SymBool))


def _state_results(
    inventory: Inventory, twins: Sequence[Any]
) -> tuple[dict[Any, Any], tuple[tuple[int, int, str], ...]]:
    names = {id(twin): i for i, twin in enumerate(twins[: inventory.num_params])}
    known = {s.key for s in inventory.slots}
    values: dict[Any, Any] = {}
    new: list[tuple[int, int, str]] = []
    for o, optimizer in enumerate(inventory.optimizers):
        for p, state in optimizer.state.items():
            if id(p) not in names:
                continue
            i = names[id(p)]
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    _refuse_python_number(optimizer, key, value)
                    continue
                slot = ("state", o, inventory.slots[i].name, key)
                if slot in known:
                    values[slot] = value
                elif isinstance(value, FunctionalTensor):
                    values[o, i, key] = value
                    new.append((o, i, key))
    return values, tuple(new)


def _refuse_python_number(optimizer: Any, key: str, value: Any) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise CaptureError(
            f"{type(optimizer).__name__} keeps the Python number state[{key!r}], which a compiled "
            "step cannot count on.\n"
            f"Needed: a tensor. In the optimizer, use state[{key!r}] = torch.tensor(0.0) and "
            f"state[{key!r}] += 1."
        )


def _plain(value: Any) -> Any:
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)  # pyright: ignore[reportPrivateImportUsage]
    return torch._from_functional_tensor(value.elem)  # pyright: ignore[reportPrivateImportUsage]


def _place(error: Exception) -> str:
    """The innermost line of the user's that led to the error."""
    own = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((_TORCH_FOLDER, _OWN_FOLDER))
        and "contextlib" not in f.filename
    ]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else "an unknown line"


def _data_dependent(error: Exception) -> CaptureError:
    frames = traceback.extract_tb(error.__traceback__)
    where = _place(error)
    optim = [f for f in frames if "/torch/optim/" in f.filename or "/torch/nn/utils" in f.filename]
    if optim:
        where += f"\n  by {optim[-1].filename}:{optim[-1].lineno}: {optim[-1].line}"
    return CaptureError(
        "the step's Python depends on a value that only the device knows.\n"
        f"  {where}\n"
        "Needed: the same operators whatever the values. Use torch.where or a mask instead of a "
        "branch, a fixed size instead of one that depends on values, and look at the loss after "
        "the step returns."
    )


def _refuse_leaks(substitute: _Substitute) -> None:
    gc.collect()
    lines = sorted({line for _, line in substitute.alive()})
    if lines:
        raise CaptureError(
            f"{len(lines)} tensors that the step makes are kept outside it, in a Python list or "
            "an attribute; a compiled step runs that Python once only.\n"
            + "\n".join(f"  made at {line}" for line in lines[:10])
            + "\nReturn them from the step and keep them there, or register a buffer for them."
        )


def _placeholders_first(graph: fx.Graph) -> fx.Graph:
    anchor = next(n for n in graph.nodes)
    late = [n for n in graph.nodes if n.op == "placeholder"]
    first = True
    previous = anchor
    for node in late:
        if first and node is anchor:
            first = False
            continue
        previous.append(node)
        previous = node
    return graph


def _constants(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value: Any = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            found[str(node.target)] = value
    return found


__all__ = ["Traced", "is_counter", "rules", "trace_step", "user_line"]

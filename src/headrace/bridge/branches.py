"""Branches on values while a model is traced: `if mask.any():`.

The exporter has no values. A condition that follows from the inputs alone is computed on the
example, the trace takes the branch that the example takes, and `headrace::require` asks the
condition again whenever the program runs. A condition on weights, buffers or random numbers is
refused with its line: training changes them, so the other branch would come.

Assertions (`assert torch.all(x >= 0)`) are taken to hold and noted. Does not know: JAX.
"""

# Operators' schemas and the switch of torch functions have no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import inspect
import linecache
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from headrace.bridge.program import behind
from headrace.errors import CaptureError

_SYM_SIZE = torch.ops.aten.sym_size.int
_TORCH = torch.__path__[0]
_OWN = str(Path(__file__).parent)


class Branches(TorchFunctionMode):
    """Decides conditions on tensors; open while `module` is traced on the example inputs."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], notes: list[str]
    ) -> None:
        super().__init__()
        self._module, self._notes = module, notes
        self._example: tuple[tuple[Any, ...], dict[str, Any]] = args, dict(kwargs)
        self._given: dict[fx.Node, Tensor] = {}  # an input as traced -> its example
        self._hook: Any = None

    def __enter__(self) -> Branches:
        self._hook = self._module.register_forward_pre_hook(self._entered, with_kwargs=True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode = get_proxy_mode()
        if mode is None:
            return
        example, named = self._example
        pairs = [(args, example), *((kwargs[k], named[k]) for k in kwargs if k in named)]
        for traced, real in pairs:
            leaves = pytree.tree_leaves(traced), pytree.tree_leaves(real)
            for given, value in zip(*leaves, strict=False):
                node = _node(given, mode.tracer) if isinstance(given, Tensor) else None
                if node is not None and isinstance(value, Tensor) and value.ndim == given.ndim:
                    self._given[node] = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is Tensor.__bool__ or func is Tensor.item
        if not asks or not isinstance(args[0], FakeTensor) or args[0].constant is not None:
            return func(*args, **(kwargs or {}))
        frame = _calling_frame()
        line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        is_number = func is Tensor.item and args[0].dtype is not torch.bool
        if line.strip().startswith("assert "):
            # a number in the assertion's own line goes nowhere else: the example's will do
            answer: Any = self._value(args[0])[0] if is_number else True
            if answer is not None:
                self._note(f"not checked by the program: {line.strip()[:120]}")
                return answer
        if is_number:
            return func(*args, **(kwargs or {}))
        where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self._decide(func, args[0], f"{where} asks `{line.strip()[:120]}`")

    def _decide(self, func: Any, condition: Tensor, where: str) -> Any:
        found, reason = self._value(condition)
        value = None if found is None else bool(found)
        if value is None and func is Tensor.item:
            return func(condition)  # it may be used as a number
        if value is None:
            raise CaptureError(
                f"{where}, a condition on {reason}, which has no fixed answer.\n"
                "Needed: torch.where at that line, or a model option that avoids the branch."
            )
        why = f"{where}; the program is for batches where that tensor is {value}"
        torch.ops.headrace.require(condition.ne(0) == value, why)
        self._note(why + ", as in the example, and checks it")
        return value

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _value(self, condition: Tensor) -> tuple[Any, str]:
        """The number on the example, or None and what it depends on that is not fixed."""
        mode = get_proxy_mode()
        if mode is None:
            return None, "a tensor outside of the trace"
        tracer: Any = mode.tracer
        node = _node(condition, tracer)
        if node is None:
            return None, "a tensor outside of the trace"
        known = self._given
        needed = _needed(node)
        reason = next((r for n in needed if (r := _unknown(n, known))), "")
        if reason:
            return None, reason
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            return _evaluated(node, needed, known, tracer.root).item(), ""


def _node(tensor: Tensor, tracer: Any) -> fx.Node | None:
    slot: Any = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def _needed(node: fx.Node) -> list[fx.Node]:
    """All nodes behind a value, writes into them included, in graph order."""
    return behind(node, lambda n: [*n.all_input_nodes, *_written(n)])


def _written(node: fx.Node) -> list[fx.Node]:
    """Nodes that write into a value, through views of it too."""
    found: list[fx.Node] = []
    for user in node.users:
        if not isinstance(user.target, OpOverload) or user.args[0] is not node:
            continue
        schema = user.target._schema
        if schema.is_mutable:
            found.append(user)
        elif any(r.alias_info is not None for r in schema.returns):
            found += _written(user)
    return found


def _unknown(node: fx.Node, known: Mapping[fx.Node, Tensor]) -> str:
    """What makes a node's value change from batch to batch other than the inputs; "" if nothing."""
    if node.op == "placeholder":
        return "" if node in known else "a parameter or buffer"
    if isinstance(node.target, OpOverload) and node.target.namespace == "headrace":
        return "a mask of the model's own" if node.target.name() == "headrace::mask" else ""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return "random numbers"
    return ""


def _evaluated(
    node: fx.Node, needed: list[fx.Node], known: Mapping[fx.Node, Tensor], root: Any
) -> Any:
    env: dict[fx.Node, Any] = {n: real.clone() for n, real in known.items()}
    for current in needed:
        if current in env:
            continue
        if current.op == "get_attr":
            value = getattr(root, str(current.target))
            env[current] = value.constant if isinstance(value, FakeTensor) else value
            continue
        args, kwargs = fx.map_arg((current.args, current.kwargs), lambda n: env[n])
        env[current] = current.target(*args, **kwargs)  # pyright: ignore
    return env[node]


def _calling_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OWN)):
        frame = frame.f_back
    return frame

"""What a step's function reads and writes besides tensors: closure variables, globals, attributes.

Python values that it closes over are part of the program: they are compared before each call. What
it changes there while it is traced (a counter, a list that grows) would happen once and never
again, so it is refused.

Does not know: tensors, graphs.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler

from headrace.errors import CaptureError

_SIMPLE = (bool, int, float, str, bytes, type(None))
_CONTAINERS = (list, dict, set)


class Surroundings:
    """The variables outside a function that its code names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = _plain_function(function)
        self._owner = getattr(function, "__self__", None)
        self._cells: list[tuple[str, Any]] = []
        self._globals: list[tuple[str, dict[str, Any]]] = []
        if self._function is not None:
            code = self._function.__code__
            self._cells = list(zip(code.co_freevars, self._function.__closure__ or (), strict=True))
            scope = self._function.__globals__
            self._globals = [(n, scope) for n in _names(code) if n in scope]

    def _variables(self) -> Iterable[tuple[str, Any]]:
        for name, cell in self._cells:
            try:
                yield name, cell.cell_contents
            except ValueError:  # a variable that is not yet assigned
                continue
        for name, scope in self._globals:
            yield name, scope.get(name)
        if self._owner is not None and not isinstance(self._owner, types.ModuleType):
            yield from ((f"self.{k}", v) for k, v in getattr(self._owner, "__dict__", {}).items())

    def modules(self, given: Iterable[nn.Module]) -> dict[str, nn.Module]:
        """Modules with tensors that the function names and that are no part of those given."""
        inside = {id(m) for model in given for m in model.modules()}
        return {
            name: value
            for name, value in self._variables()
            if isinstance(value, nn.Module) and id(value) not in inside and _has_tensors(value)
        }

    def scalers(self) -> list[GradScaler]:
        """Loss scalers that the function names."""
        return [v for _, v in self._variables() if isinstance(v, GradScaler)]

    def values(self) -> tuple[Any, ...]:
        """Simple Python values among the variables: part of the program."""
        return tuple([v for _, v in self._variables() if isinstance(v, _SIMPLE)])

    def snapshot(self, modules: Sequence[nn.Module]) -> dict[Any, Any]:
        """Simple values and lengths of containers, here and in the modules' attributes."""
        found: dict[Any, Any] = {}
        for name, value in self._variables():
            found[None, name] = _summary(value)
        for module in modules:
            for name, value in vars(module).items():
                if not name.startswith("_"):
                    found[id(module), name] = _summary(value)
        return found

    def refuse_changes(self, before: dict[Any, Any], modules: Sequence[nn.Module]) -> None:
        """Raise CaptureError for what a traced run changed."""
        after = self.snapshot(modules)
        kinds = {id(m): type(m).__name__ for m in modules}
        changed = [
            f"  {kinds[owner] + '.' if owner is not None else ''}{name}: {_shown(before.get(key))}"
            f" -> {_shown(value)}"
            for key, value in after.items()
            if before.get(key) != value
            for owner, name in [key]
        ]
        if changed:
            code = self._function.__code__ if self._function is not None else None
            where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
            raise CaptureError(
                f"the step{where} changes Python values outside it, which a compiled step would "
                "do once and never again:\n"
                + "\n".join(changed)
                + "\nReturn what should be kept and keep it outside the step, or register a buffer."
            )


def _plain_function(function: Any) -> types.FunctionType | None:
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        call = vars(type(function)).get("__call__")
        return call if isinstance(call, types.FunctionType) else None
    return function


def _names(code: types.CodeType) -> set[str]:
    nested = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*(_names(c) for c in nested))


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _summary(value: Any) -> Any:
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, _CONTAINERS):
        return type(value).__name__, len(value)
    return None


def _shown(summary: Any) -> str:
    if isinstance(summary, tuple):
        return f"{summary[0]} of {summary[1]}"
    return repr(summary)

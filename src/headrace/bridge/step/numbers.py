"""Symbols of a traced step -> numbers the host computes before each call.

Learning rates, momenta and step counts enter the graph as symbols. What depends on nothing else
(`lr / (1 - beta1 ** step)`) is computed here in double precision, as eager PyTorch does, and
enters the program as one small array. Comparisons that the step's Python made on them
(`if weight_decay != 0`) are guards: they are looked at before each call.

Does not know: tensors, JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

_NAMES: dict[str, Any] = {"math": math, "torch": torch}


class _Printer(PythonPrinter):
    """Python source that runs on plain floats."""

    def _print_FloatPow(self, expr: Any) -> str:
        base, exponent = expr.args
        return f"({self._print(base)}) ** ({self._print(exponent)})"

    def _print_Max(self, expr: Any) -> str:
        return f"max({', '.join(self._print(a) for a in expr.args)})"

    def _print_Min(self, expr: Any) -> str:
        return f"min({', '.join(self._print(a) for a in expr.args)})"


def compiled(
    symbols: Sequence[sympy.Symbol], expressions: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    """`f(*values of symbols) -> values of the expressions`, as one Python function."""
    printer = _Printer()
    names = ", ".join(str(s) for s in symbols)
    body = ", ".join(_source(printer, e) for e in expressions)
    source = f"lambda {names}: ({body}{',' if expressions else ''})"
    return eval(source, dict(_NAMES))  # the source is printed from sympy, not taken from a user


def _source(printer: _Printer, expression: Any) -> str:
    if isinstance(expression, (int, float)):
        return repr(float(expression))
    text: str = printer.doprint(expression)
    return text


def needs_only(expression: Any, symbols: frozenset[Any]) -> bool:
    """Whether the expression is known on the host: nothing the device computes is in it."""
    free: set[Any] = getattr(expression, "free_symbols", set())
    return free <= symbols

"""The strict table of operator rules: exact ATen overload -> function on JAX values.

    @lowers(aten.gelu.default, promotion=INT_TO_FLOAT, opmath=True)
    def aten_gelu(self: Array, *, approximate: str = "none") -> Array: ...

A rule has ATen's own argument names; `lowers` compares them, their order, keyword-only marks
and defaults with the operator's schema and refuses a difference, a second rule for the same
overload and in-place or `out=` overloads. Arguments that say where and how memory lies
(`device`, `layout`, `generator`, ...) are dropped here unless the rule declares them; a rule
with `draws=True` takes a trailing keyword `key`, a JAX PRNG key.

Does not know: graphs, modules, how keys are derived.
"""

# Operator schemas are a private attribute in torch, and have no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import OpOverload

from headrace.bridge.dtypes import scalar_to_jax
from headrace.bridge.ops.promotion import Promotion, category, opmath_of, promoted_dtype

DEFAULT = Promotion.DEFAULT
INT_TO_FLOAT = Promotion.INT_TO_FLOAT
ALWAYS_BOOL = Promotion.ALWAYS_BOOL
BOOL_TO_LONG = Promotion.BOOL_TO_LONG
COMPLEX_TO_FLOAT = Promotion.COMPLEX_TO_FLOAT

# Where and how torch would store or seed; XLA decides the first, PRNG keys the second.
PLACEMENT = frozenset(
    [
        "device",
        "layout",
        "pin_memory",
        "memory_format",
        "generator",
        "non_blocking",
        "copy",
        "sparse_grad",
    ]
)
_NUMBER = torch.NumberType
_RULES: dict[OpOverload, Rule] = {}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one ATen overload becomes JAX: call `function` with the arguments of the ATen call."""

    op: OpOverload
    function: Callable[..., Any]
    draws: bool
    family: str
    promotion: Promotion | None

    @property
    def schema(self) -> torch.FunctionSchema:
        return self.op._schema


def lookup(op: Any) -> Rule | None:
    """The rule of exactly this overload, or None."""
    return _RULES.get(op)


def rules() -> Iterator[Rule]:
    """All rules, in order of registration."""
    return iter(_RULES.values())


def lowers(
    *ops: OpOverload,
    promotion: Promotion | None = None,
    over: tuple[str, ...] | None = None,
    opmath: bool = False,
    draws: bool = False,
    recompute: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the rule of these overloads.

    Args:
      promotion: cast the operands to torch's promoted dtype first, and the result to it at the end.
      over: names of the operands that take part in promotion; default: all tensors and Scalars.
      opmath: compute 16-bit floats in float32, as torch does inside one kernel.
      draws: the rule takes a trailing keyword `key`.
      recompute: the backward pass has the operands alone and computes the rest again. For cheap
        functions of many steps, whose intermediate values, in float32 under opmath, would be kept.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = dict(inspect.signature(function).parameters)
        if draws and parameters.pop("key", None) is None:
            raise TypeError(f"{function.__name__} draws but does not take `key`")
        for op in ops:
            _check_signature(op, function.__name__, parameters)
            call = _adapted(op, function, promotion, over, opmath)
            _register(op, call, function, draws, promotion, recompute)
        return function

    return register


def aliases(
    table: Mapping[OpOverload, Callable[..., Any]],
    *,
    promotion: Promotion | None = None,
    opmath: bool = False,
    recompute: bool = False,
) -> None:
    """Register one-liners: JAX functions that take exactly the schema's arguments, in order."""
    for op, jax_function in table.items():
        names = [_python_name(a.name) for a in op._schema.arguments if a.name not in PLACEMENT]

        def function(
            *, _call: Callable[..., Any] = jax_function, _names: list[str] = names, **bound: Any
        ) -> Any:
            return _call(*(bound[name] for name in _names))

        adapted = _adapted(op, function, promotion, None, opmath, declared=frozenset(names))
        _register(op, adapted, jax_function, False, promotion, recompute)


def _recomputed(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` whose gradient keeps nothing but its array operands."""

    def again(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

        def run(arrays: dict[int, jax.Array]) -> Any:
            given = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(tree, given)
            return call(*args, **kwargs)

        return jax.checkpoint(run, prevent_cse=False)(arrays)

    return again


def _register(
    op: OpOverload,
    call: Callable[..., Any],
    source: Callable[..., Any],
    draws: bool,
    promotion: Promotion | None,
    recompute: bool,
) -> None:
    if not isinstance(op, OpOverload):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"{op} was given; a rule is registered for an overload such as aten.add.Tensor"
        )
    if op._schema.is_mutable and not op._name.startswith("aten::_native_batch_norm_legit"):
        raise TypeError(
            f"{op} writes to its arguments; graphs are functional before they are lowered"
        )
    if op in _RULES:
        raise TypeError(f"{op} has two rules: {_RULES[op].function} and {source}")
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"] == __name__:
        frame = frame.f_back
    family = frame.f_globals["__name__"].rpartition(".")[2] if frame is not None else "unknown"
    call = _recomputed(call) if recompute else call
    _RULES[op] = Rule(op=op, function=call, draws=draws, family=family, promotion=promotion)


def _python_name(name: str) -> str:
    # `from` is a Python keyword; `key` is where a rule that draws finds its PRNG key.
    return f"{name}_" if name in ("from", "key") else name


def _check_signature(
    op: OpOverload, rule: str, parameters: Mapping[str, inspect.Parameter]
) -> None:
    """A rule must accept every call that the schema accepts, and mean the same by it."""
    arguments = {_python_name(argument.name): argument for argument in op._schema.arguments}
    problems = [f"has no argument {name!r}" for name in parameters if name not in arguments]
    expected = [name for name in arguments if name in parameters]
    if not problems and expected != list(parameters):
        problems.append(f"has the order {expected}, the rule {list(parameters)}")
    for name, argument in arguments.items():
        parameter = parameters.get(name)
        if parameter is None:
            if name not in PLACEMENT:
                problems.append(f"has {name!r}, which the rule does not take")
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not argument.kwarg_only:
            problems.append(f"takes {name!r} by position too")
        if argument.has_default_value():
            given = parameter.default
            if given is parameter.empty or not _same_default(argument.default_value, given):
                problems.append(f"has {name}={argument.default_value!r}, the rule {given!r}")
    if problems:
        raise TypeError(f"rule {rule} differs from {op._schema}: the schema {'; '.join(problems)}")


def _same_default(schema: Any, rule: Any) -> bool:
    if isinstance(schema, list):
        return list(schema) == (
            list(rule) if isinstance(rule, (list, tuple)) else [rule] * len(schema)
        )
    if isinstance(schema, int) and isinstance(rule, torch.dtype):
        return True  # schemas hold dtypes as numbers
    return schema == rule


def _operands(op: OpOverload) -> tuple[str, ...]:
    def is_operand(kind: Any) -> bool:
        kind = kind.getElementType() if isinstance(kind, torch.OptionalType) else kind
        return kind.isSubtypeOf(torch.TensorType.get()) or isinstance(kind, _NUMBER)

    return tuple(_python_name(a.name) for a in op._schema.arguments if is_operand(a.type))


def _adapted(
    op: OpOverload,
    function: Callable[..., Any],
    promotion: Promotion | None,
    over: tuple[str, ...] | None,
    opmath: bool,
    declared: frozenset[str] | None = None,
) -> Callable[..., Any]:
    """`function` behind ATen's calling convention: placement dropped, operands promoted."""
    names = tuple(_python_name(argument.name) for argument in op._schema.arguments)
    taken = declared if declared is not None else frozenset(inspect.signature(function).parameters)
    operands = over if over is not None else _operands(op)

    def call(*args: Any, **kwargs: Any) -> Any:
        keywords = {k if k == "key" else _python_name(k): v for k, v in kwargs.items()}
        given = dict(zip(names, args, strict=False)) | keywords
        bound = {name: value for name, value in given.items() if name in taken}
        if promotion is None:
            return function(**bound)
        present = [name for name in operands if bound.get(name) is not None]
        dtype = promoted_dtype(promotion, *(bound[name] for name in present))
        compute = opmath_of(dtype) if opmath else dtype
        for name in present:
            bound[name] = _operand(bound[name], compute)
        return _cast_result(function(**bound), promotion, dtype)

    return call


def _operand(value: Any, dtype: np.dtype) -> jax.Array:
    if isinstance(value, (bool, int, float, complex)):
        return scalar_to_jax(value, dtype)
    return jnp.asarray(value, dtype)


def _cast_result(result: Any, promotion: Promotion, dtype: np.dtype) -> Any:
    if not isinstance(result, jax.Array):
        return tuple(_cast_result(item, promotion, dtype) for item in result)
    if promotion is Promotion.ALWAYS_BOOL or result.dtype == dtype:
        return result
    if promotion is Promotion.COMPLEX_TO_FLOAT and category(dtype) == 3:
        return result
    return result.astype(dtype)

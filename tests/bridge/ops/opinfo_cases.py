"""PyTorch's OpInfo samples run through the rules and compared with PyTorch itself.

One case = one sample of one operator in one dtype. The operator is traced to ATen once per sample
(`make_fx` before dispatch, so that composite operators stay whole, as torch.export leaves them),
the graph is run with the rules inside `jax.jit`, and values, dtypes, shapes and gradients are
compared. An operator without a rule is replaced by PyTorch's decomposition of it. What does not
agree in 32 or 16 bits is run again in float64 on both sides before it counts as wrong.

Used by `test_opinfo.py` (a slice, for CI) and `scripts/sweep_operators.py` (everything).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import headrace.bridge.ops  # noqa: F401  fills the registry
from headrace.bridge.dtypes import jax_to_tensor, tensor_to_jax, to_jax_dtype
from headrace.bridge.ops.decompositions import decomposition, result_shape_depends_on_values
from headrace.bridge.ops.registry import lookup
from headrace.errors import CaptureError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # optional helpers of PyTorch's own tests are not installed
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import ErrorInput, OpInfo, SampleInput

# Samples are tiny: compile fast rather than well.
_FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
_COPY_BACK = torch.ops.aten.copy_.default
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


class Verdict(StrEnum):
    PASSED = "passed"
    ROUNDING = "rounding"  # agrees in float64: the difference is rounding
    REFUSED = "refused"  # the result's shape depends on values
    MISSING = "missing"  # no rule and no decomposition
    WRONG = "wrong"
    ERROR = "error"
    ABSENT = "absent"  # torch itself cannot run, trace or differentiate the case


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one direction of one case."""

    verdict: Verdict
    reason: str = ""

    @property
    def good(self) -> bool:
        return self.verdict in (Verdict.PASSED, Verdict.ROUNDING)


class MissingRule(Exception):
    """Neither a rule nor a decomposition."""


class Refused(Exception):
    """The result's shape depends on values."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One sample as an ATen graph on its tensors."""

    graph: GraphModule
    call: Callable[..., list[torch.Tensor]]
    leaves: list[torch.Tensor]
    random: bool = field(default=False)


@functools.cache
def operators() -> dict[str, OpInfo]:
    """All OpInfos with a dense CPU meaning, by full name."""
    named = {info.full_name: info for info in op_db}
    return {n: i for n, i in sorted(named.items()) if not n.startswith(("sparse", "to_sparse"))}


def samples(info: OpInfo, dtype: torch.dtype, limit: int | None) -> list[SampleInput]:
    """Up to `limit` samples, spread evenly over all of them."""
    torch.manual_seed(0)
    np.random.seed(0)
    grad = dtype.is_floating_point and info.supports_autograd
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(info.sample_inputs("cpu", dtype, requires_grad=grad))
    if info.name in _ORDER_OF_TIES_IS_FREE:
        every = [_distinct(info.name, sample) for sample in every]
    if limit is None or len(every) <= limit:
        return every
    return [every[round(i * (len(every) - 1) / max(limit - 1, 1))] for i in range(limit)]


# Where equal values meet, PyTorch promises no order of their indices: these get distinct values.
_ORDER_OF_TIES_IS_FREE = (
    "sort",
    "argsort",
    "msort",
    "topk",
    "kthvalue",
    "mode",
    "median",
    "nanmedian",
)


def _distinct(op: str, sample: SampleInput) -> SampleInput:
    x = sample.input
    if not isinstance(x, torch.Tensor):
        return sample
    if x.dtype == torch.bool:
        stable = {"sort": True, "argsort": True}.get(op)
        sample.kwargs |= {"stable": True} if stable else {}
        return sample
    order = torch.randperm(x.numel())
    if x.dtype == torch.bfloat16 and x.numel() > 256:
        # As bit patterns of positive normal numbers.
        values = (order + 0x2000).to(torch.int16).view(torch.bfloat16)
    elif x.dtype.is_floating_point:
        values = (order - x.numel() // 2).to(x.dtype)
    else:
        values = order.to(x.dtype)
    sample.input = values.reshape(x.shape).requires_grad_(x.requires_grad)
    return sample


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def trace(info: OpInfo, sample: SampleInput) -> Traced:
    """The sample's ATen graph; in-place code is functionalised."""
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def call(*leaves: torch.Tensor) -> list[torch.Tensor]:
        values = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            values[place] = leaf
        first, args, kwargs = pytree.tree_unflatten(values, spec)
        return _tensors(sample.output_process_fn_grad(info.op(first, *args, **kwargs)))

    leaves = [flat[i] for i in places]
    plain = [leaf.detach() for leaf in leaves]
    with torch.no_grad():
        torch.manual_seed(0)
        graph = make_fx(call, pre_dispatch=True, tracing_mode="real")(*plain)
        if any(_mutates(node) for node in graph.graph.nodes):
            graph = make_fx(torch.func.functionalize(call), tracing_mode="real")(*plain)
    random = any(
        (rule := lookup(node.target)) is not None and rule.draws and _draws(node)
        for node in graph.graph.nodes
    ) or any(
        "aten.empty" in str(n.target) or "new_empty" in str(n.target) for n in graph.graph.nodes
    )
    return Traced(graph=graph, call=call, leaves=leaves, random=random)


def _draws(node: Node) -> bool:
    """Dropout of probability 0 or outside training, and attention without dropout, draw nothing."""
    rule = lookup(node.target)
    assert rule is not None
    names = [a.name for a in rule.schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "dropout_p" in names:
        return bool(given.get("dropout_p", 0.0))
    if given.get("train", given.get("training", True)) is False or (
        "training" in names and ("training" not in given)
    ):
        return False
    return given.get("p") != 0.0 or "train" not in names


def _mutates(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def interpret(graph: GraphModule, values: Sequence[Any]) -> Any:
    """Run an ATen graph with the rules on JAX values."""
    remaining = iter(values)
    env: dict[Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(remaining)
        elif node.op == "get_attr":
            constant = functools.reduce(getattr, node.target.split("."), graph)
            env[node] = tensor_to_jax(constant) if isinstance(constant, torch.Tensor) else constant
        elif node.op == "output":
            return torch.fx.map_arg(node.args[0], lambda n: env[n])
        else:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = apply(node.target, _plain(args), _plain(kwargs))
    raise AssertionError("a graph ends with an output")


def _plain(value: Any) -> Any:
    """fx keeps arguments in immutable containers, which decompositions may want to change."""
    if isinstance(value, (tuple, list)):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def apply(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One operator by its rule, else by PyTorch's decomposition."""
    if not isinstance(target, torch._ops.OpOverload):
        return target(*args, **kwargs)
    # What functionalisation leaves at the end to write a result into an input.
    rule = lookup(torch.ops.aten.copy.default if target is _COPY_BACK else target)
    if rule is not None:
        key = {"key": jax.random.key(0)} if rule.draws else {}
        return rule.function(*args, **kwargs, **key)
    if result_shape_depends_on_values(target):
        raise Refused(f"{target}: the result's shape depends on values")
    smaller = decomposition(target)
    if smaller is None:
        raise MissingRule(str(target))
    return _decomposed(smaller, args, kwargs)


def _decomposed(smaller: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    flat, spec = pytree.tree_flatten((list(args), kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]

    def call(*leaves: torch.Tensor) -> Any:
        values = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            values[place] = leaf
        inner_args, inner_kwargs = pytree.tree_unflatten(values, spec)
        return smaller(*inner_args, **inner_kwargs)

    stand_ins = [_stand_in(flat[i]) for i in places]
    with torch.no_grad():
        graph = make_fx(call, tracing_mode="fake")(*stand_ins)
        if any(_mutates(node) for node in graph.graph.nodes):
            # Of the traced graph: what a composite kernel mutates inside is hidden from it before.
            graph = make_fx(torch.func.functionalize(graph), tracing_mode="fake")(*stand_ins)
    return interpret(graph, [flat[i] for i in places])


def _stand_in(array: jax.Array) -> torch.Tensor:
    exact = jax_to_tensor(np.zeros((), array.dtype)).dtype
    if not jax.config.jax_enable_x64:
        exact = {torch.int32: torch.int64}.get(exact, exact)
    return torch.zeros(array.shape, dtype=exact)


def _differentiable(leaf: torch.Tensor) -> bool:
    return leaf.requires_grad and leaf.dtype.is_floating_point


def _expected(traced: Traced, backward: bool) -> tuple[list[torch.Tensor], list[Any], list[Any]]:
    """PyTorch's outputs, the cotangents drawn for them, and the gradients (None: unused)."""
    torch.manual_seed(0)
    leaves = [x.detach().clone().requires_grad_(_differentiable(x)) for x in traced.leaves]
    with torch.set_grad_enabled(backward):
        outputs = traced.call(*[x.view_as(x) if x.requires_grad else x for x in leaves])
    wrt = [x for x in leaves if x.requires_grad]
    heads = [y for y in outputs if y.requires_grad]
    if not backward or not heads or not wrt:
        return outputs, [], []
    cotangents = [torch.randn_like(y) if y.requires_grad else None for y in outputs]
    grads = torch.autograd.grad(
        heads, wrt, [c for c in cotangents if c is not None], allow_unused=True
    )
    return outputs, cotangents, list(grads)


def _ours(traced: Traced, cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
    """Outputs and gradients by the rules, in one jitted program."""
    inputs = [tensor_to_jax(leaf) for leaf in traced.leaves]
    wrt = [i for i, leaf in enumerate(traced.leaves) if _differentiable(leaf)] if cotangents else []

    def outputs_of(chosen: list[Any], rest: list[Any]) -> list[Any]:
        values = list(rest)
        for place, value in zip(wrt, chosen, strict=True):
            values[place] = value
        return list(interpret(traced.graph, values))

    def program(values: list[Any], heads: list[Any]) -> tuple[list[Any], list[Any]]:
        chosen = [values[i] for i in wrt]
        if not cotangents:
            return outputs_of(chosen, values), []
        outputs, pull = jax.vjp(lambda c: outputs_of(c, values), chosen)
        full = [_cotangent(y, head) for y, head in zip(outputs, heads, strict=True)]
        return outputs, list(pull(full)[0])

    heads = [None if c is None else tensor_to_jax(c) for c in cotangents]
    return jax.jit(program, compiler_options=_FAST_COMPILE)(inputs, heads)


def _cotangent(output: Any, head: Any) -> Any:
    if not jnp.issubdtype(output.dtype, jnp.inexact):
        return np.zeros(output.shape, jax.dtypes.float0)
    if head is None:
        return jnp.zeros_like(output)
    # torch and JAX differ by a conjugate in what they call the gradient of a complex number.
    return jnp.conj(head).astype(output.dtype)


def _difference(want: torch.Tensor, got: Any, values: bool) -> str:
    """Empty when equal under torch.testing's default tolerances."""
    if to_jax_dtype(want.dtype) != got.dtype:
        return f"dtype {got.dtype}, torch has {str(want.dtype).removeprefix('torch.')}"
    if tuple(want.shape) != tuple(got.shape):
        return f"shape {tuple(got.shape)}, torch has {tuple(want.shape)}"
    if not values:
        return ""
    try:
        # Through the policy: the least int64 is the least int32 on our side.
        wanted = jax_to_tensor(tensor_to_jax(want.detach().resolve_conj()))
        torch.testing.assert_close(jax_to_tensor(got), wanted, equal_nan=True)
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line]
        return "values: " + "; ".join(lines[1:3] or lines[:1])[:160]
    return ""


def _compare(wants: Sequence[Any], gots: Sequence[Any], values: bool) -> str:
    if len(wants) != len(gots):
        return f"{len(gots)} results, torch has {len(wants)}"
    for want, got in zip(wants, gots, strict=True):
        want = torch.zeros(got.shape, dtype=jax_to_tensor(got).dtype) if want is None else want
        if difference := _difference(want, got, values):
            return difference
    return ""


def run_case(info: OpInfo, sample: SampleInput, backward: bool) -> tuple[Outcome, Outcome | None]:
    """Forward and, where torch differentiates, backward outcome of one sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run_case(info, sample, backward)


def _run_case(info: OpInfo, sample: SampleInput, backward: bool) -> tuple[Outcome, Outcome | None]:
    try:
        traced = trace(info, sample)
    except Exception as error:
        return Outcome(verdict=Verdict.ABSENT, reason=f"trace: {_short(error)}"), None
    try:
        wants, cotangents, grads = _expected(traced, backward)
    except Exception as error:
        if not backward:
            return Outcome(verdict=Verdict.ABSENT, reason=_short(error)), None
        return _run_case(info, sample, False)
    try:
        gots, our_grads = _ours(traced, cotangents)
    except Exception as error:
        failed = _failure(error)
        if not cotangents or not isinstance(error, Exception):
            return failed, None
        forward, _ = _run_case(info, sample, False)
        return forward, (
            failed if forward.good else Outcome(verdict=forward.verdict, reason="as forward")
        )
    forward = _judged(_compare(wants, gots, not traced.random), traced, sample, info, False)
    if not cotangents:
        return forward, None
    wrong = _compare(grads, our_grads, not traced.random)
    return forward, _judged(wrong, traced, sample, info, True)


def _failure(error: Exception) -> Outcome:
    if (
        isinstance(error, (Refused, CaptureError))
        or "data-dependent" in str(error).lower()
        or (type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"))
    ):
        return Outcome(verdict=Verdict.REFUSED, reason=_short(error))
    if isinstance(error, MissingRule):
        return Outcome(verdict=Verdict.MISSING, reason=str(error))
    return Outcome(verdict=Verdict.ERROR, reason=_short(error))


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _judged(
    wrong: str, traced: Traced, sample: SampleInput, info: OpInfo, backward: bool
) -> Outcome:
    if not wrong:
        return Outcome(verdict=Verdict.PASSED)
    floats = any(x.is_floating_point() for x in traced.leaves)
    if wrong.startswith("values") and floats and agrees_in_float64(info, sample, backward):
        return Outcome(verdict=Verdict.ROUNDING, reason=wrong)
    return Outcome(verdict=Verdict.WRONG, reason=wrong)


def agrees_in_float64(info: OpInfo, sample: SampleInput, backward: bool) -> bool:
    """Whether both sides agree when every float is float64: then the difference was rounding."""

    def widened(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.detach().to(torch.float64).requires_grad_(x.requires_grad)
        if isinstance(x, torch.dtype) and x.is_floating_point:
            return torch.float64
        return x

    wide = SampleInput(
        pytree.tree_map(widened, sample.input),
        args=pytree.tree_map(widened, tuple(sample.args)),
        kwargs=pytree.tree_map(widened, dict(sample.kwargs)),
        output_process_fn_grad=sample.output_process_fn_grad,
    )
    with jax.enable_x64(True):
        try:
            traced = trace(info, wide)
            wants, cotangents, grads = _expected(traced, backward)
            gots, our_grads = _ours(traced, cotangents)
        except Exception:
            return False
        pair = (grads, our_grads) if backward else (wants, gots)
        return not _compare(*pair, True)


def error_samples(info: OpInfo) -> list[ErrorInput]:
    """Calls that PyTorch refuses on the CPU, by its own list."""
    if info.error_inputs_func is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(info.error_inputs("cpu"))
    return [e for e in every if _eager_refuses(info, e.sample_input)]


def _eager_refuses(info: OpInfo, sample: SampleInput) -> bool:
    try:
        info.op(sample.input, *sample.args, **sample.kwargs)
    except Exception:
        return True
    return False


def refused_by(info: OpInfo, sample: SampleInput) -> str:
    """Where such a call is refused before anything is computed: "capture", "rule" or "" (nowhere).

    Capture is PyTorch's tracing on tensors without values, a rule sees shapes and dtypes only: what
    is wrong with values (an index, a probability) cannot be refused.
    """
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def call(*leaves: torch.Tensor) -> Any:
        values = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            values[place] = leaf
        first, args, kwargs = pytree.tree_unflatten(values, spec)
        return info.op(first, *args, **kwargs)

    leaves = [flat[i].detach() for i in places]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            graph = make_fx(call, pre_dispatch=True, tracing_mode="fake")(*leaves)
        except Exception:
            return "capture"
        try:
            jax.eval_shape(lambda v: interpret(graph, v), [tensor_to_jax(x) for x in leaves])
        except Exception:
            return "rule"
    return ""


def cases(
    info: OpInfo, limit: int | None, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[tuple[torch.dtype, int, SampleInput]]:
    """The samples of an operator in each dtype it supports on the CPU."""
    for dtype in dtypes:
        if dtype in info.dtypes:
            for number, sample in enumerate(samples(info, dtype, limit)):
                yield dtype, number, sample

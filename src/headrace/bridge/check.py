"""Does the JAX program agree with PyTorch, and where do they first part? `hr.check` is its door.

Two comparisons. The whole model: outputs and every gradient against eager torch. Operator by
operator: each node gets the values torch computed, so an error is named where it is made and does
not spread; its
vector-Jacobian product is compared with torch autograd's for the same random cotangent.

Evaluation mode of dropout is used throughout: two random generators cannot agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch import nn
from torch._ops import OpOverload

from headrace.bridge import lower
from headrace.bridge.dtypes import tensor_to_jax, tensor_to_numpy
from headrace.bridge.module import JaxModule, to_jax
from headrace.bridge.passes.bounded import INDEX_OF, NOWHERE, PUTS
from headrace.bridge.program import Program

_OUTPUT_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = 1e-4
# A gradient that is zero but for rounding (a key bias under softmax) is measured against the
# model's largest.
_FLOOR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """One operator whose result, or gradient, differs from torch's when given torch's inputs."""

    node: str
    operator: str
    module: str
    what: str
    error: float

    def __str__(self) -> str:
        where = f"{self.operator} ({self.node}, in {self.module})"
        return f"{where}: {self.what} differs by {self.error:.2e}"


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What `check` found. Errors are the largest difference divided by the largest torch magnitude,
    for gradients at least by 1e-3 of the largest gradient in the model.

    `ok` is the verdict: outputs within 1e-5 and gradients within 1e-4 in float32 (bfloat16: 2e-2,
    5e-2).
    """

    model: str
    outputs: Mapping[str, float]
    gradients: Mapping[str, float]
    loops: tuple[str, ...]
    notes: tuple[str, ...]
    tolerance: tuple[float, float]
    disagreements: tuple[Disagreement, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether outputs and gradients agree with PyTorch."""
        return self.worst_output <= self.tolerance[0] and self.worst_gradient <= self.tolerance[1]

    @property
    def worst_output(self) -> float:
        """Largest relative error of an output."""
        return max(self.outputs.values(), default=0.0)

    @property
    def worst_gradient(self) -> float:
        """Largest relative error of a gradient."""
        return max(self.gradients.values(), default=0.0)

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {'agrees' if self.ok else 'DOES NOT agree'} with PyTorch",
            f"  outputs    {len(self.outputs)}, largest relative error {self.worst_output:.1e}",
            f"  gradients  {len(self.gradients)}, largest relative error {self.worst_gradient:.1e}",
        ]
        lines += [f"  {note}" for note in (*self.loops, *self.notes)]
        if self.disagreements:
            lines.append(f"  first operator that differs: {self.disagreements[0]}")
        return "\n".join(lines)


def check(
    model: nn.Module,
    example_inputs: Any,
    *,
    operators: bool | None = None,
    dynamic: bool = True,
) -> CheckReport:
    """Compare outputs and all gradients of `model` with eager PyTorch, op by op when they differ.

    Args:
        model: a module with weights on the CPU; its mode is kept, dropout is taken as the identity.
        example_inputs: as for `to_jax`; if an output is named `loss` gradients are of it, else of
        the sum of
            all floating-point outputs weighted by fixed random numbers.
        operators: run the operator-by-operator comparison; default: only when the model disagrees.
        dynamic: as for `to_jax`; False fixes the example's shapes and captures twice as fast.

    Cost: one capture, one XLA compilation, one eager forward and backward.
    """
    jm = to_jax(model, example_inputs, dynamic=dynamic)
    args, kwargs = jm.example(example_inputs)
    with _IdentityDropout():
        torch_outputs = model(*args, **kwargs)
        names, leaves = _named_leaves(torch_outputs)
        _scalar(dict(zip(names, leaves, strict=True))).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    jax_outputs, gradients = _jax_side(jm, args, kwargs)
    outputs = {
        name: relative_error(tensor_to_numpy(leaf), jax_outputs[name])
        for name, leaf in zip(names, leaves, strict=True)
    }
    by_name = jm.layout.unstack(gradients)
    floor = _FLOOR * max(
        (float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0
    )
    errors = {n: relative_error(tensor_to_numpy(g), by_name[n], floor) for n, g in expected.items()}
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    report = CheckReport(
        model=type(model).__name__,
        outputs=outputs,
        gradients=errors,
        loops=jm.program.history[-1].notes,
        notes=tuple(n for r in jm.program.history[:-1] for n in r.notes),
        tolerance=(2e-2, 5e-2) if half else (_OUTPUT_TOLERANCE, _GRADIENT_TOLERANCE),
    )
    if operators or (operators is None and not report.ok):
        found = compare_operators(model, example_inputs)
        report = replace(report, disagreements=tuple(found))
    return report


def compare_operators(
    model: nn.Module, example_inputs: Any, *, tolerance: float | None = None
) -> list[Disagreement]:
    """Every operator of the unrolled program against torch, each on torch's own inputs, in graph
    order.
    """
    jm = to_jax(model, example_inputs, roll=False)
    args, kwargs = jm.example(example_inputs)
    values = _torch_values(jm, pytree.tree_flatten((args, kwargs))[0])
    found: list[Disagreement] = []
    env: dict[fx.Node, Any] = {}
    for node, value in zip(jm.program.placeholders, values, strict=True):
        env[node] = value
    settings = lower.Settings(train=False)
    for node in jm.program.graph.nodes:
        if node.op != "call_function":
            continue
        args_, kwargs_ = _evaluation_mode(
            node, *fx.map_arg((node.args, node.kwargs), env.__getitem__)
        )
        env[node] = _call(node.target, args_, kwargs_)
        found += _compare_node(node, env, settings, tolerance)
    return found


def relative_error(expected: np.ndarray, actual: Any, floor: float = 0.0) -> float:
    """max|actual - expected| / max(max|expected|, floor) in float64; inf for another shape or lone
    NaN.
    """
    got = np.asarray(actual).astype(np.float64)
    want = expected.astype(np.float64)
    if got.shape != want.shape or (np.isnan(got) != np.isnan(want)).any():
        return float("inf")
    if not want.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = np.nan_to_num(np.abs(got - want), nan=0.0)
    return float(difference.max() / max(np.nanmax(np.abs(want), initial=0.0), floor, 1e-6))


class _IdentityDropout(torch.overrides.TorchFunctionMode):
    """Functional dropout, which dropout modules call, is the identity; everything else as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.dropout:
            return args[0]
        if func is torch.nn.functional.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _named_leaves(outputs: Any) -> tuple[list[str], list[torch.Tensor]]:
    pairs = [
        (pytree.keystr(path), leaf)
        for path, leaf in pytree.tree_flatten_with_path(outputs)[0]
        if isinstance(leaf, torch.Tensor)
    ]
    return [name for name, _ in pairs], [leaf for _, leaf in pairs]


def _weights(shape: Any) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(tuple(shape)).astype(np.float32)


def _scalar(outputs: Mapping[str, Any]) -> Any:
    """The number that is differentiated: the loss if there is one, else a weighted sum of the
    outputs.
    """
    loss = next((v for k, v in outputs.items() if k in ("['loss']", ".loss")), None)
    if loss is not None:
        return loss
    total: Any = 0.0
    for value in outputs.values():
        if isinstance(value, torch.Tensor):
            if value.dtype.is_floating_point and value.requires_grad:
                total = total + (value.float() * torch.from_numpy(_weights(value.shape))).sum()
        elif jnp.issubdtype(value.dtype, jnp.floating):
            total = total + (value.astype(jnp.float32) * _weights(value.shape)).sum()
    return total


def _jax_side(jm: JaxModule, args: Any, kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    params, buffers = jm.params(), jm.buffers()
    args, kwargs = pytree.tree_map(_to_jax, (args, kwargs))

    def objective(trained: Any) -> tuple[Any, dict[str, Any]]:
        outputs, _ = jm.apply({**params, **trained}, buffers, *args, train=_mode(jm), **kwargs)
        flat = pytree.tree_flatten_with_path(outputs)[0]
        named = {pytree.keystr(path): leaf for path, leaf in flat if hasattr(leaf, "shape")}
        return _scalar(named), named

    trained = {k: params[k] for k in jm.layout.trainable}
    gradients, named = jax.jit(jax.grad(objective, has_aux=True))(trained)
    return named, gradients


def _mode(jm: JaxModule) -> bool | None:
    """Dropout off by evaluation mode, unless batch norm would change its meaning with it."""
    return None if not jm.draws else False


def _to_jax(leaf: Any) -> Any:
    return tensor_to_jax(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _torch_values(jm: JaxModule, leaves: list[Any]) -> list[Any]:
    named = dict(jm.module.named_parameters(remove_duplicate=False))
    named |= dict(jm.module.named_buffers(remove_duplicate=False))
    user = iter(leaves)
    program: Program = jm.program
    return [
        next(user)
        if i.kind == "user"
        else (program.constants[i.names[0]] if i.kind == "constant" else named[i.names[0]].detach())
        for i in program.inputs
    ]


def _evaluation_mode(node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    if "train" in names and "dropout" in str(node.target):
        args = tuple(False if n == "train" else a for n, a in zip(names, args, strict=False))
    return args, kwargs


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    """The operator by torch. Rows that no mask selected (`passes/bounded.py`) are written nowhere,
    which torch itself refuses: it gets one more place for them, or values without them.
    """
    if target in PUTS:
        out, indices, values, *rest = args
        masks = [i for i in indices if i is not None and i.dtype == torch.bool]
        if masks:
            count = int(masks[0].sum())
            cut = len(indices) == 1 and values.ndim and values.shape[0] > max(count, 1)
            return target(out, indices, values[:count] if cut else values, *rest, **kwargs)
        dims = [d for d, i in enumerate(indices) if i is not None and bool((i == NOWHERE).any())]
        near = [i.clamp(max=out.shape[d]) if d in dims else i for d, i in enumerate(indices)]
        args = (out, near, values, *rest)
    elif target in INDEX_OF and bool((args[2] == NOWHERE).any()):
        out, dim, index, *rest = args
        dims = [dim]
        args = (out, dim, index.clamp(max=out.shape[dim]), *rest)
    else:
        return target(*args, **kwargs)
    wide = out
    for d in dims:
        wide = torch.cat([wide, wide.narrow(d, 0, 1)], d)
    result = target(wide, *args[1:], **kwargs)
    for d in dims:
        result = result.narrow(d, 0, out.shape[d])
    return result


def _compare_node(
    node: fx.Node, env: Mapping[fx.Node, Any], settings: lower.Settings, tolerance: float | None
) -> list[Disagreement]:
    result = env[node]
    if not isinstance(result, torch.Tensor) or not isinstance(node.target, OpOverload):
        return []
    if lower.is_random(node) or "empty" in str(node.target):
        return []  # nothing to compare: other draws, memory as it was
    if node.target is torch.ops.headrace.cotangent.default:
        return []  # a stand-in for what comes in the backward
    inputs = [n for n in node.all_input_nodes if isinstance(env[n], torch.Tensor)]
    floating = [n for n in inputs if env[n].dtype.is_floating_point]
    jax_env = {n: _to_jax(env[n]) for n in node.all_input_nodes}

    def call(*values: Any) -> Any:
        return lower.as_array(
            lower.call_node(node, {**jax_env, **dict(zip(floating, values, strict=True))}, settings)
        )

    limit = tolerance or (2e-2 if result.dtype in (torch.bfloat16, torch.float16) else 2e-5)
    where = lower.place(node)
    found: list[Disagreement] = []

    def note(what: str, error: float) -> None:
        if error > limit:
            found.append(
                Disagreement(
                    node=node.name,
                    operator=str(node.target),
                    module=where,
                    what=what,
                    error=error,
                )
            )

    try:
        values = tuple(jax_env[n] for n in floating)
        got, vjp = jax.vjp(call, *values) if _differentiable(result) else (call(*values), None)
    except Exception as error:
        return [
            Disagreement(
                node=node.name,
                operator=str(node.target),
                module=where,
                what=f"{type(error).__name__}: {str(error)[:200]}; value",
                error=float("inf"),
            )
        ]
    note("value", relative_error(tensor_to_numpy(result), got))
    if vjp is not None and floating:
        cotangent = torch.from_numpy(_weights(result.shape)).to(result.dtype)
        expected = _torch_vjp(node, env, floating, cotangent)
        for source, want, have in zip(floating, expected, vjp(_to_jax(cotangent)), strict=True):
            if want is not None:
                note(f"gradient to {source.name}", relative_error(tensor_to_numpy(want), have))
    return found


def _differentiable(result: torch.Tensor) -> bool:
    return result.dtype.is_floating_point


def _torch_vjp(
    node: fx.Node, env: Mapping[fx.Node, Any], floating: list[fx.Node], cotangent: torch.Tensor
) -> list[torch.Tensor | None]:
    leaves = {n: env[n].detach().clone().requires_grad_() for n in floating}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: leaves.get(n, env[n]))
    args, kwargs = _evaluation_mode(node, args, kwargs)
    target: Any = node.target
    if target is torch.ops.headrace.attention.default:
        from headrace.bridge.attention import reference_attention

        target = reference_attention
    result = _call(target, args, kwargs)
    if not result.requires_grad:
        return [None] * len(floating)
    try:
        found = torch.autograd.grad(result, list(leaves.values()), cotangent, allow_unused=True)
    except RuntimeError as error:
        if "derivative for" not in str(error) and "autograd formula" not in str(error):
            raise
        # functionalised copies and operators of ours, which torch never differentiates
        return [None] * len(floating)
    return list(found)

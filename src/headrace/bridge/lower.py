"""A `Program` -> values: walk the graph with the operator rules.

Runs while JAX traces, so its cost is paid once a compilation. Every result is compared with the
exporter's record of shape and dtype (`node.meta["val"]`), which is a free oracle for each rule.

Knows: graph nodes, rules, loops and remat policies. Does not know: modules, parameter names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import sympy
import torch
import torch.fx as fx
from jax.ad_checkpoint import checkpoint_name
from torch._ops import OpOverload

from headrace.bridge.checked import REQUIRE, checked
from headrace.bridge.derivatives import OWN_BACKWARD, backward_nodes, own_backward
from headrace.bridge.divide import Division, constrained, divide, embedding, gathered
from headrace.bridge.dtypes import to_jax_dtype
from headrace.bridge.experts import divided_experts, run_experts
from headrace.bridge.intercept import AttentionCall, Intercept
from headrace.bridge.masks import MaskSpec, attention_rule, mask_rule
from headrace.bridge.ops.registry import Rule, lookup
from headrace.bridge.passes.experts import Experts
from headrace.bridge.program import Loop, Program, place
from headrace.errors import UnsupportedOpsError
from headrace.kernels import ATTENTION_RESIDUALS
from headrace.kernels.partition import Partition, save_but_weights, tracing_on_mesh
from headrace.kernels.quantized import QuantizedWeight, dequantize

RematPolicy = Literal["none", "full", "dots", "attention", "offload"]
Array = jax.Array

_HEADRACE = torch.ops.headrace
_EMBEDDING = torch.ops.aten.embedding.default
_LAYER_ARGUMENT = 10  # of headrace::attention
LAYER_INPUT = "layer_input"  # for policies that say where it is kept


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one program is run: what is random, what is recomputed, what the batch says about
    attention.

    rng: key for every operator that draws; None when the program draws nothing.
    train: False turns dropout off and makes batch norm use its running statistics.
    intercept: what stands in for attention, see `bridge.intercept`.
    partition: the mesh; `division` is what it means for the program being run.
    """

    rng: Array | None = None
    train: bool | None = None
    remat: RematPolicy = "none"
    segment_ids: Array | None = None
    intercept: Intercept | None = None
    partition: Partition | None = None
    division: Division | None = None
    symbols: Mapping[Any, int] = field(default_factory=dict)
    sizes: dict[Any, int | None] = field(default_factory=dict)
    required: list[tuple[Array, str]] = field(default_factory=list)
    observe: Callable[[fx.Node, Any], None] | None = None


class LoweringMismatch(AssertionError):
    """A rule gave another shape or dtype than PyTorch: a mistake of ours, with the node that shows
    it.
    """


def check_supported(program: Program) -> None:
    """Refuse a program with operators that have no rule, listing all of them with where they are
    used.
    """
    missing: dict[str, list[fx.Node]] = {}
    for node in program.nodes():
        if isinstance(node.target, OpOverload) and _own_rule(node) is None:
            missing.setdefault(str(node.target), []).append(node)
    if not missing:
        return
    lines = [
        f"  {name}  {len(nodes)} uses, first {place(nodes[0])}"
        for name, nodes in sorted(missing.items())
    ]
    raise UnsupportedOpsError(
        f"{len(missing)} operators of {program.name} have no JAX rule.\n"
        + "\n".join(lines)
        + "\nNothing was loaded. To add a rule see docs/adding-an-op.md."
    )


def _own_rule(node: fx.Node) -> Any:
    special: dict[Any, Any] = {
        _HEADRACE.mask.default: mask_rule,
        _HEADRACE.attention.default: attention_rule,
        _HEADRACE.cotangent.default: jnp.ones_like,
        OWN_BACKWARD: own_backward,
        REQUIRE: checked,
        torch.ops.aten.sym_size.int: int,
    }
    return special.get(node.target) or lookup(node.target)


def run(program: Program, values: Sequence[Any], settings: Settings) -> list[Any]:
    """All results of the graph for the values of its placeholders, in order."""
    symbols = _bind_symbols(program, values)
    division = None if settings.partition is None else divide(program, settings.partition)
    settings = replace(settings, symbols=symbols, sizes={}, required=[], division=division)
    with tracing_on_mesh(settings.partition):
        return checked(list(interpret(program.graph, values, settings)), settings.required)


def _bind_symbols(program: Program, values: Sequence[Any]) -> dict[Any, int]:
    bound: dict[Any, int] = {}
    for node, value in zip(program.placeholders, values, strict=True):
        record = node.meta.get("val")
        if isinstance(record, torch.Tensor) and hasattr(value, "shape"):
            for size, actual in zip(record.shape, value.shape, strict=False):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    bound.setdefault(size.node.expr, int(actual))
    return bound


def interpret(graph: fx.Graph, values: Sequence[Any], settings: Settings) -> Any:
    """The output of a bare graph for the values of its placeholders."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return _interpret(graph, dict(zip(placeholders, values, strict=True)), settings)


def as_array(value: Any) -> Any:
    """A result as the caller may see it: masks as arrays, everything else unchanged."""
    return value.dense() if isinstance(value, MaskSpec) else value


def _interpret(graph: fx.Graph, env: dict[fx.Node, Any], settings: Settings) -> Any:
    deferred = backward_nodes(graph)
    experts = divided_experts(graph, settings.division, settings.symbols)
    for node in graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: env[n])
        if node.op == "call_function" and node not in deferred:
            if node in experts:
                if node is not experts[node].output:
                    continue  # evaluated with the layer's result
                env[node] = _divided(experts[node], env, settings)
            elif node.target is OWN_BACKWARD:
                env[node] = _own_backward(node, env, deferred, settings)
            else:
                env[node] = call_node(node, env, settings)
            if settings.observe is not None:
                settings.observe(node, env[node])
    raise AssertionError("a graph ends with an output node")


def _divided(experts: Experts, env: Mapping[fx.Node, Any], settings: Settings) -> Any:
    division = settings.division
    assert division is not None

    def evaluate(
        nodes: Sequence[fx.Node], outside: Mapping[fx.Node, Any], symbols: Mapping[Any, int]
    ) -> Any:
        inner = replace(settings, symbols=symbols, sizes={}, division=None, observe=None)
        values = dict(outside)
        for each in nodes:
            values[each] = call_node(each, values, inner)
        return values[nodes[-1]]

    tokens = [_dense(env[node]) for node in experts.inputs]
    others = {node: _used(env[node], node, division) for node in experts.others}
    return run_experts(experts, tokens, others, division, settings.symbols, evaluate)


def _used(value: Any, node: fx.Node, division: Division | None) -> Any:
    """A value as operators take it: a divided weight gathered, a quantised one decoded."""
    found = gathered(division, node, value)
    return dequantize(found) if isinstance(found, QuantizedWeight) else found


def _own_backward(
    node: fx.Node, env: dict[fx.Node, Any], deferred: frozenset[fx.Node], settings: Settings
) -> tuple[Any, ...]:
    def evaluate(nodes: Sequence[fx.Node], values: dict[fx.Node, Any], key: Any) -> None:
        inner = replace(settings, rng=key, observe=None)
        for each in nodes:
            values[each] = call_node(each, values, inner)

    arrays = {n: as_array(value) for n, value in env.items()}
    return own_backward(node, arrays, deferred, settings.rng, evaluate)


def call_node(node: fx.Node, env: Mapping[fx.Node, Any], settings: Settings) -> Any:
    """The value of one node when those of its inputs are in `env`."""
    # fx.map_arg turns lists into immutable ones and keeps slices; values are looked up as they are.
    target: Any = node.target
    division = settings.division
    looked_up = target is _EMBEDDING and division is not None and _is_table(node, division)

    def value(n: fx.Node) -> Any:
        if looked_up or isinstance(target, Loop):
            return env[n]
        return _used(env[n], n, division)

    args: Any = fx.map_arg(node.args, value)
    kwargs: Any = dict(fx.map_arg(node.kwargs, value))  # pyright: ignore[reportArgumentType]
    if isinstance(target, Loop):
        return _run_loop(target, node, args, settings)
    if target is _HEADRACE.mask.default:
        return mask_rule(*args, **kwargs)
    if target is _HEADRACE.attention.default and settings.intercept is not None:
        out = settings.intercept.attention(_attention_call(node, args))
        _compare(node, out, settings)
        return out
    if target is _HEADRACE.attention.default:
        key = _key(node, settings) if args[9] and settings.train is not False else None
        partition = settings.partition
        ids = settings.segment_ids
        out = attention_rule(*args, segment_ids=ids, key=key, partition=partition)
        out = checkpoint_name(out, "attention")
        _compare(node, out, settings)
        return out
    args, kwargs = _dense(args), _dense(kwargs)
    if target is REQUIRE:
        settings.required.append(args)
        return args[0]
    if target is torch.ops.aten.sym_size.int:
        return int(args[0].shape[args[1]])
    if not isinstance(target, OpOverload):
        return target(*args, **kwargs)  # Python arithmetic on sizes, getitem
    rule = lookup(target)
    if rule is None:
        raise UnsupportedOpsError(f"{target} has no JAX rule ({place(node)})")
    if looked_up and division is not None:
        found = embedding(division, node, args, functools.partial(rule.function, **kwargs))
        _compare(node, found, settings)
        return found
    result = _apply_rule(rule, node, args, kwargs, settings)
    if settings.intercept is not None and target is torch.ops.aten.linear.default:
        return settings.intercept.linear(node, args, result)
    return result


def _attention_call(node: fx.Node, args: Sequence[Any]) -> AttentionCall:
    query, key, value, mask, bias, sinks, causal, scale, softcap = args[:9]
    return AttentionCall(
        node=node,
        query=query,
        key=key,
        value=value,
        mask=mask,
        bias=bias,
        sinks=sinks,
        causal=causal,
        scale=scale,
        softcap=softcap,
    )


def _is_table(node: fx.Node, division: Division) -> bool:
    """Whether an embedding's table is a divided weight of the program itself."""
    return isinstance(node.args[0], fx.Node) and node.args[0].name in division.specs


def _dense(value: Any) -> Any:
    """Masks as arrays, inside lists too (fx's own list type is no JAX pytree)."""
    if isinstance(value, list):
        return [_dense(v) for v in value]
    if isinstance(value, tuple):
        return tuple(_dense(v) for v in value)
    if isinstance(value, dict):
        return {k: _dense(v) for k, v in value.items()}
    return as_array(value)


def _apply_rule(
    rule: Rule, node: fx.Node, args: Any, kwargs: dict[str, Any], settings: Settings
) -> Any:
    args, kwargs = _with_mode(rule, tuple(args), kwargs, settings.train)
    if rule.draws:
        kwargs["key"] = _key(node, settings) if _draws_here(rule, args, kwargs) else None
    try:
        result = rule.function(*args, **kwargs)
    except Exception as error:
        error.add_note(f"while lowering {node.target} as {node.name} {place(node)}")
        raise
    # The record is of training: batch norm saves no statistics in evaluation mode, its first result
    # is equal.
    values_only = settings.train is False and isinstance(result, tuple)
    _compare(node, result[:1] if values_only else result, settings)
    return result


def _with_mode(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn an operator's `train`/`training` flag off when the program runs for evaluation."""
    if train is not False:
        return args, kwargs
    values = list(args)
    for i, argument in enumerate(rule.schema.arguments):
        if argument.name not in ("train", "training"):
            continue
        if i < len(values):
            values[i] = False
        else:
            kwargs[argument.name] = False
    if any(a.name == "dropout_p" for a in rule.schema.arguments):
        i = [a.name for a in rule.schema.arguments].index("dropout_p")
        if i < len(values):
            values[i] = 0.0
        elif "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
    return tuple(values), kwargs


def _draws_here(rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call needs a key: dropout with probability 0 or in evaluation does not."""
    given = dict(zip((a.name for a in rule.schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in rule.schema.arguments:
        value = given.get(argument.name, argument.default_value)
        if argument.name in ("train", "training") and value is False:
            return False
        if argument.name in ("p", "dropout_p") and isinstance(value, (int, float)) and value == 0:
            return not any(
                a.name in ("train", "training", "dropout_p") for a in rule.schema.arguments
            )
    return True


def draws(node: fx.Node) -> bool:
    """Whether the node draws random numbers as captured; dropout with probability 0 does not."""
    if node.target is _HEADRACE.attention.default:
        return bool(node.args[9])
    rule = lookup(node.target)
    return rule is not None and rule.draws and _draws_here(rule, node.args, node.kwargs)


def is_random(node: fx.Node) -> bool:
    """Whether the operator's values are random: nothing to compare."""
    rule = lookup(node.target)
    return rule is not None and rule.draws and draws(node) and "dropout" not in str(node.target)


def _key(node: fx.Node, settings: Settings) -> Array:
    if settings.rng is None:
        raise ValueError(
            f"the program draws random numbers ({node.target}, {place(node)}) but got no key.\n"
            "Pass rng=jax.random.key(seed), or train=False to turn dropout off."
        )
    return jax.random.fold_in(settings.rng, node.meta["draw"])


def _compare(node: fx.Node, result: Any, settings: Settings) -> None:
    record = node.meta.get("val")
    if isinstance(record, torch.Tensor):
        _compare_one(node, record, result, settings)
    elif isinstance(record, (tuple, list)) and isinstance(result, (tuple, list)):
        for want, got in zip(record, result, strict=False):
            if isinstance(want, torch.Tensor) and got is not None:
                _compare_one(node, want, got, settings)


def _compare_one(node: fx.Node, record: torch.Tensor, result: Any, settings: Settings) -> None:
    shape = tuple(_size(s, settings) for s in record.shape)
    got = tuple(jnp.shape(result))
    same = len(shape) == len(got) and all(
        s is None or s == g for s, g in zip(shape, got, strict=True)
    )
    dtype = to_jax_dtype(record.dtype)
    if not same or getattr(result, "dtype", None) != dtype:
        raise LoweringMismatch(
            f"{node.target} ({node.name}, {place(node)}) gave "
            f"{getattr(result, 'dtype', type(result))}{list(got)}; "
            f"PyTorch records {dtype}{[s if s is not None else '?' for s in shape]}. "
            "This is a mistake in Headrace's rule; please report it with the model's name."
        )


def _size(size: Any, settings: Settings) -> int | None:
    """The concrete size of a recorded dimension, None when an input does not bind it."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression not in settings.sizes:
        value = expression.subs(settings.symbols) if not expression.is_Integer else expression
        settings.sizes[expression] = int(value) if value.is_Integer else None
    return settings.sizes[expression]


def _run_loop(
    loop: Loop, node: fx.Node, args: Sequence[Any], settings: Settings
) -> tuple[Any, ...]:
    carries = tuple(args[: loop.num_carries])
    stacked = tuple(args[loop.num_carries : loop.num_carries + loop.num_stacked])
    shared = tuple(args[loop.num_carries + loop.num_stacked :])
    if settings.intercept is not None:
        return _run_intercepted(loop, carries, stacked, shared, settings, settings.intercept)

    def body(carry: tuple[Any, ...], slices: tuple[Any, ...]) -> tuple[Any, Any]:
        index, values = slices
        inner = settings
        if settings.rng is not None:
            inner = replace(settings, rng=jax.random.fold_in(settings.rng, index))
        entering = (*carry, *values, *shared)
        if settings.division is not None:
            entering = _enter(loop, node, entering, settings.division)
            inner = replace(inner, division=replace(settings.division, specs={}))
        if settings.remat == "offload":
            # Named inside the loop: the name's value is what backward needs, not the carry.
            entering = (*map(_named_input, entering[: len(carry)]), *entering[len(carry) :])
        results = tuple(interpret(loop.body, entering, inner))
        return results[: loop.num_carries], results[loop.num_carries :]

    made = settings.division is not None or any(isinstance(v, QuantizedWeight) for v in args)
    run_body = _remat(body, settings.remat, in_loop=loop.length > 1, makes_weights=made)
    if loop.length == 1:
        carry, collected = run_body(carries, (jnp.uint32(0), stacked))
        return (*carry, *collected)
    index = jnp.arange(loop.length, dtype=jnp.uint32)
    carry, collected = jax.lax.scan(run_body, carries, (index, stacked))
    return (*carry, *collected)


def _run_intercepted(
    loop: Loop,
    carries: tuple[Any, ...],
    stacked: tuple[Any, ...],
    shared: tuple[Any, ...],
    settings: Settings,
    intercept: Intercept,
) -> tuple[Any, ...]:
    """The loop with the intercept's value as one more carry; nothing is random, nothing kept."""

    def body(carry: tuple[Any, Any], slices: tuple[Any, ...]) -> tuple[Any, Any]:
        (values, state), (index, slice_values) = carry, slices
        turn = intercept.inside(state, index)
        inner = replace(settings, intercept=turn)
        results = tuple(interpret(loop.body, (*values, *slice_values, *shared), inner))
        return (results[: loop.num_carries], turn.value), results[loop.num_carries :]

    start = (carries, intercept.value)
    if loop.length == 1:
        (carry, state), collected = body(start, (jnp.uint32(0), stacked))
    else:
        index = jnp.arange(loop.length, dtype=jnp.uint32)
        (carry, state), collected = jax.lax.scan(body, start, (index, stacked))
    intercept.value = state
    return (*carry, *collected)


def _enter(loop: Loop, node: fx.Node, values: Sequence[Any], division: Division) -> tuple[Any, ...]:
    """What enters a loop's body on a mesh: carries laid out by tokens, weights gathered."""
    entering: list[Any] = []
    placeholders = [n for n in loop.body.nodes if n.op == "placeholder"]
    for i, (value, inner) in enumerate(zip(values, placeholders, strict=True)):
        outer: Any = node.args[i]
        if i < loop.num_carries:
            value = constrained(division, inner.meta.get("val"), value)
        elif isinstance(outer, fx.Node):
            value = gathered(division, outer, value)
        entering.append(value)
    return tuple(entering)


def _named_input(value: Any) -> Any:
    """What a layer takes from the one before, under the name that `offload` moves."""
    hidden = jnp.issubdtype(jnp.result_type(value), jnp.floating) and jnp.ndim(value) >= 2
    return checkpoint_name(value, LAYER_INPUT) if hidden else value


def _remat(
    body: Callable[..., Any], policy: RematPolicy, *, in_loop: bool, makes_weights: bool = False
) -> Callable[..., Any]:
    """makes_weights: the body gathers or dequantises weights, which `none` must not keep."""
    if policy not in get_args(RematPolicy):
        raise ValueError(
            f"remat={policy!r} is not a policy; it is one of {', '.join(get_args(RematPolicy))}"
        )
    if policy == "none":
        if not makes_weights:
            return body
        return jax.checkpoint(body, policy=save_but_weights, prevent_cse=not in_loop)
    policies = jax.checkpoint_policies
    chosen = {
        "full": policies.nothing_saveable,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "attention": policies.save_only_these_names("attention", ATTENTION_RESIDUALS),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT, "attention", ATTENTION_RESIDUALS],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[policy]
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the first pass.
    return jax.checkpoint(body, policy=chosen, prevent_cse=not in_loop)


__all__ = [
    "LoweringMismatch",
    "RematPolicy",
    "Settings",
    "as_array",
    "check_supported",
    "interpret",
    "place",
    "run",
]

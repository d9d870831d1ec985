"""A captured module as a pure JAX function: `to_jax`, `JaxModule`, `Layout`.

Knows: names, stored form of weights, pytrees of inputs and outputs, re-capture for new static
shapes.
Does not know: training, devices, files.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from transformers.utils.generic import ModelOutput

from headrace.bridge import lower
from headrace.bridge.cache import cache_folder, capture_key
from headrace.bridge.cache import read as read_capture
from headrace.bridge.cache import write as write_capture
from headrace.bridge.capture import capture
from headrace.bridge.checked import asks
from headrace.bridge.dtypes import tensor_to_jax, tensor_to_numpy, to_jax_dtype
from headrace.bridge.intercept import Intercept
from headrace.bridge.passes.bounded import bound_sizes
from headrace.bridge.passes.head import Head, split_head
from headrace.bridge.passes.roll import roll_layers
from headrace.bridge.passes.simplify import simplify
from headrace.bridge.passes.strides import follow_memory
from headrace.bridge.program import Input, Program, run_pass
from headrace.bridge.step.ownership import make_current
from headrace.errors import CaptureError
from headrace.kernels.partition import Partition

log = logging.getLogger(__name__)
Array = jax.Array


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Stored keys <-> PyTorch names.

    `keys[key]` is the tuple of names behind a stored array: one for an ordinary tensor, several for
    repeated layers stacked on axis 0. `tied` maps the further names of a tied weight to the stored
    one.
    """

    keys: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str]
    trainable: frozenset[str]

    def stack(self, by_name: Mapping[str, Any]) -> dict[str, Any]:
        """Stored form of tensors given by PyTorch name. Copies stacked ones; KeyError lists what is
        missing.
        """
        missing = [n for names in self.keys.values() for n in names if n not in by_name]
        if missing:
            raise KeyError(f"{len(missing)} tensors are missing: {', '.join(missing[:8])}")
        return {
            key: by_name[names[0]] if len(names) == 1 else _stack([by_name[n] for n in names])
            for key, names in self.keys.items()
        }

    def unstack(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by PyTorch name from any subset of the stored form, tied ones once."""
        found: dict[str, Any] = {}
        for key, value in stored.items():
            names = self.keys[key]
            found |= {names[0]: value} if len(names) == 1 else dict(zip(names, value, strict=True))
        return found


def _stack(values: list[Any]) -> Any:
    if all(isinstance(v, np.ndarray) for v in values):
        return np.stack(values)
    return jnp.stack(values)


@dataclass(frozen=True, kw_only=True, eq=False)
class JaxModule:
    """One captured module: pure `apply`, initial values, and the names of everything.

    `apply` is a function of arrays only, so `jax.jit`, `jax.grad`, `jax.vmap` over parameters and
    sharding work on it as on any other. Made by `to_jax`.
    """

    program: Program
    module: nn.Module
    layout: Layout
    buffer_layout: Layout
    head: Head | None = None
    recapture: Callable[[tuple[Any, ...], dict[str, Any]], Program] | None = None
    partition: Partition | None = None
    _constants: dict[str, np.ndarray] = field(default_factory=dict)
    _variants: dict[Any, Program] = field(default_factory=dict)

    def params(self) -> dict[str, Array]:
        """Parameters of the torch module in stored form (copies them; raises CaptureError for meta
        weights).
        """
        return self._values(self.layout, dict(self.module.named_parameters(remove_duplicate=False)))

    def buffers(self) -> dict[str, Array]:
        """Buffers of the torch module in stored form."""
        return self._values(
            self.buffer_layout, dict(self.module.named_buffers(remove_duplicate=False))
        )

    def _values(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
        names = [n for group in layout.keys.values() for n in group]
        make_current([tensors[n] for n in names])
        meta = [n for n in names if tensors[n].is_meta]
        if meta:
            raise CaptureError(
                f"{len(meta)} tensors of {self.program.name} are on the meta device, the first "
                f"is {meta[0]}.\n"
                "Load weights into the module first, or pass your own arrays to apply()."
            )
        return {
            key: tensor_to_jax(tensors[group[0]])
            if len(group) == 1
            else jnp.stack([tensor_to_jax(tensors[n]) for n in group])
            for key, group in layout.keys.items()
        }

    def apply(
        self,
        params: Mapping[str, Any],
        buffers: Mapping[str, Any],
        *args: Any,
        rng: Array | None = None,
        train: bool | None = None,
        remat: lower.RematPolicy = "none",
        segment_ids: Array | None = None,
        observe: Callable[..., None] | None = None,
        intercept: Intercept | None = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """The module's outputs and its new buffers.

        Args:
            params, buffers: stored form, see `params()` and `buffers()`.
            args, kwargs: the module's own inputs as arrays; the same structure as the example
            inputs.
            rng: key for dropout and other draws; needed only if the program draws.
            train: False runs dropout and batch norm in evaluation mode; None as captured.
            remat: what a layer keeps for the backward pass: none (keep all), full (keep only its
            input), dots
                (keep matmul results), attention (keep attention results), offload (those and
                the layer's input, in host memory).
            segment_ids: int [B, T]; tokens attend within equal ids only (packed examples).
            intercept: stands in for attention (a key/value cache), see `bridge.intercept`.

        Returns:
            `(outputs, new_buffers)`; outputs have the module's own class (a transformers
            ModelOutput, a tuple, …) with jax arrays inside.

        Raises:
            TypeError: inputs that differ in structure from the example, or a static shape that
            differs.
        """
        kwargs = {**kwargs, **self._fixed_kwargs(kwargs)}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        program = self._program_for(leaves, spec, args, kwargs)
        if spec != program.in_spec:
            args, kwargs = _reorder(args, kwargs, program)
            leaves, spec = pytree.tree_flatten((args, kwargs))
        _check_arguments(program, leaves)
        # NumPy's int64 becomes JAX's int32 here, once, and not in every rule.
        user = iter([jnp.asarray(v) if hasattr(v, "shape") else v for v in leaves])
        values = [self._value(i, params, buffers, user) for i in program.inputs]
        settings = lower.Settings(
            rng=rng,
            train=train,
            remat=remat,
            segment_ids=segment_ids,
            observe=observe,
            intercept=intercept,
            partition=self.partition,
        )
        results = lower.run(program, values, settings)
        return self._results(program, results, buffers)

    def on_mesh(self, partition: Partition | None) -> JaxModule:
        """This module divided over a mesh: the same function of the same arrays."""
        return replace(self, partition=partition)

    def example(self, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Example inputs as `(args, kwargs)` with what capture added, ready to call the torch
        module.
        """
        args, kwargs = _split_example(example_inputs)
        return args, {**kwargs, **self._fixed_kwargs(kwargs)}

    @property
    def draws(self) -> bool:
        """Whether the program draws random numbers, so that `apply` needs `rng`."""
        return any(lower.draws(node) for node in self.program.nodes())

    @property
    def updates_buffers(self) -> bool:
        """Whether the forward gives new buffer values (batch norm in training mode)."""
        return any(o.kind == "buffer" for o in self.program.outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`apply` with the module's present weights; returns the outputs only."""
        return self.apply(self.params(), self.buffers(), *args, **kwargs)[0]

    def without_head(self) -> tuple[JaxModule, Head]:
        """This module cut at its LM head: `.logits` becomes the last hidden state [B, S, D].

        Raises:
            CaptureError: what follows the head is not token-wise; the message names the operator.
        """
        program, head = split_head(self.program)
        whole = self.recapture

        def recapture(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
            assert whole is not None
            return split_head(whole(args, kwargs))[0]

        cut = replace(self, program=program, head=head, _variants={}, recapture=whole and recapture)
        return cut, head

    def _fixed_kwargs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that capture itself set (`use_cache=False`) and the caller need not repeat."""
        names = _keyword_names(self.program)
        return {"use_cache": False} if "use_cache" in names and "use_cache" not in given else {}

    def _program_for(self, leaves: list[Any], spec: Any, args: Any, kwargs: Any) -> Program:
        if self.program.dynamic or self.recapture is None:
            return self.program
        shapes = tuple(tuple(jnp.shape(leaf)) for leaf in leaves)
        expected = tuple(
            tuple(n.meta["val"].shape) if isinstance(n.meta.get("val"), torch.Tensor) else ()
            for n, i in zip(self.program.placeholders, self.program.inputs, strict=True)
            if i.kind == "user"
        )
        if shapes == expected or len(shapes) != len(expected):
            return self.program
        if shapes not in self._variants:
            log.info("%s has static shapes: capturing again for %s", self.program.name, shapes)
            self._variants[shapes] = self.recapture(args, kwargs)
        return self._variants[shapes]

    def _value(self, i: Input, params: Any, buffers: Any, user: Any) -> Any:
        if i.kind == "user":
            return next(user)
        if i.kind == "constant":
            return self._constant(i)
        source = params if i.kind == "parameter" else buffers
        if i.key not in source:
            kind = "params" if i.kind == "parameter" else "buffers"
            raise TypeError(
                f"{kind} has no {i.key!r}; take the stored form from {kind}() or layout.stack()"
            )
        return source[i.key]

    def _constant(self, i: Input) -> Any:
        if i.key not in self._constants:
            values = [_constant_array(self.program.constants[n]) for n in i.names]
            self._constants[i.key] = values[0] if len(values) == 1 else np.stack(values)
        return jnp.asarray(self._constants[i.key])

    def _results(
        self, program: Program, results: list[Any], buffers: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        user = [
            lower.as_array(r)
            for r, o in zip(results, program.outputs, strict=True)
            if o.kind == "user"
        ]
        fresh = {
            o.name: r for r, o in zip(results, program.outputs, strict=True) if o.kind == "buffer"
        }
        outputs = pytree.tree_unflatten(user, program.out_spec)
        _register_output(type(outputs))
        new = dict(buffers)
        if fresh:
            for key, names in self.buffer_layout.keys.items():
                if any(n in fresh for n in names):
                    old = self.buffer_layout.unstack({key: buffers[key]})
                    values = [fresh.get(n, old[n]) for n in names]
                    new[key] = values[0] if len(values) == 1 else jnp.stack(values)
        return outputs, new


def _constant_array(tensor: torch.Tensor) -> np.ndarray:
    # NumPy, not JAX: under jit a JAX array made here would be a tracer and must not be kept.
    return tensor_to_numpy(tensor).astype(to_jax_dtype(tensor.dtype))


def to_jax(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | tuple[tuple[Any, ...], Mapping[str, Any]],
    *,
    dynamic: bool = True,
    roll: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> JaxModule:
    """Capture `model` once and return it as a pure JAX function.

    Args:
        model: any `nn.Module`, in the mode (train or eval) that is to be captured; may be on the
        meta device.
        example_inputs: keyword inputs as a dict, positional ones as a tuple, or `(args, kwargs)`.
            Values do not matter, shapes only where the model fixes them.
        dynamic: keep batch and sequence symbolic where the model allows it.
        roll: run repeated layers as loops, proved equal node by node; the log says why when they
        are not.
        cache_dir: a folder where captures are kept for other processes; None is
            $HEADRACE_CAPTURE_CACHE or nowhere.

    Raises:
        CaptureError: the forward cannot be captured; UnsupportedOpsError: operators without a rule,
        all listed.

    Example:
        >>> import torch, headrace as hr
        >>> jm = hr.to_jax(torch.nn.Linear(3, 2), (torch.zeros(4, 3),))
        >>> out, _ = jm.apply(jm.params(), jm.buffers(), torch.ones(5, 3).numpy())
        >>> out.shape
        (5, 2)
    """
    args, kwargs = _split_example(example_inputs)
    folder = cache_folder(cache_dir)
    program = _prepare(model, args, kwargs, dynamic=dynamic, roll=roll, folder=folder)

    def recapture(call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> Program:
        example = (args, {k: kwargs.get(k) for k in call_kwargs})
        leaves, spec = pytree.tree_flatten((call_args, call_kwargs))
        given = pytree.tree_leaves(example)
        given = given if len(given) == len(leaves) else [None] * len(leaves)
        torch_args, torch_kwargs = pytree.tree_unflatten(
            [_to_torch_example(v, g) for v, g in zip(leaves, given, strict=True)], spec
        )
        return _prepare(model, torch_args, torch_kwargs, dynamic=False, roll=roll, folder=folder)

    return JaxModule(
        program=program,
        module=model,
        layout=_layout(program, "parameter"),
        buffer_layout=_layout(program, "buffer"),
        recapture=recapture,
    )


def _prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic: bool,
    roll: bool,
    folder: Path | None,
) -> Program:
    options = {"dynamic": dynamic, "roll": roll}
    key = capture_key(model, args, kwargs, options) if folder is not None else None
    if folder is not None and key is not None:
        kept = read_capture(folder, key)
        if kept is not None:
            return kept
    program = capture(model, args, kwargs, dynamic=dynamic)
    program = run_pass(program, "simplify", simplify)
    program = run_pass(program, "bounded", bound_sizes)
    program = run_pass(program, "strides", follow_memory)
    lower.check_supported(program)
    program = run_pass(program, "roll", roll_layers) if roll else program
    if folder is not None and key is not None and not asks(program):
        write_capture(folder, key, program)
    return program


def _split_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if not isinstance(example, tuple):
        raise TypeError(
            f"example_inputs is a {type(example).__name__}; give a dict of keyword inputs, a "
            f"tuple of positional ones, "
            "or (args, kwargs)"
        )
    if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], Mapping):
        return example[0], dict(example[1])
    return example, {}


def _to_torch_example(leaf: Any, given: Any) -> Any:
    """A tensor of the leaf's shape: the first example's values again, by which branches go."""
    if not hasattr(leaf, "shape"):
        return leaf
    kind = jnp.dtype(leaf.dtype)
    dtype = getattr(torch, kind.name)
    if jnp.issubdtype(kind, jnp.integer):
        dtype = torch.int64
    shape = tuple(leaf.shape)
    if not isinstance(given, torch.Tensor) or given.ndim != len(shape) or given.is_meta:
        return torch.zeros(shape, dtype=dtype)
    for dim, size in enumerate(shape):
        if not given.shape[dim]:
            return torch.zeros(shape, dtype=dtype)
        given = given.index_select(dim, torch.arange(size) % given.shape[dim])
    return given.to(dtype)


def _layout(program: Program, kind: str) -> Layout:
    keys = {i.key: i.names for i in program.inputs if i.kind == kind}
    trainable = frozenset(
        key for key, names in keys.items() if kind == "parameter" and names[0] in program.trainable
    )
    return Layout(keys=keys, tied=program.tied, trainable=trainable)


def _keyword_names(program: Program) -> list[str]:
    spec = program.in_spec
    return (
        list(spec.child(1).context)
        if hasattr(spec, "child")
        else list(spec.children_specs[1].context)
    )


def _reorder(args: Any, kwargs: dict[str, Any], program: Program) -> tuple[Any, dict[str, Any]]:
    names = _keyword_names(program)
    if set(names) != set(kwargs):
        missing, extra = sorted(set(names) - set(kwargs)), sorted(set(kwargs) - set(names))
        raise TypeError(
            f"{program.name} was captured with the arguments {', '.join(names) or 'none'};"
            + (f" missing: {', '.join(missing)};" if missing else "")
            + (f" not in the capture: {', '.join(extra)};" if extra else "")
            + " capture again with to_jax() for another signature."
        )
    return args, {name: kwargs[name] for name in names}


def _sizes(record: torch.Tensor) -> list[Any]:
    return list(record.shape)  # integers, or symbols the exporter left free


def _check_arguments(program: Program, leaves: list[Any]) -> None:
    problems: list[str] = []
    nodes = [
        n for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "user"
    ]
    names = [i.names[0] for i in program.inputs if i.kind == "user"]
    if len(leaves) != len(nodes):
        raise TypeError(
            f"{program.name} takes {len(nodes)} values ({', '.join(names)}); {len(leaves)} were "
            f"given"
        )
    for node, name, leaf in zip(nodes, names, leaves, strict=True):
        record = node.meta.get("val")
        if not isinstance(record, torch.Tensor):
            if leaf != record and not hasattr(leaf, "shape"):
                problems.append(
                    f"  {name} = {leaf!r}; captured with {record!r}, which is part of the program"
                )
            continue
        if not hasattr(leaf, "shape"):
            problems.append(
                f"  {name} is a {type(leaf).__name__}; an array of {record.dtype} is needed"
            )
            continue
        shape = [s if isinstance(s, int) else None for s in _sizes(record)]
        fits = len(shape) == len(leaf.shape) and all(
            s is None or s == g for s, g in zip(shape, leaf.shape, strict=True)
        )
        if not fits:
            want = ", ".join("any" if s is None else str(s) for s in shape)
            problems.append(f"  {name} has shape {list(leaf.shape)}; the capture takes [{want}]")
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if floating != record.dtype.is_floating_point:
            problems.append(f"  {name} has dtype {leaf.dtype}; the capture takes {record.dtype}")
    if problems:
        raise TypeError(f"{program.name} cannot take these inputs:\n" + "\n".join(problems))


_registered: set[type] = set()


def _register_output(kind: type) -> None:
    """Let JAX transformations return a transformers output class: it is a pytree for torch only."""
    if not issubclass(kind, ModelOutput) or kind in _registered:
        return
    _registered.add(kind)

    def flatten(output: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        keys = tuple(output.keys())
        return [(jax.tree_util.GetAttrKey(k), output[k]) for k in keys], keys

    def unflatten(keys: tuple[str, ...], values: Any) -> Any:
        # Not through __init__, which looks at the values: JAX also unflattens placeholders.
        output = kind.__new__(kind)
        for key, value in zip(keys, values, strict=True):
            OrderedDict.__setitem__(output, key, value)
            object.__setattr__(output, key, value)
        return output

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)

"""`hr.compile(model)`: the same call, run by XLA. Torch tensors in, torch tensors out.

Weights go to the JAX device once and again only when torch changed them; buffers that the forward
updates (batch norm statistics) are written back into the module. When gradients are wanted, the
call is one node of torch's autograd: `backward()` runs XLA's backward program and the gradients
arrive in `.grad` as usual. For a whole training step see `hr.compile_step` and the trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.utils._pytree as pytree
from torch import nn

from headrace.bridge.dtypes import jax_to_tensor, tensor_to_jax
from headrace.bridge.module import JaxModule, to_jax
from headrace.bridge.step.ownership import make_current
from headrace.errors import CaptureError


class CompiledModule:
    """A module that runs through XLA; call it as the module itself. Made by `compile`.

    One capture serves every batch and sequence length that the model leaves free; each new shape
    costs one XLA compilation, kept in JAX's caches. Random operators follow `torch.manual_seed`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._captured: dict[Any, JaxModule] = {}
        self._calls: dict[Any, Callable[..., Any]] = {}
        self._gradients: dict[Any, Callable[..., Any]] = {}
        self._versions: dict[Any, tuple[int, ...]] = {}
        self._state: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs in the module's own output class."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (str(spec), self.module.training, tuple(_signature(leaf) for leaf in leaves))
        if key not in self._captured:
            self._captured[key] = to_jax(self.module, (args, kwargs))
            self._calls[key] = _jitted(self._captured[key])
            self._gradients[key] = _jitted_vjp(self._captured[key])
        jm = self._captured[key]
        params, buffers = self._device_state(key, jm)
        arrays = {i: tensor_to_jax(leaf) for i, leaf in enumerate(leaves) if _is_tensor(leaf)}
        rng = jax.random.key(int(torch.randint(0, 2**31 - 1, ()).item())) if jm.draws else None
        fixed = tuple((i, leaf) for i, leaf in enumerate(leaves) if not _is_tensor(leaf))
        wanted = {i: x for i, x in enumerate(leaves) if _is_tensor(x) and x.requires_grad}
        if torch.is_grad_enabled() and (jm.layout.trainable or wanted):
            run = _Differentiable(self._gradients[key], jm, params, buffers, arrays, wanted)
            outputs = run(rng, fixed, spec)
            self._write_back(key, jm, buffers, run.new)
            return outputs
        outputs, new = self._calls[key](params, buffers, arrays, rng, fixed, spec)
        self._write_back(key, jm, buffers, new)
        return pytree.tree_map(_to_torch, outputs)

    def _device_state(self, key: Any, jm: JaxModule) -> tuple[dict[str, Any], dict[str, Any]]:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        make_current(tensors)
        versions = tuple(t._version for t in tensors) + tuple(id(t) for t in tensors)
        if self._versions.get(key) != versions:
            self._state[key] = (jm.params(), jm.buffers())
            self._versions[key] = versions
        return self._state[key]

    def _write_back(
        self, key: Any, jm: JaxModule, old: dict[str, Any], new: dict[str, Any]
    ) -> None:
        if not jm.updates_buffers:
            return
        changed = {k: v for k, v in new.items() if v is not old[k]}
        owned = dict(self.module.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, value in jm.buffer_layout.unstack(changed).items():
                owned[name].copy_(jax_to_tensor(value))


def compile(model: nn.Module) -> CompiledModule:
    """Return `model` as a callable that runs through XLA.

    Args:
        model: any `nn.Module` with weights; its train/eval mode is followed at each call.

    Raises (at the first call): CaptureError, UnsupportedOpsError.

    Example:
        >>> import torch, headrace as hr
        >>> layer = torch.nn.Linear(3, 2)
        >>> x = torch.ones(4, 3)
        >>> bool(torch.allclose(hr.compile(layer)(x), layer(x), atol=1e-6))
        True
    """
    return CompiledModule(model)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _signature(leaf: Any) -> Any:
    return (leaf.dtype, leaf.ndim) if isinstance(leaf, torch.Tensor) else leaf


def _to_torch(leaf: Any) -> Any:
    return jax_to_tensor(leaf) if isinstance(leaf, jax.Array) else leaf


def _jitted(jm: JaxModule) -> Callable[..., Any]:
    def call(
        params: Any, buffers: Any, arrays: Any, rng: Any, fixed: Any, spec: Any
    ) -> tuple[Any, Any]:
        leaves = {**arrays, **dict(fixed)}
        args, kwargs = pytree.tree_unflatten([leaves[i] for i in range(len(leaves))], spec)
        return jm.apply(params, buffers, *args, rng=rng, **kwargs)

    return jax.jit(call, static_argnames=("fixed", "spec"))


def _jitted_vjp(jm: JaxModule) -> Callable[..., Any]:
    """The forward that also gives its pullback, whose residuals stay on the device."""

    def call(
        trained: Any, frozen: Any, buffers: Any, wanted: Any, arrays: Any, rng: Any, fixed: Any,
        spec: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        def forward(trained: Any, wanted: Any) -> tuple[list[Any], Any]:
            leaves = {**arrays, **wanted, **dict(fixed)}
            args, kwargs = pytree.tree_unflatten([leaves[i] for i in range(len(leaves))], spec)
            outputs, new = jm.apply({**frozen, **trained}, buffers, *args, rng=rng, **kwargs)
            return _floating(outputs), (outputs, new)

        _, pullback, aux = jax.vjp(forward, trained, wanted, has_aux=True)
        return aux, pullback

    return jax.jit(call, static_argnames=("fixed", "spec"))


def _floating(outputs: Any) -> list[Any]:
    return [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]


@jax.jit
def _pull(pullback: Any, cotangents: Any) -> Any:
    return pullback(cotangents)


class _Differentiable:
    """One call under autograd: runs the forward program, keeps what the backward needs."""

    def __init__(
        self,
        program: Callable[..., Any],
        jm: JaxModule,
        params: dict[str, Any],
        buffers: dict[str, Any],
        arrays: dict[int, Any],
        wanted: dict[int, torch.Tensor],
    ) -> None:
        self.new: dict[str, Any] = {}
        self._program = program
        self._jm = jm
        self._trained = {k: params[k] for k in jm.layout.trainable}
        self._frozen = {k: v for k, v in params.items() if k not in jm.layout.trainable}
        self._buffers = buffers
        self._wanted = {i: arrays[i] for i in wanted}
        self._arrays = {i: a for i, a in arrays.items() if i not in wanted}
        named = dict(jm.module.named_parameters(remove_duplicate=False))
        self._names = [n for k in self._trained for n in jm.layout.keys[k]]
        self._inputs = [*(named[n] for n in self._names), *wanted.values()]

    def __call__(self, rng: Any, fixed: Any, spec: Any) -> Any:
        (outputs, self.new), self._pullback = self._program(
            self._trained, self._frozen, self._buffers, self._wanted, self._arrays, rng, fixed, spec
        )
        leaves, out_spec = pytree.tree_flatten(outputs)
        floats = _floating(outputs)
        self._cotangent_dtypes = [f.dtype for f in floats]
        made: Any = _Boundary.apply(self, [jax_to_tensor(f) for f in floats], *self._inputs)
        graded = iter(made)
        known = {id(f) for f in floats}
        results = [next(graded) if id(x) in known else _to_torch(x) for x in leaves]
        return pytree.tree_unflatten(results, out_spec)

    def pull(self, cotangents: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        """Gradients of the parameters and inputs, in the order they were given to autograd."""
        arrays = [
            tensor_to_jax(c).astype(d)
            for c, d in zip(cotangents, self._cotangent_dtypes, strict=True)
        ]
        trained, wanted = _pull(self._pullback, arrays)
        by_name = self._jm.layout.unstack(trained)
        found = [*(by_name[n] for n in self._names), *wanted.values()]
        return [
            jax_to_tensor(g).to(t.dtype) if t.requires_grad else None
            for g, t in zip(found, self._inputs, strict=True)
        ]


class _Boundary(torch.autograd.Function):
    """Where torch's autograd ends and XLA's program begins."""

    @staticmethod
    def forward(ctx: Any, run: _Differentiable, outputs: list[torch.Tensor], *_: Any) -> Any:
        ctx.run = run
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # create_graph=True: the gradient would be cut off silently
            raise CaptureError(
                "create_graph=True was given, but a module compiled by hr.compile has first "
                "derivatives only.\nTrace the whole step with hr.compile_step, which has all."
            )
        return None, None, *ctx.run.pull(cotangents)

"""`hr.compile(model)`: the same call, run by XLA. Torch tensors in, torch tensors out.

Weights go to the JAX device once and again only when torch changed them; buffers that the forward
updates (batch norm statistics) are written back into the module. Inference only: results carry no
autograd graph. For training see `hr.compile_step` and the trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
import torch.utils._pytree as pytree
from torch import nn

from headrace.bridge.dtypes import jax_to_tensor, tensor_to_jax
from headrace.bridge.module import JaxModule, to_jax


class CompiledModule:
    """A module that runs through XLA; call it as the module itself. Made by `compile`.

    One capture serves every batch and sequence length that the model leaves free; each new shape
    costs one XLA compilation, kept in JAX's caches. Random operators follow `torch.manual_seed`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._captured: dict[Any, JaxModule] = {}
        self._calls: dict[Any, Callable[..., Any]] = {}
        self._versions: dict[Any, tuple[int, ...]] = {}
        self._state: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs in the module's own output class."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (str(spec), self.module.training, tuple(_signature(leaf) for leaf in leaves))
        if key not in self._captured:
            self._captured[key] = to_jax(self.module, (args, kwargs))
            self._calls[key] = _jitted(self._captured[key])
        jm = self._captured[key]
        params, buffers = self._device_state(key, jm)
        arrays = {i: tensor_to_jax(leaf) for i, leaf in enumerate(leaves) if _is_tensor(leaf)}
        rng = jax.random.key(int(torch.randint(0, 2**31 - 1, ()).item())) if jm.draws else None
        fixed = tuple((i, leaf) for i, leaf in enumerate(leaves) if not _is_tensor(leaf))
        outputs, new = self._calls[key](params, buffers, arrays, rng, fixed, spec)
        self._write_back(key, jm, buffers, new)
        return pytree.tree_map(_to_torch, outputs)

    def _device_state(self, key: Any, jm: JaxModule) -> tuple[dict[str, Any], dict[str, Any]]:
        tensors = [*self.module.parameters(), *self.module.buffers()]
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

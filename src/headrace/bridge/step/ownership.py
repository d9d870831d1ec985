"""Who has the present values of which parameters: a compiled step, or the torch tensors.

One compiled step at a time owns a parameter. Everybody else who is about to read all of a model or
optimizer (another step, `state_dict`, a forward outside the step, an eager `optimizer.step()`,
`hr.compile`) first makes the owner write its values back; single tensors see to themselves
(`guard.py`).

Does not know: what a step is, beyond `sync()` and `drop_grads()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_OWNERS: dict[int, weakref.ref[Any]] = {}


class _Sync:
    """A hook that brings the tensors up to date. Copies and pickles of it do nothing."""

    def __init__(self, step: Any = None) -> None:
        self._step = weakref.ref(step) if step is not None else None

    def __call__(self, *_: Any, **__: Any) -> None:
        step = self._step() if self._step is not None else None
        if step is not None:
            step.sync()

    def __reduce__(self) -> Any:
        return _Sync, ()

    def __deepcopy__(self, memo: Any) -> _Sync:
        return _Sync()


class _Reset(_Sync):
    """A hook after an optimizer loaded its state: the step looks at everything anew."""

    def __call__(self, *_: Any, **__: Any) -> None:
        step = self._step() if self._step is not None else None
        if step is not None:
            release(step)


def watch(step: Any, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Register the hooks that call `step.sync()` before anybody reads."""
    sync, reset = _Sync(step), _Reset(step)
    for model in models:
        model.register_forward_pre_hook(sync)
        for module in model.modules():
            module.register_state_dict_pre_hook(sync)
            module.register_load_state_dict_pre_hook(sync)
    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(sync)
        optimizer.register_load_state_dict_pre_hook(sync)
        optimizer.register_load_state_dict_post_hook(reset)
        optimizer.register_step_pre_hook(sync)
    for target in (*optimizers, *models):
        if type(target).zero_grad in (nn.Module.zero_grad, Optimizer.zero_grad):
            vars(target)["zero_grad"] = _ZeroGrad(step, target)


class _ZeroGrad:
    """`zero_grad()` outside the step reaches gradients that the step carries over."""

    def __init__(self, step: Any, target: Any) -> None:
        self._step = weakref.ref(step)
        self._target = weakref.ref(target)

    def __call__(self, set_to_none: bool = True) -> None:
        target, step = self._target(), self._step()
        assert target is not None
        if step is None or not step.drop_grads(_params(target), to_none=set_to_none):
            type(target).zero_grad(target, set_to_none=set_to_none)

    def __reduce__(self) -> Any:  # a copy of the target has its own, without the step
        return getattr, (self._target(), "zero_grad")


def _params(target: Any) -> list[torch.Tensor]:
    if isinstance(target, nn.Module):
        return list(target.parameters())
    return [p for group in target.param_groups for p in group["params"]]


def owns(step: Any) -> bool:
    """Whether the step's arrays are the present values."""
    return step.owned


def take(step: Any) -> None:
    """Make `step` the owner; former owners write back and give up."""
    for tensor in step.owned_tensors():
        owner = _OWNERS.get(id(tensor))
        former = owner() if owner is not None else None
        if former is not None and former is not step:
            release(former)
        _OWNERS[id(tensor)] = weakref.ref(step)
    step.owned = True


def release(step: Any) -> None:
    """Make the torch tensors the present values again."""
    step.sync()
    step.owned = False


def make_current(tensors: Sequence[torch.Tensor]) -> None:
    """Bring tensors that a compiled step owns up to date."""
    for step in {id(s): s for t in tensors if (r := _OWNERS.get(id(t))) and (s := r())}.values():
        step.sync()

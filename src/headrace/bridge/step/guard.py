"""Tensors whose present values are on the device: whoever looks at one first brings it up to date.

While a compiled step is ahead of the torch tensors, their class is a subclass made here. Every
operator and every attribute that could read or write a value goes through PyTorch's own
`__torch_function__`, which makes the step write back; the step then gives the tensors their own
class again. Nothing has to be looked at before each call, however many tensors there are.

Not seen: memory shared before (a NumPy view, `p.detach()` kept from earlier).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree

_STEP = "_headrace_step"
_FIELDS = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "nbytes")
# What says nothing about a tensor's values.
_METADATA = {getattr(torch.Tensor, name).__get__ for name in _FIELDS} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.stride,
    torch.Tensor.element_size,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
}


class _Guarded:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                return func(*args, **kwargs)
        for leaf in pytree.tree_iter((args, kwargs)):
            if isinstance(leaf, _Guarded):
                bring_up_to_date(leaf)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        bring_up_to_date(self)
        return self.__deepcopy__(memo)  # by now the tensor's own

    def __reduce_ex__(self, protocol: Any) -> Any:
        bring_up_to_date(self)
        return self.__reduce_ex__(protocol)


def bring_up_to_date(tensor: Any) -> None:
    """Make the step that holds the tensor's value write it back; nothing if none does."""
    step = vars(tensor).get(_STEP)
    if step is not None:
        step.sync()


def guard(tensors: Iterable[torch.Tensor], step: Any) -> None:
    """From now on a look at any of `tensors` calls `step.sync()`, which has to `unguard` them.

    The tensors keep the step alive, since it has their values.
    """
    for tensor in tensors:
        bring_up_to_date(tensor)
        vars(tensor)[_STEP] = step
        tensor.__class__ = _guarded(type(tensor))


def unguard(tensors: Iterable[torch.Tensor]) -> None:
    """The tensors are plain ones again."""
    for tensor in tensors:
        if vars(tensor).pop(_STEP, None) is not None:
            tensor.__class__ = type(tensor).__mro__[2]


@functools.cache
def _guarded(kind: type) -> type:
    made = types.new_class(kind.__name__, (_Guarded, kind))
    made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
    return made

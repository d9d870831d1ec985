"""Many small tensors of a step's state as one array: what a call costs grows with its arrays.

A `Pack` names the tensors that one device array holds. Tensors up to `LIMIT` bytes that a program
treats alike (same dtype, read and written in the same places) travel together, raveled end to end;
larger ones stay alone, in their own shape, because packing costs a copy of them inside the program.

Does not know: graphs, modules, when a step is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from headrace.bridge.dtypes import jax_to_tensor, tensor_to_jax
from headrace.bridge.step.state import Key

LIMIT = 16 * 1024  # bytes: about what is copied in the time that one more array costs a call
_MEMBERS = 64  # XLA's compile time grows faster than the number of operands of a concatenation


@dataclass(frozen=True)
class Pack:
    """The tensors that one device array holds; one alone keeps its shape."""

    keys: tuple[Key, ...]
    shapes: tuple[tuple[int, ...], ...]


def partition(items: Sequence[Any], label: Callable[[Any], Hashable]) -> list[tuple[Any, ...]]:
    """Items of the same label together, in order; those whose label is None alone."""
    found: list[list[Any]] = []
    open_groups: dict[Hashable, list[Any]] = {}
    for item in items:
        kind = label(item)
        group = open_groups.get(kind) if kind is not None else None
        if group is None or len(group) == _MEMBERS:
            group = []
            found.append(group)
            open_groups[kind] = group
        group.append(item)
    return [tuple(group) for group in found]


def joined(values: Sequence[jax.Array]) -> jax.Array:
    """The values of one pack as its array."""
    return values[0] if len(values) == 1 else jnp.concatenate([v.ravel() for v in values])


def parts(array: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The values in a pack's array, JAX's or torch's."""
    if len(shapes) == 1:
        return [array]
    found: list[Any] = []
    begin = 0
    for shape in shapes:
        end = begin + math.prod(shape)
        found.append(array[begin:end].reshape(shape))
        begin = end
    return found


class DeviceState:
    """The step's tensors on the device: each in one pack, however the last program cut them."""

    def __init__(self) -> None:
        self._arrays: dict[Pack, Any] = {}
        self._homes: dict[Key, Pack] = {}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._homes)

    def put(self, pack: Pack, array: Any) -> None:
        """New values of a pack's tensors."""
        if pack not in self._arrays:
            self.drop(pack.keys)
            self._homes.update(dict.fromkeys(pack.keys, pack))
        self._arrays[pack] = array

    def get(self, pack: Pack, load: Callable[[Key], torch.Tensor]) -> Any:
        """A pack's array; `load` gives the tensors that are not on the device yet."""
        if pack not in self._arrays:
            there = dict(self.items({k for k in pack.keys if k in self._homes}))
            tensors = [there[k] if k in there else load(k) for k in pack.keys]
            whole = tensors[0] if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])
            self.put(pack, tensor_to_jax(whole))
        return self._arrays[pack]

    def items(self, keys: Iterable[Key] | None = None) -> Iterator[tuple[Key, torch.Tensor]]:
        """Copies on the host, one pack after the other; waits for the device."""
        wanted = self._homes.keys() if keys is None else set(keys)
        for pack in dict.fromkeys(self._homes[k] for k in wanted):
            values = parts(jax_to_tensor(self._arrays[pack]), pack.shapes)
            alone = len(values) == 1
            for key, value in zip(pack.keys, values, strict=True):
                if key in wanted:
                    yield key, value if alone else value.clone()

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget these tensors."""
        gone = {k for k in keys if k in self._homes}
        self._isolate(gone)
        for pack in {self._homes.pop(k): None for k in gone}:
            del self._arrays[pack]

    def fill_zeros(self, keys: Iterable[Key]) -> None:
        """Make these tensors zeros."""
        there = {k for k in keys if k in self._homes}
        self._isolate(there)
        for pack in {self._homes[k]: None for k in there}:
            self._arrays[pack] = jnp.zeros_like(self._arrays[pack])

    def _isolate(self, keys: set[Key]) -> None:
        """Take packs apart that hold these tensors and others."""
        for pack in {self._homes[k]: None for k in keys}:
            if keys.issuperset(pack.keys):
                continue
            values = parts(jax_to_tensor(self._arrays.pop(pack)), pack.shapes)
            for key, shape, value in zip(pack.keys, pack.shapes, values, strict=True):
                self._homes[key] = alone = Pack((key,), (shape,))
                self._arrays[alone] = tensor_to_jax(value)


__all__ = ["LIMIT", "DeviceState", "Pack", "joined", "partition", "parts"]

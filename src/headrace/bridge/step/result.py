"""A result of a compiled step: a torch tensor whose values arrive when somebody looks.

A step returns while the device still computes. `LazyTensor` is an ordinary `torch.Tensor` to its
user; the first operator, `.item()` or `print` on it waits for the device and copies the values.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
import torch.utils._pytree as pytree

from headrace.bridge.dtypes import jax_to_tensor


class LazyTensor(torch.Tensor):
    """A CPU tensor backed by a `jax.Array` until it is used; `.array` is that array."""

    array: jax.Array
    _fetched: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type, array: jax.Array, shape: tuple[int, ...], dtype: torch.dtype
    ) -> LazyTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.array = array
        made._fetched = None
        return made

    def fetch(self) -> torch.Tensor:
        """The plain tensor; waits for the device and copies once."""
        if self._fetched is None:
            self._fetched = jax_to_tensor(self.array).to(self.dtype)
        return self._fetched

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on the values."""
        args, kwargs = pytree.tree_map_only(cls, LazyTensor.fetch, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.fetch())

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The values as NumPy."""
        return self.fetch().numpy(force=force)

    def tolist(self) -> Any:
        """The values as Python numbers."""
        return self.fetch().tolist()

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self.fetch().numpy(), dtype=dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetch().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.fetch().clone()

"""Dimension arguments as torch gives them -> axes as JAX wants them.

Torch lets zero-dim tensors be addressed with dim 0 or -1, takes an int where a list is meant,
and reads an empty list of dims as "all of them" in reductions.
"""

from __future__ import annotations

from collections.abc import Sequence


def one_dim(dim: int, ndim: int) -> int:
    """A dim as a non-negative axis; a zero-dim tensor counts as having one."""
    size = max(ndim, 1)
    if not -size <= dim < size:
        raise IndexError(f"dim {dim} was given for a tensor of {ndim} dims")
    return dim % size


def reduced_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The axes a reduction runs over; None and [] mean all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = [dim] if isinstance(dim, int) else dim
    return tuple(one_dim(d, ndim) for d in dims) if ndim else ()


def spread(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """An `int[count]` argument: one number stands for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values

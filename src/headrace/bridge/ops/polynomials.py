"""Orthogonal polynomials of torch.special, by their three-term recurrences.

The degree is a tensor; the recurrence runs to the greatest degree asked for and each element
keeps the value of its own degree. A negative degree gives 0. No derivatives, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import torch
from jax import Array, lax

from headrace.bridge.ops.registry import INT_TO_FLOAT, aliases

aten = torch.ops.aten
Step = Callable[[Array, Array, Array, Array], Array]


def _recurrence(first: Callable[[Array], Array], step: Step) -> Callable[[Array, Array], Array]:
    """P0 = 1, P1 = first(x), P(k+1) = step(k, x, Pk, P(k-1))."""

    def polynomial(x: Array, n: Array) -> Array:
        x, n = jnp.broadcast_arrays(x, n)
        degree = jnp.trunc(n).astype(jnp.int32)
        before, now = jnp.ones_like(x), first(x)
        result = jnp.where(degree == 0, before, now)

        def body(k: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            before, now, result = state
            after = step(k.astype(x.dtype), x, now, before)
            return now, after, jnp.where(degree == k + 1, after, result)

        top = jnp.max(degree, initial=0)
        result = lax.fori_loop(1, top, body, (before, now, result))[2]
        return jnp.where(degree < 0, 0, result)

    return polynomial


def _chebyshev(first: Callable[[Array], Array], shifted: bool) -> Callable[[Array, Array], Array]:
    polynomial = _recurrence(first, lambda k, x, now, before: 2 * x * now - before)
    return (lambda x, n: polynomial(2 * x - 1, n)) if shifted else polynomial


_FIRST = {
    "t": lambda x: x,
    "u": lambda x: 2 * x,
    "v": lambda x: 2 * x - 1,
    "w": lambda x: 2 * x + 1,
}
_FAMILIES: dict[str, Callable[[Array, Array], Array]] = {
    "hermite_polynomial_h": _recurrence(
        lambda x: 2 * x, lambda k, x, now, before: 2 * (x * now - k * before)
    ),
    "hermite_polynomial_he": _recurrence(
        lambda x: x, lambda k, x, now, before: x * now - k * before
    ),
    "laguerre_polynomial_l": _recurrence(
        lambda x: 1 - x, lambda k, x, now, before: ((2 * k + 1 - x) * now - k * before) / (k + 1)
    ),
    "legendre_polynomial_p": _recurrence(
        lambda x: x, lambda k, x, now, before: ((2 * k + 1) * x * now - k * before) / (k + 1)
    ),
}
for _kind, _first in _FIRST.items():
    _FAMILIES[f"chebyshev_polynomial_{_kind}"] = _chebyshev(_first, False)
    _FAMILIES[f"shifted_chebyshev_polynomial_{_kind}"] = _chebyshev(_first, True)

for _name, _function in _FAMILIES.items():
    _packet = getattr(aten, f"special_{_name}")
    aliases(
        dict.fromkeys((_packet.default, _packet.x_scalar, _packet.n_scalar), _function),
        promotion=INT_TO_FLOAT,
    )

"""Which key a query may attend to.

A mask has a static part, `MaskRule` (causal, sliding window: known while tracing, so whole blocks
can be left out), and a traced part, `MaskArrays` (padding, segments, an arbitrary mask). Knows
nothing of scores or softmax.

Indices count from the beginning of both sequences, as torch's `is_causal` does when T != S.

Shapes: B = sequences, N = query heads, T = queries, S = keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Index = TypeVar("Index", int, Array)


@dataclass(frozen=True, kw_only=True)
class MaskRule:
    """The part of a mask that depends on positions only.

    `window` counts as Transformers does: with `causal`, query i sees the keys j with 0 <= i -
    j < window (the query itself included); without it, the keys with |i - j| <= window.
    """

    causal: bool
    window: int | None = None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys before and after its own position a query sees; None = all."""
        if self.window is None:
            return None, (0 if self.causal else None)
        return (self.window - 1, 0) if self.causal else (self.window, self.window)

    def visible(self, rows_T: Array, cols_S: Array) -> Array | None:
        """bool [T, S] for query and key positions, or None when everything is visible."""
        back, ahead = self.reach
        terms: list[Array] = []
        distance_TS = rows_T[:, None] - cols_S[None, :]
        if ahead is not None:
            terms.append(distance_TS >= -ahead)
        if back is not None:
            terms.append(distance_TS <= back)
        return conjunction(*terms)

    def key_range(self, start: Index, stop: Index, num_keys: int) -> tuple[Index, Index]:
        """First and end of the keys that queries [start, stop) see, within [0, num_keys]."""
        back, ahead = self.reach
        traced = isinstance(start, Array)
        least, most = (jnp.minimum, jnp.maximum) if traced else (min, max)
        first = most(start - back, 0) if back is not None else start * 0
        end = least(stop + ahead, num_keys) if ahead is not None else start * 0 + num_keys
        return least(first, end), end  # pyright: ignore[reportReturnType]

    def numpy(self, num_queries: int, num_keys: int) -> np.ndarray:
        """The rule as a bool [T, S] array, for tests and for reading."""
        with jax.ensure_compile_time_eval():
            keep = self.visible(jnp.arange(num_queries), jnp.arange(num_keys))
        return np.ones((num_queries, num_keys), bool) if keep is None else np.asarray(keep)


class MaskArrays(NamedTuple):
    """The part of a mask that is data. Every field may be None."""

    padding_BS: Array | None = None  # bool, True = the key may be attended
    segments_BT: Array | None = None  # int32, equal ids attend; T == S
    mask_BNTS: Array | None = None  # bool, every dim may be 1

    def any(self) -> bool:
        return any(field is not None for field in self)


def conjunction(*terms: Array | None) -> Array | None:
    """The logical and of the terms that exist; None when there are none."""
    result: Array | None = None
    for term in terms:
        if term is not None:
            result = term if result is None else result & term
    return result


def visible_BNTS(
    rule: MaskRule, arrays: MaskArrays, num_queries: int, num_keys: int
) -> Array | None:
    """The whole mask, bool and broadcastable to [B, N, T, S]; None when everything is visible."""
    keep = rule.visible(jnp.arange(num_queries), jnp.arange(num_keys))
    padding, segments = arrays.padding_BS, arrays.segments_BT
    return conjunction(
        None if keep is None else keep[None, None],
        None if padding is None else padding[:, None, None, :],
        None if segments is None else segments[:, None, :, None] == segments[:, None, None, :],
        arrays.mask_BNTS,
    )

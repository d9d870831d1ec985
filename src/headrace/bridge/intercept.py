"""What a caller may put in the place of a program's attention, and add to its linear layers.

Serving runs the captured graph with a key/value cache, and with several adapters on one base. Both
need to step in at a node and to keep arrays from one layer to the next; an `Intercept` does that
and the bridge stays ignorant of what it is for.

`value` is a pytree of arrays. Layers that run as a loop hand it from turn to turn as a carry, so
an intercept never closes over arrays that it changes.

Shapes: B = batch, N = query heads, K = key/value heads, T = queries, S = keys, H = head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch.fx as fx

from headrace.bridge.masks import MaskSpec

Array = jax.Array


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The operands of one `headrace::attention` node, as `attention_rule` takes them.

    query [B,N,T,H], key [B,K,S,H], value [B,K,S,Hv]; the result is [B,N,T,Hv].
    """

    node: fx.Node
    query: Array
    key: Array
    value: Array
    mask: MaskSpec | Array | None
    bias: Array | None
    sinks: Array | None
    causal: bool
    scale: float
    softcap: float


class Intercept(ABC):
    """Replaces attention and may change the results of linear layers while a program is lowered.

    value: arrays as they stand after the nodes lowered so far. turn: the loop's turn inside a loop
    (a traced uint32), None outside.
    """

    value: Any
    turn: Array | None

    @abstractmethod
    def inside(self, value: Any, turn: Array) -> Intercept:
        """The intercept for one turn of a loop, starting from `value`."""

    @abstractmethod
    def attention(self, call: AttentionCall) -> Array:
        """The result of an attention node; may replace `self.value`."""

    def linear(self, node: fx.Node, operands: Sequence[Any], outputs: Array) -> Array:
        """The result of an `aten.linear` node: operands are input, weight and perhaps a bias."""
        del node, operands
        return outputs

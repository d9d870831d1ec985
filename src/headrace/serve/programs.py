"""The compiled programs of one engine: few shapes, all compiled before the engine is ready.

A shape that is missing after warm-up is compiled on the spot, counted and logged.

Knows: lowered programs, the device state they work on. Does not know: requests, text.

Shapes: T = tokens of a step, O = rows that get a token, V = vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.kernels.paged import PagedForm
from headrace.serve import sampler
from headrace.serve.cache import Pages
from headrace.serve.lora import Stacks, place_lora
from headrace.serve.lowering import Lowering
from headrace.serve.model import ServedModel
from headrace.serve.shapes import Shapes, StepShape

log = logging.getLogger(__name__)
Array = jax.Array


@dataclass(kw_only=True, eq=False)
class Programs:
    """Compiled programs and the device state they work on: pages, adapters, penalty counts."""

    model: ServedModel
    shapes: Shapes
    forms: Mapping[str, PagedForm]
    pages: Pages = field(init=False)
    stacks: Stacks = field(init=False)
    shaping: sampler.Shaping = field(init=False)
    lowering: Lowering = field(init=False)
    warm: bool = False
    late_compilations: int = 0
    _compiled: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lowering = Lowering(model=self.model, shapes=self.shapes, forms=self.forms)
        self.pages = _zeros(self.lowering.pages)
        self.stacks = _zeros(self.lowering.stacks)
        self.shaping = _zeros(self.lowering.shaping)

    # running ------------------------------------------------------------------------------------

    def step(self, shape: StepShape, packed: np.ndarray, *, lora: bool) -> tuple[Array, Array]:
        """Run one step; returns hidden states of all tokens [T, D] and of those that get a
        successor [O, D]. The cache is replaced.
        """
        run = self._get(("step", shape, lora))
        stacks = self.stacks if lora else {}
        self.pages, hidden_TD, hidden_OD = run(
            self.model.params, self.model.buffers, self.pages, stacks, packed
        )
        return hidden_TD, hidden_OD

    def sample(
        self,
        variant: sampler.Variant,
        hidden_OD: Array,
        integers: np.ndarray,
        floats: np.ndarray,
        bits_OW: np.ndarray | None = None,
    ) -> sampler.Sampled:
        """One token a row. integers, floats: the fields of `sampler.Rows`, packed."""
        run = self._get(("sample", variant, hidden_OD.shape[0]))
        if variant != "shaped":
            return run(self.model.head_params, hidden_OD, integers, floats)
        result, self.shaping = run(
            self.model.head_params, hidden_OD, integers, floats, self.shaping, bits_OW
        )
        return result

    def score(self, hidden_TD: Array, targets_T: np.ndarray) -> sampler.Sampled:
        """Log-probabilities of given tokens and of the most likely ones, at every position."""
        return self._get(("score", hidden_TD.shape[0]))(
            self.model.head_params, hidden_TD, targets_T
        )

    # compiling ----------------------------------------------------------------------------------

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> float:
        """Compile every program; returns seconds. progress(done, total, name)."""
        start, keys = time.perf_counter(), self.lowering.all_keys()
        for i, key in enumerate(keys):
            if progress is not None:
                progress(i, len(keys), " ".join(str(k) for k in key))
            if key not in self._compiled:
                self._compiled[key] = self.lowering.lower(key).compile()
        self._warm_updates()
        if progress is not None:
            progress(len(keys), len(keys), "ready")
        self.warm = True
        return time.perf_counter() - start

    def _warm_updates(self) -> None:
        """The small programs that change one row of penalty counts, one slot of adapters."""
        self.set_shaping(0, np.zeros(self.model.vocab_size, np.int32), seen=None, bias=None)
        if self.shapes.max_loras:
            self.stacks = place_lora(self.stacks, None, self.model.targets, 1, name="")

    def set_shaping(
        self, slot: int, counts_V: np.ndarray, *, seen: np.ndarray | None, bias: np.ndarray | None
    ) -> None:
        """Replace the counts, prompt tokens and biases of one running sequence."""
        size = self.model.vocab_size
        self.shaping = sampler.set_shaping(
            self.shaping,
            np.int32(slot),
            counts_V,
            np.zeros(size, bool) if seen is None else seen,
            np.zeros(size, np.float32) if bias is None else bias,
        )

    def _get(self, key: Any) -> Any:
        run = self._compiled.get(key)
        if run is None:
            if self.warm:
                self.late_compilations += 1
                log.warning("compiled after warm-up: %s is no shape that was foreseen", key)
            run = self._compiled[key] = self.lowering.lower(key).compile()
        return run


def _zeros(shapes: Any) -> Any:
    """Arrays of zeros, made where they shall lie."""

    def make() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    where = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(make, out_shardings=where)() if jax.tree.leaves(where) else make()

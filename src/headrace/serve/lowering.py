"""The programs of an engine as functions of arrays, lowered from shapes alone.

    step      [D decode rows + blocks of prompt] -> hidden states, cache (donated)
    sample    hidden states -> one token a row, in the variants of `sampler`
    score     hidden states -> log-probabilities of given next tokens (prompt_logprobs)

Everything that changes at run time is an argument; a step's integers travel in one array. The
weights may be shapes too: the planner lowers an engine's programs for devices that nobody has
rented.

Knows: the served model, shapes. Does not know: compiling, the state of a running engine, requests.

Shapes: T = tokens of a step, R = rows, M = pages a sequence may have, O = rows that get a token,
V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from headrace.kernels.paged import PagedForm, empty_pages
from headrace.kernels.paged_sharded import page_spec
from headrace.serve import sampler
from headrace.serve.cache import CacheEntry, PagedIntercept, Pages
from headrace.serve.linear import linear_weight_first, weight_first
from headrace.serve.lora import LoraStacks, Stacks, empty_stacks
from headrace.serve.model import ServedModel
from headrace.serve.shapes import Shapes, StepShape, packed_size, split_packed, step_rows

Array = jax.Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Lowering:
    """What an engine of one model and one set of sizes may compile.

    forms: of every cache. device: lowers for it when the model is on no mesh; None is JAX's
    default device. `pages`, `stacks` and `shaping` are the shapes of the engine's state.
    """

    model: ServedModel
    shapes: Shapes
    forms: Mapping[str, PagedForm]
    device: Any = None

    # state --------------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> Sharding | None:
        """Where an array lies that every device has whole; None on JAX's default device."""
        if self.model.mesh is not None:
            return NamedSharding(self.model.mesh, PartitionSpec())
        return None if self.device is None else SingleDeviceSharding(self.device)

    @cached_property
    def pages(self) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
        """The caches, by the name of the entry that writes them."""
        return {e.name: self._pages(e) for e in self._entries}

    @cached_property
    def stacks(self) -> Any:
        """The slots of adapters, see `lora.empty_stacks`."""
        if not self.shapes.max_loras:
            return {}
        kinds = [
            p.dtype for p in self.model.params.values() if jnp.issubdtype(p.dtype, jnp.floating)
        ]
        make = partial(
            empty_stacks,
            self.model.targets,
            slots=self.shapes.max_loras,
            rank=self.shapes.max_lora_rank,
            dtype=kinds[0] if kinds else jnp.float32,
        )
        return self._everywhere(jax.eval_shape(make))

    @cached_property
    def shaping(self) -> Any:
        """Penalty counts and biases, see `sampler.empty_shaping`."""
        rows, size = self.shapes.max_num_seqs, self.model.vocab_size
        return self._everywhere(jax.eval_shape(partial(sampler.empty_shaping, rows, size)))

    @property
    def _entries(self) -> list[CacheEntry]:
        return [e for e in self.model.entries.values() if e.writes]

    def _pages(self, entry: CacheEntry) -> tuple[jax.ShapeDtypeStruct, ...]:
        found = jax.eval_shape(
            partial(empty_pages, self.shapes.paged(entry), self.forms[entry.name])
        )
        where = self.whole
        if self.model.mesh is not None:
            where = NamedSharding(self.model.mesh, self._page_specs[entry.name])
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x in found)

    @cached_property
    def _page_specs(self) -> dict[str, PartitionSpec]:
        mesh = self.model.mesh
        if mesh is None:
            return {}
        return {
            e.name: page_spec(self.shapes.paged(e), self.forms[e.name], mesh) for e in self._entries
        }

    def _everywhere(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: self._argument(x.shape, x.dtype), tree)

    # lowering -----------------------------------------------------------------------------------

    def all_keys(self) -> list[Any]:
        """Every program that can be asked for."""
        found: list[Any] = []
        for shape in self.shapes.steps:
            tokens = self.shapes.tokens(shape)
            found.append(("step", shape, False))
            if self.shapes.max_loras:
                found.append(("step", shape, True))
            rows = self.shapes.outputs(shape)
            found += [("sample", v, rows) for v in sampler.VARIANTS]
            if shape.blocks:
                found.append(("score", tokens))
        return list(dict.fromkeys(found))

    def lower(self, key: Any) -> Any:
        """The program of a key from `all_keys`, lowered. A second or two."""
        run, arguments = self.program(key)
        return run.lower(*arguments)

    def program(self, key: Any) -> tuple[Any, tuple[Any, ...]]:
        """The jitted function of a key and the shapes that it takes."""
        kind = key[0]
        head, hidden = self.model.head_params, self._hidden
        if kind == "step":
            _, shape, lora = key
            packed = self._argument((packed_size(self.shapes, shape),), jnp.int32)
            where = jax.tree.map(lambda x: x.sharding, self.pages)
            results = self._results((where, self.whole, self.whole))
            run = jax.jit(partial(self._step, shape), donate_argnums=(2,), **results)
            stacks = self.stacks if lora else {}
            return run, (self.model.params, self.model.buffers, self.pages, stacks, packed)
        if kind == "score":
            tokens = key[1]
            states = self._argument((tokens, hidden.shape[-1]), hidden.dtype)
            run = jax.jit(self._score, **self._results(self.whole))
            return run, (head, states, self._argument((tokens,), jnp.int32))
        _, variant, rows = key
        states = self._argument((rows, hidden.shape[-1]), hidden.dtype)
        integers = self._argument((sampler.NUM_INTEGERS, rows), jnp.int32)
        floats = self._argument((sampler.NUM_FLOATS, rows), jnp.float32)
        arguments = (head, states, integers, floats)
        if variant != "shaped":
            run = jax.jit(partial(self._sample, variant), **self._results(self.whole))
            return run, arguments
        bits = self._argument((rows, -(-self.model.vocab_size // 32)), jnp.int32)
        run = jax.jit(self._sample_shaped, donate_argnums=(4,), **self._results(self.whole))
        return run, (*arguments, self.shaping, bits)

    def _argument(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """An argument that every device has whole."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.whole)

    def _results(self, shardings: Any) -> dict[str, Any]:
        """Where results lie, for `jax.jit`; nothing to say on JAX's default device."""
        return {} if self.whole is None else {"out_shardings": shardings}

    @cached_property
    def _hidden(self) -> jax.ShapeDtypeStruct:
        shape = self.shapes.steps[0]
        packed = jax.ShapeDtypeStruct((packed_size(self.shapes, shape),), jnp.int32)
        step = partial(self._step, shape)
        return jax.eval_shape(step, self.model.params, self.model.buffers, self.pages, {}, packed)[
            1
        ]

    # traced -------------------------------------------------------------------------------------

    def _step(
        self, shape: StepShape, params: Any, buffers: Any, pages: Pages, stacks: Stacks, packed: Any
    ) -> tuple[Pages, Array, Array]:
        parts = split_packed(packed, self.shapes, shape)
        rows = step_rows(parts, self.shapes, shape)
        adapters = None
        if stacks:
            adapters = LoraStacks(
                targets=self.model.targets,
                stacks=stacks,
                slots_T=parts.adapters_T,
                num_decode=shape.decode,
            )
        intercept = PagedIntercept(
            pages=pages,
            entries=self.model.entries,
            rows=rows,
            num_pages=self.shapes.num_pages,
            forms=self.forms,
            page_specs=self._page_specs,
            mesh=self.model.mesh,
            lora=adapters,
        )
        outputs, _ = self.model.module.apply(
            params,
            buffers,
            train=False,
            intercept=intercept,
            input_ids=parts.tokens_T[None],
            position_ids=jnp.maximum(rows.positions_T, 0)[None],
        )
        hidden_TD = outputs.logits[0]
        return intercept.value, hidden_TD, hidden_TD[parts.select_O]

    def _logits(self, head: Any, hidden: Array) -> Array:
        form = self.model.head
        if form is None:
            return hidden.astype(jnp.float32)
        alone = self.model.mesh is None
        if alone and hidden.ndim == 2 and weight_first(hidden.shape[0]):
            bias = None if form.bias_key is None else head[form.bias_key]
            logits = linear_weight_first(hidden, head[form.weight_key], bias)
            return (logits if form.tail is None else form.tail(logits)).astype(jnp.float32)
        return form.logits(head, hidden).astype(jnp.float32)

    def _sample(
        self,
        variant: sampler.Variant,
        head: Any,
        hidden_OD: Array,
        integers: Any,
        floats: Any,
    ) -> sampler.Sampled:
        rows = sampler.unpack(integers, floats)
        return sampler.sample(self._logits(head, hidden_OD), rows, variant)

    def _sample_shaped(
        self,
        head: Any,
        hidden_OD: Array,
        integers: Any,
        floats: Any,
        shaping: sampler.Shaping,
        bits_OW: Any,
    ) -> tuple[sampler.Sampled, sampler.Shaping]:
        rows = sampler.unpack(integers, floats)
        logits = self._logits(head, hidden_OD)
        return sampler.sample_shaped(logits, rows, shaping, bits_OW)

    def _score(self, head: Any, hidden_TD: Array, targets_T: Any) -> sampler.Sampled:
        def one(pair: tuple[Array, Array]) -> sampler.Sampled:
            hidden, target = pair
            return sampler.describe(self._logits(head, hidden), target)

        return jax.lax.map(one, (hidden_TD, targets_T), batch_size=64)

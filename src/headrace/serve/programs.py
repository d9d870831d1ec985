"""The compiled programs of one engine: few shapes, all compiled before the engine is ready.

    step      [D decode rows + blocks of prompt] -> hidden states, cache (donated)
    sample    hidden states -> one token a row, in the variants of `sampler`
    score     hidden states -> log-probabilities of given next tokens (prompt_logprobs)

Everything that changes at run time is an argument; a step's integers travel in one array. A shape
that is missing after warm-up is compiled on the spot, counted and logged.

Knows: the served model, shapes, compilation. Does not know: requests, text.

Shapes: T = tokens of a step, R = rows, M = pages a sequence may have, O = rows that get a token,
V = vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.errors import ConfigError
from headrace.kernels.paged import KVCacheDtype, PagedForm, PagedRows, PagedShape, empty_pages
from headrace.kernels.paged_sharded import one_part, page_spec
from headrace.serve import sampler
from headrace.serve.cache import (
    CacheEntry,
    PagedIntercept,
    Pages,
)
from headrace.serve.linear import linear_weight_first, weight_first
from headrace.serve.lora import LoraStacks, Stacks, empty_stacks, place_lora
from headrace.serve.model import ServedModel

log = logging.getLogger(__name__)
Array = jax.Array


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """decode: rows of one token. blocks: rows of `Shapes.block` prompt tokens."""

    decode: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes an engine is compiled for.

    max_model_len: most tokens of prompt and answer. page_size: tokens a page. num_pages: pages of
    the pool, page 0 included, which takes what padding writes. max_num_seqs: sequences that run at
    once. block: prompt tokens that share one row. block_steps: numbers of blocks a step may have.
    num_drafts: guesses that a step may check for one sequence. kv_cache_dtype: how keys and values
    are stored.
    """

    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    block: int
    block_steps: tuple[int, ...]
    max_loras: int = 0
    max_lora_rank: int = 16
    num_drafts: int = 0
    kv_cache_dtype: KVCacheDtype = "auto"

    @property
    def pages_a_sequence(self) -> int:
        """Width of the page table; one block may reach past the last token."""
        return -(-(self.max_model_len + self.block) // self.page_size)

    @property
    def decode_steps(self) -> tuple[int, ...]:
        """Numbers of decode rows: powers of two up to max_num_seqs."""
        sizes = [1 << i for i in range(self.max_num_seqs.bit_length())]
        return tuple(sorted({min(s, self.max_num_seqs) for s in [*sizes, self.max_num_seqs]}))

    @property
    def steps(self) -> tuple[StepShape, ...]:
        """Every shape a step may take: decode alone, or all rows with some blocks."""
        alone = [StepShape(decode=d, blocks=0) for d in self.decode_steps]
        mixed = [StepShape(decode=self.max_num_seqs, blocks=b) for b in self.block_steps]
        return (*alone, *mixed)

    def paged(self, entry: CacheEntry) -> PagedShape:
        """The pages of one cache."""
        return entry.shape(
            num_pages=self.num_pages,
            page_size=self.page_size,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def tokens(self, shape: StepShape) -> int:
        """Tokens of a step, padding included."""
        return shape.decode + shape.blocks * self.block

    def outputs(self, shape: StepShape) -> int:
        """Tokens of a step that may get a successor."""
        return shape.decode * (1 + self.num_drafts) if shape.blocks else shape.decode

    def fit(self, decode: int, blocks: int) -> StepShape:
        """The smallest compiled shape that holds so many rows."""
        if blocks == 0:
            return StepShape(decode=next(d for d in self.decode_steps if d >= decode), blocks=0)
        wide = next(b for b in self.block_steps if b >= blocks)
        return StepShape(decode=self.max_num_seqs, blocks=wide)


def packed_size(shapes: Shapes, shape: StepShape) -> int:
    """Length of a step's integer array, see `Packed`."""
    rows = shape.decode + shape.blocks
    return 4 * shapes.tokens(shape) + shapes.outputs(shape) + rows * shapes.pages_a_sequence


class Packed(NamedTuple):
    """The parts of a step's integer array, in order; NumPy views on the host, traced inside."""

    tokens_T: Any
    positions_T: Any
    slots_T: Any
    adapters_T: Any
    select_O: Any
    tables_RM: Any


def split_packed(packed: Any, shapes: Shapes, shape: StepShape) -> Packed:
    """Views of a packed step."""
    T, outputs = shapes.tokens(shape), shapes.outputs(shape)
    tables = packed[4 * T + outputs :].reshape(-1, shapes.pages_a_sequence)
    return Packed(
        tokens_T=packed[:T],
        positions_T=packed[T : 2 * T],
        slots_T=packed[2 * T : 3 * T],
        adapters_T=packed[3 * T : 4 * T],
        select_O=packed[4 * T : 4 * T + outputs],
        tables_RM=tables,
    )


def _rows(parts: Packed, shapes: Shapes, shape: StepShape) -> PagedRows:
    return PagedRows(
        positions_T=parts.positions_T,
        slots_T=parts.slots_T,
        tables_RM=parts.tables_RM,
        num_decode=shape.decode,
        block=shapes.block,
    )


@dataclass(kw_only=True, eq=False)
class Programs:
    """Compiled programs and the device state they work on: pages, adapters, penalty counts."""

    model: ServedModel
    shapes: Shapes
    forms: Mapping[str, PagedForm]
    pages: Pages = field(init=False)
    stacks: Stacks = field(init=False)
    shaping: sampler.Shaping = field(init=False)
    warm: bool = False
    late_compilations: int = 0
    _compiled: dict[Any, Any] = field(default_factory=dict)
    _whole: NamedSharding | None = None
    _page_specs: dict[str, PartitionSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        entries = [e for e in self.model.entries.values() if e.writes]
        if (mesh := self.model.mesh) is not None:
            self._whole = NamedSharding(mesh, PartitionSpec())
            self._page_specs = {
                e.name: page_spec(self.shapes.paged(e), self.forms[e.name], mesh) for e in entries
            }
        self.pages = {e.name: self._empty_pages(e) for e in entries}
        shaping = sampler.empty_shaping(self.shapes.max_num_seqs, self.model.vocab_size)
        self.stacks, self.shaping = self._empty_stacks(), shaping
        if self._whole is not None:
            self.stacks, self.shaping = jax.device_put((self.stacks, shaping), self._whole)

    def _empty_pages(self, entry: CacheEntry) -> tuple[Array, ...]:
        shape, form = self.shapes.paged(entry), self.forms[entry.name]
        if self.model.mesh is None:
            return empty_pages(shape, form)
        where = NamedSharding(self.model.mesh, self._page_specs[entry.name])
        return jax.jit(partial(empty_pages, shape, form), out_shardings=where)()

    def _empty_stacks(self) -> Stacks:
        if not self.shapes.max_loras:
            return {}
        kinds = [
            p.dtype for p in self.model.params.values() if jnp.issubdtype(p.dtype, jnp.floating)
        ]
        dtype = kinds[0] if kinds else jnp.float32
        return empty_stacks(
            self.model.targets,
            slots=self.shapes.max_loras,
            rank=self.shapes.max_lora_rank,
            dtype=dtype,
        )

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

    def keys(self) -> list[Any]:
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

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> float:
        """Compile every program; returns seconds. progress(done, total, name)."""
        start, keys = time.perf_counter(), self.keys()
        for i, key in enumerate(keys):
            if progress is not None:
                progress(i, len(keys), " ".join(str(k) for k in key))
            if key not in self._compiled:
                self._compiled[key] = self._compile(key)
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
            run = self._compiled[key] = self._compile(key)
        return run

    def _compile(self, key: Any) -> Any:
        kind = key[0]
        head, hidden = self.model.head_params, self._hidden_size
        if kind == "step":
            _, shape, lora = key
            packed = self._argument((packed_size(self.shapes, shape),), jnp.int32)
            stacks = self.stacks if lora else {}
            where = jax.tree.map(lambda x: x.sharding, self.pages)
            results = self._results((where, self._whole, self._whole))
            run = jax.jit(partial(self._step, shape), donate_argnums=(2,), **results)
            arguments = (self.model.params, self.model.buffers, self.pages, stacks, packed)
        elif kind == "sample":
            _, variant, rows = key
            states = self._argument((rows, hidden.shape[-1]), hidden.dtype)
            integers = self._argument((sampler.NUM_INTEGERS, rows), jnp.int32)
            floats = self._argument((sampler.NUM_FLOATS, rows), jnp.float32)
            arguments = (head, states, integers, floats)
            if variant == "shaped":
                words = -(-self.model.vocab_size // 32)
                bits = self._argument((rows, words), jnp.int32)
                run = jax.jit(
                    self._sample_shaped, donate_argnums=(4,), **self._results(self._whole)
                )
                arguments = (*arguments, self.shaping, bits)
            else:
                run = jax.jit(partial(self._sample, variant), **self._results(self._whole))
        else:
            tokens = key[1]
            states = self._argument((tokens, hidden.shape[-1]), hidden.dtype)
            run = jax.jit(self._score, **self._results(self._whole))
            arguments = (head, states, self._argument((tokens,), jnp.int32))
        return run.lower(*arguments).compile()

    def _argument(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """An argument that every device has whole."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

    def _results(self, shardings: Any) -> dict[str, Any]:
        """Where results lie, for `jax.jit`; nothing to say on one device."""
        return {} if self._whole is None else {"out_shardings": shardings}

    @cached_property
    def _hidden_size(self) -> jax.ShapeDtypeStruct:
        shape = self.shapes.steps[0]
        packed = jax.ShapeDtypeStruct((packed_size(self.shapes, shape),), jnp.int32)
        step = partial(self._step, shape)
        model = self.model
        return jax.eval_shape(step, model.params, model.buffers, self.pages, {}, packed)[1]

    # traced -------------------------------------------------------------------------------------

    def _step(
        self, shape: StepShape, params: Any, buffers: Any, pages: Pages, stacks: Stacks, packed: Any
    ) -> tuple[Pages, Array, Array]:
        parts = split_packed(packed, self.shapes, shape)
        rows = _rows(parts, self.shapes, shape)
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


def choose_forms(
    entries: list[CacheEntry], shapes: Shapes, mesh: Mesh | None = None
) -> dict[str, PagedForm]:
    """`ragged` for caches that the TPU kernel can hold, `gather` for all others and elsewhere.

    Raises ConfigError for an int8 cache on a TPU, whose kernel cannot read it.
    """
    from headrace.kernels.paged_tpu import ragged_obstacles

    on_tpu = jax.default_backend() == "tpu"
    if on_tpu and shapes.kv_cache_dtype == "int8":
        raise ConfigError(
            "kv_cache_dtype is int8; the ragged paged attention kernel that a TPU needs takes one "
            "number for all keys (k_scale) and one for all values, not a scale for each token and "
            "head. Leave kv_cache_dtype at auto, or hand over to vLLM (--engine vllm)"
        )
    forms: dict[str, PagedForm] = {}
    for entry in entries:
        own = one_part(shapes.paged(entry), mesh)
        queries = entry.num_heads * own.num_kv_heads // entry.num_kv_heads
        fits = not ragged_obstacles(own, queries) and not entry.has_sinks
        forms[entry.name] = "ragged" if on_tpu and fits else "gather"
    return forms


def check_shapes(shapes: Shapes, model: ServedModel) -> None:
    """Refuse sizes that contradict each other, all problems at once."""
    problems: list[str] = []
    least = shapes.pages_a_sequence + 1
    if shapes.num_pages < least:
        problems.append(
            f"the cache has {shapes.num_pages} pages of {shapes.page_size} tokens; one sequence of "
            f"max_model_len={shapes.max_model_len} needs {least}. Give more cache memory or a "
            "smaller max_model_len"
        )
    if model.max_positions is not None and shapes.max_model_len > model.max_positions:
        problems.append(
            f"max_model_len is {shapes.max_model_len}; the model has {model.max_positions} "
            "positions"
        )
    if shapes.max_num_seqs < 1 or shapes.max_model_len < 2:
        problems.append("max_num_seqs is at least 1 and max_model_len at least 2")
    if problems:
        raise ConfigError("; ".join(problems))

"""The sizes an engine is compiled for, and how a step's integers lie in one array.

Knows: shapes, the forms of paged attention. Does not know: programs, requests.

Shapes: T = tokens of a step, R = rows, M = pages a sequence may have, O = rows that get a token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import Mesh

from headrace.errors import ConfigError
from headrace.kernels.attention import traced_platform
from headrace.kernels.paged import KVCacheDtype, PagedForm, PagedRows, PagedShape
from headrace.kernels.paged_sharded import one_part
from headrace.serve.cache import CacheEntry
from headrace.serve.model import ServedModel

log = logging.getLogger(__name__)


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


def step_rows(parts: Packed, shapes: Shapes, shape: StepShape) -> PagedRows:
    return PagedRows(
        positions_T=parts.positions_T,
        slots_T=parts.slots_T,
        tables_RM=parts.tables_RM,
        num_decode=shape.decode,
        block=shapes.block,
    )


def choose_forms(
    entries: list[CacheEntry], shapes: Shapes, mesh: Mesh | None = None
) -> dict[str, PagedForm]:
    """`ragged` for caches that the TPU kernel can hold, `triton` for those that the GPU kernel can
    hold and, tried on this device, reads right; `gather` for all others and elsewhere.

    Raises ConfigError for an int8 cache on a TPU, whose kernel cannot read it.
    """
    check_kv_cache_dtype(shapes.kv_cache_dtype)
    forms: dict[str, PagedForm] = {}
    for entry in entries:
        own = one_part(shapes.paged(entry), mesh)
        queries = entry.num_heads * own.num_kv_heads // entry.num_kv_heads
        forms[entry.name] = _form(entry, own, queries)
    return forms


def _form(entry: CacheEntry, own: PagedShape, num_heads: int) -> PagedForm:
    """own, num_heads: what one device holds and computes."""
    platform = traced_platform()
    if platform == "tpu" and not entry.has_sinks:
        from headrace.kernels.paged_tpu import ragged_obstacles

        return "gather" if ragged_obstacles(own, num_heads) else "ragged"
    if platform == "gpu" and not entry.has_sinks and entry.window is None:
        from headrace.kernels.paged_gpu import triton_fault, triton_obstacles

        if triton_obstacles(own):
            return "gather"
        if fault := triton_fault(own, num_heads):
            log.warning("paged attention takes its portable form, its GPU kernel failed: %s", fault)
            return "gather"
        return "triton"
    return "gather"


def check_kv_cache_dtype(kv_cache_dtype: KVCacheDtype) -> None:
    """Raise ConfigError for an int8 cache on a TPU, whose kernel cannot read it."""
    if traced_platform() == "tpu" and kv_cache_dtype == "int8":
        raise ConfigError(
            "kv_cache_dtype is int8; the ragged paged attention kernel that a TPU needs takes one "
            "number for all keys (k_scale) and one for all values, not a scale for each token and "
            "head. Leave kv_cache_dtype at auto, or hand over to vLLM (--engine vllm)"
        )


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

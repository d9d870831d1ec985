"""Settings of an engine, and the sizes that follow from them and the device.

Knows: options, memory. Does not know: requests, programs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from headrace.errors import ConfigError
from headrace.kernels.attention import traced_platform
from headrace.kernels.paged import KEYS_AT_A_TIME, KVCacheDtype
from headrace.kernels.paged_sharded import one_part
from headrace.kernels.quantized import FORMATS
from headrace.serve.base import CommonOptions
from headrace.serve.model import (
    DEFAULT_MAX_MODEL_LEN,
    ServedModel,
    capture_for_serving,
    load_served_model,
)
from headrace.serve.shapes import Shapes, check_shapes
from headrace.sharding import device_memory

log = logging.getLogger(__name__)

HOST_SHARE = 0.25  # of host memory, when the cache lives there
BLOCKS = (2, 8, 32, 128, 512)  # of prompt tokens a step, what programs are compiled for
CPU_BLOCKS = (2, 4, 8, 12, 16, 32, 64)  # compute is what counts there: little may be padding
DEVICE_SHARE = 0.80  # of what the weights leave; the rest is for programs and their buffers


@dataclass(frozen=True, kw_only=True)
class EngineOptions(CommonOptions):
    """How an engine is built; `CommonOptions` has the rest.

    max_model_len: most tokens of prompt and answer; None takes the model's own, 4096 at most.
    max_batched_tokens: prompt tokens a step; None is 256 on CPU, where a larger step only makes
    others wait, and 512 elsewhere. page_size: tokens a page; None chooses by platform.
    cache_tokens: size of the cache; None takes what max_num_seqs sequences of full length need, as
    far as memory goes. prefix_caching: reuse equal beginnings. max_loras: adapter slots,
    max_lora_rank: their largest rank. speculative_tokens: guesses a step from the text so far, 0 is
    off. merge: fold an adapter into its base. quantization: int8, int4 or nf4 stores the weights of
    linear layers so. kv_cache_dtype: "auto" keeps keys and values in the model's dtype, "int8" as
    codes with a scale for each token and head (not on TPU). tensor_parallel_size: devices that
    share weights and heads. roll: run repeated layers as loops; None chooses by platform.
    """

    max_batched_tokens: int | None = None
    page_size: int | None = None
    cache_tokens: int | None = None
    prefix_caching: bool = True
    max_loras: int = 0
    max_lora_rank: int = 32
    speculative_tokens: int = 0
    merge: bool = False
    quantization: str | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    tensor_parallel_size: int = 1
    roll: bool | None = None

    def least(self) -> dict[str, int]:
        return {
            **super().least(),
            "max_model_len": 2,
            "max_batched_tokens": 16,
            "max_loras": 0,
            "max_lora_rank": 1,
            "tensor_parallel_size": 1,
            "speculative_tokens": 0,
            "page_size": 1,
            "cache_tokens": 1,
        }

    def problems(self) -> list[str]:
        problems: list[str] = []
        if self.speculative_tokens > 15:
            problems.append(f"speculative_tokens is {self.speculative_tokens}; it is at most 15")
        if self.quantization not in (None, *FORMATS):
            known = ", ".join(FORMATS)
            problems.append(f"quantization is {self.quantization!r}; it is {known} or nothing")
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            known = ", ".join(get_args(KVCacheDtype))
            problems.append(f"kv_cache_dtype is {self.kv_cache_dtype!r}; it is one of {known}")
        if self.quantization is not None and self.tensor_parallel_size > 1:
            problems.append("quantization serves one device; leave out tensor_parallel_size")
        if self.merge and self.max_loras:
            problems.append("merge folds the adapter into the base; max_loras keeps them apart")
        return problems


def open_model(
    model: Any, options: EngineOptions, more_adapters: bool
) -> tuple[ServedModel, dict[str, str]]:
    """The captured model, and the adapter that was asked for by giving its folder."""
    from headrace.weights.adapter import find_adapter

    options.use_compilation_cache()
    size = options.tensor_parallel_size
    if isinstance(model, ServedModel):
        there = 1 if model.mesh is None else model.mesh.size
        if size not in (1, there):
            raise ConfigError(
                f"tensor_parallel_size is {size}; the ServedModel was captured for {there}"
            )
        return model, {}
    if not isinstance(model, (str, Path)):
        served = capture_for_serving(
            model,
            name=type(model).__name__,
            roll=options.roll,
            quantization=options.quantization,
            tensor_parallel_size=size,
        )
        return served, {}
    adapter = find_adapter(model)
    if options.merge and adapter is None:
        raise ConfigError(f"{model} is no adapter, so there is nothing to merge")
    if options.merge and more_adapters:
        raise ConfigError("merge serves one adapter folded into its base; leave out --adapter")
    own: dict[str, str] = {}
    source: Any = model
    if adapter is not None and not options.merge:
        own = {Path(model).resolve().name: str(model)}
        source = options.base or adapter.base_model_name_or_path
    served = load_served_model(
        source,
        base=options.base if options.merge else None,
        merge=options.merge,
        dtype=options.dtype,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        tokenizer_from=model,
        quantization=options.quantization,
        tensor_parallel_size=size,
    )
    return served, own


def choose_shapes(
    model: ServedModel, options: EngineOptions, *, room: float | None = None
) -> Shapes:
    """Sizes of the programs and the cache. Raises ConfigError when they contradict each other.

    room: bytes of each device beside the weights; None asks the devices.
    """
    longest = min(model.max_positions or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
    length = longest if options.max_model_len is None else options.max_model_len
    page = _page_size(length) if options.page_size is None else options.page_size
    on_cpu = traced_platform() == "cpu"
    block, tokens, steps = (16, 256, CPU_BLOCKS) if on_cpu else (32, 512, BLOCKS)
    tokens = tokens if options.max_batched_tokens is None else options.max_batched_tokens
    most = -(-tokens // block)
    blocks = sorted({min(b, most) for b in steps} | {most})
    a_sequence = -(-(length + block) // page)
    wanted = options.max_num_seqs * a_sequence
    if options.cache_tokens is not None:
        pages = -(-options.cache_tokens // page)
    else:
        pages = min(wanted, _affordable(model, page, options, room))
        if pages < wanted:
            log.info(
                "the cache holds %d tokens of the %d that %d full sequences need",
                pages * page,
                wanted * page,
                options.max_num_seqs,
            )
    shapes = Shapes(
        max_model_len=length,
        page_size=page,
        num_pages=pages + 1,
        max_num_seqs=options.max_num_seqs,
        block=block,
        block_steps=tuple(b for b in blocks if b <= most),
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
        num_drafts=options.speculative_tokens,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    check_shapes(shapes, model)
    return shapes


def _page_size(length: int) -> int:
    """As many tokens as attention reads at a time on CPU, so that a page is copied whole; 16 on
    GPU; on TPU a sixteenth of the context, so that tables fit its scalar memory.
    """
    backend = traced_platform()
    if backend != "tpu":
        return KEYS_AT_A_TIME.get(backend, 16)
    return max(16, min(256, 1 << ((length // 16) - 1).bit_length()))


def _affordable(
    model: ServedModel, page_size: int, options: EngineOptions, room: float | None
) -> int:
    """Pages that the memory of each device has room for."""
    stored = options.kv_cache_dtype
    shapes = [
        e.shape(num_pages=1, page_size=page_size, kv_cache_dtype=stored)
        for e in model.entries.values()
        if e.writes
    ]
    bytes_a_page = page_size * sum(one_part(s, model.mesh).bytes_a_token for s in shapes)
    device = device_memory() if room is None else None
    if device is not None:
        room = device.limit - device.used
    usable = _host_memory() * HOST_SHARE if room is None else room * DEVICE_SHARE
    return int(usable // bytes_a_page)


def _host_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""The engine's own programs, lowered for a slice from shapes alone.

The model is captured as serving captures it, on the meta device; the engine chooses its sizes and
forms as on such a device; nothing is loaded and no cache is made. As in training plans, repeated
layers are captured three times over and their loop is stretched.

Knows: serve's lowering, captures. Does not know: compiling, time, money.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from headrace.bridge.module import JaxModule
from headrace.bridge.passes.head import Head
from headrace.config import TrainConfig
from headrace.errors import CaptureError, ConfigError
from headrace.kernels import target_platform
from headrace.plan.candidate import ServerCandidate
from headrace.plan.program import capture_deep
from headrace.plan.topology import topology_devices
from headrace.serve.cache import cache_entries
from headrace.serve.lora import lora_targets
from headrace.serve.lowering import Lowering
from headrace.serve.model import (
    ServedModel,
    capture_decoder,
    served_quantizations,
    vocabulary_size,
)
from headrace.serve.options import EngineOptions, choose_shapes
from headrace.serve.shapes import check_kv_cache_dtype, choose_forms
from headrace.sharding import MeshConfig, make_mesh, make_partition, plan_params
from headrace.sharding.place import param_shardings
from headrace.train.abstract import abstract_buffers
from headrace.train.memory import local_bytes
from headrace.weights import meta_model
from headrace.weights.quantization import quantized_weight


@dataclass(frozen=True, kw_only=True)
class CapturedServer:
    """A model of full depth as serving captures it; gives hidden states when there is a head."""

    module: JaxModule
    head: Head | None
    name: str
    vocab_size: int
    max_positions: int | None
    notes: tuple[str, ...]


def capture_server(config: TrainConfig, *, roll: bool = True) -> CapturedServer:
    """Build on the meta device and capture. Costs seconds to a minute; reads config.json only.

    Raises CaptureError as the engine would. Whether tokens meet outside of attention takes weights
    to see; the engine asks that at its start.
    """

    def capture(found: Any) -> JaxModule:
        model = meta_model(
            found,
            task="causal",
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
        return capture_decoder(model, roll=roll)

    module, notes = capture_deep(config, capture)
    cache_entries(module.program)  # refuses what a page table cannot serve
    head: Head | None = None
    try:
        module, head = module.without_head()
    except CaptureError:
        notes = (*notes, "the head cannot be cut off: logits of every token are computed")
    model: Any = module.module
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    return CapturedServer(
        module=module,
        head=head,
        name=type(model).__name__,
        vocab_size=vocabulary_size(model),
        max_positions=positions or getattr(text, "n_positions", None),
        notes=notes,
    )


def abstract_model(
    captured: CapturedServer, devices: list[Any], *, quantization: str | None = None
) -> ServedModel:
    """The served model with shapes for weights, divided over the devices as the engine does."""
    mesh = make_mesh(MeshConfig(tensor=len(devices)), devices)
    plans = plan_params(captured.module, MeshConfig(**mesh.shape))
    module = captured.module
    where: dict[str, Any] = dict(param_shardings(mesh, plans))
    whole: Any = NamedSharding(mesh, PartitionSpec())
    if len(devices) > 1:
        module = module.on_mesh(make_partition(mesh, plans))
    else:
        whole = SingleDeviceSharding(devices[0])
        where = dict.fromkeys(where, whole)
    params: dict[str, Any] = {
        k: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=where[k]) for k, p in plans.items()
    }
    if quantization is not None:
        for key, wanted in served_quantizations(module, captured.head, quantization).items():
            kept = params[key]
            params[key] = quantized_weight(kept.shape, kept.dtype, wanted, kept.sharding)
    buffers: dict[str, Any] = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
        for k, x in abstract_buffers(module).items()
    }
    return ServedModel(
        name=captured.name,
        module=module,
        head=captured.head,
        params=params,
        buffers=buffers,
        entries=cache_entries(module.program),
        targets=lora_targets(module.program),
        vocab_size=captured.vocab_size,
        end_ids=(),
        max_positions=captured.max_positions,
    )


def server_options(candidate: ServerCandidate) -> EngineOptions:
    """The engine's settings of a candidate. Raises ConfigError for what the engine refuses."""
    with target_platform("tpu"):
        check_kv_cache_dtype(candidate.kv_cache_dtype)
    return EngineOptions(
        max_model_len=candidate.longest,
        max_num_seqs=candidate.streams,
        quantization=candidate.quantization,
        kv_cache_dtype=candidate.kv_cache_dtype,
        tensor_parallel_size=candidate.tensor,
    )


def server_lowering(captured: CapturedServer, candidate: ServerCandidate) -> Lowering:
    """The programs of an engine on the candidate's devices. A second; lowering comes after.

    Raises ConfigError for what the engine refuses, a cache too small for one sequence included,
    PlanError without a TPU compiler.
    """
    options = server_options(candidate)
    if captured.max_positions is not None and candidate.longest > captured.max_positions:
        raise ConfigError(
            f"sequences of {candidate.longest:,} tokens are planned; the model has "
            f"{captured.max_positions:,} positions. Give shorter --prompt-tokens, --answer-tokens "
            "or --max_length."
        )
    devices = topology_devices(candidate.hardware)[: candidate.tensor]
    model = abstract_model(captured, devices, quantization=candidate.quantization)
    room = candidate.hardware.chip.hbm_bytes - local_bytes((model.params, model.buffers))
    with target_platform("tpu"):
        shapes = choose_shapes(model, options, room=max(0, room))
        writing = [e for e in model.entries.values() if e.writes]
        forms = choose_forms(writing, shapes, model.mesh)
    device = devices[0] if len(devices) == 1 else None
    return Lowering(model=model, shapes=shapes, forms=forms, device=device)


def lower_for_tpu(lowering: Lowering, key: Any) -> Any:
    """A program of the engine, lowered as on its TPU. A second or two."""
    context: AbstractContextManager[Any] = nullcontext()
    if lowering.device is not None:  # the kernel asks a mesh which TPU it is for
        mesh = make_mesh(MeshConfig(), [lowering.device])
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with target_platform("tpu"), context:
        return lowering.lower(key)


__all__ = [
    "CapturedServer",
    "abstract_model",
    "capture_server",
    "lower_for_tpu",
    "server_lowering",
    "server_options",
]

"""A folder -> the captured model that the engine runs, with weights, tokenizer and limits.

Knows: loading, capture, what cannot be served and why. Does not know: requests, pages, HTTP.

Shapes: D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import torch
import torch.fx as fx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

from headrace.bridge.module import JaxModule, to_jax
from headrace.bridge.passes.head import Head
from headrace.errors import CaptureError, ConfigError
from headrace.kernels.attention import traced_platform
from headrace.kernels.quantized import Quantization, quantize
from headrace.serve.cache import CacheEntry, cache_entries, has_attention, shares_across_loop
from headrace.serve.defaults import GenerationDefaults, end_ids, generation_defaults
from headrace.serve.lora import LoraTarget, lora_targets
from headrace.serve.tokenwise import require_tokenwise
from headrace.sharding import MeshConfig, make_mesh, make_partition, param_shardings, plan_params
from headrace.weights.quantization import quantizations

log = logging.getLogger(__name__)
Array = jax.Array

DEFAULT_MAX_MODEL_LEN = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedModel:
    """A causal language model ready for the engine.

    module gives hidden states [B, S, D] when there is a head, logits otherwise. end_ids: token ids
    that end an answer. max_positions: what the model was built for, in tokens. defaults: what its
    authors recommend for requests that ask for nothing else.
    """

    name: str
    module: JaxModule
    head: Head | None
    params: dict[str, Any]
    buffers: dict[str, Array]
    entries: Mapping[fx.Node, CacheEntry]
    targets: Mapping[fx.Node, LoraTarget]
    vocab_size: int
    end_ids: tuple[int, ...]
    max_positions: int | None
    tokenizer: Any = None
    defaults: GenerationDefaults = field(default_factory=lambda: GenerationDefaults(sampling={}))

    @property
    def head_params(self) -> dict[str, Array]:
        """The weights that turn hidden states into logits."""
        if self.head is None:
            return {}
        keys = [self.head.weight_key, self.head.bias_key]
        return {k: self.params[k] for k in keys if k is not None}

    @property
    def mesh(self) -> Mesh | None:
        """The devices it is divided over, None for one."""
        partition = self.module.partition
        if partition is None:
            return None
        assert isinstance(partition.mesh, Mesh)
        return partition.mesh

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, each counted once however many devices hold it."""
        return sum(int(x.nbytes) for x in jax.tree.leaves((self.params, self.buffers)))


def load_served_model(
    name: str | Path,
    *,
    base: str | Path | None = None,
    merge: bool = False,
    dtype: str = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
    tokenizer_from: str | Path | None = None,
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
) -> ServedModel:
    """Load and capture a model folder, hub id, or an adapter folder's base.

    tokenizer_from: a folder whose tokenizer is preferred (an adapter's own chat template).
    merge: fold the adapter in `name` into its base. Without it an adapter folder must not come
    here: give its base and load the adapter into a slot.
    Raises ConfigError or CaptureError before any weight reaches the device.
    """
    from headrace.evaluate.model import load_tokenizer
    from headrace.weights.adapter import load_torch_model, take_generation_config

    model: Any = load_torch_model(
        name,
        base=base,
        task="causal",
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    if hasattr(model, "merge_and_unload"):
        if not merge:
            raise ConfigError(f"{name} is an adapter; serve its base with the adapter in a slot")
        model = model.merge_and_unload(safe_merge=True)
    source = tokenizer_from or name
    take_generation_config(model, Path(source))  # an adapter's own end tokens
    tokenizer = load_tokenizer(source, base=base, trust_remote_code=trust_remote_code)
    title = Path(str(name)).name or str(name)
    served = capture_for_serving(
        model,
        tokenizer=tokenizer,
        name=title,
        quantization=quantization,
        tensor_parallel_size=tensor_parallel_size,
    )
    model.to("meta")  # the weights live on the device now
    return served


def capture_for_serving(
    model: nn.Module,
    *,
    tokenizer: Any = None,
    name: str = "model",
    roll: bool | None = None,
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
) -> ServedModel:
    """Capture a loaded causal model; copies its weights.

    roll: run repeated layers as loops: quick to compile; None does so where the compiler reads a
    layer's weights in place (TPU, GPU) and unrolls on CPU, where each slice would be copied.
    quantization: int8, int4 or nf4 for the weights of linear layers and experts; embeddings and
    the head stay as they are. tensor_parallel_size: devices that share the weights and the heads.
    """
    mesh = _mesh(tensor_parallel_size)
    roll = traced_platform() != "cpu" if roll is None else roll
    module = capture_decoder(model, roll=roll)
    if has_attention(module.program):
        cache_entries(module.program)  # refuses before weights are copied
    params, buffers = _stored(module, mesh)
    head: Head | None = None
    try:
        module, head = module.without_head()
    except CaptureError as error:
        log.info("logits are computed for every token of a step: %s", error)
    if mesh is not None:
        module, params, buffers = _divided(module, params, buffers, mesh)
    text: Any = model.config.get_text_config()  # pyright: ignore
    vocab_size = vocabulary_size(model)
    generation = getattr(model, "generation_config", None)
    defaults = generation_defaults(generation)
    if defaults.unused:
        log.warning("generation_config.json: %s not applied", ", ".join(defaults.unused))
    kind = type(model).__name__
    try:
        require_tokenwise(module, params, buffers, vocab_size=vocab_size, name=kind)
    except CaptureError:
        if module.program.loops:  # an operator inside of a loop has no name yet
            whole = capture_decoder(model, roll=False)
            require_tokenwise(whole, *_stored(whole, mesh), vocab_size=vocab_size, name=kind)
        raise
    if quantization is not None:
        params = _quantized(module, params, head, quantization)
    return ServedModel(
        name=name,
        module=module,
        head=head,
        params=params,
        buffers=buffers,
        entries=cache_entries(module.program),
        targets=lora_targets(module.program),
        vocab_size=vocab_size,
        end_ids=end_ids(generation, tokenizer),
        max_positions=getattr(text, "max_position_embeddings", None)
        or getattr(text, "n_positions", None),
        tokenizer=tokenizer,
        defaults=defaults,
    )


def capture_decoder(model: nn.Module, *, roll: bool) -> JaxModule:
    """The capture that serving runs. Raises CaptureError for models that have none: encoders with
    a decoder, fixed shapes, no position_ids.
    """
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise CaptureError(
            f"{kind} is an encoder-decoder; the engine serves decoders. "
            "`headrace eval` answers with it"
        )
    module = _capture(model, roll=roll)
    if roll and shares_across_loop(module.program):
        log.info("%s shares keys and values across layers: served without loops", kind)
        module = _capture(model, roll=False)
    if not module.program.dynamic:
        raise CaptureError(
            f"{kind} can only be captured with fixed shapes, so one program cannot "
            "serve prompts of every length: " + "; ".join(module.program.history[0].notes)
        )
    return module


def _capture(model: nn.Module, *, roll: bool) -> JaxModule:
    ids = torch.ones(2, 16, dtype=torch.int64)
    positions = torch.arange(16).expand(2, 16).contiguous()
    try:
        return to_jax(model.eval(), {"input_ids": ids, "position_ids": positions}, roll=roll)
    except TypeError as error:
        raise CaptureError(
            f"{type(model).__name__} takes no position_ids, which serving needs to place the "
            f"tokens of several requests in one batch ({error})"
        ) from error


def _mesh(tensor: int) -> Mesh | None:
    """The first `tensor` devices; None for one. Raises ConfigError when there are fewer."""
    devices = jax.devices()
    if tensor == 1:
        return None
    if tensor > len(devices):
        raise ConfigError(
            f"tensor_parallel_size is {tensor}; there are {len(devices)} devices here"
        )
    return make_mesh(MeshConfig(tensor=tensor), devices[:tensor])


def _stored(module: JaxModule, mesh: Mesh | None) -> tuple[dict[str, Array], dict[str, Array]]:
    """Weights and buffers; in host memory when they are to be divided, one device may be small."""
    if mesh is None:
        return module.params(), module.buffers()
    with jax.default_device(jax.devices("cpu")[0]):
        return module.params(), module.buffers()


def _divided(
    module: JaxModule, params: dict[str, Array], buffers: dict[str, Array], mesh: Mesh
) -> tuple[JaxModule, dict[str, Array], dict[str, Array]]:
    """The module on the mesh, its weights where the model's own plan puts them, buffers whole."""
    plans = plan_params(module, MeshConfig(**mesh.shape))
    where = param_shardings(mesh, plans)
    placed = {key: jax.device_put(value, where[key]) for key, value in params.items()}
    whole = jax.device_put(buffers, NamedSharding(mesh, PartitionSpec()))
    return module.on_mesh(make_partition(mesh, plans)), placed, whole


def _quantized(
    module: JaxModule, params: Mapping[str, Array], head: Head | None, format_name: str
) -> dict[str, Any]:
    """The weights with those of linear layers as codes and scales; one in both forms at a time."""
    chosen = served_quantizations(module, head, format_name)
    store = jax.jit(quantize, static_argnums=1)
    return {k: store(x, chosen[k]) if k in chosen else x for k, x in params.items()}


def served_quantizations(
    module: JaxModule, head: Head | None, format_name: str
) -> dict[str, Quantization]:
    """Stored key -> how it is quantised: linear layers and experts, not the head."""
    frozen = replace(module.layout, trainable=frozenset[str]())  # nothing is trained here
    chosen = quantizations(replace(module, layout=frozen), format_name)
    kept = {head.weight_key, head.bias_key} if head is not None else set[str | None]()
    return {key: wanted for key, wanted in chosen.items() if key not in kept}


def vocabulary_size(model: Any) -> int:
    """Rows of the output embedding: token ids the model may write."""
    output = model.get_output_embeddings()
    if output is not None:
        return int(output.weight.shape[0])
    return int(model.config.get_text_config().vocab_size)

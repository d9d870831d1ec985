"""A run whose model comes by name and goes from its files to the devices, never through torch.

Used on a mesh, and for quantised bases, for models without new heads. The torch module keeps
structure, names and the adapter; its base weights stay on the meta device.

Knows: meta models, weight streams, the hub's folder. Does not know: meshes' rules, the loop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from headrace.config import TrainConfig
from headrace.errors import ConfigError
from headrace.train.durable import write_arrays, written_order
from headrace.train.placement import Placement, host_value
from headrace.train.processes import is_first
from headrace.weights import meta_model
from headrace.weights.checksums import check_sums, write_sums
from headrace.weights.files import INDEX, SINGLE, model_folder

MAX_SHARD_BYTES = 5 * 10**9


def can_stream(config: TrainConfig, objective: Any, placement: Placement) -> bool:
    """On a mesh or with a quantised base, for tasks that take the model as it is."""
    streamed = getattr(objective, "auto_class", "") in (
        "AutoModelForCausalLM",
        "AutoModelForMaskedLM",
    )
    wanted = placement.mesh is not None or config.quantization is not None
    return wanted and streamed and not config.use_dora


def structure(config: TrainConfig, objective: Any) -> tuple[nn.Module, Path]:
    """The model without weights, and the folder its files are in (downloaded if need be)."""
    name = str(config.model_name_or_path)
    folder = model_folder(name, config.model_revision)
    share = (jax.process_index(), jax.process_count())
    check_sums(folder, hub=config.verify_weights, share=share)
    model: Any = meta_model(
        name,
        task=objective.auto_class,
        dtype=config.dtype,
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
    )
    model.config._name_or_path = name
    model.name_or_path = name
    return model, folder


def is_streamed(model: nn.Module) -> bool:
    """Whether the model's own weights are not in torch."""
    return any(parameter.is_meta for parameter in model.parameters())


class _Later:
    """One tensor of a stored array, fetched from the devices when it is written."""

    def __init__(self, array: Any, layer: int | None, dtype: Any) -> None:
        self._array, self._layer = array, layer
        self.shape: tuple[int, ...] = tuple(array.shape if layer is None else array.shape[1:])
        self.dtype = np.dtype(dtype)
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        value = self._array if self._layer is None else self._array[self._layer]
        return host_value(value).astype(dtype or self.dtype, copy=False)


def save_streamed(
    folder: Path,
    stored: Mapping[str, Any],
    keys: Mapping[str, tuple[str, ...]],
    dtypes: Mapping[str, Any],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Stored arrays as safetensors by PyTorch name, sharded with an index; returns the files.

    One tensor is on the host at a time. Tied names are written once.
    """
    tensors: dict[str, _Later] = {}
    for key, names in keys.items():
        for layer, name in enumerate(names):
            index = layer if len(names) > 1 else None
            tensors[name] = _Later(stored[key], index, dtypes[key])
    groups: list[dict[str, _Later]] = [{}]
    for name, tensor in tensors.items():
        held = sum(each.nbytes for each in groups[-1].values())
        if groups[-1] and held + tensor.nbytes > max_shard_bytes:
            groups.append({})
        groups[-1][name] = tensor
    count = len(groups)
    files = [SINGLE] if count == 1 else [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]  # fmt: skip
    digests: dict[str, str] = {}
    for file, group in zip(files, groups, strict=True):
        if is_first():
            digests[file] = write_arrays(folder / file, group)
        else:
            for name in written_order(group):
                np.asarray(group[name])
    if count > 1 and is_first():
        total = sum(tensor.nbytes for tensor in tensors.values())
        places = {n: f for f, group in zip(files, groups, strict=True) for n in group}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True), encoding="utf-8")
    if is_first():
        write_sums(folder, digests)
    return files


def host_memory() -> int:
    """Bytes of memory that are free on this host."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def start_adapter(model: nn.Module) -> None:
    """Give an adapter on meta weights its first values, as PEFT would; nothing for other models.

    Raises ConfigError for adapters that are computed from base weights.
    """
    if isinstance(model, PeftModel):
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                _start_layer(layer, model.peft_config)
    wrong = [
        n for n, p in model.named_parameters() if p.requires_grad and p.is_meta and "lora" in n
    ]
    if wrong:
        raise ConfigError(
            f"the adapter's {wrong[0]} starts from base weights, which are streamed to the devices "
            "on a mesh. Use an initialisation that needs none (init_lora_weights: true), or pass "
            "the model as an object."
        )


def _start_layer(layer: Any, configs: Mapping[str, Any]) -> None:
    names = [n for n, p in layer.named_parameters() if "lora_" in n and p.is_meta]
    if not names:
        return
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module, parameter = layer.get_submodule(owner), layer.get_parameter(name)
        values = torch.zeros(parameter.shape, dtype=parameter.dtype)
        fresh = nn.Parameter(values, requires_grad=parameter.requires_grad)
        module.register_parameter(leaf, fresh)
    for adapter in configs:
        if adapter in layer.r:
            layer.reset_lora_parameters(adapter, configs[adapter].init_lora_weights)


__all__ = [
    "can_stream",
    "host_memory",
    "is_streamed",
    "save_streamed",
    "start_adapter",
    "structure",
]

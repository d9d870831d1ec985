"""Which weights of a model are stored in 8 or 4 bits, and where their codes and scales lie.

The frozen weights of linear layers and of experts. Embeddings, the output head, norms, biases and
everything that is trained stay as they are, as with bitsandbytes.

Knows: modules, roles. Does not know: files, arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding
from torch import nn

from headrace.bridge.module import JaxModule
from headrace.errors import ConfigError
from headrace.kernels.partition import Partition
from headrace.kernels.quantized import BLOCKS, Quantization, QuantizedWeight, quantized_shape
from headrace.sharding.roles import Roles

Quantizations = Mapping[str, Quantization]


def quantizations(module: JaxModule, format_name: str | None) -> dict[str, Quantization]:
    """Stored key -> how it is quantised, for the weights that are; nothing without a format.

    Raises ConfigError naming every weight that the format does not fit, and when none is left.
    """
    if format_name is None:
        return {}
    roles = Roles(module.module)
    modules = dict(module.module.named_modules())
    tensors = dict(module.module.named_parameters(remove_duplicate=False))
    found: dict[str, Quantization] = {}
    problems: list[str] = []
    for key, names in module.layout.keys.items():
        axis = None if key in module.layout.trainable else _input_axis(names[0], modules, roles)
        if axis is None:
            continue
        found[key] = Quantization(format=format_name, axis=axis)
        shape = tuple(tensors[names[0]].shape)
        if not found[key].block(shape):
            problems.append(f"{names[0]} {list(shape)} has {shape[axis]} inputs")
    if problems:
        raise ConfigError(
            f"quantization: {format_name} needs a multiple of {BLOCKS[-1]} inputs in every linear "
            "layer; use int8, which takes any:\n  " + "\n  ".join(problems)
        )
    if not found:
        raise ConfigError(
            f"quantization: {format_name}, but {type(module.module).__name__} has no frozen linear "
            "layer or experts; remove it"
        )
    return found


def _input_axis(name: str, modules: Mapping[str, Any], roles: Roles) -> int | None:
    """The dim of a linear weight's inputs; None for what stays as it is."""
    owner = modules[name.rpartition(".")[0]]
    if not name.endswith(".bias") and isinstance(owner, nn.Linear):
        return None if roles(name).role == "embedding" else -1
    if name.endswith(".weight") and type(owner).__name__ == "Conv1D":
        return -2
    if ".lora_" not in name and roles(name).role.startswith("experts"):
        return -1
    return None


def quantized_weight(
    shape: tuple[int, ...], dtype: Any, quantization: Quantization, sharding: Any
) -> QuantizedWeight:
    """A stored weight's codes and scales as shapes; both lie as the weight where that divides."""

    def fitting(sizes: tuple[int, ...]) -> Any:
        if not isinstance(sharding, NamedSharding):
            return sharding
        spec = Partition(mesh=sharding.mesh).fitting(sharding.spec, sizes)
        return NamedSharding(sharding.mesh, spec)

    codes = fitting(quantization.codes_shape(shape))
    scales = fitting(quantization.scales_shape(shape))
    return quantized_shape(shape, dtype, quantization, codes, scales)


def quantized_line(
    module: JaxModule, quantized: Quantizations, *, trainable: frozenset[str]
) -> str:
    """What is quantised, for the start screen."""
    tensors = dict(module.module.named_parameters(remove_duplicate=False))
    sizes = {
        key: tensors[names[0]].numel() * len(names) for key, names in module.layout.keys.items()
    }
    frozen = sum(size for key, size in sizes.items() if key not in trainable)
    inside = sum(sizes[key] for key in quantized)
    names = sorted({module.layout.keys[key][0].split(".")[-3 if _wrapped(module, key) else -2]
                    for key in quantized})  # fmt: skip
    format_name = next(iter(quantized.values())).format
    return (
        f"{format_name}: {100 * inside / frozen:.1f} % of the frozen weights ({', '.join(names)}); "
        "the rest stays as it is"
    )


def _wrapped(module: JaxModule, key: str) -> bool:
    return ".base_layer." in module.layout.keys[key][0]


__all__ = ["quantizations", "quantized_line", "quantized_weight"]

"""Weights from files straight into each device's part of the stored arrays.

Names in the files are brought to the model's by transformers' own conversion mapping, so what stock
`from_pretrained` loads, loads here. A tensor that is only renamed is read by range; one that is put
together from several (experts saved one by one) is converted one layer at a time. A stack of layers
is filled on the device, layer by layer: the host holds one tensor and the one read ahead.

Knows: files, transformers' mapping, shardings. Does not know: training, plans.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from torch import nn

from headrace.bridge.dtypes import jax_to_tensor, narrowed, tensor_to_numpy
from headrace.errors import CheckpointError
from headrace.kernels.quantized import QuantizedWeight, quantize
from headrace.weights.files import Part, TensorEntry, find_weights, read_parts, read_whole

Array = jax.Array


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one parameter's values are. converter: transformers' recipe when it is not one tensor
    under another name; `collected` is what it takes: (renamed, original, pattern)."""

    entries: tuple[TensorEntry, ...]
    converter: Any = None
    collected: tuple[tuple[str, str, str], ...] = ()

    @property
    def direct(self) -> bool:
        return self.converter is None


@dataclass(frozen=True, kw_only=True)
class WeightStream:
    """The parameters of a model and where each is in a folder. missing: in no file.

    problems are for the caller to raise: what is left out may be meant so (a new head).
    """

    model: nn.Module
    sources: Mapping[str, Source]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Raises CheckpointError with every missing, extra and mis-shaped tensor."""
        lines = [f"missing: {name}" for name in self.missing]
        lines += [f"extra: {name}" for name in self.unexpected]
        lines += [f"mis-shaped: {text}" for text in self.mismatched]
        if lines:
            shown = "\n  ".join(lines[:60])
            more = f"\n  and {len(lines) - 60} more" if len(lines) > 60 else ""
            raise CheckpointError(
                f"the files do not fit {type(self.model).__name__} ({len(lines)}):\n  {shown}{more}"
            )

    def read(self, name: str, parts: Sequence[Part], dtype: np.dtype) -> list[np.ndarray]:
        """Parts of one parameter, by PyTorch name, in `dtype`."""
        source = self.sources[name]
        if source.direct:
            return read_parts(source.entries[0], parts, dtype)
        whole = self._converted(name, source)
        return [narrowed(whole[part], dtype) for part in parts]

    def _converted(self, name: str, source: Source) -> np.ndarray:
        converter = deepcopy(source.converter)
        for (renamed, original, pattern), entry in zip(
            source.collected, source.entries, strict=True
        ):
            tensor = jax_to_tensor(read_whole(entry))
            converter.add_tensor(renamed, original, pattern, tensor)
        model: Any = self.model
        first = source.collected[0][0]
        made = converter.convert(first, model=model, config=model.config)
        value = made[_clean(name)]
        value = value[0] if isinstance(value, list) else value
        wanted = tuple(dict(model.named_parameters(remove_duplicate=False))[name].shape)
        if tuple(value.shape) != wanted:
            raise CheckpointError(
                f"{name} becomes {list(value.shape)} from {len(source.entries)} tensors of the "
                f"files; the model needs {list(wanted)}"
            )
        return tensor_to_numpy(value)


def open_stream(folder: str | Path, model: nn.Module) -> WeightStream:
    """Match the tensors of a folder with a transformers model's parameters (PEFT's may be in it).

    Reads headers only. Raises CheckpointError for files that cannot be read.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    entries = find_weights(folder)
    hf: Any = model
    parameters: dict[str, list[str]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        parameters.setdefault(_clean(name), []).append(name)
    buffers = {_clean(n): n for n, _ in model.named_buffers(remove_duplicate=False)}
    state = dict.fromkeys((*parameters, *buffers), True)
    mapping = get_model_conversion_mapping(hf)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    collected: dict[str, list[tuple[str, str, str]]] = {}
    unexpected: list[str] = []
    sources: dict[str, Source] = {}
    for original in sorted(entries, key=_natural):
        renamed, pattern = rename_source_key(
            original, renamings, converters, hf.base_model_prefix, state
        )
        if renamed not in state and original in state:
            renamed, pattern = original, None
        if renamed not in state:
            unexpected.append(original)
        elif pattern is not None:
            collected.setdefault(renamed, []).append((renamed, original, pattern))
        elif renamed in parameters:
            source = Source(entries=(entries[original],))
            sources |= dict.fromkeys(parameters[renamed], source)
    for items in collected.values():
        converter = by_pattern[items[0][2]]
        source = Source(
            entries=tuple(entries[original] for _, original, _ in items),
            converter=converter,
            collected=tuple(items),
        )
        for target in _targets(converter, items[0], parameters):
            sources[target] = source
    missing, mismatched = _compare(model, sources)
    return WeightStream(
        model=model,
        sources=sources,
        missing=tuple(missing),
        unexpected=tuple(name for name in unexpected if not _ignored(hf, name)),
        mismatched=tuple(mismatched),
    )


def _targets(
    converter: Any, item: tuple[str, str, str], parameters: Mapping[str, list[str]]
) -> list[str]:
    """Every parameter that a converter makes: the first by name, the others by its patterns."""
    first, patterns = item[0], converter.target_patterns
    names = [first.replace(patterns[0], pattern) for pattern in patterns]
    return [own for name in names for own in parameters.get(name, ())]


def _compare(model: nn.Module, sources: dict[str, Source]) -> tuple[list[str], list[str]]:
    """What no file has (tied names take each other's values) and what has another shape."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(parameter), name), []).append(name)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    missing: list[str] = []
    mismatched: list[str] = []
    for stored, same in names.items():
        found = next((sources[name] for name in same if name in sources), None)
        if found is None:
            if ".lora_" not in stored:
                missing.append(stored)
            continue
        for name in same:
            sources.setdefault(name, found)
        wanted = tuple(tensors[stored].shape)
        if found.direct and found.entries[0].shape != wanted:
            mismatched.append(
                f"{stored} is {list(found.entries[0].shape)} in {found.entries[0].file.name}, the "
                f"model needs {list(wanted)}"
            )
    return missing, mismatched


def _ignored(model: Any, name: str) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in (*patterns, r"rotary_emb\.inv_freq"))


def _clean(name: str) -> str:
    """A parameter's name as the base model has it, without PEFT's wrappers."""
    name = name.replace(".base_layer.", ".")
    return re.sub(r"\.(original_module|modules_to_save\.[^.]+)\.", ".", name)


def _natural(name: str) -> list[Any]:
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(name)


# -- onto devices ----------------------------------------------------------------------------------


def load_stored(
    stream: WeightStream,
    keys: Mapping[str, tuple[str, ...]],
    shardings: Mapping[str, Sharding],
    dtypes: Mapping[str, np.dtype],
    quantized: Mapping[str, QuantizedWeight] | None = None,
) -> dict[str, Any]:
    """Stored arrays: every local device gets its part, read from the files.

    keys: stored key -> PyTorch names, several for a stack of layers. quantized: shapes with
    shardings of what becomes a QuantizedWeight; each layer is quantised when it was placed, so one
    layer of one weight is on the devices in full precision. Peak host memory above the
    arrays: two tensors of one layer, one being placed and one being read.
    """
    quantized = quantized or {}
    shapes = {n: tuple(p.shape) for n, p in stream.model.named_parameters(remove_duplicate=False)}
    jobs = [(key, layer) for key, names in keys.items() for layer in range(len(names))]
    places = {key: _of_layer(shardings[key], len(names) > 1) for key, names in keys.items()}
    parts = {key: _local_parts(places[key], shapes[names[0]]) for key, names in keys.items()}

    def read(job: tuple[str, int]) -> list[np.ndarray]:
        key, layer = job
        return stream.read(keys[key][layer], parts[key].distinct, dtypes[key])

    stored: dict[str, Any] = {}
    ahead = _read_ahead(read, jobs)
    for key, layer in jobs:
        names, values = keys[key], next(ahead)
        shape = shapes[names[0]]
        placed = [jax.device_put(values[i], device) for device, i in parts[key].devices]
        one: Any = jax.make_array_from_single_device_arrays(shape, places[key], placed)
        del values, placed  # the host copy is let go before the next but one is read
        if key not in quantized and len(names) == 1:
            stored[key] = jax.block_until_ready(one)
            continue
        whole = jax.ShapeDtypeStruct((len(names), *shape), dtypes[key], sharding=shardings[key])
        leaves, structure = jax.tree.flatten(quantized.get(key, whole))
        start, fill = _layer_programs(tuple(leaves), structure, len(names) > 1)
        if layer == 0:
            stored[key] = start()
        stored[key] = jax.block_until_ready(fill(stored[key], one, np.int32(layer)))
        del one
    return stored


@functools.lru_cache(maxsize=64)
def _layer_programs(leaves: tuple[Any, ...], structure: Any, stacked: bool) -> tuple[Any, Any]:
    """`() -> empty arrays` and `(them, a layer's values, its number) -> them` with the layer in.

    leaves, structure: shapes with shardings of what is stored, an array or a QuantizedWeight. One
    program for all devices, and for all weights of this shape.
    """
    made: Any = jax.tree.unflatten(structure, leaves)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, made)

    def empty() -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), made)

    def fill(stack: Any, value: Array, layer: Array) -> Any:
        one = quantize(value, made.quantization) if isinstance(made, QuantizedWeight) else value
        if not stacked:
            return one
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, layer, 0),
            stack, one,
        )  # fmt: skip

    return (
        jax.jit(empty, out_shardings=shardings),
        jax.jit(fill, donate_argnums=0, out_shardings=shardings),
    )


def _of_layer(sharding: Sharding, stacked: bool) -> Sharding:
    """The sharding of one layer of a stack, whose layer axis is never divided."""
    if stacked and isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


@dataclass(frozen=True, kw_only=True)
class _LocalParts:
    """Different parts that local devices hold, and (device, which part) of every device."""

    distinct: list[Part]
    devices: list[tuple[Any, int]]


def _local_parts(sharding: Sharding, shape: tuple[int, ...]) -> _LocalParts:
    distinct: list[Part] = []
    known: dict[str, int] = {}
    devices: list[Any] = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part: Part = tuple(index)  # pyright: ignore
        text = repr([s.indices(n)[:2] for s, n in zip(part, shape, strict=True)])
        if text not in known:
            known[text] = len(distinct)
            distinct.append(part)
        devices.append((device, known[text]))
    return _LocalParts(distinct=distinct, devices=devices)


def _read_ahead(read: Callable[[Any], Any], jobs: Sequence[Any]) -> Iterator[Any]:
    """read(job) for every job in order, one of them ahead of its use."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        following = pool.submit(read, jobs[0]) if jobs else None
        for i in range(len(jobs)):
            assert following is not None
            value = following.result()
            following = pool.submit(read, jobs[i + 1]) if i + 1 < len(jobs) else None
            yield value
            del value

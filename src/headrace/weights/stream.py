"""Weights from files straight into each device's part of the stored arrays.

Names in the files are brought to the model's by transformers' own conversion mapping, so what stock
`from_pretrained` loads, loads here. A tensor that is only renamed is read by range; one that is put
together from several (experts saved one by one) is converted one layer at a time. A stack of layers
is filled on the device, layer by layer: the host holds one tensor and the one read ahead.

Knows: files, transformers' mapping, shardings. Does not know: training, plans.
"""

from __future__ import annotations

import functools
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
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
from headrace.weights.files import (
    Part,
    TensorEntry,
    aligned_empty,
    find_weights,
    finish,
    read_whole,
    start_reading,
)

Array = jax.Array
COMPILERS = 2  # threads that compile what fills stacks, while files are read


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one parameter's values are. converter: transformers' recipe when it is not one tensor
    under another name; `collected` is what it takes: (renamed, original, pattern).

    pieces: the same as tensors of the files, in the parameter's dims, each with the place of its
    first value; empty when only the recipe can tell.
    """

    entries: tuple[TensorEntry, ...]
    converter: Any = None
    collected: tuple[tuple[str, str, str], ...] = ()
    pieces: tuple[tuple[TensorEntry, tuple[int, ...]], ...] = ()

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

    def start(
        self, name: str, parts: Sequence[Part], arrays: Sequence[np.ndarray]
    ) -> list[Future[None]]:
        """Start to fill `arrays` with parts of one parameter, by PyTorch name; see `finish`."""
        source = self.sources[name]
        if not source.pieces:
            return [_converting().submit(self._convert, name, parts, arrays)]
        work: list[Future[None]] = []
        for entry, origin in source.pieces:
            work += start_reading(entry, _shared(entry.shape, origin, parts, arrays))
        return work

    def _convert(self, name: str, parts: Sequence[Part], arrays: Sequence[np.ndarray]) -> None:
        whole = self._converted(name, self.sources[name])
        for part, array in zip(parts, arrays, strict=True):
            array[...] = narrowed(whole[part], array.dtype)

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
            entry = entries[original]
            source = Source(entries=(entry,), pieces=((entry, (0,) * len(entry.shape)),))
            sources |= dict.fromkeys(parameters[renamed], source)
    for items in collected.values():
        converter = by_pattern[items[0][2]]
        source = Source(
            entries=tuple(entries[original] for _, original, _ in items),
            converter=converter,
            collected=tuple(items),
            pieces=_pieces(converter, items, entries),
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


def _pieces(
    converter: Any, items: Sequence[tuple[str, str, str]], entries: Mapping[str, TensorEntry]
) -> tuple[tuple[TensorEntry, tuple[int, ...]], ...]:
    """What a recipe that only stacks and joins tensors makes, as places in its result."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [type(op) for op in converter.operations]
    if kinds not in ([MergeModulelist], [Concatenate], [MergeModulelist, Concatenate]):
        return ()
    patterns, targets = converter.source_patterns, converter.target_patterns
    stacked = kinds[0] is MergeModulelist
    if len(targets) != 1 or (kinds == [MergeModulelist] and len(patterns) != 1):
        return ()
    joined = kinds[-1] is Concatenate
    made: list[tuple[TensorEntry, tuple[int, ...]]] = []
    start = 0  # of this pattern along the joined dim
    for pattern in patterns:
        group = [entries[original] for _, original, own in items if own == pattern]
        if not group or len({entry.shape for entry in group}) > (1 if stacked else len(group)):
            return ()
        for i, entry in enumerate(group):
            if stacked:
                dim = converter.operations[0].dim % (len(entry.shape) + 1)
                shape = (*entry.shape[:dim], 1, *entry.shape[dim:])
                entry, place = replace(entry, shape=shape), {dim: i}
            else:
                place: dict[int, int] = {}
            axis = converter.operations[-1].dim % len(entry.shape) if joined else 0
            if joined:
                place[axis] = start
            made.append((entry, tuple(place.get(d, 0) for d in range(len(entry.shape)))))
            if joined and (not stacked or i + 1 == len(group)):
                start += entry.shape[axis]
    return tuple(made)


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
    layer of one weight is on the devices in full precision. Peak host memory above the arrays:
    nothing but blocks of BLOCK_BYTES where devices compute in host memory; elsewhere two tensors
    of one layer, one being placed and one being read.
    """
    quantized = quantized or {}
    tensors: dict[str, Any] = dict(stream.model.named_parameters(remove_duplicate=False))
    wanted = {
        key: jax.ShapeDtypeStruct(
            stored_shape(names, tensors), dtypes[key], sharding=shardings[key]
        )
        for key, names in keys.items()
    }
    here = [key for key in keys if key not in quantized and _in_host_memory(shardings[key])]
    stored: dict[str, Any] = _read_in_place(stream, {key: keys[key] for key in here}, wanted)
    rest = {key: names for key, names in keys.items() if key not in stored}
    return stored | _read_through_host(stream, rest, wanted, quantized)


def stored_shape(names: Sequence[str], tensors: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a stored array: a layer axis in front when it holds several parameters."""
    shape = tuple(tensors[names[0]].shape)
    return (len(names), *shape) if len(names) > 1 else shape


def _in_host_memory(sharding: Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def _read_in_place(
    stream: WeightStream, keys: Mapping[str, tuple[str, ...]], wanted: Mapping[str, Any]
) -> dict[str, Array]:
    """Arrays over the memory that was read into: no value is copied after the kernel gave it."""
    work: list[Future[None]] = []
    filled: dict[str, tuple[_LocalParts, list[np.ndarray]]] = {}
    for key, names in keys.items():
        parts = _local_parts(wanted[key].sharding, wanted[key].shape)
        arrays = [aligned_empty(shape, wanted[key].dtype) for shape in parts.shapes]
        filled[key] = (parts, arrays)
        for layer, name in enumerate(names):
            own, places = parts.distinct, arrays
            if len(names) > 1:
                own, places = [part[1:] for part in own], [array[layer] for array in arrays]
            work += stream.start(name, own, places)
    finish(work)
    return {key: parts.placed(wanted[key], arrays) for key, (parts, arrays) in filled.items()}


def _read_through_host(
    stream: WeightStream,
    keys: Mapping[str, tuple[str, ...]],
    wanted: Mapping[str, Any],
    quantized: Mapping[str, QuantizedWeight],
) -> dict[str, Any]:
    """Arrays on devices with memory of their own, tensor by tensor, while the next are read."""
    layers = {
        key: jax.ShapeDtypeStruct(
            wanted[key].shape[1:] if len(names) > 1 else wanted[key].shape,
            wanted[key].dtype,
            sharding=_of_layer(wanted[key].sharding, len(names) > 1),
        )
        for key, names in keys.items()
    }
    parts = {key: _local_parts(one.sharding, one.shape) for key, one in layers.items()}
    jobs = [(key, layer) for key, names in keys.items() for layer in range(len(names))]

    programs = {
        key: _layer_programs(
            *_flat(quantized.get(key, wanted[key])), len(names) > 1, one=layers[key]
        )
        for key, names in keys.items()
        if key in quantized or len(names) > 1
    }

    def start(job: tuple[str, int]) -> tuple[list[np.ndarray], list[Future[None]]]:
        key, layer = job
        arrays = [aligned_empty(shape, layers[key].dtype) for shape in parts[key].shapes]
        return arrays, stream.start(keys[key][layer], parts[key].distinct, arrays)

    sizes = [layers[key].dtype.itemsize * sum(map(math.prod, parts[key].shapes)) for key, _ in jobs]
    stored: dict[str, Any] = {}
    ahead = _read_ahead(start, jobs, sizes)
    for key, layer in jobs:
        values = next(ahead)
        one: Any = parts[key].placed(layers[key], values)
        del values  # the host copy is let go before the next but one is read
        if key not in programs:
            stored[key] = jax.block_until_ready(one)
            continue
        empty, fill = programs[key]
        if layer == 0:
            stored[key] = empty.result()()
        filled = fill.result()(stored[key], one, np.int32(layer))
        stored[key] = jax.block_until_ready(filled)
        del one
    return stored


def _flat(made: Any) -> tuple[tuple[Any, ...], Any]:
    leaves, structure = jax.tree.flatten(made)
    return tuple(leaves), structure


@functools.lru_cache(maxsize=64)
def _layer_programs(
    leaves: tuple[Any, ...], structure: Any, stacked: bool, *, one: jax.ShapeDtypeStruct
) -> tuple[Future[Any], Future[Any]]:
    """`() -> empty arrays` and `(them, a layer's values, its number) -> them` with the layer in,
    while they are compiled.

    leaves, structure: shapes with shardings of what is stored, an array or a QuantizedWeight; one:
    of a layer's values. One program for all devices, and for all weights of this shape.
    """
    made: Any = jax.tree.unflatten(structure, leaves)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, made)

    def empty() -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), made)

    def fill(stack: Any, value: Array, layer: Array) -> Any:
        new = quantize(value, made.quantization) if isinstance(made, QuantizedWeight) else value
        if not stacked:
            return new
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, layer, 0),
            stack, new,
        )  # fmt: skip

    number = jax.ShapeDtypeStruct((), np.dtype(np.int32))
    lowered = (
        jax.jit(empty, out_shardings=shardings).lower(),
        jax.jit(fill, donate_argnums=0, out_shardings=shardings).lower(made, one, number),
    )
    first, second = (_compiling().submit(each.compile) for each in lowered)
    return first, second


@functools.cache
def _compiling() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COMPILERS, thread_name_prefix="headrace-compile")


@functools.cache
def _converting() -> ThreadPoolExecutor:
    """One thread: a recipe's tensors are in memory together, and those of one recipe only."""
    return ThreadPoolExecutor(1, thread_name_prefix="headrace-convert")


def _of_layer(sharding: Sharding, stacked: bool) -> Sharding:
    """The sharding of one layer of a stack, whose layer axis is never divided."""
    if stacked and isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


@dataclass(frozen=True, kw_only=True)
class _LocalParts:
    """Different parts that local devices hold, and (device, which part) of every device."""

    distinct: list[Part]
    shapes: list[tuple[int, ...]]
    devices: list[tuple[Any, int]]

    def placed(self, whole: jax.ShapeDtypeStruct, values: Sequence[np.ndarray]) -> Array:
        """An array from this process's parts, which must not be written to afterwards."""
        each = [jax.device_put(values[i], device) for device, i in self.devices]
        sharding: Any = whole.sharding
        return jax.make_array_from_single_device_arrays(whole.shape, sharding, each)


def _local_parts(sharding: Sharding, shape: tuple[int, ...]) -> _LocalParts:
    known: dict[tuple[tuple[int, int], ...], int] = {}
    devices: list[Any] = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part: Part = tuple(index)  # pyright: ignore
        span = tuple(s.indices(n)[:2] for s, n in zip(part, shape, strict=True))
        devices.append((device, known.setdefault(span, len(known))))
    return _LocalParts(
        distinct=[tuple(slice(a, b) for a, b in span) for span in known],
        shapes=[tuple(b - a for a, b in span) for span in known],
        devices=devices,
    )


def _shared(
    shape: tuple[int, ...],
    origin: tuple[int, ...],
    parts: Sequence[Part],
    arrays: Sequence[np.ndarray],
) -> list[tuple[Part, np.ndarray]]:
    """What each part takes of a tensor that begins at `origin`: (part of it, where it goes)."""
    found: list[tuple[Part, np.ndarray]] = []
    for part, array in zip(parts, arrays, strict=True):
        spans = [
            (max(s.start, first), min(s.stop, first + n), first, s.start)
            for s, first, n in zip(part, origin, shape, strict=True)
        ]
        if all(low < high for low, high, _, _ in spans):
            taken = tuple(slice(low - first, high - first) for low, high, first, _ in spans)
            place = tuple(slice(low - own, high - own) for low, high, _, own in spans)
            found.append((taken, array[place] if place else array))
    return found


def _read_ahead(
    start: Callable[[Any], tuple[list[np.ndarray], list[Future[None]]]],
    jobs: Sequence[Any],
    sizes: Sequence[int],
) -> Iterator[list[np.ndarray]]:
    """What start(job) reads, for every job in order; sizes: bytes of each.

    What is read ahead of use is no more than the largest.
    """
    limit, held = max(sizes, default=0), 0
    waiting = deque(zip(jobs, sizes, strict=True))
    started: deque[tuple[int, list[np.ndarray], list[Future[None]]]] = deque()

    def start_more() -> None:
        nonlocal held
        while waiting and held + waiting[0][1] <= limit:
            job, size = waiting.popleft()
            started.append((size, *start(job)))
            held += size

    start_more()
    while started:
        size, values, work = started.popleft()
        finish(work)
        held -= size
        start_more()  # reading goes on while these values are placed
        yield values
        del values, work

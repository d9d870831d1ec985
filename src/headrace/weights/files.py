"""Safetensors files read by range: what is in them, and any part of any tensor.

A folder holds `model.safetensors`, or several files with `model.safetensors.index.json`. Headers
are read and checked against the files' sizes at once; values only when they are asked for, by
`pread`, never through a memory map, so that what is read is what is held.

Knows: the format, byte ranges. Does not know: models, devices.
"""

from __future__ import annotations

import functools
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from headrace.bridge.dtypes import narrowed
from headrace.errors import CheckpointError, ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BLOCK_BYTES = 2**22  # read at a time
READERS = 8  # threads: a disk gives its rate to several requests at once
MAX_HEADER = 100_000_000  # bytes; the format's own limit
ALIGNMENT = 64  # bytes; what XLA asks of memory that it does not allocate

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
Part = tuple[slice, ...]
_of_thread = threading.local()


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies. start: its first byte in the file."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def model_folder(name: str | Path, revision: str = "main") -> Path:
    """The folder of a model: itself, or the hub's files, downloaded if need be."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json"]
    return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))


def refuse_gguf(name: str | Path) -> None:
    """Raises ConfigError with the way to convert it for a GGUF file, or a folder with no other
    weights."""
    path = Path(name)
    if path.suffix == ".gguf":
        folder, file = path.parent, path.name
    else:
        found = sorted(path.glob("*.gguf")) if path.is_dir() else []
        if not found or any(path.glob("*.safetensors")):
            return
        folder, file = path, found[0].name
    target = f"{Path(file).stem}-hf"
    raise ConfigError(
        f"{folder / file} is a GGUF file, and its weights are usually rounded to few bits; "
        "safetensors are read. Name the repository it was made from, or convert it once "
        f"(`pip install gguf`; needs memory for the whole model) and give {target}:\n"
        "  from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig\n"
        f"  folder, file = {str(folder)!r}, {file!r}\n"
        "  whole = GgufConfig(gguf_file=file, dequantize=True)\n"
        "  model = AutoModelForCausalLM.from_pretrained(\n"
        "      folder, gguf_file=file, quantization_config=whole)\n"
        "  model.hf_quantizer = model.config.quantization_config = None\n"
        f"  model.save_pretrained({target!r})\n"
        "  tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)\n"
        f"  tokenizer.save_pretrained({target!r})"
    )


def find_weights(folder: str | Path) -> dict[str, TensorEntry]:
    """Every tensor of a model folder by name.

    Raises CheckpointError listing all that is wrong: files that are missing, cut off or not
    safetensors, tensors that the index names and no file holds.
    """
    root = Path(folder)
    problems: list[str] = []
    named: Mapping[str, str] = {}
    if (root / INDEX).is_file():
        try:
            named = json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{root / INDEX} is not a safetensors index: {error!r}"
            ) from error
        files = sorted(set(named.values()))
    elif (root / SINGLE).is_file():
        files = [SINGLE]
    else:
        found = ", ".join(sorted(p.name for p in root.glob("*.bin"))[:3])
        hint = f" It has {found}: save the model again with safe_serialization." if found else ""
        raise CheckpointError(f"{root} has neither {SINGLE} nor {INDEX}.{hint}")
    entries: dict[str, TensorEntry] = {}
    for name in files:
        path = root / name
        if not path.is_file():
            count = sum(1 for file in named.values() if file == name)
            problems.append(f"{name} is missing; the index puts {count} tensors there")
            continue
        entries |= read_header(path, problems)
    missing = [
        name for name, file in named.items() if name not in entries and (root / file).is_file()
    ]
    problems += [f"{named[name]} lacks {name}, which the index puts there" for name in missing]
    if problems:
        shown = "\n  ".join(problems[:40])
        more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
        raise CheckpointError(f"{root} cannot be read ({len(problems)}):\n  {shown}{more}")
    return entries


def read_header(path: Path, problems: list[str]) -> dict[str, TensorEntry]:
    """The tensors of one file; what is wrong with it goes to `problems`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, MAX_HEADER):
            problems.append(f"{path.name} ({size} bytes) is cut off or not safetensors")
            return {}
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError:
            problems.append(f"{path.name}: the header is not JSON; the file is damaged")
            return {}
    header.pop("__metadata__", None)
    problems += _uncovered(path.name, header, size - 8 - length)
    entries: dict[str, TensorEntry] = {}
    for name, item in header.items():
        dtype = DTYPES.get(item["dtype"])
        first, last = item["data_offsets"]
        if dtype is None:
            problems.append(
                f"{path.name}: {name} has dtype {item['dtype']}, which is not supported"
            )
            continue
        entry = TensorEntry(
            name=name, file=path, dtype=dtype, shape=tuple(item["shape"]), start=8 + length + first
        )
        if last - first != entry.nbytes:
            problems.append(
                f"{path.name}: {name} {item['dtype']}{item['shape']} needs {entry.nbytes} bytes, "
                f"its range has {last - first}"
            )
        elif 8 + length + last > size:
            problems.append(
                f"{path.name} is cut off: {name} ends at byte {8 + length + last:,} of {size:,}"
            )
        else:
            entries[name] = entry
    return entries


def _uncovered(file: str, header: Mapping[str, Any], size: int) -> list[str]:
    """The format lets no two tensors share bytes and leaves no byte without a tensor."""
    ranges = sorted((*item["data_offsets"], name) for name, item in header.items())
    found: list[str] = []
    end = 0
    for first, last, name in ranges:
        if first != end:
            kind = "shares bytes with another tensor" if first < end else "follows a gap"
            found.append(f"{file}: {name} {kind} (byte {first:,}, expected {end:,})")
        end = max(end, last)
    if end < size:
        found.append(f"{file} has {size - end:,} bytes more than its tensors; it is damaged")
    return found


def read_parts(
    entry: TensorEntry, parts: Sequence[Part], dtype: np.dtype | None = None
) -> list[np.ndarray]:
    """Parts of a tensor, each a copy, in `dtype` (the file's own without it)."""
    spans = [[s.indices(n)[:2] for s, n in zip(part, entry.shape, strict=True)] for part in parts]
    shapes = [tuple(b - a for a, b in each) for each in spans]
    results = [aligned_empty(shape, dtype or entry.dtype) for shape in shapes]
    finish(start_reading(entry, list(zip(parts, results, strict=True))))
    return results


def read_whole(entry: TensorEntry) -> np.ndarray:
    """A whole tensor."""
    return read_parts(entry, [tuple(slice(None) for _ in entry.shape)])[0]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without values that JAX's CPU backend takes as it is instead of copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + nbytes].view(dtype).reshape(shape)


def start_reading(
    entry: TensorEntry, taking: Sequence[tuple[Part, np.ndarray]]
) -> list[Future[None]]:
    """Start to read parts of a tensor, each into an array of its shape, which says the dtype.

    Several threads read blocks of BLOCK_BYTES. A part of whole rows is read right into its array;
    rows of which parts take some columns are read once for all of them. The arrays are filled when
    all that is returned is done (`finish`).
    """
    shape = entry.shape or (1,)
    takers = [
        _Taking.make(part or (slice(None),), array.reshape(array.shape or (1,)), shape)
        for part, array in taking
    ]
    row_bytes = entry.nbytes // max(shape[0], 1)
    if len(shape) > 2 and row_bytes > BLOCK_BYTES:
        return _start_each_row(entry, takers, row_bytes)
    columns = [(0, n) for n in shape[1:]]
    direct = [
        each for each in takers
        if each.columns == columns
        and each.array.dtype == entry.dtype
        and each.array.flags.c_contiguous
    ]  # fmt: skip
    cut = [each for each in takers if not any(each is other for other in direct)]
    step = max(BLOCK_BYTES // max(row_bytes, 1), 1)
    work = [
        _readers().submit(_read_rows, entry, start, each.rows(start, stop))
        for each in direct
        for start, stop in _blocks(each.first, each.last, step)
    ]
    ends = [(each.first, each.last) for each in cut] or [(0, 0)]
    return work + [
        _readers().submit(_read_for_all, entry, (start, stop), cut)
        for start, stop in _blocks(min(a for a, _ in ends), max(b for _, b in ends), step)
    ]


def finish(work: Sequence[Future[None]]) -> None:
    """Wait for everything started; the first error is raised, and what has not begun is dropped."""
    try:
        for each in work:
            each.result()
    except BaseException:
        for each in work:
            each.cancel()
        raise


@dataclass(frozen=True, kw_only=True)
class _Taking:
    """An array that takes `columns` of a tensor's rows from `first` to before `last`."""

    first: int
    last: int
    columns: list[tuple[int, int]]
    array: np.ndarray

    @classmethod
    def make(cls, part: Part, array: np.ndarray, shape: tuple[int, ...]) -> _Taking:
        (first, last), *columns = (s.indices(n)[:2] for s, n in zip(part, shape, strict=True))
        return cls(first=first, last=last, columns=columns, array=array)

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.array[start - self.first : stop - self.first]


def _start_each_row(
    entry: TensorEntry, takers: Sequence[_Taking], row_bytes: int
) -> list[Future[None]]:
    """A tensor of more than two dims whose rows are large: each row as a tensor of its own."""
    work: list[Future[None]] = []
    for i in range(entry.shape[0]):
        row = replace(entry, shape=entry.shape[1:], start=entry.start + i * row_bytes)
        work += start_reading(row, [
            (tuple(slice(a, b) for a, b in each.columns), each.array[i - each.first])
            for each in takers if each.first <= i < each.last
        ])  # fmt: skip
    return work


def _blocks(first: int, last: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, last)) for start in range(first, last, step)]


def _read_rows(entry: TensorEntry, start: int, into: np.ndarray) -> None:
    """Whole rows of a tensor, from row `start` on, into an array of their shape and dtype."""
    if not into.size:
        return
    offset = entry.start + start * (into.nbytes // len(into))
    view, done = into.reshape(-1).view(np.uint8).data, 0
    descriptor = os.open(entry.file, os.O_RDONLY)
    try:
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], offset + done)
            if got == 0:
                raise CheckpointError(
                    f"{entry.file} ended while {entry.name} was read; it changed since it was "
                    "opened"
                )
            done += got
    finally:
        os.close(descriptor)


def _read_for_all(entry: TensorEntry, rows: tuple[int, int], taking: Sequence[_Taking]) -> None:
    """Rows [start, stop) read once, and given to every array that takes some of them."""
    start, stop = rows
    here = [each for each in taking if each.first < stop and start < each.last]
    if not here:
        return
    shape = (stop - start, *(entry.shape or (1,))[1:])
    block = _scratch(math.prod(shape) * entry.dtype.itemsize).view(entry.dtype).reshape(shape)
    _read_rows(entry, start, block)
    for each in here:
        low, high = max(start, each.first), min(stop, each.last)
        columns = tuple(slice(a, b) for a, b in each.columns)
        values = block[(slice(low - start, high - start), *columns)]
        own = each.rows(low, high)
        own[...] = values if own.dtype == entry.dtype else narrowed(values, own.dtype)


def _scratch(nbytes: int) -> np.ndarray:
    """This thread's own memory to read into: memory that is new each time costs as much as the
    reading."""
    memory: np.ndarray | None = getattr(_of_thread, "memory", None)
    if memory is None or memory.nbytes < nbytes:
        memory = _of_thread.memory = np.empty(max(nbytes, BLOCK_BYTES), np.uint8)
    return memory[:nbytes]


@functools.cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(READERS, thread_name_prefix="headrace-read")

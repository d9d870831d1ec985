"""Safetensors files read by range: what is in them, and any part of any tensor.

A folder holds `model.safetensors`, or several files with `model.safetensors.index.json`. Headers
are read and checked against the files' sizes at once; values only when they are asked for, by
`pread`, never through a memory map, so that what is read is what is held.

Knows: the format, byte ranges. Does not know: models, devices.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from headrace.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BLOCK_BYTES = 2**23  # read at a time when a part is not one range
MAX_HEADER = 100_000_000  # bytes; the format's own limit

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


def read_parts(entry: TensorEntry, parts: Sequence[Part]) -> list[np.ndarray]:
    """Parts of a tensor, each a copy. Rows are read once for all parts that share them."""
    shape = entry.shape
    ranges = [tuple(s.indices(n)[:2] for s, n in zip(p, shape, strict=True)) for p in parts]
    results = [np.empty([b - a for a, b in r], entry.dtype) for r in ranges]
    if not shape:
        descriptor = os.open(entry.file, os.O_RDONLY)
        try:
            value = _pread(descriptor, entry, 0, 1).reshape(())
        finally:
            os.close(descriptor)
        return [value.copy() for _ in parts]
    row_bytes = max(entry.nbytes // max(shape[0], 1), 1)
    step = max(BLOCK_BYTES // row_bytes, 1)
    first, last = min(r[0][0] for r in ranges), max(r[0][1] for r in ranges)
    descriptor = os.open(entry.file, os.O_RDONLY)
    try:
        for start in range(first, last, step):
            stop = min(start + step, last)
            if not any(r[0][0] < stop and start < r[0][1] for r in ranges):
                continue
            rows = _pread(descriptor, entry, start * row_bytes, (stop - start) * row_bytes)
            rows = rows.reshape(stop - start, *shape[1:])
            for result, spans in zip(results, ranges, strict=True):
                low, high = max(start, spans[0][0]), min(stop, spans[0][1])
                if low < high:
                    inner = tuple(slice(a, b) for a, b in spans[1:])
                    result[low - spans[0][0] : high - spans[0][0]] = rows[
                        (slice(low - start, high - start), *inner)
                    ]
    finally:
        os.close(descriptor)
    return results


def read_whole(entry: TensorEntry) -> np.ndarray:
    """A whole tensor."""
    return read_parts(entry, [tuple(slice(None) for _ in entry.shape)])[0]


def _pread(descriptor: int, entry: TensorEntry, offset: int, count: int) -> np.ndarray:
    count = count if entry.shape else entry.dtype.itemsize
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        got = os.preadv(descriptor, [view[done:]], entry.start + offset + done)
        if got == 0:
            raise CheckpointError(
                f"{entry.file} ended while {entry.name} was read; it changed since it was opened"
            )
        done += got
    return np.frombuffer(buffer, entry.dtype)

"""Files that must survive: arrays as safetensors, hashed while they are written, flushed to disk.

Knows: bytes. Does not know: what the arrays are, checkpoints, runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32",
    "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> str:
    """Write a safetensors file one array at a time; returns the SHA-256 of its bytes."""
    ordered = written_order(arrays)
    header: dict[str, Any] = {}
    offset = 0
    for name in ordered:
        array = arrays[name]
        end = offset + array.nbytes
        header[name] = {
            "dtype": _DTYPES[str(array.dtype)], "shape": list(array.shape),
            "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data must start 8-byte aligned
    digest = hashlib.sha256()
    with path.open("wb") as file:
        _put(file, digest, len(text).to_bytes(8, "little") + text)
        for name in ordered:
            flat = np.ascontiguousarray(np.asarray(arrays[name])).reshape(-1)
            _put(file, digest, flat.view(np.uint8).data if flat.size else b"")
    return digest.hexdigest()


def written_order(arrays: Mapping[str, Any]) -> list[str]:
    """The order arrays are written in; processes that only help to fetch them follow it too."""
    return sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))


def _put(file: BinaryIO, digest: Any, data: Any) -> None:
    file.write(data)
    digest.update(data)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

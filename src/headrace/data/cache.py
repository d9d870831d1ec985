"""Prepared data on disk: the second run of a recipe reads arrays and tokenises nothing.

    ~/.cache/headrace/data/<key>/   one .npy for each array, prepared.json for the rest

The key is a hash of everything the arrays depend on: the bytes of the data files, the tokenizer and
its chat template, the settings of data and length, and FORMAT. Only data from local files is kept:
a hub dataset has a cache of its own, rows given in Python are in memory. A folder is written beside
its place and renamed; a broken one is made anew. Arrays are mapped, not read: no pickle.

Knows: Dataset, Rows, reports as plain data. Does not know: how they are made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.config import TrainConfig
from headrace.data.batches import Rows
from headrace.data.dataset import Dataset
from headrace.data.examples import Examples
from headrace.data.labels import Labels
from headrace.data.masking import Masking
from headrace.data.packing import Packing
from headrace.data.report import DataReport

FORMAT = 1  # raise it when the same input gives other arrays
KEPT = 16  # folders; the ones used longest ago go first
_FILE = "prepared.json"
# Settings that change what is prepared. Batch sizes belong to it: they move a chosen max_length.
_SETTINGS = (
    "task", "seed", "dataset_name", "datasets", "dataset_train_split", "dataset_test_split",
    "eval_dataset_name", "eval_strategy", "test_split_size", "text_column", "text_pair_column",
    "label_column", "problem_type", "mlm_probability", "max_length", "over_length",
    "truncation_mode", "packing", "eval_packing", "completion_only_loss", "assistant_only_loss",
    "apply_chat_template", "bucket_count", "length_buckets", "pad_to_multiple_of",
    "per_device_train_batch_size", "gradient_accumulation_steps", "preference_loss",
)  # fmt: skip
_ARRAYS = ("input_ids", "offsets", "token_labels", "row_labels", "token_type_ids")


def cache_key(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    files: Sequence[Path],
    **further: Any,
) -> str:
    """Reads every byte of `files` (about a second a GB)."""
    digest = hashlib.sha256(f"headrace data {FORMAT}".encode())
    settings = {name: getattr(config, name) for name in _SETTINGS}
    digest.update(json.dumps({**settings, **further}, sort_keys=True, default=str).encode())
    backend: Any = tokenizer.backend_tokenizer
    digest.update(backend.to_str().encode())
    template = json.dumps(tokenizer.chat_template, default=str)
    digest.update(f"{template}{tokenizer.special_tokens_map}{tokenizer.padding_side}".encode())
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def store(
    folder: Path, key: str, datasets: Mapping[str, Dataset | None], labels: Labels | None
) -> bool:
    """Write under folder/key. A full or read-only disk costs the cache, not the run: False then."""
    making = folder / f".{key}.{os.getpid()}.tmp"
    try:
        making.mkdir(parents=True, exist_ok=True)
        plain = {
            name: _store_dataset(making, name, data)
            for name, data in datasets.items()
            if data is not None
        }
        names = None if labels is None else {"names": labels.names}
        text = json.dumps({"datasets": plain, "labels": names})
        (making / _FILE).write_text(text, encoding="utf-8")
        shutil.rmtree(folder / key, ignore_errors=True)
        making.rename(folder / key)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
        return False
    _prune(folder)
    return True


def load(folder: Path, key: str) -> tuple[dict[str, Dataset], Labels | None] | None:
    """What `store` wrote under this key; None when there is none, or it is damaged."""
    place = folder / key
    try:
        plain = json.loads((place / _FILE).read_text(encoding="utf-8"))
        found = {name: _load_dataset(place, name, data) for name, data in plain["datasets"].items()}
        os.utime(place)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    labels = plain["labels"]
    if labels is None:
        return found, None
    names = labels["names"]
    return found, Labels(names=None if names is None else tuple(names))


def _store_dataset(folder: Path, name: str, data: Dataset) -> dict[str, Any]:
    rows = data.rows
    arrays: dict[str, np.ndarray | None] = {
        array: getattr(rows.examples, array) for array in _ARRAYS
    }
    arrays |= {
        "members": rows.packing.members,
        "row_offsets": rows.packing.offsets,
        "row_buckets": rows.row_buckets,
        "desirable": rows.desirable,
    }
    for array, value in arrays.items():
        if value is not None:
            np.save(folder / f"{name}-{array}.npy", value, allow_pickle=False)
    return {
        "kind": rows.kind,
        "row_length": rows.packing.row_length,
        "num_tokens": rows.packing.num_tokens,
        "bucket_lengths": rows.bucket_lengths,
        "pad_token_id": rows.pad_token_id,
        "masking": None if rows.masking is None else dataclasses.asdict(rows.masking),
        "report": dataclasses.asdict(data.report),
        "arrays": [array for array, value in arrays.items() if value is not None],
    }


def _load_dataset(folder: Path, name: str, plain: Mapping[str, Any]) -> Dataset:
    arrays = {
        array: np.load(folder / f"{name}-{array}.npy", mmap_mode="r", allow_pickle=False)
        for array in plain["arrays"]
    }
    report = dict(plain["report"])
    report["example"] = tuple((text, trained) for text, trained in report["example"])
    report["lengths"], report["notes"] = tuple(report["lengths"]), tuple(report["notes"])
    masking = plain["masking"]
    rows = Rows(
        kind=plain["kind"],
        examples=Examples(**{array: arrays.get(array) for array in _ARRAYS}),  # type: ignore[arg-type]
        packing=Packing(
            members=np.asarray(arrays["members"]),
            offsets=np.asarray(arrays["row_offsets"]),
            row_length=plain["row_length"],
            num_tokens=plain["num_tokens"],
        ),
        bucket_lengths=tuple(plain["bucket_lengths"]),
        row_buckets=np.asarray(arrays["row_buckets"]),
        pad_token_id=plain["pad_token_id"],
        desirable=arrays.get("desirable"),
        masking=None if masking is None else Masking(**masking),
    )
    return Dataset(rows=rows, report=DataReport(**report))


def _prune(folder: Path) -> None:
    kept = sorted(
        (path for path in folder.iterdir() if (path / _FILE).is_file()),
        key=lambda path: path.stat().st_mtime,
    )
    for path in kept[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)

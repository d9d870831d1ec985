"""Several datasets in one run: each read by itself, in its own format, with a share of its rows.

    datasets:
      - path: chats.jsonl
      - path: owner/name
        name: en              # configuration of a hub dataset
        split: train[:5000]
        fraction: 0.5         # half of the rows, drawn by seed; 2 takes every row twice

Knows: the entries. Does not know: formats, tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.read import concatenate, local_files, read_table
from headrace.data.table import Table
from headrace.errors import ConfigError

KEYS = ("path", "name", "split", "fraction")
_ALIASES = {
    "dataset_name": "path", "dataset": "path", "data_files": "path", "config": "name",
    "dataset_config": "name", "weight": "fraction", "dataset_train_split": "split",
}  # fmt: skip
_FOUND_BY_LOOKING = (
    "type",
    "ds_type",
    "chat_template",
    "field_messages",
    "message_property_mappings",
)


def entries(datasets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries under canonical keys; ConfigError lists all that is wrong with them."""
    problems: list[str] = []
    found: list[dict[str, Any]] = []
    for number, given in enumerate(datasets, start=1):
        entry: dict[str, Any] = {}
        for key, value in given.items():
            name = _ALIASES.get(key, key)
            if name in KEYS:
                entry[name] = value
            elif key not in _FOUND_BY_LOOKING:
                near = difflib.get_close_matches(key, KEYS, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; needs {', '.join(KEYS)}"
                problems.append(f"entry {number}: {key} is unknown{hint}")
        if not entry.get("path"):
            problems.append(f"entry {number}: path is missing")
        fraction = entry.get("fraction", 1)
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or fraction <= 0:
            problems.append(f"entry {number}: fraction is {fraction!r}; needs a number above 0")
        found.append(entry)
    if problems:
        raise ConfigError("datasets: " + "\n  ".join(["", *problems]).strip())
    return found


def read_mixture(datasets: Sequence[Mapping[str, Any]], *, seed: int) -> Table:
    """All parts as one table that remembers them; the same seed draws the same rows."""
    parts = []
    for number, entry in enumerate(entries(datasets)):
        split = str(entry.get("split", "train"))
        table = read_table(str(entry["path"]), split=split, config=entry.get("name"))
        parts.append(_drawn(table, float(entry.get("fraction", 1)), [seed, number]))
    sources = ", ".join(part.source for part in parts)
    return concatenate(parts, f"{len(parts)} datasets: {sources}", keep_parts=True)


def mixture_files(datasets: Sequence[Mapping[str, Any]]) -> list[Path] | None:
    """The local files of all parts; None when one of them is not local."""
    files: list[Path] = []
    for entry in entries(datasets):
        found = local_files(str(entry["path"]))
        if found is None:
            return None
        files += found
    return files


def _drawn(table: Table, fraction: float, seed: list[int]) -> Table:
    """`fraction` of the rows: whole copies, and a part drawn without repetition."""
    if fraction == 1:
        return table
    copies, rest = divmod(round(fraction * len(table)), len(table))
    order = np.random.default_rng(seed).permutation(len(table))
    indices = [*np.tile(np.arange(len(table)), copies), *np.sort(order[:rest])]
    if not indices:
        raise ConfigError(f"datasets: fraction {fraction} of {table.source} is no row")
    return table.take([int(i) for i in indices])

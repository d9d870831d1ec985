"""Programs that a plan compiled for a TPU machine: what they were compiled with.

`headrace plan --save-programs DIR` writes entries of JAX's persistent compilation cache, whose
names are hashes of the program, its options, the compiler and the slice. A run that uses DIR as its
compilation cache finds its own program or compiles it; a list beside the entries says why it would
not be found. Files are JAX's own; nothing here is unpickled.

Knows: versions, one JSON file. Does not know: programs, how they are compiled.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SAVED = "saved_programs.json"
_FIELDS = {"slice", "program", "versions"}
_PARTS = ("jax", "jaxlib", "libtpu")


def note_saved(folder: Path, *, slice_name: str, program: str, files: list[str]) -> None:
    """Add a program to the folder's list. files: its entries of the cache."""
    entry = {"slice": slice_name, "program": program, "files": files, "versions": _versions()}
    kept = [each for each in _saved(folder) if each["program"] != program]
    text = json.dumps([*kept, entry], indent=1) + "\n"
    (folder / SAVED).write_text(text, encoding="utf-8")


def saved_obstacles(folder: Path) -> list[str]:
    """Why programs in this compilation cache that a plan saved will not be found here: versions
    that differ. Empty without such programs.
    """
    here, found = _versions(), list[str]()
    for each in _saved(folder):
        there: dict[str, str] = each["versions"]
        differ = [f"{k} {there.get(k)} (here {here[k]})" for k in _PARTS if there.get(k) != here[k]]
        if differ:
            found.append(
                f"the program saved for {each['slice']} was compiled with {', '.join(differ)}: "
                "it is compiled again. Install those versions to use it"
            )
    return found


def _saved(folder: Path) -> list[dict[str, Any]]:
    try:
        found: Any = json.loads((folder / SAVED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    entries: list[Any] = found if isinstance(found, list) else []
    return [e for e in entries if isinstance(e, dict) and e.keys() >= _FIELDS]


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PARTS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


__all__ = ["SAVED", "note_saved", "saved_obstacles"]

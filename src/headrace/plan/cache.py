"""Compiled reports on disk, so that a plan asked for twice is compiled once.

Two names lead to a report: the request's (model configuration, settings, candidate, versions, our
own sources), which is known before anything heavy is imported, and the program's hash, which
survives changes that leave the program as it is. Reports are JSON; nothing is ever unpickled.

Knows: files, hashes. Does not know: what a report means.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# What the program depends on. A new setting that changes it must be added here.
PROGRAM_SETTINGS = (
    "task", "model_revision", "dtype", "optim", "use_peft", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "use_rslora",
    "use_dora", "quantization", "max_grad_norm", "weight_decay", "sharding_overrides",
)  # fmt: skip
_ROOMS = ("bridge", "kernels", "sharding", "train", "plan", "serve")


def cache_folder(folder: str | Path | None = None) -> Path:
    """Where reports lie: the argument, $HEADRACE_PLAN_CACHE, or ~/.cache/headrace/plan."""
    chosen = folder or os.environ.get("HEADRACE_PLAN_CACHE") or "~/.cache/headrace/plan"
    return Path(chosen).expanduser()


def request_key(request: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    """Name of a request: everything that its report depends on."""
    parts = {
        "model": request["model_config"],
        "settings": {k: request["config"].get(k) for k in PROGRAM_SETTINGS},
        "num_labels": request.get("num_labels"),
        "supervised_share": request.get("supervised_share"),
        "candidate": candidate,
        "versions": _versions(),
        "sources": sources_fingerprint(),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return "request-" + hashlib.sha256(text.encode()).hexdigest()[:24]


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("jax", "libtpu", "torch", "transformers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


@functools.cache
def sources_fingerprint() -> str:
    """Changes when Headrace's own code does."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for room in _ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:24]


def read_report(key: str, folder: Path) -> dict[str, Any] | None:
    """A stored report, None when there is none or its file is damaged."""
    try:
        found: Any = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "fits" in found else None


def write_report(key: str, report: Mapping[str, Any], folder: Path) -> None:
    """Store a report; a folder that cannot be written to is no error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(report, file)
        Path(name).replace(folder / f"{key}.json")
    except OSError:
        return

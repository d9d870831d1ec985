"""Checkpoints of a run: written whole or not at all, checked when read, rotated.

    checkpoint-120/
      train_state.safetensors   every array of TrainState under its tree path
      trainer_state.json        progress: data position, log history, best metric, schedule state
      checkpoint.json           format, identity of the run, bytes and SHA-256 of every file
      ...                       whatever `write_model` put beside them (PEFT or model files)

Arrays are safetensors and the rest JSON: no pickle, readable by other tools, written and hashed one
array at a time. (Orbax adds a second format and its own directory commit; it earns its place when
several hosts write one state.) A folder is written beside its final place, flushed to disk, then
renamed; an interruption or a full disk leaves the earlier checkpoints as they were. The loop calls
this in a thread with a copy of the state, so steps go on meanwhile.

Knows: files, checksums, identity. Does not know: what progress or model files mean.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from headrace.errors import CheckpointError
from headrace.train.durable import flush, write_arrays, written_order
from headrace.train.placement import OnHost
from headrace.train.placement import like as place_like
from headrace.train.processes import is_first, wait_for_all
from headrace.train.state import TrainState
from headrace.weights.checksums import sha256

FORMAT = 1
STATE_FILE, PROGRESS_FILE, MANIFEST_FILE = (
    "train_state.safetensors", "trainer_state.json", "checkpoint.json",
)  # fmt: skip
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint read back. notes: what had to be passed over on the way, for the user."""

    state: TrainState
    progress: dict[str, Any]
    path: Path
    step: int
    notes: tuple[str, ...] = ()


def checkpoint_step(path: Path) -> int | None:
    """The step in a `checkpoint-N` folder name, None for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def list_checkpoints(directory: str | Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    root = Path(directory)
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if checkpoint_step(p) is not None]
    complete = [p for p in found if (p / MANIFEST_FILE).is_file()]
    return sorted(complete, key=lambda p: checkpoint_step(p) or 0)


def save_checkpoint(
    directory: str | Path,
    state: TrainState,
    *,
    step: int,
    progress: Mapping[str, Any],
    identity: Mapping[str, Any],
    write_model: Callable[[Path], None] | None = None,
) -> Path:
    """Write `checkpoint-{step}` under `directory`; returns its path.

    identity: what must be equal for the checkpoint to belong to a run (JSON values). write_model:
    called with the folder in the making. state: of NumPy arrays too (state.host_copy), so that a
    thread can write it while steps go on. Waits for the state. Raises CheckpointError when the disk
    is full or not writable; earlier checkpoints stay.
    """
    root = Path(directory)
    final, making = root / f"checkpoint-{step}", root / f".checkpoint-{step}.tmp"
    if not is_first():
        _help_to_write(state, making, write_model)
        wait_for_all(f"saved {step}")
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".checkpoint-*.tmp"):  # of a run that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)
        making.mkdir()
        _write_contents(making, state, step, progress, identity, write_model)
        _publish(making, final)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        raise CheckpointError(_write_failure(error, root, step, state)) from error
    except BaseException:  # Ctrl-C included: leave no half-written folder, then pass it on
        shutil.rmtree(making, ignore_errors=True)
        raise
    wait_for_all(f"saved {step}")
    return final


def _help_to_write(
    state: TrainState, making: Path, write_model: Callable[[Path], None] | None
) -> None:
    """What another process does while the first writes: give its parts, in the same order."""
    leaves = _leaves(state)
    for name in written_order(leaves):
        np.asarray(leaves[name])
    if write_model is not None:
        write_model(making)


def _write_contents(
    folder: Path,
    state: TrainState,
    step: int,
    progress: Mapping[str, Any],
    identity: Mapping[str, Any],
    write_model: Callable[[Path], None] | None,
) -> None:
    digests = {STATE_FILE: write_arrays(folder / STATE_FILE, _leaves(state))}
    (folder / PROGRESS_FILE).write_text(json.dumps(progress, indent=1), encoding="utf-8")
    if write_model is not None:
        write_model(folder)
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        digest = digests.get(name) or sha256(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": digest}
        flush(path)
    manifest = {"format": FORMAT, "step": step, "identity": identity, "files": files}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    flush(folder / MANIFEST_FILE)
    flush(folder)


def _publish(making: Path, final: Path) -> None:
    """Rename into place; a folder of the same step is moved aside first and removed after."""
    replaced = final.with_name(f".{final.name}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    making.rename(final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_failure(error: OSError, root: Path, step: int, state: TrainState) -> str:
    kept = list_checkpoints(root)
    last = f"The last good checkpoint is {kept[-1]}." if kept else "No checkpoint was saved before."
    if error.errno != errno.ENOSPC:
        return f"checkpoint-{step} could not be written to {root}: {error}. {last}"
    need = sum(leaf.nbytes for leaf in _leaves(state).values())
    free = shutil.disk_usage(root).free
    return (
        f"checkpoint-{step} could not be written: the disk of {root} is full. The training state "
        f"alone needs {need / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free. Free space, or "
        f"lower save_total_limit. {last}"
    )


def rotate(
    directory: str | Path, *, limit: int | None, protect: Collection[Path] = ()
) -> list[Path]:
    """Delete the oldest checkpoints beyond `limit`, never the newest nor one in `protect`."""
    found = list_checkpoints(directory)
    if limit is None or len(found) <= limit or not is_first():
        return []
    safe = {found[-1].name, *(path.name for path in protect)}
    removable = [path for path in found if path.name not in safe]
    removed = removable[: len(found) - limit]
    for path in removed:
        shutil.rmtree(path)
    return removed


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest, after every file was found whole. Raises CheckpointError listing all damage."""
    manifest_path = path / MANIFEST_FILE
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {MANIFEST_FILE} cannot be read ({error})."
        ) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {manifest.get('format')}, this version reads {FORMAT}."
        )
    damage: list[str] = []
    for name, expected in manifest["files"].items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            damage.append(f"{name} is missing")
        elif size != expected["bytes"]:
            damage.append(f"{name} has {size} of {expected['bytes']} bytes")
        elif sha256(file) != expected["sha256"]:
            damage.append(f"{name} has another checksum than when it was written")
    if damage:
        raise CheckpointError(f"{path} is damaged: {'; '.join(damage)}.")
    return manifest


def load_checkpoint(
    path: str | Path, template: TrainState, *, identity: Mapping[str, Any]
) -> Restored:
    """Read one checkpoint into the structure of `template` (a fresh state of the same run).

    Raises CheckpointError when it is damaged, when it belongs to another run (all differences are
    listed), or when its arrays do not fit the model.
    """
    folder = Path(path)
    manifest = verify_checkpoint(folder)
    _check_identity(folder, manifest["identity"], identity)
    progress = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    state = _read_state(folder, template)
    return Restored(state=state, progress=progress, path=folder, step=manifest["step"])


def load_latest(
    directory: str | Path, template: TrainState, *, identity: Mapping[str, Any]
) -> Restored:
    """The newest whole checkpoint under `directory`; damaged ones are passed over with a note."""
    notes: list[str] = []
    for path in reversed(list_checkpoints(directory)):
        try:
            verify_checkpoint(path)
        except CheckpointError as damage:
            notes.append(f"{damage} Falling back to the checkpoint before it.")
            continue
        restored = load_checkpoint(path, template, identity=identity)
        return Restored(
            state=restored.state, progress=restored.progress, path=path, step=restored.step,
            notes=tuple(notes),
        )  # fmt: skip
    found = " ".join(notes) or "There is none."
    raise CheckpointError(
        f"no usable checkpoint in {directory}. {found} Start without resume_from_checkpoint."
    )


def _check_identity(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    now = json.loads(json.dumps(now))  # tuples become lists, as they did in the file
    differences = [
        f"  {key}: {saved.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in sorted({*saved, *now})
        if saved.get(key) != now.get(key)
    ]
    if differences:
        raise CheckpointError(
            f"{folder} belongs to another run:\n" + "\n".join(differences) + "\n"
            "Resume with the same settings and data, or start anew with another output_dir."
        )


def _leaves(state: TrainState) -> dict[str, Any]:
    """Tree path -> array, keys as their raw data."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            OnHost(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        )
        for path, leaf in leaves
    }


def _placed_leaves(state: TrainState) -> dict[str, Any]:
    """Tree path -> array on its devices, keys as their raw data."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            jax.random.key_data(leaf) if _is_key(leaf) else leaf
        )
        for path, leaf in leaves
    }


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _read_state(folder: Path, template: TrainState) -> TrainState:
    wanted = _leaves(template)
    placed = _placed_leaves(template)
    with safe_open(folder / STATE_FILE, framework="numpy") as file:
        names = set(file.keys())
        problems = [f"{n} is missing" for n in wanted if n not in names]
        problems += [f"{n} is not part of this run" for n in sorted(names - set(wanted))]
        arrays: dict[str, Any] = {}
        for name, like in wanted.items():
            if name not in names:
                continue
            array = file.get_tensor(name)
            if array.shape != like.shape or array.dtype != like.dtype:
                problems.append(
                    f"{name} is {array.dtype}{list(array.shape)}, "
                    f"this run needs {like.dtype}{list(like.shape)}"
                )
            else:  # a copy: the step will donate it, and it must not point into the file's memory
                arrays[name] = place_like(array, placed[name])
    if problems:
        shown = "\n".join(f"  {line}" for line in problems[:20])
        raise CheckpointError(f"{folder} does not fit this model ({len(problems)}):\n{shown}")
    structure = jax.tree.structure(template)
    restored = [
        jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array
        for array, leaf in zip(arrays.values(), jax.tree.leaves(template), strict=True)
    ]
    return jax.tree.unflatten(structure, restored)

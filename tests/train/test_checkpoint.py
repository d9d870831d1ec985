"""Checkpoints: exact, whole or absent, checked, rotated, and only for their own run."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.errors import CheckpointError
from headrace.train import checkpoint, durable
from headrace.train.checkpoint import (
    STATE_FILE,
    list_checkpoints,
    load_checkpoint,
    load_latest,
    rotate,
    save_checkpoint,
)
from headrace.train.optimizers import make_optimizer
from headrace.train.state import TrainState, create_state

IDENTITY = {"dataset": "abc", "seed": 1, "targets": ("q", "v")}


def make_state(optim: str = "adamw", *, seed: int = 0, width: int = 4) -> TrainState:
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "a.weight": jax.random.normal(keys[0], (3, width), jnp.bfloat16),
        "a.bias": jax.random.normal(keys[1], (width,)),
    }
    buffers = {"mean": jax.random.normal(keys[2], (2,), jnp.bfloat16), "count": jnp.array(3)}
    optimizer = make_optimizer(optim)
    state, _ = create_state(params, buffers, trainable=params, optimizer=optimizer, seed=seed)
    grads = jax.tree.map(jnp.sin, state.trainable)
    trainable, opt_state = optimizer.update(grads, state.opt_state, state.trainable, jnp.float32(1))
    return TrainState(
        step=state.step + 7, rng=state.rng, trainable=trainable, opt_state=opt_state,
        buffers=state.buffers,
    )  # fmt: skip


def save(root: Path, state: TrainState, step: int, **kwargs: Any) -> Path:
    return save_checkpoint(
        root, state, step=step, progress={"position": step * 2}, identity=IDENTITY, **kwargs
    )


def assert_same(left: TrainState, right: TrainState) -> None:
    raw_left, raw_right = checkpoint._leaves(left), checkpoint._leaves(right)
    assert raw_left.keys() == raw_right.keys()
    for name in raw_left:
        assert raw_left[name].dtype == raw_right[name].dtype, name
        assert np.asarray(raw_left[name]).tobytes() == np.asarray(raw_right[name]).tobytes(), name


@pytest.mark.parametrize("optim", ["adamw", "adafactor", "lion", "sgd"])
def test_round_trip_is_bit_equal(tmp_path: Path, optim: str) -> None:
    state = make_state(optim)
    path = save(tmp_path, state, 7, write_model=lambda p: (p / "m.txt").write_text("x"))
    restored = load_checkpoint(path, make_state(optim, seed=5), identity=IDENTITY)
    assert_same(state, restored.state)
    assert restored.progress == {"position": 14} and restored.step == 7
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-7"]
    arrays = load_file(path / STATE_FILE)  # the stock reader takes our file
    np.testing.assert_array_equal(arrays["trainable/a.bias"], np.asarray(state.trainable["a.bias"]))
    assert str(arrays["buffers/mean"].dtype) == "bfloat16"


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, make_state(seed=1), 7)
    save(tmp_path, make_state(seed=2), 7)
    restored = load_latest(tmp_path, make_state(), identity=IDENTITY)
    assert_same(restored.state, make_state(seed=2))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-7"]


def test_rotation_keeps_newest_and_protected(tmp_path: Path) -> None:
    paths = [save(tmp_path, make_state(), step) for step in (2, 10, 9, 30)]
    removed = rotate(tmp_path, limit=2, protect=[paths[0]])
    assert [p.name for p in removed] == ["checkpoint-9", "checkpoint-10"]
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-30"]
    assert rotate(tmp_path, limit=None) == []
    assert [p.name for p in rotate(tmp_path, limit=1)] == ["checkpoint-2"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damage_falls_back_with_a_note(tmp_path: Path, damage: str) -> None:
    good = make_state(seed=1)
    save(tmp_path, good, 10)
    newest = save(tmp_path, make_state(seed=2), 20)
    file = newest / STATE_FILE
    data = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(data[:-5])
    elif damage == "flip":
        data[-3] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    restored = load_latest(tmp_path, make_state(), identity=IDENTITY)
    assert restored.step == 10
    assert_same(restored.state, good)
    assert "checkpoint-20 is damaged: train_state.safetensors" in restored.notes[0]
    with pytest.raises(CheckpointError, match="checkpoint-20 is damaged"):
        load_checkpoint(newest, make_state(), identity=IDENTITY)


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, make_state(), 10)
    (path / "checkpoint.json").unlink()
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        load_latest(tmp_path, make_state(), identity=IDENTITY)


def test_another_run_is_refused_with_every_difference(tmp_path: Path) -> None:
    save(tmp_path, make_state(), 10)
    other = {**IDENTITY, "dataset": "xyz", "seed": 2}
    with pytest.raises(CheckpointError) as caught:
        load_latest(tmp_path, make_state(), identity=other)
    text = str(caught.value)
    assert "dataset: 'abc' in the checkpoint, 'xyz' now" in text and "seed: 1" in text
    assert "targets" not in text


def test_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make_state(), 10)
    with pytest.raises(
        CheckpointError, match=r"a.bias is float32\[4\], this run needs float32\[5\]"
    ):
        load_latest(tmp_path, make_state(width=5), identity=IDENTITY)
    with pytest.raises(CheckpointError, match="is missing"):
        load_latest(tmp_path, make_state("adafactor"), identity=IDENTITY)


class _FullDisk:
    """Lets `allowed` writes pass, then behaves as a full disk or an impatient user."""

    def __init__(self, allowed: int, error: BaseException) -> None:
        self.left, self.error, self.real = allowed, error, durable._put

    def __call__(self, *args: Any) -> None:
        if self.left == 0:
            raise self.error
        self.left -= 1
        self.real(*args)


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_full_disk_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    state = make_state(seed=1)
    save(tmp_path, state, 10)
    full = _FullDisk(allowed, OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(durable, "_put", full)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, make_state(seed=2), 20)
    assert "is full" in str(caught.value) and "checkpoint-10" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-10"]
    assert_same(load_latest(tmp_path, make_state(), identity=IDENTITY).state, state)


def test_full_disk_while_the_model_is_written(tmp_path: Path) -> None:
    def write_model(path: Path) -> None:
        (path / "model.bin").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No checkpoint was saved before"):
        save(tmp_path, make_state(), 20, write_model=write_model)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_save_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, make_state(seed=1), 10)
    monkeypatch.setattr(durable, "_put", _FullDisk(2, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, make_state(seed=2), 10)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-10"]
    restored = load_latest(tmp_path, make_state(), identity=IDENTITY)
    assert_same(restored.state, make_state(seed=1))


def test_killed_while_saving_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """A folder in the making, as a power cut leaves it, is neither listed nor in the way."""
    save(tmp_path, make_state(seed=1), 10)
    making = tmp_path / ".checkpoint-20.tmp"
    making.mkdir()
    (making / STATE_FILE).write_bytes(b"half")
    assert load_latest(tmp_path, make_state(), identity=IDENTITY).step == 10
    path = save(tmp_path, make_state(seed=2), 20)
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert set(manifest["files"]) == {STATE_FILE, "trainer_state.json"}
    assert not making.exists()

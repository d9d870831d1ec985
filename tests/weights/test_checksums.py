"""A changed byte in a weight file is found before the file is used, and the file is named."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.config import TrainConfig
from headrace.errors import CheckpointError
from headrace.train.objectives import make_objective
from headrace.train.streaming import save_streamed, structure
from headrace.weights.checksums import SUMS, check_sums, sha256, write_sums


def _folder(path: Path) -> Path:
    path.mkdir()
    for i in range(3):
        save_file({f"x{i}": torch.arange(8.0) + i}, path / f"model-{i}.safetensors")
    write_sums(path)
    return path


def _change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # in a tensor's values: no header check sees it
    file.write_bytes(content)


def test_a_changed_byte_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model")
    check_sums(folder)
    _change(folder / "model-1.safetensors")
    with pytest.raises(CheckpointError) as error:
        check_sums(folder)
    text = str(error.value)
    assert "1 of 3 weight files" in text and "model-1.safetensors: SHA-256" in text
    assert "Copy them again" in text and f"delete {SUMS}" in text
    check_sums(folder, share=(0, 3))  # another process's share
    with pytest.raises(CheckpointError):
        check_sums(folder, share=(1, 3))


def test_the_file_is_what_sha256sum_reads(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model")
    command = ["sha256sum", "-c", "--strict", SUMS]
    assert subprocess.run(command, cwd=folder, capture_output=True).returncode == 0
    made = subprocess.run("sha256sum *.safetensors", shell=True, cwd=folder, capture_output=True)
    assert made.stdout.decode() == (folder / SUMS).read_text()
    (folder / SUMS).write_text("nothing of the kind\n")
    with pytest.raises(CheckpointError, match="no checksums"):
        check_sums(folder)


def test_files_of_the_hub_are_compared_with_the_names_of_their_blobs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"x": torch.zeros(4)}, tmp_path / "x")
    blob = blobs / sha256(tmp_path / "x")
    shutil.move(tmp_path / "x", blob)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    check_sums(snapshot, hub=True)
    _change(blob)
    check_sums(snapshot)  # not asked for
    with pytest.raises(CheckpointError, match="download them again"):
        check_sums(snapshot, hub=True)


def test_what_is_saved_in_shards_is_compared_when_it_is_loaded(tmp_path: Path) -> None:
    import numpy as np
    import transformers as tf

    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2,
        )
    )  # fmt: skip
    values = {name: value.detach().numpy() for name, value in model.named_parameters()}
    dtypes = dict.fromkeys(values, np.dtype(np.float32))
    keys = {name: (name,) for name in values}
    files = save_streamed(tmp_path, values, keys, dtypes, max_shard_bytes=4_000)
    model.config.save_pretrained(tmp_path)
    config = TrainConfig(model_name_or_path=str(tmp_path))
    structure(config, make_objective(config))
    _change(tmp_path / files[1])
    with pytest.raises(CheckpointError, match=files[1]):
        structure(config, make_objective(config))

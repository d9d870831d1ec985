"""Streamed weights equal from_pretrained's; what is wrong with files is listed at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from headrace.bridge.dtypes import tensor_to_numpy
from headrace.errors import CheckpointError
from headrace.train.streaming import save_streamed
from headrace.weights import files, load_stored, meta_model, open_stream, stream
from headrace.weights.files import aligned_empty, find_weights, finish, read_parts

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def _stored(folder: Path, meta: Any, stacked: dict[str, tuple[str, ...]]) -> dict[str, np.ndarray]:
    stream = open_stream(folder, meta)
    stream.check()
    parameters = dict(meta.named_parameters())
    in_stacks = {name for names in stacked.values() for name in names}
    keys = {name: (name,) for name in parameters if name not in in_stacks} | stacked
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    dtypes = {
        key: tensor_to_numpy(torch.empty(0, dtype=parameters[names[0]].dtype)).dtype
        for key, names in keys.items()
    }
    found = load_stored(stream, keys, dict.fromkeys(keys, place), dtypes)
    return {key: np.asarray(value) for key, value in found.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("own_memory", [True, False])  # as devices that are not the host's CPU
def test_values_are_those_of_from_pretrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, own_memory: bool
) -> None:
    monkeypatch.setattr(stream, "_in_host_memory", lambda _: not own_memory)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, tie_word_embeddings=tied))
    folder = _saved(model.to(torch.bfloat16), tmp_path, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) >= 2
    names = tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(2))
    found = _stored(folder, meta_model(folder), {"stack": names})
    stock = tf.LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    want = {n: tensor_to_numpy(p) for n, p in stock.named_parameters()}
    np.testing.assert_array_equal(found.pop("stack"), np.stack([want.pop(n) for n in names]))
    assert set(found) == set(want)
    for name, value in want.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


EXPERTS = {
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(
            **TINY, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        )
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**TINY, num_local_experts=4)),
}


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("block", [16, 2**22])  # bytes: less than a row, and all at once
def test_experts_saved_one_by_one_are_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, block: int
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    model = EXPERTS[family]()
    folder = _saved(model, tmp_path)
    on_disk = load_file(folder / "model.safetensors")
    assert any("experts.3." in name for name in on_disk)
    meta = meta_model(folder)
    found = _stored(folder, meta, {})
    for name, value in model.named_parameters():
        np.testing.assert_array_equal(found[name], value.detach().numpy())
    opened = open_stream(folder, meta)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert len(opened.sources[name].pieces) == 8  # gate and up of four experts
    part = (slice(1, 3), slice(8, 30), slice(4, 20))
    array = aligned_empty((2, 22, 16), np.dtype(np.float32))
    finish(opened.start(name, [part], [array]))
    np.testing.assert_array_equal(array, model.get_parameter(name).detach().numpy()[part])


def test_what_only_the_recipe_can_tell_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = EXPERTS["qwen3_moe"]()
    folder = _saved(model, tmp_path)
    monkeypatch.setattr(stream, "_pieces", lambda *_: ())
    found = _stored(folder, meta_model(folder), {})
    for name, value in model.named_parameters():
        np.testing.assert_array_equal(found[name], value.detach().numpy())


def test_what_is_read_ahead_is_no_more_than_the_largest() -> None:
    sizes = [1, 2, 8, 3, 3, 3, 8, 1]
    started: list[int] = []

    def start(job: int) -> Any:
        started.append(job)
        return [np.full(1, job)], []

    for i, values in enumerate(stream._read_ahead(start, range(len(sizes)), sizes)):
        assert values[0][0] == i
        ahead = [sizes[job] for job in started[i + 1 :]]
        assert sum(ahead) <= 8 and (ahead or i + 1 == len(sizes))


def test_memory_that_was_read_into_is_not_copied() -> None:
    array = aligned_empty((3, 5), np.dtype(np.float32))
    array[:] = 2.0
    placed = jax.device_put(array, jax.devices()[0])
    assert placed.unsafe_buffer_pointer() == array.ctypes.data


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.ones(64, 64)}, tmp_path / "model.safetensors")
    entry = find_weights(tmp_path)["x"]
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        read_parts(entry, [(slice(0, 64), slice(0, 32))])


@pytest.mark.parametrize("block", [16, 2**22])  # bytes: less than a row, and all at once
def test_parts_are_read_by_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    value = torch.arange(6 * 8 * 4, dtype=torch.float32).reshape(6, 8, 4)
    tensors = {"x": value, "scalar": torch.tensor(3.0), "half": value.half() / 3}
    save_file(tensors, tmp_path / "model.safetensors")
    entries = find_weights(tmp_path)
    part = (slice(2, 5), slice(None), slice(1, 3))
    rows = (slice(0, 2), slice(4, 8), slice(None))
    first, second = read_parts(entries["x"], [part, rows])
    np.testing.assert_array_equal(first, value.numpy()[part])
    np.testing.assert_array_equal(second, value.numpy()[rows])
    whole = (slice(None), slice(None), slice(None))
    np.testing.assert_array_equal(read_parts(entries["x"], [whole])[0], value.numpy())
    half = read_parts(entries["x"], [rows, part], np.dtype(np.float16))
    assert [each.dtype for each in half] == [np.float16, np.float16]
    np.testing.assert_array_equal(half[0], value.half().numpy()[rows])
    np.testing.assert_array_equal(half[1], value.half().numpy()[part])
    for wanted in (torch.float32, torch.bfloat16):
        want = tensor_to_numpy(tensors["half"].to(wanted))
        np.testing.assert_array_equal(
            read_parts(entries["half"], [rows], want.dtype)[0], want[rows]
        )
    assert read_parts(entries["scalar"], [()])[0] == 3.0


def test_everything_wrong_with_the_files_is_listed(tmp_path: Path) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY))
    folder = _saved(model, tmp_path, max_shard_size="15KB")
    files = sorted(folder.glob("model-*.safetensors"))
    files[0].unlink()
    content = files[1].read_bytes()
    files[1].write_bytes(content[:-10])
    files[2].write_bytes(b"\x05")
    with pytest.raises(CheckpointError) as error:
        find_weights(folder)
    text = str(error.value)
    for part in (f"{files[0].name} is missing", f"{files[1].name} is cut off", "not safetensors"):
        assert part in text
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        find_weights(folder)
    with pytest.raises(CheckpointError, match="neither"):
        find_weights(tmp_path / "elsewhere")


def test_every_byte_belongs_to_one_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    assert set(find_weights(tmp_path)) == {"a", "b"}
    overlapping = whole.replace(b"[16,32]", b"[12,28]")
    for damaged, part in ((whole + b"123", "3 bytes more"), (overlapping, "b shares bytes")):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=part):
            find_weights(tmp_path)


def test_missing_extra_and_misshaped_tensors_are_listed(tmp_path: Path) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY))
    folder = _saved(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    tensors["stranger"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        open_stream(folder, meta_model(folder)).check()
    text = str(error.value)
    assert "missing: model.norm.weight" in text and "extra: stranger" in text
    assert "mis-shaped: model.layers.0.mlp.up_proj.weight is [3, 3]" in text


def test_saved_shards_load_in_stock_transformers(tmp_path: Path) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY)).to(torch.bfloat16)
    values = {n: tensor_to_numpy(p) for n, p in model.named_parameters()}
    names = tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(2))
    stored = {"stack": np.stack([values[n] for n in names])}
    stored |= {n: v for n, v in values.items() if n not in names}
    keys = {"stack": names} | {n: (n,) for n in values if n not in names}
    dtypes = {key: stored[key].dtype for key in keys}
    files = save_streamed(tmp_path, stored, keys, dtypes, max_shard_bytes=20_000)
    model.config.save_pretrained(tmp_path)
    assert len(files) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    back = tf.LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for (name, value), (_, other) in zip(
        model.named_parameters(), back.named_parameters(), strict=True
    ):
        assert torch.equal(value, other), name

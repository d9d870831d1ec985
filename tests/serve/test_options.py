"""Settings that are refused, flags of the commands that answer by themselves, damaged weights."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertModel

from headrace.cli.app import run
from headrace.errors import CheckpointError, ConfigError
from headrace.serve import EngineOptions
from headrace.serve.api.errors import as_api_error
from headrace.serve.lora import read_lora
from headrace.serve.pooling.model import _load_encoder
from headrace.serve.pooling.recipe import Recipe
from headrace.weights.checksums import write_sums


@pytest.mark.parametrize(
    "name", ["max_model_len", "max_batched_tokens", "page_size", "cache_tokens"]
)
def test_nought_is_not_the_way_to_leave_a_setting_out(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is 0; .* Leave it out to have it chosen"):
        EngineOptions(**{name: 0})
    assert getattr(EngineOptions(), name) is None


def test_all_wrong_settings_at_once_and_noughts_that_mean_something() -> None:
    both = "max_num_seqs is 0; it is at least 1; max_lora_rank is 0"
    with pytest.raises(ConfigError, match=both):
        EngineOptions(max_num_seqs=0, max_lora_rank=0)
    assert EngineOptions(max_loras=0, speculative_tokens=0).max_loras == 0


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_cache_and_devices_reach_the_engine(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    @contextmanager
    def start(model: str, adapters: Any, options: dict[str, Any], *, quiet: bool):
        seen.update(options)
        defaults = SimpleNamespace(sampling={}, stop=())
        yield SimpleNamespace(
            adapters=SimpleNamespace(names=()),
            model=SimpleNamespace(defaults=defaults, name="tiny", tokenizer=None),
            stream=lambda text, params, adapter: iter(()),
        )

    monkeypatch.setattr("headrace.cli.engine.start_engine", start)
    monkeypatch.setattr("builtins.input", lambda prompt: "/quit")
    words = ["--prompt", "x"] if command == "generate" else []
    flags = ["--kv-cache-dtype", "int8", "--tensor-parallel-size", "2"]
    assert not run([command, "out/tiny", *words, *flags])
    assert (seen["kv_cache_dtype"], seen["tensor_parallel_size"]) == ("int8", 2)
    assert seen["max_num_seqs"] == 1
    EngineOptions(**seen)


def damage(folder: Path) -> None:
    """Another last byte in the weights, after their digests were written."""
    write_sums(folder)
    weights = next(folder.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def test_an_adapter_for_a_slot_is_compared_with_its_sums(tmp_path: Path) -> None:
    tuned: Any = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    tuned.save_pretrained(str(tmp_path))
    write_sums(tmp_path)
    assert read_lora(tmp_path).rank == 2
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors") as caught:
        read_lora(tmp_path)
    assert as_api_error(caught.value).code == 400


def test_an_encoder_is_compared_with_its_sums(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    inner = tmp_path / "0_Transformer"
    BertModel(config).save_pretrained(str(inner))
    options = {"trust_remote_code": False, "revision": "main"}
    write_sums(inner)
    _load_encoder(tmp_path, None, Recipe(subfolder="0_Transformer"), options)
    damage(inner)
    with pytest.raises(CheckpointError, match="not what was written"):
        _load_encoder(tmp_path, None, Recipe(subfolder="0_Transformer"), options)
    with pytest.raises(CheckpointError, match="not what was written"):
        _load_encoder(inner, None, Recipe(), options)

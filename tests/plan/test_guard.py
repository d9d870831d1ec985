"""Runs that cannot fit are refused before anything is loaded."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from headrace.config import TrainConfig
from headrace.errors import ConfigError
from headrace.plan import guard
from headrace.plan.automatic import Here
from headrace.train.compiler_flags import FLAG_SETS, compiler_options, flag_sets


def llama_7b(folder) -> str:
    LlamaConfig(num_hidden_layers=32, dtype="bfloat16").save_pretrained(folder)
    return str(folder)


def test_a_run_far_beyond_the_memory_is_refused_with_its_causes(tmp_path, monkeypatch):
    monkeypatch.setattr(guard.Here, "look", lambda: Here(count=8, memory=16 * 2**30))
    config = TrainConfig(model_name_or_path=llama_7b(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)optimizer 5\d\.\d.*mesh: auto.*all 8.*use_peft"):
        guard.check_fits(config)
    guard.check_fits(config.replace(mesh="auto", use_peft=True, max_length=512))


def test_no_limit_or_no_model_is_no_obstacle(tmp_path, monkeypatch):
    config = TrainConfig(model_name_or_path=llama_7b(tmp_path))
    monkeypatch.setattr(guard.Here, "look", lambda: Here(count=1))
    guard.check_fits(config)
    monkeypatch.setattr(guard.Here, "look", lambda: Here(count=1, memory=1))
    guard.check_fits(TrainConfig(model_name_or_path=str(tmp_path / "missing")))


def test_flags_are_for_tpus_and_known_sets():
    assert compiler_options("overlap", "cpu") == {}
    assert compiler_options("overlap", "tpu") == FLAG_SETS["overlap"]
    assert flag_sets("v5e", 1) == ("default",)
    assert set(flag_sets("v6e", 8)) <= set(FLAG_SETS)

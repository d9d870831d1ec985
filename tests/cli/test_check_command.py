"""`headrace check`: what it says of models that work, and of those that do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Lfm2Config, LlamaConfig, MambaConfig

from headrace.cli.app import run


def configure(config: Any, architecture: str, folder: Path) -> str:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return str(folder)


def answers(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = run(["check", *words, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]


def test_a_model_known_only_by_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = configure(config, "LlamaForCausalLM", tmp_path)
    code, found = answers([folder], capsys)
    assert code == 0
    subjects = ["capture", "layers run as loops", "numbers", "LoRA targets", "packing", "serving"]
    assert {s: found[s]["verdict"] for s in subjects} == dict.fromkeys(subjects, "yes")
    assert found["layers run as loops"]["loops"] == [3]
    assert found["LoRA targets"]["q_proj"] == {"layer": 3}
    assert "lm_head" not in found["LoRA targets"]
    assert found["numbers"]["weights"] == "random"
    # 2 key/value heads of 8 for keys and for values, float32, 3 layers
    assert found["serving"]["cache_bytes_per_token"] == 3 * 2 * (8 + 8) * 4
    assert found["sharding over fsdp=2,tensor=2"]["sources"]["tp_plan: colwise"] == 5


def test_a_recurrent_model_is_told_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = MambaConfig(vocab_size=96, hidden_size=16, state_size=4, num_hidden_layers=1)
    folder = configure(config, "MambaForCausalLM", tmp_path)
    code, found = answers([folder, "--structure-only"], capsys)
    assert code == 0
    assert found["numbers"]["verdict"] == "skipped"
    assert found["packing"]["verdict"] == "no"
    assert found["serving"]["verdict"] == "no"
    assert "no attention operator" in " ".join(found["serving"]["lines"])


def test_state_beside_attention_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its graph has attention, so only numbers show that the convolution carries tokens along."""
    config = Lfm2Config(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
    )
    folder = configure(config, "Lfm2ForCausalLM", tmp_path)
    _, found = answers([folder], capsys)
    assert found["serving"]["verdict"] == "no"
    assert "first with aten.conv1d" in found["serving"]["lines"][0]
    _, found = answers([folder, "--structure-only"], capsys)
    assert found["serving"]["verdict"] == "partly"
    assert "not tried" in found["serving"]["lines"][1]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale > 0:
            return x * self.scale
        return x


def raising() -> nn.Module:
    raise RuntimeError("no such file: weights.bin")


def branching() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Branches(), (torch.ones(2, 3),)


def test_a_factory_runs_only_when_asked_and_a_refusal_has_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "factories", sys.modules[__name__])
    assert run(["check", "factories:branching"]) == 2
    assert "add --factory" in capsys.readouterr().err
    code, found = answers(["factories:branching", "--factory"], capsys)
    assert code == 1
    assert found["capture"]["verdict"] == "no"
    assert "test_check_command.py" in found["capture"]["error"]
    assert run(["check", "factories:branching", "--factory"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 100
    assert run(["check", "factories:raising", "--factory"]) == 2
    shown = capsys.readouterr().err
    assert "RuntimeError: no such file: weights.bin" in shown
    assert "returns a module" in shown


def test_what_is_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(tmp_path)]) == 2
    shown = capsys.readouterr().err.replace("│", " ")  # the panel breaks lines where it must
    assert "is no model" in " ".join(shown.split())
    assert run(["check", "nowhere:make", "--factory"]) == 2
    assert "cannot be imported" in capsys.readouterr().err

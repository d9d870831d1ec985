"""Captures kept on disk: the same program comes back, and only for the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from families import build
from peft import LoraConfig, get_peft_model
from torch import nn

import headrace as hr
from headrace.bridge import cache, module, serial


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.capture"))


def test_a_kept_capture_computes_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model, inputs = build("gemma2")
    first = hr.to_jax(model, inputs, cache_dir=tmp_path)
    assert len(kept(tmp_path)) == 1
    monkeypatch.setattr(module, "capture", None)  # a second capture would fail
    again = hr.to_jax(model, inputs, cache_dir=tmp_path)
    assert str(again.program) == str(first.program)
    assert again.layout == first.layout
    args, kwargs = first.example(inputs)
    kwargs = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}

    def loss(jm: Any, params: Any) -> Any:
        return jm.apply(params, jm.buffers(), *args, rng=jax.random.key(0), **kwargs)[0].loss

    results = [
        jax.jit(jax.value_and_grad(lambda p, jm=jm: loss(jm, p)))(first.params())
        for jm in (first, again)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)
    arrays = {k: v for k, v in kwargs.items() if hasattr(v, "shape")}
    longer = {k: np.zeros((3, 2 * v.shape[1]), v.dtype) for k, v in arrays.items()}

    def logits(jm: Any, **inputs: Any) -> Any:
        return jm.apply(jm.params(), jm.buffers(), **inputs)[0].logits

    shapes = [jax.eval_shape(partial(logits, jm), **longer) for jm in (first, again)]
    assert shapes[0] == shapes[1]  # sizes are still free


def test_what_changes_a_program_changes_its_key(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.LayerNorm(3))
    x = (torch.zeros(4, 3),)

    def key(**options: Any) -> str:
        found = cache.capture_key(model, x, {}, {"dynamic": True, "roll": True, **options})
        assert found is not None
        return found

    seen = [key()]
    assert key() == seen[0]
    seen.append(key(roll=False))
    model.eval()
    seen.append(key())
    model[1].p = 0.2
    seen.append(key())
    model[2].eps = 1e-3
    seen.append(key())
    model[0].weight.requires_grad_(False)
    seen.append(key())
    model[0].factor = torch.ones(2)  # a tensor that is no buffer becomes a constant
    seen.append(key())
    model[0].factor += 1
    seen.append(key())
    x = (torch.zeros(4, 3, dtype=torch.float64),)
    seen.append(key())
    model[0].weight = model[2].weight = nn.Parameter(torch.ones(3, 3))  # tied
    seen.append(key())
    assert len(set(seen)) == len(seen)
    with torch.no_grad():
        model[0].weight.mul_(3.0)  # weights are inputs
    assert key() == seen[-1]
    model[0].hook = lambda: None  # what it does cannot be compared
    assert cache.capture_key(model, x, {}, {}) is None


KEY_OF_A_LLAMA = """
import sys, torch
sys.path.insert(0, "tests/bridge")
from families import build
from headrace.bridge.cache import capture_key
model, inputs = build("llama")
print(capture_key(model, (), inputs, {}))
"""


def test_the_key_is_the_same_in_another_process() -> None:
    model, inputs = build("llama")
    here = cache.capture_key(model, (), inputs, {})
    command = [sys.executable, "-c", KEY_OF_A_LLAMA]
    there = subprocess.run(command, capture_output=True, text=True, check=True)
    assert there.stdout.split() == [here]


def test_adapters_are_kept_too_and_damaged_files_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = build("llama")
    plain = hr.to_jax(model, inputs, cache_dir=tmp_path)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).get_base_model()
    jm = hr.to_jax(adapted, inputs, cache_dir=tmp_path)
    assert len(jm.layout.trainable) > 0
    assert jm.layout.trainable != plain.layout.trainable
    assert len(kept(tmp_path)) == 2
    for path in kept(tmp_path):
        raw = bytearray(path.read_bytes())
        raw[200] ^= 1
        path.write_bytes(raw)
    again = hr.to_jax(adapted, inputs, cache_dir=tmp_path)
    assert "is damaged (the digest differs)" in caplog.text
    assert str(again.program.graph) == str(jm.program.graph)


def test_a_file_cannot_name_code_to_run() -> None:
    jm = hr.to_jax(nn.Linear(3, 2), (torch.zeros(4, 3),))
    written, constants = serial.dump(jm.program)
    call = next(n for n in written["graph"] if n["op"] == "call_function")
    for target in ({"op": ["os", "system", ""]}, {"python": "os.system"}):
        changed = json.loads(json.dumps(written))
        changed["graph"][written["graph"].index(call)]["target"] = target
        with pytest.raises((serial.NotSerialisable, KeyError)):
            serial.load(changed, constants)

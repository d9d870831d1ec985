"""Serving on two and four pretended CPU devices gives the tokens of transformers on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_llama

from headrace.errors import ConfigError
from headrace.serve import Engine, EngineOptions


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Two key/value heads on 2 devices (one each, layers as loops) and on 4 (all on each)."""
    flags = "--xla_force_host_platform_device_count=4"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    program = [sys.executable, str(Path(__file__).parent / "mesh_serving_program.py")]
    done = subprocess.run(program, env=env, capture_output=True, text=True)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    assert "three" in found, done.stderr[-3000:]
    return found


def test_tokens_are_those_of_transformers(results: dict[str, Any]) -> None:
    """Greedy, with a penalty (its counts lie on the devices), and with an adapter in a slot."""
    want = results["want"]
    assert results["four"]["tokens"] == {"plain": want.pop("shallow")}
    assert results["two"]["tokens"] == want
    assert want["adapted"] != want["plain"] != want["shaped"]


def test_weights_and_pages_are_divided(results: dict[str, Any]) -> None:
    two, four = results["two"], results["four"]
    assert (two["devices"], two["weights"], two["pages"]) == (2, 1 / 2, 1 / 2)
    assert (four["devices"], four["weights"], four["pages"]) == (4, 1 / 4, 1.0)


def test_paged_attention_on_a_mesh_is_paged_attention(results: dict[str, Any]) -> None:
    """With a window, sinks and int8 pages; divided heads and heads that are whole everywhere."""
    assert results["kernels"] < 1e-6


def test_sizes_that_do_not_fit_are_refused(results: dict[str, Any]) -> None:
    assert "tensor: 3 does not divide the 4 attention heads" in results["three"]
    with pytest.raises(ConfigError, match="tensor_parallel_size is 64; there are 1 devices"):
        Engine(tiny_llama(), options=EngineOptions(tensor_parallel_size=64))

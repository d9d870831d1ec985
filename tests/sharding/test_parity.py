"""Loss and gradients on 8 pretended devices are those of one; the collectives are the expected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

FSDP, LORA = "llama|fsdp=4|full", "llama|fsdp=4|full|lora"
NF4 = "llama|fsdp=4|none|lora|nf4"
MIXTURE, MIXTURE_LORA = "mixtral|data=2,fsdp=2|none", "mixtral|fsdp=4|full|lora"
CASES = [
    FSDP,
    LORA,
    NF4,
    "llama|tensor=4,fsdp=2|none",
    "llama|context=4,fsdp=2|none",
    "gemma3|data=2,context=2,tensor=2|full",
    "qwen3_moe|expert=4,fsdp=2|full",
    MIXTURE,
    MIXTURE_LORA,
    "bert|data=2,fsdp=2,tensor=2|none",
    "t5|fsdp=2,tensor=2|none",
]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    # LLVM's optimisation of programs that run once is most of the time; the partitioner's work, of
    # which the collectives are read, is the same without it.
    flags = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true"
    )
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
    }
    program = [sys.executable, str(Path(__file__).parent / "mesh_program.py")]
    llama = [case for case in CASES if case.startswith("llama")]  # they share what one device gives
    halves = (llama, [case for case in CASES if case not in llama])
    started = [
        subprocess.Popen([*program, *half], env=env, stdout=PIPE, stderr=PIPE, text=True)
        for half in halves
    ]
    said = [each.communicate() for each in started]
    found = [json.loads(line) for out, _ in said for line in out.splitlines()]
    assert len(found) == len(CASES), "\n".join(errors[-3000:] for _, errors in said)
    return {each["case"]: each for each in found}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_device(results: Any, case: str) -> None:
    found = results[case]
    assert found["loss"] < 1e-6 and found["gradient"] < 1e-5
    assert found["misplaced"] == []


def _elements(found: Any, kind: str) -> list[int]:
    return [size for each, size in found["collectives"] if each == kind]


def test_fsdp_gathers_every_weight_once_a_pass(results: Any) -> None:
    # Seven matrices a layer, gathered in the forward and again in the backward loop; the head once.
    # What else is gathered are tokens, not weights.
    matrices = {32 * 48, 32 * 32, 32 * 16}
    gathered = [size for size in _elements(results[FSDP], "all-gather") if size in matrices]
    assert len(gathered) == 2 * 7
    assert _elements(results[FSDP], "all-gather").count(96 * 32) == 1


def test_of_quantised_weights_the_codes_are_gathered(results: Any) -> None:
    gathered = _elements(results[NF4], "all-gather")
    # Two codes a byte; three matrices [32, 48] and two [32, 32] a layer, in two passes.
    assert gathered.count(32 * 48 // 2) == 6 and gathered.count(32 * 32 // 2) == 4
    assert 32 * 48 not in gathered and 32 * 32 not in gathered


def test_lora_sums_gradients_of_the_adapter_only(results: Any) -> None:
    found = results[LORA]
    summed = _elements(found, "all-reduce") + _elements(found, "reduce-scatter")
    assert sum(summed) <= 1.1 * found["trained"]
    # The full run sums the gradients of all weights: the bound above is not empty.
    full = results[FSDP]
    assert sum(_elements(full, "all-reduce") + _elements(full, "reduce-scatter")) > 5_000


@pytest.mark.parametrize("case", [MIXTURE, MIXTURE_LORA])
def test_every_device_sorts_its_own_tokens(results: Any, case: str) -> None:
    found = results[case]
    tokens, choices, experts, features = 8 * 32, 2, 6, 32
    gathered = _elements(found, "all-gather")
    assert not {tokens * experts, tokens * choices * features} & set(gathered)
    # The matrices of the experts are gathered once a pass, like all others.
    assert gathered.count(experts * 2 * 48 * 32) == gathered.count(experts * 48 * 32) == 2
    # What is summed are gradients of what is trained, of an adapter its own: no rows of tokens.
    summed = _elements(found, "all-reduce") + _elements(found, "reduce-scatter")
    assert sum(summed) <= 1.1 * found["trained"]


def test_with_divided_experts_rows_are_still_summed(results: Any) -> None:
    rows = 8 * 32 * 2 * 32  # the bound above is not empty
    assert rows in _elements(results["qwen3_moe|expert=4,fsdp=2|full"], "all-reduce")

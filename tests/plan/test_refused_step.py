"""A step that a TPU cannot hold: what the real compiler says, and whether the advice is true.

HEADRACE_TEST_ALL_ADVICE=1 compiles the three changes too (a minute).
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from transformers import LlamaConfig

from headrace.config import TrainConfig
from headrace.errors import TrainingError
from headrace.plan.candidate import Candidate
from headrace.plan.program import LoweredStep, capture_model, lower_step
from headrace.plan.topology import compiler_obstacle, without_compilation_cache
from headrace.train.memory import MemoryCauses, local_bytes, out_of_memory_explained

HBM = int(15.75 * 2**30)  # of a v5e chip
SETTINGS = {
    "per_device_train_batch_size": "batch_size",
    "max_length": "length",
    "gradient_accumulation_steps": "accumulation",
    "activation_checkpointing": "remat",
}


def causes(step: LoweredStep, wanted: int) -> MemoryCauses:
    """As a run makes them of its arrays and the compiler's number."""
    held = {name: local_bytes(tree) for name, tree in step.arguments.items()}
    trained = held["trained weights (float32)"]
    return MemoryCauses(
        frozen=held["frozen weights"], trainable=trained, optimizer=held["optimizer"],
        other=held["batch and buffers"], gradients=trained, temporary=wanted,
        peak=sum(held.values()) + wanted,
    )  # fmt: skip


def changed(candidate: Candidate, advice: str) -> Candidate:
    """The candidate with the settings that a line of advice names."""
    found: dict[str, Any] = {}
    for name, value in re.findall(r"(\w+): (\w+) \(now", advice):
        found[SETTINGS[name]] = int(value) if value.isdigit() else value
    for times in re.findall(r"gradient_accumulation_steps x (\d+)", advice):
        found["accumulation"] = candidate.accumulation * int(times)
    assert found
    return candidate.but(**found)


def total(step: LoweredStep) -> int:
    with without_compilation_cache():
        stats = step.lowered.compile().memory_analysis()
    used = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return used + stats.temp_size_in_bytes


@pytest.mark.skipif(compiler_obstacle() is not None, reason=str(compiler_obstacle()))
def test_the_compilers_refusal_is_read_and_what_is_advised_fits(tmp_path):
    LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1, head_dim=128, dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    captured = capture_model(TrainConfig(model_name_or_path=str(tmp_path), dtype="bfloat16"))
    asked = Candidate(slice_name="v5e-1", batch_size=8192, length=1024, packing=False, remat="none")
    step, told = lower_step(captured, asked), []

    def explain(wanted: int, available: int | None) -> list[str]:
        told.extend((wanted, available))
        return causes(step, wanted).advice(
            rows=asked.batch_size, length=asked.length, remat=asked.remat, lora=False, devices=1,
            quantized=False, limit=available,
        )  # fmt: skip

    with pytest.raises(TrainingError) as error, out_of_memory_explained(explain):
        total(step)
    wanted, available = told
    assert available == HBM
    tokens = asked.batch_size * asked.length
    assert wanted > 2 * tokens * 2 * (256 + 256 + 128 + 128) > HBM  # what two layers keep at least
    first, *advised = str(error.value).splitlines()
    assert "RESOURCE_EXHAUSTED" in first
    assert len(advised) == 3
    for line in advised if os.environ.get("HEADRACE_TEST_ALL_ADVICE") else []:
        assert total(lower_step(captured, changed(asked, line))) <= HBM, line

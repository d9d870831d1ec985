"""Bytes by cause add up to what the compiler counts, and the advice names the largest causes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import tiny

from headrace import SFTConfig, SFTTrainer
from headrace.errors import TrainingError
from headrace.train import programs
from headrace.train.memory import (
    MemoryCauses,
    available_bytes,
    local_bytes,
    out_of_memory_explained,
    peak_memory,
    refused_bytes,
)
from headrace.train.shapes import CompiledFunction


def test_causes_are_the_arrays_of_the_run_and_the_compilers_sum(tmp_path: Path) -> None:
    config = SFTConfig(
        output_dir=str(tmp_path), max_length=32, per_device_train_batch_size=4,
        compilation_cache_dir=None,
    )  # fmt: skip
    rows, tokens = tiny.text_rows(16), tiny.tokenizer()
    trainer = SFTTrainer(tiny.llama(), config, train_dataset=rows, processing_class=tokens)
    lines = trainer.memory()
    assert "optimizer" in lines[0] and "gradients" in lines[0]
    assert trainer._programs is not None
    causes = trainer._programs.memory(trainer.train_state)
    assert causes is not None
    weights = sum(p.numel() for p in tiny.llama().parameters()) * 4
    assert causes.trainable == weights and causes.frozen == 0
    assert 2 * weights <= causes.optimizer <= 2 * weights + 64
    arguments = causes.frozen + causes.trainable + causes.optimizer + causes.other
    # Donated state is counted once; outputs beside it are a few metrics.
    assert arguments + causes.temporary <= causes.peak <= arguments + causes.temporary + 4096


def test_advice_names_three_changes_the_largest_first() -> None:
    causes = MemoryCauses(
        frozen=10, trainable=100, optimizer=200, other=1, gradients=100, temporary=1100, peak=2000
    )
    found = causes.advice(rows=8, length=512, remat="none", lora=False, devices=4, quantized=False)
    assert len(found) == 3
    text = " ".join(found)
    assert "per_device_train_batch_size: 4" in text and "activation_checkpointing: full" in text
    tight = causes.advice(rows=1, length=512, remat="full", lora=True, devices=4, quantized=True)
    assert len(tight) == 3 and "max_length: 256" in tight[0]
    large = MemoryCauses(
        frozen=9000, trainable=1, optimizer=2, other=1, gradients=1, temporary=9, peak=9013
    ).advice(rows=1, length=512, remat="full", lora=True, devices=4, quantized=False)
    assert "quantization: nf4" in large[0]


def test_advice_goes_as_far_as_the_device_needs() -> None:
    """130 GiB of activations into 16: rows and tokens go down until a change fits, and a change
    that leaves too much takes rows with it."""
    gib = 2**30
    causes = MemoryCauses(
        frozen=2 * gib, trainable=0, optimizer=0, other=0, gradients=0, temporary=128 * gib,
        peak=130 * gib,
    )  # fmt: skip
    found = causes.advice(
        rows=64, length=2048, remat="none", lora=True, devices=1, quantized=True, limit=16 * gib
    )
    # 2 + 128 / 16 GiB fit; half of 128 GiB and an eighth of the rows do
    assert sorted(text.rpartition(": about")[0] for text in found) == [
        "activation_checkpointing: full (now none), and per_device_train_batch_size: 8 (now 64), "
        "with gradient_accumulation_steps x 8",
        "max_length: 128 (now 2048)",
        "per_device_train_batch_size: 4 (now 64), with gradient_accumulation_steps x 16",
    ]


@pytest.mark.parametrize(
    ("message", "wanted", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (1.06T) exceeds available HBM (15.75G).",
            1.06 * 2**40,
            15.75 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 49.34G of 32.00G hbm. Exceeded hbm capacity by 17.34G.",
            49.34 * 2**30,
            32 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, "
            "exceeding available bytes: 95.74G",
            34.82 * 2**30,
            95.74 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.50M. "
            "That was not possible. There are 512.0K free.",
            1.5 * 2**20,
            None,
        ),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes.", 2**32, None),
        ("INTERNAL: something else", None, None),
    ],
)
def test_refusals_of_xla_are_read(message: str, wanted: float, available: float | None) -> None:
    """The forms that OpenXLA documents (E1000, E0100), and what the compilers here print."""
    assert refused_bytes(message) == (None if wanted is None else int(wanted))
    assert available_bytes(message) == (None if available is None else int(available))


def test_an_allocation_that_fails_here_is_explained() -> None:
    """XLA on a CPU: 64 TiB are more than a process can address."""
    import jax.numpy as jnp

    def explain(wanted: int, available: int | None) -> list[str]:
        assert available is None
        return [f"wanted {wanted}"]

    refused = pytest.raises(TrainingError, match=rf"RESOURCE_EXHAUSTED(.|\n)*wanted {2**46}")
    with refused, out_of_memory_explained(explain):
        jax.jit(lambda: jnp.ones(2**46, jnp.uint8))()


def test_local_bytes_of_numpy_like_trees() -> None:
    import jax.numpy as jnp

    assert local_bytes({"a": jnp.zeros((3, 4), jnp.bfloat16), "b": [jnp.zeros(2)]}) == 24 + 8


def test_peak_memory_is_the_devices_where_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(peak_memory()) == ["process_peak_bytes"]
    stats = {"bytes_in_use": 5, "peak_bytes_in_use": 7 * 2**30}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    assert peak_memory() == {"device_peak_bytes": 7 * 2**30}


REFUSED = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 23.50G of 15.75G hbm."
)


def _refusing(monkeypatch: pytest.MonkeyPatch, times: int, method: str) -> None:
    """`times` calls of the training step's method end as on a device without memory."""
    whole, left = getattr(CompiledFunction, method), [times]

    def method_of(self: CompiledFunction, *args: object) -> object:
        if self.name == "training step" and left[0]:
            left[0] -= 1
            raise jax.errors.JaxRuntimeError(REFUSED)
        return whole(self, *args)

    monkeypatch.setattr(CompiledFunction, method, method_of)


def _trainer(folder: Path, **settings: object) -> SFTTrainer:
    config = SFTConfig(
        output_dir=str(folder), max_length=32, per_device_train_batch_size=4, max_steps=1,
        compilation_cache_dir=None, **settings,
    )  # fmt: skip
    rows, tokens = tiny.text_rows(16), tiny.tokenizer()
    return SFTTrainer(tiny.llama(), config, train_dataset=rows, processing_class=tokens)


@pytest.mark.parametrize("method", ["prepare", "__call__"])
def test_out_of_memory_names_the_causes_and_three_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    _refusing(monkeypatch, 1, method)
    with pytest.raises(TrainingError) as error:
        _trainer(tmp_path, activation_checkpointing="none").train()
    text = str(error.value)
    assert "a device ran out of memory (RESOURCE_EXHAUSTED" in text
    assert "optimizer" in text and "activations, logits and workspace" in text
    assert text.index("Changes that help most") < text.index("per_device_train_batch_size: 2")
    assert len(text.splitlines()) == 6
    if method == "prepare":  # the compiler's own number
        assert "a device needs 23.50 GiB" in text


def test_auto_takes_the_next_policy_when_the_compiler_refuses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(limit=2**34, used=0)
    monkeypatch.setattr(programs, "device_memory", lambda: memory)
    _refusing(monkeypatch, 1, "prepare")
    trainer = _trainer(tmp_path, activation_checkpointing="auto")
    assert trainer.run is not None and trainer._programs is not None
    assert trainer._programs.remat == "dots"

"""Settings left to the devices: what is chosen, and that a step's rows stay."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from headrace.config import TrainConfig, load_config
from headrace.plan.analytic import estimate, memory_by_cause, training_of
from headrace.plan.automatic import Here, automatic_settings, local_candidate
from headrace.plan.hardware import local_slice, parse_slice
from headrace.plan.shape import model_shape
from headrace.train.trainer import Trainer

BASE = str(Path(__file__).parents[2] / "examples" / "reminders" / "base")
LLAMA_7B = LlamaConfig(num_hidden_layers=32, dtype="bfloat16").to_dict()
SMALL = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
    dtype="bfloat16",
).to_dict()  # fmt: skip


def on(slice_name: str) -> Here:
    hardware = parse_slice(slice_name)
    return Here(count=hardware.num_devices, memory=hardware.chip.hbm_bytes, hardware=hardware)


def test_devices_are_known_by_their_kind():
    assert local_slice("TPU v5 lite", 8) == parse_slice("v5e-8")
    assert local_slice("TPU v5", 4) == parse_slice("v5p-8")
    assert local_slice("TPU7x", 8) == parse_slice("v7x-8")
    assert local_slice("NVIDIA H100 80GB HBM3", 8) == parse_slice("h100-8")
    assert local_slice("TPU v5 lite", 3) is None
    assert local_slice("cpu", 8) is None


def test_a_model_that_fits_a_chip_is_not_divided_and_one_that_does_not_is():
    config = TrainConfig(mesh="auto", use_peft=True, max_length=1024)
    small, notes = automatic_settings(config, SMALL, on("v5e-8"))
    assert small.mesh == {"data": 8}
    assert notes == ("mesh: auto -> data 8",)
    large, _ = automatic_settings(config, LLAMA_7B, on("v5e-8"))
    assert large.mesh is not None
    assert large.mesh["fsdp"] > 1
    assert large.mesh.get("tensor", 1) == 1
    unknown, _ = automatic_settings(config, SMALL, Here(count=8))
    assert unknown.mesh == {"fsdp": 8}
    one, notes = automatic_settings(config, SMALL, Here(count=1))
    assert (one.mesh, notes) == ("auto", ())


@pytest.mark.parametrize("rows", [8, 6, 1])
def test_micro_batches_shrink_until_they_fit_and_steps_keep_their_rows(rows):
    config = TrainConfig(
        auto_find_batch_size=True, per_device_train_batch_size=rows, use_peft=True,
        gradient_accumulation_steps=2, max_length=8192, activation_checkpointing="full",
    )  # fmt: skip
    here = Here(count=1, memory=30 * 2**30)
    found, notes = automatic_settings(config, LLAMA_7B, here)
    batch, accumulation = found.per_device_train_batch_size, found.gradient_accumulation_steps
    assert batch * accumulation == rows * 2
    assert f"per_device_train_batch_size {batch}," in notes[0]

    def needed(settings: TrainConfig) -> int:
        training = training_of(settings, model_shape(LLAMA_7B, "llama"))
        return sum(memory_by_cause(training, local_candidate(settings, here)).values())

    if rows == 8:
        assert batch < 8
        assert (
            needed(found)
            <= 0.9 * here.memory
            < needed(found.replace(per_device_train_batch_size=2 * batch))
        )
    plenty, _ = automatic_settings(config, LLAMA_7B, Here(count=1))
    assert plenty.per_device_train_batch_size == rows


def test_auto_as_a_batch_size_is_the_switch(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("per_device_train_batch_size: auto\n")
    config = load_config(recipe).config
    assert config.auto_find_batch_size
    assert config.per_device_train_batch_size == 8


def test_a_run_takes_what_was_chosen_and_is_held_against_the_plan(tmp_path, monkeypatch, capsys):
    # as if the one device were a v5e chip with next to no memory left
    here = Here(count=1, memory=1, hardware=parse_slice("v5e-1"))
    monkeypatch.setattr(Here, "look", lambda: here)
    trainer = Trainer(
        BASE,
        TrainConfig(
            output_dir=str(tmp_path / "out"), auto_find_batch_size=True, max_steps=2, packing=False,
            per_device_train_batch_size=4, max_length=256, compilation_cache_dir=None,
            model_card=False, use_peft=True,
        ),
        train_dataset=[{"text": f"call mother at {hour}"} for hour in range(8)],
    )  # fmt: skip
    output = trainer.train()
    assert trainer.args.per_device_train_batch_size == 1
    assert trainer.args.gradient_accumulation_steps == 4
    assert any("auto_find_batch_size ->" in note for note in trainer.run.notes)
    said = capsys.readouterr()
    assert re.search(r"planned .* s a step of the longest rows", said.out + said.err)
    assert re.search(r"measured .* times the plan", said.out + said.err)
    log = [json.loads(line) for line in next(tmp_path.rglob("*.jsonl")).read_text().splitlines()]
    by_event = {entry["event"]: entry for entry in log if "event" in entry}
    longest = max(shape[2] for shape in trainer.run.train_loader.shapes)
    expected = estimate(
        training_of(trainer.args, model_shape(trainer.run.model.config.to_dict(), "base")),
        local_candidate(trainer.args, here, length=longest),
    )
    assert by_event["planned"]["step_seconds"] == pytest.approx(expected.seconds)
    measured = output.metrics["train_step_runtime"] / 2
    assert by_event["measured"]["step_seconds"] == pytest.approx(measured)

"""LoRA of one model on a base of every format: loss curves and bytes of frozen weights.

    python benchmarks/quantized_base.py [--model FOLDER] [--rows FILE] [--steps 60]

Every run has the same seed, data and adapter; only `quantization` differs. The model and rows are
the demo's by default.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from peft import LoraConfig

from headrace import SFTConfig, SFTTrainer
from headrace.train.memory import local_bytes, size

DEMO = Path(__file__).parents[1] / "examples" / "reminders"


def losses(given: argparse.Namespace, quantization: str | None) -> tuple[list[float], int]:
    """Loss of every step, and bytes of the frozen weights."""
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, dataset_name=given.rows, max_steps=given.steps, logging_steps=1,
            learning_rate=2e-3, save_strategy="no", quantization=quantization, report_to="none",
        )  # fmt: skip
        lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
        trainer = SFTTrainer(given.model, config, peft_config=lora)
        trainer.train()
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return found, local_bytes(trainer.run.frozen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(DEMO / "base"))
    parser.add_argument("--rows", default=str(DEMO / "train.jsonl"))
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    runs = {name: losses(given, name) for name in (None, "int8", "int4", "nf4")}
    plain = np.array(runs[None][0])
    tail = max(given.steps // 6, 1)
    print(f"\n{'base':10} {'first':>7} {'last':>7} {'apart, mean':>12} {'largest':>8}  frozen")
    for name, (found, stored) in runs.items():
        apart = np.abs(np.array(found) - plain)
        print(
            f"{name or 'plain':10} {found[0]:7.4f} {np.mean(found[-tail:]):7.4f} "
            f"{apart.mean():12.4f} {apart.max():8.4f}  {size(stored)}"
        )


if __name__ == "__main__":
    main()

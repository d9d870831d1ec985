"""The main job, start to end, offline: a base model, LoRA through XLA, before and after.

    scripts/demo

1. scores the base model on held-out reminders        3. scores the saved adapter on the same rows
2. trains the recipe lora.yaml                        4. asks stock transformers + peft one question
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "reminders" / "lora.yaml"
OUTPUT = ROOT / "out" / "demo"
QUESTION = (
    "Reminder: Could you please remind me to ask Brenda about the rent next Friday "
    "at half past five in the afternoon?\nJSON:"
)
console = Console(highlight=False)


def main() -> None:
    started = time.monotonic()
    os.chdir(ROOT)  # the recipe's paths start here
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    from transformers.utils import logging

    logging.disable_progress_bar()
    from headrace.config import load_config

    shutil.rmtree(OUTPUT, ignore_errors=True)
    config = load_config(RECIPE, {"output_dir": str(OUTPUT)}).config

    heading("1. The base model on held-out reminders: people and phrasings training never shows")
    before = scored(config, None)
    heading("2. LoRA fine-tuning, one XLA program a step")
    trained(config)
    heading("3. The same rows with the adapter that was saved")
    after = scored(config, OUTPUT)
    heading("4. The saved files in stock transformers + peft (no Headrace, no JAX)")
    show_stock(config.model_name_or_path)

    minutes = (time.monotonic() - started) / 60
    console.print(
        f"\nexact match {before:.1%} -> {after:.1%} on held-out rows, {minutes:.1f} minutes; "
        f"the adapter is in {OUTPUT.relative_to(ROOT)}",
        style="bold",
    )


def heading(text: str) -> None:
    console.print(f"\n{text}", style="bold cyan")


def scored(config: Any, adapter: Path | None) -> float:
    """Exact match on the test rows, printed with the loss."""
    from headrace.evaluate import evaluate

    begun = time.monotonic()
    report = evaluate(config, model=adapter)
    console.print(
        f"exact match {report.metrics['exact_match']:.1%} of {report.num_rows} rows, "
        f"loss {report.metrics['loss']:.3f} ({time.monotonic() - begun:.0f} s)"
    )
    return report.metrics["exact_match"]


def trained(config: Any) -> None:
    from headrace.train.trainer import Trainer

    Trainer(args=config).train()


def show_stock(base: str) -> None:
    """The same prompt, answered by the base and by base + adapter, with stock libraries alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(OUTPUT)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    inputs = tokenizer(QUESTION, return_tensors="pt")

    def answer(of: Any) -> str:
        with torch.no_grad():
            out = of.generate(**inputs, max_new_tokens=64, do_sample=False)
        return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    console.print(QUESTION, markup=False)
    console.print(f"  before {answer(model)}", markup=False)
    console.print(
        f"  after  {answer(PeftModel.from_pretrained(model, str(OUTPUT)))}",
        markup=False,
        style="green",
    )


if __name__ == "__main__":
    main()

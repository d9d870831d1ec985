"""BANKING77 on the CPU: Headrace beside the Hugging Face Trainer, same model, rows and optimizer.

Two questions. End to end: one epoch over all rows and the evaluation of the test set, imports,
tokenising and compilation included, each tool as its users run it (Headrace: length buckets;
Trainer: padding to the longest row of each batch). Same shapes: every batch is [32, 64] in both,
the rate of
the steps after the first ones.

    python benchmarks/banking77.py --data DIR --model MODEL_FOLDER

Each run is a process of its own; they run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, LENGTH, EVAL_BATCH = 32, 64, 64


def headrace(options: argparse.Namespace) -> dict[str, float]:
    """One run of our trainer; the rate is that of its own log."""
    import headrace as hr

    folder = Path(options.data)
    fixed = {"length_buckets": [LENGTH], "max_length": LENGTH} if options.fixed else {}
    config = hr.ClassificationConfig(
        model_name_or_path=options.model,
        dataset_name=str(folder / "train.csv"),
        eval_dataset_name=str(folder / "test.csv"),
        output_dir=options.out,
        dtype="float32",
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=EVAL_BATCH,
        num_train_epochs=1,
        max_steps=options.steps,
        learning_rate=3e-4,
        save_strategy="no",
        compilation_cache_dir=None,
        **fixed,
    )
    trainer = hr.ClassificationTrainer(args=config)
    stamps = Stamps()
    trainer.add_callback(stamps.callback())
    trainer.train()
    found = stamps.result()
    if options.steps < 0:
        found["accuracy"] = trainer.evaluate()["eval_accuracy"]
    return found


def trainer(options: argparse.Namespace) -> dict[str, float]:
    """The Hugging Face Trainer with its default collator."""
    import pandas
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tables = {n: pandas.read_csv(Path(options.data) / f"{n}.csv") for n in ("train", "test")}
    names = sorted(tables["train"]["category"].unique())
    padding: Any = "max_length" if options.fixed else False

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        found = tokenizer(
            rows["text"],
            truncation=True,
            max_length=LENGTH if options.fixed else 512,
            padding=padding,
        )
        return {**found, "labels": [names.index(c) for c in rows["category"]]}

    data = {
        n: Dataset.from_pandas(t).map(encode, batched=True, remove_columns=["text", "category"])
        for n, t in tables.items()
    }
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=len(names))
    stamps = Stamps()
    run = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.out,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=EVAL_BATCH,
            num_train_epochs=1,
            max_steps=options.steps,
            learning_rate=3e-4,
            save_strategy="no",
            report_to="none",
            logging_steps=50,
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=data["train"],
        processing_class=tokenizer,
        callbacks=[stamps.callback()],
        compute_metrics=lambda p: {"accuracy": float((p[0].argmax(-1) == p[1]).mean())},
    )
    run.train()
    found = stamps.result()
    if options.steps < 0:
        found["accuracy"] = run.evaluate(data["test"])["eval_accuracy"]
    return found


class Stamps:
    """Times of the ends of steps; the first ones compile or warm caches and do not count."""

    WARM = 10

    def __init__(self) -> None:
        self.ends: list[float] = []

    def callback(self) -> Any:
        from transformers import TrainerCallback

        ends = self.ends

        class Stamp(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                ends.append(time.perf_counter())

        return Stamp()

    def result(self) -> dict[str, float]:
        steps = len(self.ends) - 1 - self.WARM
        return {
            "steps": float(len(self.ends)),
            "samples_per_second": BATCH * steps / (self.ends[-1] - self.ends[self.WARM]),
        }


def measure(name: str, options: argparse.Namespace, *, fixed: bool, steps: int) -> dict[str, float]:
    """One contender in a process; wall seconds of the whole process are added."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--run", name, "--out", out, "--steps", str(steps)]
        command += ["--data", options.data, "--model", options.model]
        command += ["--fixed"] if fixed else []
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        if name == "headrace":  # as the headrace command starts itself
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        start = time.perf_counter()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
        )
        seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with train.csv and test.csv")
    parser.add_argument("--model", required=True, help="folder of the encoder")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the same-shape comparison")
    parser.add_argument("--run", choices=("headrace", "trainer"))
    parser.add_argument("--out", default="out/bench")
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--fixed", action="store_true")
    options = parser.parse_args()
    if options.run:
        print(json.dumps({"headrace": headrace, "trainer": trainer}[options.run](options)))
        return
    print(f"{'same shapes [32, 64]':28}{'headrace':>12}{'HF Trainer':>12}{'ratio':>8}", flush=True)
    for _ in range(options.rounds):
        ours = measure("headrace", options, fixed=True, steps=40)["samples_per_second"]
        theirs = measure("trainer", options, fixed=True, steps=40)["samples_per_second"]
        print(f"{'  samples/s':28}{ours:12.1f}{theirs:12.1f}{ours / theirs:8.2f}", flush=True)
    ours = measure("headrace", options, fixed=False, steps=-1)
    theirs = measure("trainer", options, fixed=False, steps=-1)
    print("end to end, 1 epoch + evaluation")
    for key in ("seconds", "samples_per_second", "accuracy"):
        ratio = theirs[key] / ours[key] if key == "seconds" else ours[key] / theirs[key]
        print(f"{'  ' + key:28}{ours[key]:12.3f}{theirs[key]:12.3f}{ratio:8.2f}")


if __name__ == "__main__":
    main()

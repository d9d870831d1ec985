"""Instruction tuning on real rows: Headrace beside the Hugging Face Trainer with PEFT.

The same Llama shape, the same Alpaca-format rows, rank-16 LoRA on every linear layer, loss on the
answer only, float32. Each tool works as its users run it: Headrace packs rows to 512 tokens and
computes the head for supervised tokens only; the Trainer pads each batch to its longest row, in
random order or grouped by length. What counts is real tokens (no padding) per second of the steps
after the first ones.

    python benchmarks/alpaca_lora.py --data alpaca.json --tokenizer MINILM_FOLDER

Each run is a process of its own; they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LENGTH, RANK, WARM = 512, 16, 6
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [SEP]{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CONTENDERS = ("headrace", "trainer", "trainer, grouped")


def make_model(folder: Path, tokenizer_folder: str) -> None:
    """A random Llama of 8 layers and hidden size 384 with the tokenizer beside it."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template, tokenizer.eos_token = CHAT, "[SEP]"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def headrace(options: argparse.Namespace) -> float:
    """Real tokens per second of our trainer's steps."""
    import headrace as hr

    ends: list[tuple[float, int]] = []
    config = hr.SFTConfig(
        model_name_or_path=options.model,
        dataset_name=options.data,
        output_dir=options.out,
        dtype="float32",
        max_length=LENGTH,
        packing=True,
        per_device_train_batch_size=4,
        max_steps=options.steps,
        activation_checkpointing="none",
        use_peft=True,
        lora_r=RANK,
        lora_target_modules="all-linear",
        save_strategy="no",
        logging_steps=1,
        compilation_cache_dir=None,
    )
    trainer = hr.SFTTrainer(args=config)
    trainer.add_callback(_stamps(ends))
    trainer.train()
    log = [json.loads(line) for line in (Path(options.out) / "log.jsonl").read_text().splitlines()]
    rates = [row["tokens_per_second"] for row in log if "tokens_per_second" in row]
    return statistics.median(rates[WARM:])


def trainer(options: argparse.Namespace, *, grouped: bool) -> float:
    """Real tokens per second of the Hugging Face Trainer's steps."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def encode(row: dict[str, str]) -> dict[str, list[int]]:
        user = "\n\n".join(filter(None, (row["instruction"], row["input"])))
        messages = [{"role": "user", "content": user}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        messages.append({"role": "assistant", "content": row["output"]})
        full = tokenizer.apply_chat_template(messages, return_dict=False)[:LENGTH]
        labels = [-100] * min(len(prompt), len(full)) + full[len(prompt) :]
        return {"input_ids": full, "attention_mask": [1] * len(full), "labels": labels}

    rows = json.loads(Path(options.data).read_text())
    data = Dataset.from_list([encode(row) for row in rows])
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(options.model),
        LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    pad, counts, ends = DataCollatorForSeq2Seq(tokenizer), [], []

    def collate(features: list[dict[str, Any]]) -> Any:
        counts.append(sum(len(f["input_ids"]) for f in features))
        return pad(features)

    Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.out,
            per_device_train_batch_size=8,
            max_steps=options.steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            train_sampling_strategy="group_by_length" if grouped else "random",
        ),
        train_dataset=data,
        data_collator=collate,
        callbacks=[_stamps(ends)],
    ).train()
    return sum(counts[WARM : len(ends)]) / (ends[-1][0] - ends[WARM - 1][0])


def _stamps(ends: list[tuple[float, int]]) -> Any:
    from transformers import TrainerCallback

    class Stamp(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append((time.perf_counter(), state.global_step))

    return Stamp()


def measure(name: str, options: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--run", name, "--out", out, "--model", options.model]
        command += ["--data", options.data, "--steps", str(options.steps)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        if name == "headrace":  # as the headrace command starts itself
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="JSON rows: instruction, input, output")
    parser.add_argument("--tokenizer", help="folder of a tokenizer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--run", choices=CONTENDERS)
    parser.add_argument("--out")
    parser.add_argument("--model")
    options = parser.parse_args()
    if options.run:
        if options.run == "headrace":
            print(headrace(options))
        else:
            print(trainer(options, grouped=options.run.endswith("grouped")))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.model = folder
        make_model(Path(folder), options.tokenizer)
        rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for _ in range(options.rounds):
            for name in CONTENDERS:
                rates[name].append(measure(name, options))
    print(f"{'':20}{'real tokens/s':>14}{'min':>8}{'max':>8}{'headrace is':>14}")
    for name, values in rates.items():
        paired = [a / b for a, b in zip(rates["headrace"], values, strict=True)]
        ratio = "" if name == "headrace" else f"{statistics.median(paired):.2f}x faster"
        median = statistics.median(values)
        print(f"{name:20}{median:14.0f}{min(values):8.0f}{max(values):8.0f}{ratio:>14}")


if __name__ == "__main__":
    main()

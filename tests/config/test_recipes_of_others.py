"""Whole recipes as people publish them for other tools: taken as they stand, no key lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import load_config

TRL = """
# trl sft --config sft.yaml, as in TRL's examples
model_name_or_path: Qwen/Qwen3-0.6B
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: trl-lib/Capybara
dataset_num_proc: 8
max_seq_length: 2048
packing: true
packing_strategy: bfd
loss_type: chunked_nll
learning_rate: 2.0e-4
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.03
num_train_epochs: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
bf16: true
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: all-linear
logging_strategy: steps
logging_steps: 5
log_level: info
evaluation_strategy: 'no'
save_strategy: epoch
save_total_limit: 1
overwrite_output_dir: true
report_to: [tensorboard]
push_to_hub: false
hub_strategy: every_save
output_dir: data/Qwen3-sft
seed: 42
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: false
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
wandb_project: null
wandb_name: null
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint: null
flash_attention: true
warmup_steps: 10
weight_decay: 0.0
deepspeed: null
fsdp: null
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
do_train: true
finetuning_type: lora
lora_target: all
lora_rank: 8
pref_beta: 0.2
pref_loss: sigmoid
dataset: dpo_en_demo.json
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/llama3-8b/lora/dpo
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
"""
EXPECTED: list[tuple[str, str, dict[str, Any]]] = [
    (
        "trl",
        TRL,
        {
            "dtype": "bfloat16", "max_length": 2048, "packing": True, "learning_rate": 2e-4,
            "warmup_ratio": 0.03, "activation_checkpointing": "full", "use_peft": True,
            "report_to": ("tensorboard",), "save_strategy": "epoch", "eval_strategy": "no",
        },
    ),
    (
        "axolotl",
        AXOLOTL,
        {
            "model_name_or_path": "NousResearch/Llama-3.2-1B", "use_peft": True,
            "max_length": 2048, "test_split_size": 0.1, "per_device_train_batch_size": 2,
            "num_train_epochs": 1.0, "completion_only_loss": True, "optim": "adamw",
            "datasets": ({"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"},),
        },
    ),
    (
        "llama-factory",
        LLAMA_FACTORY,
        {
            "task": "preference", "preference_loss": "dpo", "beta": 0.2, "lora_r": 8,
            "lora_target_modules": "all-linear", "max_length": 2048, "test_split_size": 0.1,
            "dataset_train_split": "train[:1000]", "dtype": "bfloat16", "learning_rate": 5e-6,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "text", "expected"), EXPECTED, ids=[e[0] for e in EXPECTED])
def test_a_published_recipe_is_taken_as_it_stands(
    tool: str, text: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / f"{tool}.yaml"
    path.write_text(text, encoding="utf-8")
    found = load_config(path)
    for name, value in expected.items():
        assert getattr(found.config, name) == value, name
    keys = [line.split(":")[0] for line in text.splitlines() if line and line[0].isalpha()]
    for key in keys:
        known = key in type(found.config).model_fields
        assert known or any(key in note for note in found.notes), f"{key} is lost without a word"

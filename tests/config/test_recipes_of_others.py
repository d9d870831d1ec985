"""Whole recipes as people publish them for other tools: taken as they stand, no key lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import load_config
from headrace.errors import ConfigError

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


# Further recipes, as each tool's documentation writes them, and the lines that stop them, if any.
MORE: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    (
        "trl dpo",
        """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
learning_rate: 5.0e-6
max_steps: 1000
gradient_checkpointing: true
eval_strategy: steps
eval_steps: 50
output_dir: Qwen2-0.5B-DPO
task: preference
loss_type: [sigmoid]
beta: 0.1
max_prompt_length: 512
precompute_ref_log_probs: false
ref_model_init_kwargs: null
disable_dropout: true
use_peft: true
lora_r: 32
dataloader_num_workers: 4
optim: adamw_torch_fused
env: {WANDB_PROJECT: x}
""",
        {"preference_loss": "dpo", "beta": 0.1, "optim": "adamw"},
        (),
    ),
    (
        "trl sft, mixture",
        """
model_name_or_path: Qwen/Qwen2.5-0.5B
datasets:
  - path: stanfordnlp/imdb
    split: train
test_split_size: 0.1
streaming: false
assistant_only_loss: true
chat_template_path: HuggingFaceTB/SmolLM3-3B
eos_token: <|im_end|>
use_liger_kernel: true
fsdp: full_shard auto_wrap
fsdp_config: {fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer}
hub_token: abc
activation_offloading: true
trackio_space_id: me/board
""",
        {},
        ("fsdp", "fsdp_config", "hub_token"),
    ),
    (
        "trl reward",
        """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
output_dir: reward
center_rewards_coefficient: 0.01
lora_task_type: SEQ_CLS
""",
        {},
        ("center_rewards_coefficient",),
    ),
    (
        "axolotl qlora",
        """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
datasets:
  - path: fozziethebeat/alpaca_messages_2k_test
    type: chat_template
    roles_to_train: [assistant]
val_set_size: 0.05
adapter: qlora
lora_model_dir:
sequence_len: 4096
sample_packing: true
lora_target_linear: true
lora_mlp_kernel: true
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_bnb_8bit
bf16: auto
local_rank:
loss_watchdog_threshold: 5.0
evals_per_epoch: 4
saves_per_epoch: 1
special_tokens: {pad_token: <|end_of_text|>}
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
output_dir: ./outputs/out
""",
        {},
        ("evals_per_epoch", "optim"),
    ),
    (
        "axolotl pretraining",
        """
base_model: TinyLlama/TinyLlama_v1.1
max_steps: 200
pretraining_dataset:
  - path: allenai/c4
    name: en
    type: pretrain
val_set_size: 0.0
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
optimizer: adamw_torch_fused
evals_per_epoch:
saves_per_epoch: 1
bf16: auto
""",
        {
            "dataset_name": "allenai/c4", "dataset_config": "en", "dataset_streaming": True,
            "test_split_size": None, "save_strategy": "epoch", "max_steps": 200,
        },
        (),
    ),
    (
        "axolotl dpo",
        """
base_model: mistralai/Mistral-7B-v0.1
rl: dpo
rl_beta: 0.1
datasets:
  - path: Intel/orca_dpo_pairs
    type: chatml.intel
sequence_len: 2048
adapter: lora
micro_batch_size: 1
optimizer: adamw_torch
debug:
some_new_key:
output_dir: ./o
""",
        {"task": "preference"},
        (),
    ),
    (
        "llama-factory sft",
        """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
image_max_pixels: 262144
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity
dataset_dir: data
template: qwen3_nothink
cutoff_len: 2048
neat_packing: true
enable_thinking: false
flash_attn: auto
bf16: true
""",
        {},
        ("dataset_dir",),
    ),
    (
        "llama-factory pretraining",
        """
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: pt
finetuning_type: lora
lora_target: all
dataset: c4_demo.json
max_samples: 1000
cutoff_len: 2048
""",
        {"task": "causal", "use_peft": True, "dataset_train_split": "train[:1000]"},
        (),
    ),
    (
        "llama-factory reward, full",
        """
model_name_or_path: Qwen/Qwen3-4B
stage: rm
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: dpo_en_demo.json
use_swanlab: true
""",
        {},
        ("deepspeed", "use_swanlab"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "text", "expected", "refused"), MORE, ids=[m[0] for m in MORE])
def test_every_key_of_a_recipe_is_taken_named_or_refused_in_a_line(
    tool: str, text: str, expected: dict[str, Any], refused: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    if refused:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        lines = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
        assert sorted(line.split()[0] for line in lines) == sorted(refused)
        assert "unknown" not in str(caught.value)
        return
    found = load_config(path)
    for name, value in expected.items():
        assert getattr(found.config, name) == value, name
    for key in (line.split(":")[0] for line in text.splitlines() if line and line[0].isalpha()):
        known = key in type(found.config).model_fields
        assert known or any(key in note for note in found.notes), f"{key} is lost without a word"

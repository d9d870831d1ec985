"""Names and values of other tools (TRL, axolotl, LLaMA-Factory, ...) and what they become here.

Four tables, by what happens to a key that is not a field: RENAMED, TRANSLATED (the value decides),
IGNORED (it has no effect here, and that is said), REFUSED (it would change the run and cannot be
honoured). Knows names, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "base_model": "model_name_or_path",
    "model": "model_name_or_path",
    "tokenizer": "processing_class",
    "tokenizer_name_or_path": "processing_class",
    "torch_dtype": "dtype",
    "dataset": "dataset_name",
    "dataset_text_field": "text_column",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "excess_length_strategy": "over_length",
    "sample_packing": "packing",
    "eval_sample_packing": "eval_packing",
    "neat_packing": "packing",
    "micro_batch_size": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "streaming": "dataset_streaming",
    "wandb_name": "run_name",
    "lr": "learning_rate",
    "label_smoothing": "label_smoothing_factor",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "evaluation_strategy": "eval_strategy",
    "noise_alpha": "neftune_noise_alpha",
    "early_stopping_steps": "early_stopping_patience",
    "lora_rank": "lora_r",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "rl_beta": "beta",
    "pref_beta": "beta",
    "dpo_beta": "beta",
    "orpo_alpha": "beta",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "additional_target": "lora_modules_to_save",
    "additional_target_modules": "lora_modules_to_save",
}

# settings that say auto, and the switch that means it
AUTOMATIC: Mapping[str, str] = {"per_device_train_batch_size": "auto_find_batch_size"}

IGNORED: Mapping[str, str] = {
    "bnb_4bit_compute_dtype": "quantised weights are multiplied in the model's dtype",
    "bnb_4bit_quant_storage": "codes of 4 bits take half a byte",
    "bnb_4bit_use_double_quant": "scales of 4-bit blocks are bfloat16, a quarter bit a weight",
    "use_bnb_nested_quant": "scales of 4-bit blocks are bfloat16, a quarter bit a weight",
    "attn_implementation": "attention always runs through the kernel of the accelerator",
    "dataset_num_proc": "the fast tokenizer uses all cores in one process",
    "dataloader_num_workers": "batches are prepared by one prefetching thread",
    "dataloader_pin_memory": "arrays go to the device directly",
    "dataloader_drop_last": "the last batch is completed with rows of weight zero",
    "remove_unused_columns": "only the columns that are needed are read",
    "group_by_length": "length buckets do this",
    "padding_free": "rows have fixed lengths; packing removes the padding",
    "save_safetensors": "weights are always saved as safetensors",
    "overwrite_output_dir": "an existing run is continued only with resume_from_checkpoint",
    "logging_dir": "logs stand in output_dir",
    "average_tokens_across_devices": "the loss is always a mean over all tokens",
    "tf32": "matmul precision is XLA's",
    "flash_attention": "attention always runs through the kernel of the accelerator",
    "lora_task_type": "task decides it",
    "use_cpu": "JAX_PLATFORMS chooses the device",
    "no_cuda": "JAX_PLATFORMS chooses the device",
    "ddp_find_unused_parameters": "there are no unused gradients",
    "ddp_timeout": "there is one program, no process group",
    "gradient_checkpointing_kwargs": "activation_checkpointing names what is recomputed",
    "logging_strategy": "logs come every logging_steps",
    "log_level": "the log is short as it is",
    "disable_tqdm": "a bar is drawn on terminals only",
    "include_num_input_tokens_seen": "tokens are always counted",
    "hub_strategy": "the finished run is uploaded once",
    "save_only_model": "a checkpoint always has what resuming needs",
    "plot_loss": "report.html has the curves",
    "do_train": "the command says it",
    "do_eval": "eval_strategy says it",
    "template": "the tokenizer's own chat template is used; chat_template_path names another",
    "chat_template": "the tokenizer's own chat template is used; chat_template_path names another",
    "overwrite_cache": "prepared data is kept by content and never stale",
    "preprocessing_num_workers": "the fast tokenizer uses all cores in one process",
    "dataset_processes": "the fast tokenizer uses all cores in one process",
    "dataset_prepared_path": "prepared data is kept by content, in data_cache_dir",
    "dataset_batch_size": "the tokenizer is given a thousand rows at a time",
    "pad_to_sequence_len": "rows always have fixed lengths",
    "model_type": "the model's own config names its class",
    "tokenizer_type": "the tokenizer's own config names its class",
    "is_llama_derived_model": "models are captured as they are",
    "strict": "settings are always checked",
    "xformers_attention": "attention always runs through the kernel of the accelerator",
    "sdp_attention": "attention always runs through the kernel of the accelerator",
    "use_unsloth": "the program is compiled whole",
    "wandb_project": "WANDB_PROJECT names it",
    "wandb_entity": "WANDB_ENTITY names it",
    "wandb_watch": "gradients' norms are logged",
    "wandb_log_model": "push_to_hub keeps the result",
    "project": "WANDB_PROJECT names it",
    "trackio_space_id": "trackio writes its local database",
    "env": "set environment variables before the command",
    "use_liger_kernel": "the fused loss is always on",
    "liger_rope": "the program is compiled whole",
    "liger_rms_norm": "the program is compiled whole",
    "liger_glu_activation": "the program is compiled whole",
    "liger_layer_norm": "the program is compiled whole",
    "liger_fused_linear_cross_entropy": "the fused loss is always on",
    "lora_mlp_kernel": "the program is compiled whole",
    "lora_qkv_kernel": "the program is compiled whole",
    "lora_o_kernel": "the program is compiled whole",
    "lora_fan_in_fan_out": "PEFT sees it in the layer",
    "flash_attn": "attention always runs through the kernel of the accelerator",
    "local_rank": "JAX knows the processes",
    "loss_watchdog_threshold": "three steps in a row that are not finite end the run",
    "loss_watchdog_patience": "three steps in a row that are not finite end the run",
    "eval_max_new_tokens": "eval_samples and eval_sample_tokens show answers",
    "dataset_kwargs": "rows are prepared as their format says",
    "disable_dropout": "preference and reward losses have no dropout",
    "max_prompt_length": "max_length counts prompt and answer, over_length says what is cut",
    "max_completion_length": "max_length counts prompt and answer, over_length says what is cut",
    "no_remove_unused_columns": "only the columns that are needed are read",
    "image_max_pixels": "images are not read",
    "video_max_pixels": "videos are not read",
    "debug": "every start shows one example with what is trained",
}

REFUSED: Mapping[str, str] = {
    "deepspeed": "sharding is XLA's; remove it",
    "fsdp": "sharding is XLA's; remove it",
    "fsdp_config": "sharding is XLA's; remove it",
    "dataset_dir": "no registry is needed: dataset_name takes the file itself; remove it",
    "enable_thinking": "rows say it in chat_template_kwargs; remove it",
    "hub_token": "a token in a recipe is read by others: log in with `hf auth login`; remove it",
    "use_swanlab": "report_to takes tensorboard, wandb and trackio; remove it",
    "lora_model_dir": "merge that adapter first (headrace merge), then train on the result",
    "adapter_name_or_path": "merge that adapter first (headrace merge), then train on the result",
    "precompute_ref_log_probs": "the reference is computed in the step; remove it",
    "sync_ref_model": "the reference stays the model before training; remove it",
    "ref_model_init_kwargs": "the reference is the model before training; remove it",
    "save_on_each_node": "checkpoints are written together by all hosts; remove it",
}

OPTIMIZERS: Mapping[str, str] = {
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw_hf": "adamw",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion": "lion",
    "lion_32bit": "lion",
}


def optimizer_name(name: Any) -> Any:
    """transformers' optimizer name -> ours; other values pass, to be refused by the field."""
    return OPTIMIZERS.get(name, name) if isinstance(name, str) else name


def is_true(value: Any) -> bool:
    """YAML and flag spellings of true; everything else is false."""
    return value is True or str(value).strip().lower() in ("true", "yes", "on", "1")


def _when_true(**settings: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda value: settings if is_true(value) else {}


def _lora_target(value: Any) -> dict[str, Any]:
    return {"lora_target_modules": "all-linear" if value in ("all", "all-linear") else value}


def _train_on_prompt(value: Any) -> dict[str, Any]:
    return {"completion_only_loss": not is_true(value), "assistant_only_loss": not is_true(value)}


def _method(value: Any) -> dict[str, Any]:
    """axolotl's adapter, LLaMA-Factory's finetuning_type."""
    if value in ("lora", "qlora"):
        return {"use_peft": True} | ({"quantization": "nf4"} if value == "qlora" else {})
    if value in (None, "", "full", "none"):
        return {"use_peft": False}
    raise ValueError(f"{value!r} is not known; needs lora, qlora or full")


def _quant_type(value: Any) -> dict[str, Any]:
    """transformers' bnb_4bit_quant_type: load_in_4bit switches it on, and means nf4 here."""
    if value == "nf4":
        return {}
    raise ValueError(f"{value!r} is not supported; needs nf4 (or set quantization: int4)")


def _quantization_bit(value: Any) -> dict[str, Any]:
    """LLaMA-Factory's."""
    formats = {"4": "nf4", "8": "int8"}
    if value in (None, ""):
        return {}
    if str(value) not in formats:
        raise ValueError(f"{value!r} is not supported; needs 4 or 8")
    return {"quantization": formats[str(value)]}


def _fp16(value: Any) -> dict[str, Any]:
    if is_true(value):
        raise ValueError("float16 training needs loss scaling, which is not here; use bf16: true")
    return {}


PREFERENCE_LOSSES: Mapping[str, str] = {
    "sigmoid": "dpo",
    "dpo": "dpo",
    "ipo": "ipo",
    "orpo": "orpo",
    "simpo": "simpo",
    "kto": "kto",
}


def _preference_loss(value: Any) -> dict[str, Any]:
    """TRL's loss_type, LLaMA-Factory's pref_loss, axolotl's rl."""
    if isinstance(value, list) and len(value) == 1:  # pyright: ignore[reportUnknownArgumentType]
        value = value[0]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        raise ValueError("several losses at once are not supported; keep one")
    if value in ("nll", "chunked_nll"):
        return {}
    if value not in PREFERENCE_LOSSES:
        needed = ", ".join(PREFERENCE_LOSSES)
        raise ValueError(f"{value!r} is not supported; needs {needed} (or nll for other tasks)")
    return {"preference_loss": PREFERENCE_LOSSES[value]}


def _rl(value: Any) -> dict[str, Any]:
    return {"task": "preference"} | _preference_loss(value)


def _stage(value: Any) -> dict[str, Any]:
    """LLaMA-Factory's stage."""
    stages: dict[Any, dict[str, Any]] = {
        "pt": {},
        "sft": {},
        "rm": {"task": "reward"},
        "dpo": {"task": "preference"},
        "kto": {"task": "preference", "preference_loss": "kto"},
    }
    if value not in stages:
        raise ValueError(f"{value!r} is not supported; needs {', '.join(stages)}")
    return stages[value]


def _held_out(value: Any) -> dict[str, Any]:
    """axolotl's val_set_size, LLaMA-Factory's val_size: 0 holds out nothing."""
    return {} if value in (None, "", 0, "0", "0.0") else {"test_split_size": value}


def _an_epoch(setting: str) -> Callable[[Any], dict[str, Any]]:
    """axolotl's evals_per_epoch and saves_per_epoch; more often is counted in steps."""
    every = setting.replace("_strategy", "_steps")

    def translate(value: Any) -> dict[str, Any]:
        if value in (None, "", 0):
            return {}
        if str(value) != "1":
            raise ValueError(f"only 1 is taken as it stands; set {setting}: steps and {every}")
        return {setting: "epoch"}

    return translate


def _special_tokens(value: Any) -> dict[str, Any]:
    """axolotl's; padding is told by position, so a pad token changes nothing."""
    tokens = dict(value or {})
    tokens.pop("pad_token", None)
    end = tokens.pop("eos_token", None)
    if tokens:
        raise ValueError(f"{', '.join(tokens)} cannot be set; change the tokenizer's own files")
    return {} if end is None else {"eos_token": end}


def _plugins(value: Any) -> dict[str, Any]:
    """axolotl's; fused losses and kernels are what XLA does anyway."""
    wrong = [p for p in value or [] if "liger" not in p.lower() and "cut_cross_entropy" not in p]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: plugins are axolotl's own; remove it")
    return {}


def _pretraining(value: Any) -> dict[str, Any]:
    """axolotl's pretraining_dataset: a stream of texts."""
    parts: list[Any] = value if isinstance(value, list) else [value]
    if len(parts) != 1:
        raise ValueError("several streams are not supported; keep one")
    part = parts[0] if isinstance(parts[0], dict) else {"path": parts[0]}
    found = {"dataset_name": part["path"], "dataset_streaming": True}
    return found | ({"dataset_config": part["name"]} if part.get("name") else {})


def _max_samples(value: Any) -> dict[str, Any]:
    if value in (None, ""):
        return {}
    return {"dataset_train_split": f"train[:{int(value)}]"}


def _packing_strategy(value: Any) -> dict[str, Any]:
    if value == "bfd":
        return {}
    if value == "bfd_split":
        return {"over_length": "split"}
    raise ValueError(
        f"{value!r} is not supported; bfd keeps examples whole, bfd_split splits long ones"
    )


TRANSLATED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "bf16": _when_true(dtype="bfloat16"),
    "fp16": _fp16,
    "gradient_checkpointing": lambda value: {
        "activation_checkpointing": "full" if is_true(value) else "none"
    },
    "train_on_inputs": _train_on_prompt,
    "train_on_prompt": _train_on_prompt,
    "load_in_4bit": _when_true(quantization="nf4"),
    "load_in_8bit": _when_true(quantization="int8"),
    "bnb_4bit_quant_type": _quant_type,
    "quantization_type": _quant_type,
    "quantization_bit": _quantization_bit,
    "lora_target": _lora_target,
    "lora_target_linear": _when_true(lora_target_modules="all-linear"),
    "adapter": _method,
    "finetuning_type": _method,
    "packing_strategy": _packing_strategy,
    "max_samples": _max_samples,
    "loss_type": _preference_loss,
    "pref_loss": _preference_loss,
    "rl": _rl,
    "stage": _stage,
    "reward_model": _when_true(task="reward"),
    "val_set_size": _held_out,
    "val_size": _held_out,
    "evals_per_epoch": _an_epoch("eval_strategy"),
    "saves_per_epoch": _an_epoch("save_strategy"),
    "special_tokens": _special_tokens,
    "plugins": _plugins,
    "pretraining_dataset": _pretraining,
    "activation_offloading": _when_true(activation_checkpointing="offload"),
}

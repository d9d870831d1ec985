"""`headrace train config.yaml --field value`: fine-tune a model.

Knows: how words become a configuration. Does not know: how training works (`headrace.train`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.settings import (
    read_settings,
    show_everything,
    show_reference,
    show_settings,
)

if TYPE_CHECKING:
    from headrace.config import TrainConfig


def train(
    context: typer.Context,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", "--dry_run", help="Check and print all settings and their source, stop."
        ),
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="List every setting with its default, then stop.")
    ] = False,
) -> None:
    """Fine-tune a model: headrace train config.yaml --learning_rate 1e-4

    Every setting can stand in the YAML file or be given as --name value; flags win. Names are those
    of transformers and TRL; --settings lists them all. A wrong name or value is reported before
    anything is loaded, together with all the others. The ones used most:

    \b
    what      task (causal, preference, reward, sequence-classification,
              token-classification, masked-lm), preference_loss, output_dir
    model     model_name_or_path, dtype, use_peft, lora_r, lora_target_modules
    data      dataset_name, datasets, eval_dataset_name, test_split_size,
              chat_template_path, max_length, packing
    length    max_steps, num_train_epochs, per_device_train_batch_size,
              gradient_accumulation_steps
    learning  learning_rate, lr_scheduler_type, warmup_ratio, optim
    watching  eval_strategy, eval_steps, eval_samples, logging_steps, report_to,
              save_steps, load_best_model_at_end, early_stopping_patience
    again     resume_from_checkpoint, seed, push_to_hub
    """
    if settings:
        show_reference()
        return
    resolved = read_settings(context.args)
    if dry_run:
        show_everything(resolved)
        return
    _require_model_and_data(resolved.config)
    show_settings(resolved)
    from headrace.plan.guard import check_fits

    check_fits(resolved.config)
    from headrace.train.trainer import Trainer

    Trainer(args=resolved.config).train()


def _require_model_and_data(config: TrainConfig) -> None:
    """What Python may pass as objects must have a name here."""
    from headrace.errors import ConfigError

    missing: list[str] = []
    if config.model_name_or_path is None:
        missing.append("model_name_or_path (a folder or a hub id)")
    if config.dataset_name is None and not config.datasets:
        missing.append("dataset_name (a file, a folder or a hub id)")
    if missing:
        raise ConfigError(
            f"nothing to train: {' and '.join(missing)} is not set. For example\n"
            "  headrace train --model_name_or_path Qwen/Qwen3-0.6B --dataset_name rows.jsonl "
            "--output_dir out"
        )

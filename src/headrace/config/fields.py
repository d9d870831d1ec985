"""Every setting of a training run: name, type, default, limits, one line of help, group.

Names are those of transformers and TRL. This file is the only place where a default stands;
docs/configuration.md and `--help` are made from it. It does not know files or flags (load.py) or
contradictions (checks.py).

To add a setting: one entry here. The groups appear in the order of their first field.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, ValidationInfo, field_validator

from headrace.config.aliases import optimizer_name
from headrace.config.cast import cast_text

Task = Literal[
    "causal",
    "sequence-classification",
    "token-classification",
    "masked-lm",
    "preference",
    "reward",
]
PreferenceLossName = Literal["dpo", "ipo", "orpo", "simpo", "kto"]
Dtype = Literal["auto", "float32", "bfloat16"]
OverLength = Literal["truncate", "drop", "split", "error"]
Remat = Literal["none", "full", "dots", "attention", "offload", "auto"]
Optimizer = Literal["adamw", "adafactor", "sgd", "lion"]
CompilerFlags = Literal["default", "overlap", "overlap-vmem", "sparsecore"]
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "reduce_lr_on_plateau",
]
Reporter = Literal["tensorboard", "wandb", "trackio"]


def _setting(
    default: Any, description: str, *, group: str, shown: str | None = None, **limits: Any
) -> Any:
    """A Field whose default may be a function of the fields before it; `shown` is its text."""
    extra: dict[str, JsonValue] = {"group": group}
    if shown:
        extra["default"] = shown
    if callable(default):
        return Field(
            default_factory=default, description=description, json_schema_extra=extra, **limits
        )
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


def _by_task(causal: Any, classification: Any) -> Callable[[dict[str, Any]], Any]:
    """By whether the model is a causal language model (which preference tuning trains too)."""
    return lambda before: causal if before["task"] in ("causal", "preference") else classification


def _learning_rate(before: dict[str, Any]) -> float:
    """Preference tuning starts from a tuned model: a tenth with LoRA, a fortieth without."""
    if before["task"] == "preference":
        return 2e-5 if before["use_peft"] else 5e-7
    return 2e-4 if before["use_peft"] else 2e-5


def _no_from_yaml(value: Any) -> Any:
    """YAML reads a bare `no` as false; the strategies mean the word."""
    return "no" if value is False else value


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.strip("[]() ").split(",") if part.strip())
    return value


def _as_mesh(value: Any) -> Any:
    """`fsdp=4,tensor=2` of a flag as a mapping."""
    if not isinstance(value, str) or "=" not in value:
        return value
    pairs = [part.partition("=") for part in value.split(",")]
    return {name.strip(): size.strip() for name, _, size in pairs}


def _as_entries(value: Any) -> Any:
    """A list of names or mappings; one of them alone will do."""
    if isinstance(value, str):
        import yaml

        value = yaml.safe_load(value)
    listed = value if isinstance(value, list | tuple) else [value] if value else []
    return tuple({"path": entry} if isinstance(entry, str) else entry for entry in listed)


def _as_reporters(value: Any) -> Any:
    return () if value in (None, "none", ["none"], False) else _as_tuple(value)


Strategy = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(_no_from_yaml)]
Mesh = Annotated[dict[str, int] | Literal["auto"] | None, BeforeValidator(_as_mesh)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Lengths = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]

_run = partial(_setting, group="Run")
_model = partial(_setting, group="Model")
_data = partial(_setting, group="Data")
_length = partial(_setting, group="Length, packing and loss mask")
_devices = partial(_setting, group="Devices")
_size = partial(_setting, group="Batches and duration")
_optim = partial(_setting, group="Optimizer")
_preference = partial(_setting, group="Preference tuning")
_lora = partial(_setting, group="LoRA and quantised bases")
_memory = partial(_setting, group="Memory and compilation")
_log = partial(_setting, group="Logging")
_eval = partial(_setting, group="Evaluation")
_save = partial(_setting, group="Checkpoints")
_hub = partial(_setting, group="Hub")


_plan = partial(_setting, group="Planning")


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    """All settings of a run, frozen and checked.

    Raises ConfigError with every unknown name, wrong value and contradiction at once. Names of
    other tools (`max_seq_length`, `micro_batch_size`, ...) are taken, each with one warning.

        >>> TrainConfig(use_peft=True).learning_rate
        0.0002
    """

    task: Task = _run(
        "causal",
        "What is learned: the next token, a label for the text or for each word, masked words, "
        "which of two answers is better (by the model itself, or as a reward model).",
    )
    output_dir: str = _run("out", "Folder for checkpoints, logs and the final model.")
    seed: int = _run(42, "Seed of weights that are new, dropout and, by default, data order.", ge=0)
    data_seed: int | None = _run(None, "Seed of the data order alone.", shown="`seed`", ge=0)

    model_name_or_path: str | None = _model(None, "Folder or hub id of the model.")
    model_revision: str = _model("main", "Branch, tag or commit of a hub model.")
    trust_remote_code: bool = _model(False, "Run Python code that comes with the model.")
    verify_weights: bool = _model(
        False,
        "Compare weight files from the hub with the hub's SHA-256 before they are used (reads them "
        "once more). Folders with SHA256SUMS, as written here, are always compared.",
    )
    dtype: Dtype = _model("auto", "Compute dtype; auto keeps the checkpoint's own.")
    processing_class: str | None = _model(
        None, "Folder or hub id of the tokenizer.", shown="the model's"
    )
    chat_template_path: str | None = _model(
        None, "Jinja file, or tokenizer folder, whose chat template is used and saved."
    )
    eos_token: str | None = _model(None, "End token to use.", shown="the tokenizer's")

    dataset_name: str | None = _data(
        None, "File (json, jsonl, csv, parquet, arrow, txt), folder, glob or hub id."
    )
    datasets: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_as_entries)] = _data(
        (),
        "Several datasets at once, each with path and, if wanted, name, split and fraction.",
        shown="none",
    )
    dataset_streaming: bool = _data(
        False, "Read and tokenise in pieces, arrays on disk: for data larger than memory."
    )
    data_cache_dir: str | None = _data(
        "~/.cache/headrace/data", "Where prepared data is kept by content; none turns it off."
    )
    dataset_config: str | None = _data(None, "Configuration name of a hub dataset.")
    dataset_train_split: str = _data("train", "Training split; slices such as train[:1000] work.")
    dataset_test_split: str = _data("test", "Split for evaluation.")
    eval_dataset_name: str | None = _data(
        None, "Where evaluation data is, when not a split of dataset_name."
    )
    test_split_size: float | int | None = _data(
        None, "Hold out this share (below 1) or number of training rows for evaluation.", gt=0
    )
    text_column: str | None = _data(None, "Column that holds the text.", shown="found by looking")
    text_pair_column: str | None = _data(
        None, "Column with the second text of a pair.", shown="found by looking"
    )
    label_column: str | None = _data(None, "Column with the label.", shown="found by looking")
    problem_type: Literal["single_label_classification", "regression"] | None = _data(
        None, "Classes or numbers.", shown="float labels mean regression"
    )

    mlm_probability: float = _data(
        0.15, "Masked language modelling: share of tokens to predict.", gt=0, lt=1
    )

    max_length: int | None = _length(
        None, "Longest sequence in tokens.", shown="chosen from the data, and printed", ge=2
    )
    over_length: OverLength = _length("truncate", "What happens to longer examples.")
    truncation_mode: Literal["keep_start", "keep_end"] = _length(
        "keep_start", "Which end survives when over_length is truncate."
    )
    packing: bool = _length(
        lambda before: before["task"] == "causal",
        "Put several examples in a row; they never see each other.",
        shown="true for causal",
    )
    eval_packing: bool = _length(
        lambda before: before["packing"], "Packing of evaluation data.", shown="as `packing`"
    )
    completion_only_loss: bool = _length(
        True, "Prompt/completion and Alpaca data: train the answer only."
    )
    assistant_only_loss: bool = _length(True, "Chat data: train assistant turns only.")
    apply_chat_template: bool = _length(
        True, "Prompt/completion and Alpaca data: write it as a chat, if the tokenizer can."
    )
    bucket_count: int = _length(4, "Most row lengths to compile when not packing.", ge=1, le=32)
    length_buckets: Lengths | None = _length(
        None, "Row lengths to compile.", shown="chosen from the data"
    )
    pad_to_multiple_of: int = _length(
        _by_task(128, 16),
        "Row lengths are multiples of this.",
        shown="128 for causal models, 16 for others",
        ge=1,
    )

    mesh: Mesh = _devices(
        None,
        "Devices along data, fsdp, tensor, context, expert; auto chooses for all devices.",
        shown="one device",
    )
    sharding_overrides: dict[str, Any] = _devices(
        dict, "Parameter names with * -> mesh axes of every dim, or replicated.", shown="none"
    )

    per_device_train_batch_size: int = _size(8, "Rows in a micro-batch on each device.", ge=1)
    auto_find_batch_size: bool = _size(
        False, "Take the largest micro-batch that fits; accumulation makes up the rest of the rows."
    )
    per_device_eval_batch_size: int = _size(8, "Rows in an evaluation batch on a device.", ge=1)
    gradient_accumulation_steps: int = _size(1, "Micro-batches in one optimizer step.", ge=1)
    num_train_epochs: float = _size(3.0, "Passes over the training data.", gt=0)
    max_steps: int = _size(-1, "Optimizer steps; -1 leaves it to num_train_epochs.", ge=-1)

    use_peft: bool = _lora(False, "Train a LoRA adapter instead of all weights.")
    lora_r: int = _lora(16, "Rank.", ge=1)
    lora_alpha: float = _lora(32, "Scale numerator; the update is scaled by alpha / r.", gt=0)
    lora_dropout: float = _lora(0.05, "Dropout before the adapter.", ge=0, lt=1)
    lora_target_modules: str | tuple[str, ...] = _lora(
        "all-linear", "Module names, a regular expression, or all-linear."
    )
    lora_target_parameters: Names = _lora(
        (), "Parameters (MoE experts) to adapt by name.", shown="none"
    )
    lora_modules_to_save: Names = _lora(
        (), "Modules trained in full beside the adapter.", shown="none"
    )
    use_rslora: bool = _lora(False, "Scale by alpha / sqrt(r).")
    use_dora: bool = _lora(False, "Weight-decomposed LoRA.")
    quantization: Literal["int8", "int4", "nf4"] | None = _lora(
        None,
        "Store the frozen linear weights in 8 or 4 bits (QLoRA is nf4); quantised while loading.",
    )

    learning_rate: float = _optim(
        _learning_rate,
        "Peak learning rate.",
        shown="2e-4 with LoRA, 2e-5 without; preference: 2e-5 and 5e-7",
        ge=0,
    )
    lr_scheduler_type: Schedule = _optim("linear", "Shape of the schedule.")
    lr_scheduler_kwargs: dict[str, Any] = _optim(
        dict, "Extra settings of the schedule.", shown="none"
    )
    warmup_steps: float = _optim(0, "Warm-up steps; below 1 it is a share of all steps.", ge=0)
    warmup_ratio: float = _optim(0.0, "Warm-up as a share of all steps.", ge=0, lt=1)
    optim: Annotated[Optimizer, BeforeValidator(optimizer_name)] = _optim(
        "adamw", "Optimizer; transformers' names (adamw_torch, ...) are understood."
    )
    weight_decay: float = _optim(0.0, "Decay of weight matrices.", ge=0)
    adam_beta1: float = _optim(0.9, "First moment decay.", ge=0, lt=1)
    adam_beta2: float = _optim(0.999, "Second moment decay.", ge=0, lt=1)
    adam_epsilon: float = _optim(1e-8, "Added to the denominator.", gt=0)
    max_grad_norm: float = _optim(1.0, "Clip gradients to this norm; 0 turns it off.", ge=0)
    label_smoothing_factor: float = _optim(
        0.0, "Share of a label that is spread over all classes or tokens.", ge=0, lt=1
    )
    neftune_noise_alpha: float | None = _optim(
        None, "Noise added to embeddings in training (NEFTune); 5 is usual.", gt=0
    )
    ema_decay: float | None = _optim(
        None,
        "Also keep a running average of the trained weights, which is evaluated and saved; 0.999.",
        gt=0,
        lt=1,
    )

    preference_loss: PreferenceLossName = _preference(
        "dpo", "Loss of task preference; dpo, ipo and kto compare with the model before training."
    )
    beta: float = _preference(
        lambda before: 2.0 if before["preference_loss"] == "simpo" else 0.1,
        "Strength of the preference term.",
        shown="2.0 for simpo, 0.1 for others",
        gt=0,
    )
    simpo_gamma: float = _preference(
        1.0, "SimPO: margin by which the better answer should win.", ge=0
    )
    preference_label_smoothing: float = _preference(
        0.0, "DPO and SimPO: probability that a pair is labelled the wrong way round.", ge=0, lt=0.5
    )
    desirable_weight: float = _preference(1.0, "KTO: weight of wanted answers.", gt=0)
    undesirable_weight: float = _preference(1.0, "KTO: weight of unwanted answers.", gt=0)
    center_rewards_coefficient: float = _preference(
        0.0, "Reward model: pulls the sum of a pair's rewards towards zero.", ge=0
    )

    activation_checkpointing: Remat = _memory(
        _by_task("full", "none"),
        "What is recomputed instead of kept; auto takes the cheapest that fits.",
        shown="full for causal models, none for others",
    )
    compilation_cache_dir: str | None = _memory(
        "~/.cache/headrace/xla", "Where compiled programs are kept; none turns it off."
    )

    compiler_flags: CompilerFlags = _memory(
        "default", "Set of TPU compiler flags; `headrace plan` names the best one for a slice."
    )

    logging_steps: int = _log(10, "Steps between log lines.", ge=1)
    logging_first_step: bool = _log(True, "Log the first step too.")
    report_to: Annotated[tuple[Reporter, ...], BeforeValidator(_as_reporters)] = _log(
        (), "Trackers to write to beside the console and the log file.", shown="none"
    )
    run_name: str | None = _log(None, "Name of the run in trackers.", shown="output_dir's name")

    eval_strategy: Strategy = _eval("no", "When to evaluate.")
    eval_steps: int = _eval(500, "Steps between evaluations with eval_strategy: steps.", ge=1)
    eval_on_start: bool = _eval(False, "Evaluate before the first step.")
    eval_samples: int = _eval(
        0, "Evaluation prompts to answer, before training and at every evaluation.", ge=0, le=32
    )
    eval_sample_tokens: int = _eval(64, "Longest of those answers in tokens.", ge=1)
    early_stopping_patience: int | None = _eval(
        None, "Evaluations without a better metric_for_best_model after which the run ends.", ge=1
    )
    early_stopping_threshold: float = _eval(
        0.0, "How much better counts as better for early stopping.", ge=0
    )

    save_strategy: Strategy = _save("steps", "When to save; the end is always saved.")
    save_steps: int = _save(500, "Steps between checkpoints with save_strategy: steps.", ge=1)
    save_total_limit: int | None = _save(2, "Checkpoints kept; none keeps all.", ge=1)
    load_best_model_at_end: bool = _save(False, "End with the best checkpoint, not the last.")
    metric_for_best_model: str | None = _save(None, "What best means.", shown="loss")
    greater_is_better: bool | None = _save(
        None, "Direction of that metric.", shown="false for losses, true for others"
    )
    resume_from_checkpoint: bool | str | None = _save(
        None, "A checkpoint folder, or true for the newest in output_dir."
    )

    plan: dict[str, Any] = _plan(
        dict,
        "What `headrace plan` cannot see: dataset_rows, dataset_mean_tokens, supervised_share, "
        "num_labels, slice, prices.",
        shown="none",
    )

    push_to_hub: bool = _hub(False, "Upload the result.")
    hub_model_id: str | None = _hub(None, "Repository to upload to.")
    hub_private_repo: bool | None = _hub(None, "Make the repository private.")
    model_card: bool = _hub(
        True, "Write README.md (a model card) and report.html into output_dir at the end."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _cast_text(cls, value: Any, info: ValidationInfo) -> Any:
        return cast_text(value, cls.model_fields[str(info.field_name)].annotation)

    if not TYPE_CHECKING:  # a visible __init__ would hide the fields from type checkers

        def __init__(self, **settings: Any) -> None:
            from headrace.config.load import fill  # load.py knows this class

            for note in fill(self, settings):
                warnings.warn(note, UserWarning, stacklevel=2)

    def replace(self, **changes: Any) -> Self:
        """The same settings with some changed, checked again; derived defaults follow."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**given | changes)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Warm-up in optimizer steps, from a count or a share of total_steps (rounded up)."""
        share = self.warmup_ratio or (self.warmup_steps if self.warmup_steps < 1 else 0.0)
        return -int(-share * total_steps // 1) if share else int(self.warmup_steps)

    def as_given(self) -> Mapping[str, Any]:
        """The settings that were set, in the order of the reference; the rest are defaults."""
        return {n: getattr(self, n) for n in type(self).model_fields if n in self.model_fields_set}


class SFTConfig(TrainConfig, frozen=True):
    """TrainConfig for next-token training; TRL's name for it."""

    task: Literal["causal"] = _run("causal", "Next-token training.")


class ClassificationConfig(TrainConfig, frozen=True):
    """TrainConfig for one label (or number) per text."""

    task: Literal["sequence-classification"] = _run(
        "sequence-classification", "One label per text."
    )


class DPOConfig(TrainConfig, frozen=True):
    """TrainConfig for preference tuning; TRL's name for it. preference_loss picks the loss."""

    task: Literal["preference"] = _run("preference", "Which of two answers is better.")


class RewardConfig(TrainConfig, frozen=True):
    """TrainConfig for a reward model: one number a text, higher for better answers."""

    task: Literal["reward"] = _run("reward", "A number that says how good an answer is.")

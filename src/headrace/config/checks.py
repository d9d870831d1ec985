"""Settings that contradict each other, found before anything is loaded.

Each check reads a valid TrainConfig and yields (field, problem). What depends on data or model is
checked where those are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.config.fields import TrainConfig

Problem = tuple[str, str]

CAUSAL_METRICS = ("loss", "perplexity", "mean_token_accuracy")

# setting -> the tasks it belongs to
_BELONGS = {
    "text_pair_column": ("sequence-classification",),
    "problem_type": ("sequence-classification",),
    "label_column": ("sequence-classification", "token-classification", "preference"),
    "mlm_probability": ("masked-lm",),
    "preference_loss": ("preference",),
    "beta": ("preference",),
    "simpo_gamma": ("preference",),
    "preference_label_smoothing": ("preference",),
    "desirable_weight": ("preference",),
    "undesirable_weight": ("preference",),
    "center_rewards_coefficient": ("reward",),
}
# setting -> the preference losses it belongs to
_OF_LOSS = {
    "simpo_gamma": ("simpo",),
    "preference_label_smoothing": ("dpo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


def conflicts(config: TrainConfig) -> list[Problem]:
    """All contradictions of one configuration, as (field, what is wrong and what to do)."""
    checks = (
        _lora,
        _task,
        _preference,
        _smoothing,
        _lengths,
        _schedule,
        _sources,
        _evaluation,
        _samples,
        _best_model,
        _hub,
    )
    return [problem for check in checks for problem in check(config)]


def _is_set(config: TrainConfig, name: str) -> bool:
    """Whether the setting was given and is not what it would be anyway."""
    if name not in config.model_fields_set:
        return False
    before = config.model_dump()
    field = type(config).model_fields[name]
    return bool(
        getattr(config, name) != field.get_default(call_default_factory=True, validated_data=before)
    )


def _lora(config: TrainConfig) -> Iterator[Problem]:
    if config.quantization and config.use_dora:
        yield "use_dora", "starts from whole base weights; remove it or quantization"
    if config.use_peft:
        return
    names = (n for n in config.model_fields_set if n.startswith("lora_"))
    for name in sorted({*names, *(config.model_fields_set & {"use_rslora", "use_dora"})}):
        yield name, "has no effect without use_peft: true; add that or remove this"


def _task(config: TrainConfig) -> Iterator[Problem]:
    for name, tasks in _BELONGS.items():
        if config.task not in tasks and _is_set(config, name):
            yield name, f"belongs to task: {' or '.join(tasks)}"
    if config.task == "causal":
        return
    for name in ("packing", "eval_packing"):
        if getattr(config, name):
            yield name, f"task {config.task} needs one text a row; remove it"
    if config.over_length == "split" and config.task != "masked-lm":
        yield "over_length", "split would give one label to several texts; use truncate or drop"


def _preference(config: TrainConfig) -> Iterator[Problem]:
    loss = config.preference_loss
    if config.task == "preference":
        for name, losses in _OF_LOSS.items():
            if loss not in losses and _is_set(config, name):
                yield name, f"belongs to preference_loss: {' or '.join(losses)}, not {loss}"
        if config.use_dora and loss in ("dpo", "ipo", "kto"):
            yield "use_dora", f"{loss} turns the adapter off for the reference; use plain LoRA"


def _sources(config: TrainConfig) -> Iterator[Problem]:
    if config.datasets and config.dataset_name:
        yield "datasets", "says where the data is, and so does dataset_name; keep one"
    if not config.dataset_streaming:
        return
    if config.task != "causal":
        yield "dataset_streaming", "is for task causal; remove it"
    if config.datasets:
        yield "dataset_streaming", "takes one dataset_name, not datasets"
    if config.test_split_size is not None:
        yield "test_split_size", "a stream has no length; set eval_dataset_name instead"


def _smoothing(config: TrainConfig) -> Iterator[Problem]:
    if not config.label_smoothing_factor:
        return
    if config.task in ("preference", "reward"):
        yield (
            "label_smoothing_factor",
            f"spreads labels, and task {config.task} has none; for pairs that may be labelled the "
            "wrong way round set preference_label_smoothing",
        )
    if config.problem_type == "regression":
        yield "label_smoothing_factor", "has no meaning for numbers; remove it"


def _lengths(config: TrainConfig) -> Iterator[Problem]:
    buckets = config.length_buckets
    if buckets is None:
        return
    if not buckets or min(buckets) < 1 or list(buckets) != sorted(set(buckets)):
        yield "length_buckets", f"{list(buckets)} needs to be rising lengths such as [128, 512]"
    elif config.max_length is not None and buckets[-1] != config.max_length:
        yield (
            "length_buckets",
            f"the last ({buckets[-1]}) must equal max_length ({config.max_length})",
        )
    if config.packing and config.task == "causal":
        yield "length_buckets", "packed rows all have max_length; set packing: false or remove it"


def _schedule(config: TrainConfig) -> Iterator[Problem]:
    if config.max_steps == 0:
        yield "max_steps", "0 trains nothing; use a positive number, or -1 for num_train_epochs"
    if config.warmup_steps and config.warmup_ratio:
        yield "warmup_ratio", "says the same as warmup_steps; keep one"
    if config.warmup_steps > 1 and config.warmup_steps % 1:
        yield "warmup_steps", f"{config.warmup_steps} needs to be whole, or a share below 1"


def _evaluation(config: TrainConfig) -> Iterator[Problem]:
    if config.eval_dataset_name and config.test_split_size:
        yield "test_split_size", "evaluation data is given by eval_dataset_name too; keep one"
    size = config.test_split_size
    if size is not None and size > 1 and size % 1:
        yield "test_split_size", f"{size} needs to be a whole number of rows, or a share below 1"
    if config.eval_strategy != "no":
        return
    for name in ("eval_on_start", "eval_samples", "early_stopping_patience"):
        if getattr(config, name):
            yield name, "needs eval_strategy: steps or epoch"
    if config.lr_scheduler_type == "reduce_lr_on_plateau":
        yield "lr_scheduler_type", "reduce_lr_on_plateau needs eval_strategy: steps or epoch"


def _samples(config: TrainConfig) -> Iterator[Problem]:
    if config.eval_samples and config.task not in ("causal", "preference"):
        yield "eval_samples", f"task {config.task} writes no text; remove it"
    if config.eval_samples and config.mesh:
        yield "eval_samples", "answers are written on one device only; remove it or mesh"
    if config.neftune_noise_alpha and config.task in ("preference", "reward"):
        yield (
            "neftune_noise_alpha",
            f"task {config.task} compares answers without noise and dropout; remove it",
        )


def _best_model(config: TrainConfig) -> Iterator[Problem]:
    metric = (config.metric_for_best_model or "loss").removeprefix("eval_")
    if config.task == "causal" and metric not in CAUSAL_METRICS:
        yield (
            "metric_for_best_model",
            f"{metric!r} is not measured; needs {' or '.join(CAUSAL_METRICS)}",
        )
    if not config.load_best_model_at_end:
        return
    if config.eval_strategy == "no":
        yield "load_best_model_at_end", "needs an evaluation; set eval_strategy: steps or epoch"
    elif config.save_strategy != config.eval_strategy:
        yield (
            "load_best_model_at_end",
            f"needs save_strategy: {config.eval_strategy}, the same as eval_strategy",
        )
    elif config.eval_strategy == "steps" and config.save_steps % config.eval_steps:
        yield (
            "save_steps",
            f"{config.save_steps} needs to be a multiple of eval_steps ({config.eval_steps}), "
            "so that every checkpoint has a metric",
        )


def _hub(config: TrainConfig) -> Iterator[Problem]:
    if config.push_to_hub and not config.hub_model_id:
        yield "hub_model_id", "push_to_hub needs the repository to upload to, such as me/my-model"
    for name in ("hub_model_id", "hub_private_repo"):
        if getattr(config, name) is not None and not config.push_to_hub:
            yield name, "has no effect without push_to_hub: true"

"""A folder or hub id -> the torch model it stands for, with its adapter when it has one.

Uses stock transformers and PEFT alone, so what loads here loads anywhere. Knows: auto classes,
adapter_config.json, the labels of a classifier. Does not know: JAX, datasets, training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, TaskType
from safetensors import safe_open
from torch import nn

from headrace.errors import AdapterError, ConfigError
from headrace.weights.checksums import check_sums
from headrace.weights.files import refuse_gguf

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def find_adapter(folder: str | Path) -> PeftConfig | None:
    """The adapter's configuration when `folder` holds one, else None.

    Raises AdapterError when the folder says it is an adapter but its weights are missing.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise AdapterError(
            f"{folder} has {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}; give the folder that "
            "training or PEFT wrote, complete"
        )
    return PeftConfig.from_pretrained(str(folder))


def load_torch_model(
    name: str | Path,
    *,
    base: str | Path | None = None,
    task: str | None = None,
    dtype: str = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
) -> nn.Module:
    """The model, or the PeftModel on its base, in evaluation mode.

    name: a model or adapter folder, or a hub id. base: the base model, when it is not where the
    adapter's configuration says. task: one of the configuration's; an adapter's own task type
    wins, and None reads the model's configuration. dtype: "auto" keeps the files' own.
    Raises ConfigError for a folder that is neither model nor adapter, AdapterError for an adapter
    without a base.
    """
    adapter = find_adapter(name)
    refuse_gguf(name)
    check_sums(name)
    options: dict[str, Any] = {
        "dtype": "auto" if dtype == "auto" else getattr(torch, dtype),
        "trust_remote_code": trust_remote_code,
    }
    if adapter is None:
        _require_model(name)
        kind = auto_class(task or _task_of_config(str(name), trust_remote_code))
        return kind.from_pretrained(str(name), revision=revision, **options).eval()
    source = str(base or adapter.base_model_name_or_path or "")
    if not source:
        raise AdapterError(f"{name} does not say which base model it belongs to; name it")
    _require_model(source, adapter=str(name))
    kind = auto_class(
        task_of_adapter(adapter) or task or _task_of_config(source, trust_remote_code)
    )
    refuse_gguf(source)
    check_sums(source)
    model = kind.from_pretrained(source, **options, **_label_options(Path(name), adapter))
    take_generation_config(model, Path(name))
    # In the base's dtype: a float32 copy of a bfloat16 adapter would compute something else.
    peft_model = PeftModel.from_pretrained(model, str(name), autocast_adapter_dtype=False)
    return peft_model.eval()


def _require_model(name: str | Path, *, adapter: str | None = None) -> None:
    """A local folder must hold a model; anything that is no folder is left to transformers."""
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        what = f"the base of {adapter}" if adapter else "a model or adapter"
        raise ConfigError(
            f"{folder} should hold {what}, but has neither config.json nor {ADAPTER_CONFIG}"
        )
    if not folder.exists() and (folder.is_absolute() or str(name).startswith((".", "~"))):
        hint = f" ({adapter} was trained on it; name its present place)" if adapter else ""
        raise ConfigError(f"{name} does not exist{hint}")


_AUTO_CLASSES = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "reward": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "masked-lm": "AutoModelForMaskedLM",
}
_ADAPTER_TASKS = {
    TaskType.SEQ_CLS: "sequence-classification",
    TaskType.TOKEN_CLS: "token-classification",
    TaskType.CAUSAL_LM: "causal",
}


def take_generation_config(model: Any, folder: Path) -> None:
    """What training learned to stop at is saved beside the adapter; PEFT does not read it."""
    if (folder / "generation_config.json").is_file() and model.can_generate():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(str(folder))


def task_of_adapter(adapter: PeftConfig) -> str | None:
    """The task an adapter's task_type stands for; None when it names none of ours."""
    return _ADAPTER_TASKS.get(TaskType(adapter.task_type)) if adapter.task_type else None


def auto_class(task: str) -> Any:
    """The transformers class that loads models of a task; AutoModelForCausalLM for all others."""
    import transformers

    return getattr(transformers, _AUTO_CLASSES.get(task, "AutoModelForCausalLM"))


def _task_of_config(name: str, trust_remote_code: bool) -> str:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    classes: list[str] = config.architectures or []
    for task, auto in _AUTO_CLASSES.items():
        if any(each.endswith(auto.removeprefix("AutoModel")) for each in classes):
            return task
    return "causal"


def _label_options(folder: Path, adapter: PeftConfig) -> dict[str, Any]:
    """num_labels and names for a classifier's base: from config.json beside it, or the head."""
    if adapter.task_type not in (TaskType.SEQ_CLS, TaskType.TOKEN_CLS):
        return {}
    if (folder / "config.json").is_file():
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(folder))
        return {
            "num_labels": config.num_labels,
            "id2label": config.id2label,
            "label2id": config.label2id,
        }
    with safe_open(str(folder / ADAPTER_WEIGHTS), framework="pt") as tensors:
        heads = [k for k in tensors.keys() if ".lora_" not in k and k.endswith("weight")]  # noqa: SIM118
        rows = {tensors.get_slice(key).get_shape()[0] for key in heads[-1:]}
    return {"num_labels": rows.pop()} if rows else {}

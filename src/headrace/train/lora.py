"""LoRA through PEFT itself: its config, its layers (captured as they are), its files.

Every name in a config must match something; what PEFT would pass over in silence is an error here,
with the nearest names. Adapter weights stay in the model's dtype (the masters are float32).

Knows: peft. Does not know: the step, JAX programs, checkpoints.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from torch import nn

from headrace.errors import AdapterError

# These change the base weights on the way in: the saved adapter would not fit the base people have.
_BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class AdapterReport:
    """What an adapter reaches. adapted: last name -> (modules adapted, modules of that name)."""

    adapted: dict[str, tuple[int, int]]
    parameters: tuple[str, ...]
    trainable: int
    reached: int
    total: int

    def __str__(self) -> str:
        parts = [
            f"{name} {done}" if done == every else f"{name} {done} of {every}"
            for name, (done, every) in sorted(self.adapted.items())
        ]
        parts += list(self.parameters)
        share = 100 * self.reached / max(self.total, 1)
        return (
            f"LoRA on {', '.join(parts)}; {self.trainable:,} trainable parameters; the adapted "
            f"weights are {share:.1f} % of the base model's {self.total:,}"
        )


_VLLM_RANK = 16  # its default for --max-lora-rank
_HEADS = ("classifier", "score")  # names PEFT trains whole for classifiers


def apply_lora(
    model: nn.Module, config: PeftConfig, *, task_type: TaskType | None = None
) -> tuple[PeftModel, AdapterReport]:
    """Put LoRA layers into `model` (in place), after every name in `config` was found in it.

    task_type: used when the config has none; PEFT needs it to train and save a classifier's head.
    Raises AdapterError for another PEFT type, names that match nothing (all of them, with the
    nearest), and initialisations that change base weights.
    """
    if isinstance(model, PeftModel):
        raise AdapterError(
            "the model already carries an adapter and peft_config is given too. Give the base "
            "model with peft_config, or the PeftModel alone to go on training it."
        )
    if not isinstance(config, LoraConfig):
        raise AdapterError(
            f"{type(config).__name__} was given; only peft.LoraConfig (LoRA, rsLoRA, DoRA) is "
            "supported."
        )
    problems = [*_problems(model, config)]
    if problems:
        lines = "\n".join(f"  {line}" for line in problems)
        raise AdapterError(f"peft_config does not fit {type(model).__name__}:\n{lines}")
    if config.task_type is None and task_type is not None:
        config = copy.copy(config)
        config.task_type = task_type
    if config.task_type == TaskType.TOKEN_CLS and config.target_modules == "all-linear":
        # The head is trained whole. PEFT leaves it out of all-linear for SEQ_CLS only.
        config = copy.copy(config)
        config.exclude_modules = config.exclude_modules or list(_HEADS)
    total = sum(p.numel() for p in model.parameters())
    names = Counter(name.rsplit(".", 1)[-1] for name, _ in model.named_modules())
    try:
        # float32 copies are the train state's masters; a second float32 copy here would only
        # turn the adapter's matmuls into float32.
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
    except (ValueError, NotImplementedError) as error:
        raise AdapterError(f"PEFT refused this config: {error}") from error
    assert isinstance(peft_model, PeftModel)
    return peft_model, _report(peft_model, names, total)


def _report(model: PeftModel, names: Mapping[str, int], total: int) -> AdapterReport:
    tuner = model.base_model
    targeted: Sequence[str] = getattr(tuner, "targeted_module_names", [])
    parameters: Sequence[str] = getattr(tuner, "targeted_parameter_names", [])
    done = Counter(name.rsplit(".", 1)[-1] for name in targeted)
    reached = 0
    for name, parameter in model.named_parameters():
        bare = name.replace("base_model.model.", "", 1).replace(".base_layer", "")
        if bare.rpartition(".")[0] in targeted or bare in parameters:
            reached += parameter.numel() if ".lora_" not in name else 0
    return AdapterReport(
        adapted={name: (count, names[name]) for name, count in done.items()},
        parameters=tuple(parameters),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        reached=reached,
        total=total,
    )


def _problems(model: nn.Module, config: LoraConfig) -> Iterable[str]:
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    yield from _missing("target_modules", config.target_modules, modules)
    yield from _missing("exclude_modules", config.exclude_modules, modules)
    yield from _missing("modules_to_save", config.modules_to_save, modules)
    yield from _missing("target_parameters", config.target_parameters, parameters)
    for setting in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, setting) or {}:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in modules):
                yield f"{setting} {pattern!r} matches no module{_nearest(pattern, modules)}"
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        yield (
            f"init_lora_weights={init!r} changes base weights, so the saved adapter would not fit "
            "the original base; use True or 'gaussian'"
        )


def _missing(setting: str, wanted: Any, names: Sequence[str]) -> Iterable[str]:
    """Patterns of `setting` that match none of `names`, by PEFT's own rules."""
    if not wanted or wanted in ("all-linear", ["all-linear"]):
        return
    if isinstance(wanted, str):
        if not any(re.fullmatch(wanted, name) for name in names):
            yield f"{setting} {wanted!r} (a regular expression) matches nothing{_nearest(wanted, names)}"  # noqa: E501
        return
    for name in wanted:
        if not any(full == name or full.endswith(f".{name}") for full in names):
            yield f"{setting} {name!r} matches nothing{_nearest(name, names)}"


def _nearest(wanted: str, names: Sequence[str]) -> str:
    short = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
    near = difflib.get_close_matches(wanted.rsplit(".", 1)[-1], short, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; the model has {', '.join(n for n in short if not n.isdigit())[:200]}"


def copy_into_module(model: nn.Module, arrays: Mapping[str, Any]) -> None:
    """Write arrays, by PyTorch name, into the module's own parameters and buffers (in their dtype).

    Every name must exist with the same shape; AdapterError lists those that do not.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    wrong = [
        f"{name} {list(np.shape(array))}"
        for name, array in arrays.items()
        if name not in tensors or tuple(tensors[name].shape) != tuple(np.shape(array))
    ]
    if wrong:
        raise AdapterError(f"the module has no such tensors: {', '.join(wrong[:8])}")
    with torch.no_grad():
        for name, array in arrays.items():
            value = np.asarray(array)
            if value.dtype.kind not in "iub":  # numpy has no bfloat16 that torch can read
                value = value.astype(np.float32)
            tensors[name].copy_(torch.from_numpy(np.array(value)))


def serving_notes(config: LoraConfig) -> list[str]:
    """What vLLM would refuse of this adapter (its PEFTHelper), said before it is trained."""
    parts = {
        "modules_to_save": config.modules_to_save,
        "DoRA": config.use_dora,
        "target_parameters": config.target_parameters,
        "bias": config.bias != "none",
    }
    outside = [name for name, used in parts.items() if used]
    if outside:
        return [
            f"vLLM loads no adapter with {', '.join(outside)}; `headrace merge` makes a whole "
            "model of it, which vLLM serves"
        ]
    if config.r > _VLLM_RANK:
        return [f"vLLM takes adapters of rank {config.r} with --max-lora-rank {config.r} or more"]
    return []


def save_adapter(model: PeftModel, path: str | Path) -> None:
    """PEFT's own files: adapter_config.json and adapter_model.safetensors, in PEFT's key names.

    Embeddings are saved when they are trained, and never fetched for comparison from the hub.
    """
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    embedding = model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is embedding]
    embedded = any(name.startswith(prefix) for prefix in names for name in trained)
    model.save_pretrained(str(path), save_embedding_layers=embedded)


def load_back_adapter(model: PeftModel, path: str | Path, inputs: Mapping[str, Any]) -> Any:
    """Logits of stock PEFT with the adapter read from `path`, on the base weights of `model`.

    The files go into a second, fresh adapter (its saved modules start from the base's own), which
    is removed again; the trained adapter stays as it was.
    """
    active: Any = model.active_adapter
    was_training = model.training
    requires_grad = {name for name, p in model.named_parameters() if p.requires_grad}
    model.load_adapter(str(path), adapter_name="load_back", autocast_adapter_dtype=False)
    try:
        model.set_adapter("load_back")
        model.eval()
        with torch.no_grad():
            return model(**inputs).logits.float()
    finally:
        model.set_adapter(active)
        model.delete_adapter("load_back")
        model.train(was_training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in requires_grad)

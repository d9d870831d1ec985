"""A model's structure without its weights: parameters on the meta device, buffers with values.

What is computed from the configuration alone (rotary frequencies, position ids) is there; every
parameter has its shape and dtype and no memory. Capture, sharding plans and compilation need no
more.

Knows: transformers' auto classes and initialisation. Does not know: files of weights, JAX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from headrace.errors import ConfigError

_SENTINEL = -(2**31) + 77  # no buffer that transformers computes holds it


def meta_model(
    source: str | Path | PreTrainedConfig,
    *,
    task: str = "causal",
    dtype: str | torch.dtype = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
    **changes: Any,
) -> nn.Module:
    """The model of a folder, a hub id or a configuration, in evaluation mode, without weights.

    task: "causal", "sequence-classification", or the name of a transformers auto class such as
    "AutoModelForSeq2SeqLM". dtype: "auto" is the configuration's own. changes: set on the
    configuration first (num_labels, ...). Raises ConfigError when a buffer's value is only in the
    checkpoint.
    """
    config = source
    if not isinstance(config, PreTrainedConfig):
        config = AutoConfig.from_pretrained(
            str(source), revision=revision, trust_remote_code=trust_remote_code, **changes
        )
    elif changes:
        config = type(config).from_dict({**config.to_dict(), **changes})
    own: Any = getattr(config.get_text_config(), "dtype", None) or config.dtype or torch.float32
    chosen: Any = (
        own if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    )
    with torch.device("meta"):
        model = auto_class(task).from_config(
            config, dtype=chosen, trust_remote_code=trust_remote_code
        )
    _kept_in_float32(model, chosen)
    _compute_buffers(model)
    return model.eval()


def auto_class(task: str) -> Any:
    """transformers' auto class of a task."""
    import transformers

    names = {
        "causal": "AutoModelForCausalLM",
        "sequence-classification": "AutoModelForSequenceClassification",
        "token-classification": "AutoModelForTokenClassification",
        "masked": "AutoModelForMaskedLM",
        "masked-lm": "AutoModelForMaskedLM",
    }
    name = names.get(task, task)
    if not name.startswith("AutoModel") or not hasattr(transformers, name):
        raise ConfigError(f"task {task!r} is not known; use one of {', '.join(names)}")
    return getattr(transformers, name)


def _kept_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Modules that transformers keeps in float32 whatever dtype is asked for."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)  # pyright: ignore[reportPrivateUsage]
    for name, module in model.named_modules():
        for pattern, kept in plan.items():
            if pattern in name.split(".") or name.endswith(pattern):
                module.to(kept)


def _compute_buffers(model: Any) -> None:
    """Give every buffer memory and let transformers' own initialisation fill it."""
    owners = [m for m in model.modules() if any(True for _ in m.buffers(recurse=False))]
    for module in owners:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                fill = float("nan") if buffer.is_floating_point() else _fill(buffer.dtype)
                module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype)
    with torch.no_grad():
        for module in owners:
            _owner(model, module)._init_weights(module)
    left = [name for name, buffer in model.named_buffers() if _untouched(buffer)]
    if left:
        raise ConfigError(
            f"{type(model).__name__}: the value of {', '.join(left[:4])} is not computed from the "
            "configuration. Load the model whole (from_pretrained) and give it as an object."
        )


def _owner(model: Any, module: nn.Module) -> Any:
    """The innermost PreTrainedModel around a module: its initialisation knows the module."""
    from transformers import PreTrainedModel

    found = model
    for candidate in model.modules():
        if isinstance(candidate, PreTrainedModel) and module in set(candidate.modules()):
            found = candidate  # modules() goes from the outside in
    return found


def _fill(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else max(_SENTINEL, torch.iinfo(dtype).min)


def _untouched(buffer: torch.Tensor) -> bool:
    if not buffer.numel() or buffer.dtype == torch.bool:
        return False
    if buffer.is_floating_point():
        return bool(buffer.isnan().all())
    return bool((buffer == _fill(buffer.dtype)).all())

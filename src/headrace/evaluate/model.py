"""A folder -> a captured model with its weights and tokenizer, ready for scoring and decoding.

Knows: loading, capture, the LM head split. Does not know: data, metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jax import Array
from peft import PeftModel

from headrace.bridge.module import JaxModule, to_jax
from headrace.bridge.passes.head import Head
from headrace.errors import CaptureError, ConfigError
from headrace.weights.adapter import auto_class, find_adapter, load_torch_model, task_of_adapter

_CAUSAL_INPUTS = ("input_ids", "position_ids")
_ENCODER_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
INPUTS = {
    "causal": _CAUSAL_INPUTS,
    "preference": _CAUSAL_INPUTS,
    "reward": ("input_ids", "attention_mask"),
    "sequence-classification": _ENCODER_INPUTS,
    "token-classification": _ENCODER_INPUTS,
    "masked-lm": _ENCODER_INPUTS,
}


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """A model that can be evaluated. head is None where logits cannot be cut from the rest.

    module gives hidden states [B, S, D] in `.logits` when there is a head, logits otherwise.
    """

    torch_model: Any
    module: JaxModule
    head: Head | None
    params: Mapping[str, Array]
    buffers: Mapping[str, Array]
    tokenizer: Any
    inputs: tuple[str, ...]

    def logits(self, params: Mapping[str, Array], hidden: Array) -> Array:
        """Logits [..., V] from what the module gave, inside a jitted function."""
        return hidden if self.head is None else self.head.logits(params, hidden)


def load_eval_model(
    name: str | Path,
    *,
    base: str | Path | None = None,
    task: str = "causal",
    dtype: str = "auto",
    tokenizer: Any = None,
    revision: str = "main",
    trust_remote_code: bool = False,
) -> EvalModel:
    """Load a model or adapter folder (or hub id), capture it and put its weights on the device.

    tokenizer: one that is loaded already; else the folder's own, else the base's. Raises
    ConfigError when the folder holds a model of another task.
    """
    _check_kind(name, task, trust_remote_code=trust_remote_code)
    model = load_torch_model(
        name,
        base=base,
        task=task,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    tokenizer = tokenizer or load_tokenizer(name, base=base, trust_remote_code=trust_remote_code)
    return capture_for_eval(model, tokenizer, task=task)


def capture_for_eval(model: Any, tokenizer: Any, *, task: str = "causal") -> EvalModel:
    """An EvalModel of a torch model that is loaded already; its weights are copied."""
    names = INPUTS[task]
    if "token_type_ids" not in tokenizer.model_input_names:
        names = tuple(name for name in names if name != "token_type_ids")
    ids = torch.ones(2, 16, dtype=torch.int64)
    examples = {
        "input_ids": ids,
        "position_ids": torch.arange(16).expand(2, 16).contiguous(),
        "attention_mask": ids,
        "token_type_ids": torch.zeros_like(ids),
    }
    # PEFT's wrapper hides the model's signature behind **kwargs; its layers are in the base itself.
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    module = to_jax(inner.eval(), {name: examples[name] for name in names})
    params, buffers = module.params(), module.buffers()
    head: Head | None = None
    if task == "causal" and module.program.dynamic:
        try:
            module, head = module.without_head()
        except CaptureError:
            head = None  # whole logits: the same numbers, more memory
    return EvalModel(
        torch_model=model,
        module=module,
        head=head,
        params=params,
        buffers=buffers,
        tokenizer=tokenizer,
        inputs=names,
    )


def _check_kind(name: str | Path, task: str, *, trust_remote_code: bool) -> None:
    """A folder's model must be of the task; weights its files lack would be random numbers."""
    from transformers import AutoConfig

    adapter = find_adapter(name)
    wanted = "sequence-classification" if task == "reward" else task
    if adapter is not None:
        found = task_of_adapter(adapter)
        if found not in (None, wanted) and (found, wanted) != ("causal", "preference"):
            raise ConfigError(
                f"{name} is an adapter for {found}, task is {task}. Give the recipe it was trained "
                f"with, or set task: {found}"
            )
        return
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        return  # loading says what is missing
    config = AutoConfig.from_pretrained(str(name), trust_remote_code=trust_remote_code)
    known, fitting = _known_classes(), _classes_of(auto_class(wanted))
    for each in config.architectures or []:
        if each in known and each not in fitting:
            raise ConfigError(
                f"{name} holds a {each}, which has no head for task {task}: its scores would be "
                "those of random weights. Set the task it was trained for, or train it first"
            )


def _classes_of(auto: Any) -> set[str]:
    """Names of the model classes an auto class loads."""
    found: set[str] = set()
    for each in auto._model_mapping._model_mapping.values():
        found |= {each} if isinstance(each, str) else set(each)
    return found


def _known_classes() -> set[str]:
    """Names of transformers' own models, headless ones and all tasks' here."""
    import transformers

    classes = _classes_of(transformers.AutoModel)
    for task in INPUTS:
        classes |= _classes_of(auto_class(task))
    return classes


def load_tokenizer(
    name: str | Path, *, base: str | Path | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer beside a model or adapter, or its base's when it brings none."""
    from transformers import AutoTokenizer

    adapter = find_adapter(name)
    source: Any = name
    if adapter is not None and not (Path(name) / "tokenizer_config.json").is_file():
        source = base or adapter.base_model_name_or_path
    return AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code)

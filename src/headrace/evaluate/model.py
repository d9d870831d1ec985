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
from headrace.errors import CaptureError
from headrace.weights.adapter import find_adapter, load_torch_model

CAUSAL_INPUTS = ("input_ids", "position_ids")
CLASSIFIER_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


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

    tokenizer: one that is loaded already; else the folder's own, else the base's.
    """
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
    names = CAUSAL_INPUTS if task == "causal" else CLASSIFIER_INPUTS
    if task != "causal" and "token_type_ids" not in tokenizer.model_input_names:
        names = names[:2]
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

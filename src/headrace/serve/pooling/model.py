"""A folder -> a captured encoder or classifier, and the task that a folder is for.

An adapter is merged into its base: one program, one set of weights. Knows: loading, capture,
labels, tokenizers. Does not know: queues, HTTP.

Shapes: B = texts, S = tokens, O = numbers a text (the embedding's or one a class).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import torch
from peft import PeftConfig, PeftModel, TaskType
from torch import nn

from headrace.bridge.module import JaxModule, to_jax
from headrace.errors import CaptureError, ConfigError
from headrace.evaluate.model import load_tokenizer
from headrace.serve.pooling import pool
from headrace.serve.pooling.recipe import Recipe, is_sentence_model, read_recipe
from headrace.weights.adapter import ADAPTER_WEIGHTS, find_adapter, load_torch_model
from headrace.weights.checksums import check_sums

Array = jax.Array
Task = Literal["generate", "embed", "classify"]
Activation = Literal["none", "sigmoid", "softmax"]

DEFAULT_MAX_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One text as tokens. token_types: None where the model has none."""

    ids: tuple[int, ...]
    token_types: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolingModel:
    """A model that answers a text with O numbers, ready for the engine.

    inputs: names of the capture's arguments. max_tokens: most tokens a text. labels: one a class,
    for classifiers. activation: what makes probabilities of a classifier's logits.
    """

    name: str
    task: Task
    module: JaxModule
    params: dict[str, Array]
    buffers: dict[str, Array]
    tokenizer: Any
    inputs: tuple[str, ...]
    vocab_size: int
    max_tokens: int
    recipe: Recipe = field(default_factory=Recipe)
    labels: tuple[str, ...] = ()
    activation: Activation = "none"
    lock: threading.Lock = field(default_factory=threading.Lock)

    def outputs(self, params: Any, buffers: Any, batch: Mapping[str, Array]) -> Array:
        """float32 [B, O]: embeddings before normalisation, or logits. Inside a jitted function."""
        inputs: dict[str, Any] = dict(batch)
        found, _ = self.module.apply(params, buffers, train=False, **inputs)
        if self.task == "classify":
            return found.logits.astype("float32")
        return pool.embed(found.last_hidden_state, batch["attention_mask"], self.recipe)

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        most: int | None = None,
    ) -> Encoded:
        """Token ids of a text, or of two that a classifier was trained to compare.

        most: cut after so many tokens, special tokens kept; None never cuts.
        """
        text = self.recipe.prompt + text
        if self.recipe.lower_case:
            text = text.lower()
        with self.lock:  # a tokenizer that cuts changes its own settings
            found = self.tokenizer(
                text,
                pair,
                add_special_tokens=add_special_tokens,
                truncation=most is not None,
                max_length=most,
                verbose=False,
            )
        types = found.get("token_type_ids") if "token_type_ids" in self.inputs else None
        return Encoded(ids=tuple(found["input_ids"]), token_types=types and tuple(types))

    def probabilities(self, logits_BO: np.ndarray) -> np.ndarray:
        """Of the classes: softmax, one sigmoid each, or the numbers themselves for regression."""
        if self.activation == "none":
            return logits_BO
        if self.activation == "sigmoid":
            return 1.0 / (1.0 + np.exp(-logits_BO))
        powers_BO = np.exp(logits_BO - logits_BO.max(axis=-1, keepdims=True))
        return powers_BO / powers_BO.sum(axis=-1, keepdims=True)


def shorten(
    embeddings_BO: np.ndarray, *, dimensions: int | None = None, normalize: bool
) -> np.ndarray:
    """The first `dimensions` numbers of each embedding, of length 1 when the recipe wants that."""
    cut_BO = embeddings_BO[:, :dimensions]
    if not normalize:
        return cut_BO
    return cut_BO / np.maximum(np.linalg.norm(cut_BO, axis=-1, keepdims=True), 1e-12)


def serving_task(
    name: str | Path, *, base: str | Path | None = None, trust_remote_code: bool = False
) -> Task:
    """What a folder or hub id is served as, from its own files; loads no weights.

    Raises ConfigError for heads that no endpoint is for.
    """
    adapter = find_adapter(name)
    if adapter is not None:
        return _task_of_adapter(adapter, base, trust_remote_code)
    if Path(name).is_dir() and is_sentence_model(name):
        return "embed"
    return _task_of_config(name, trust_remote_code)


def _task_of_adapter(adapter: PeftConfig, base: str | Path | None, trust_remote_code: bool) -> Task:
    kinds: dict[Any, Task] = {
        TaskType.CAUSAL_LM: "generate",
        TaskType.SEQ_CLS: "classify",
        TaskType.FEATURE_EXTRACTION: "embed",
    }
    if adapter.task_type in kinds:
        return kinds[adapter.task_type]
    if adapter.task_type is not None:
        raise ConfigError(f"an adapter for {adapter.task_type} has no endpoint; {_SERVED}")
    source = base or adapter.base_model_name_or_path
    return _task_of_config(source, trust_remote_code) if source else "generate"


_SERVED = "served are decoders, encoders (embeddings) and classifiers of whole texts"


def _task_of_config(name: str | Path, trust_remote_code: bool) -> Task:
    from transformers import AutoConfig

    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        return "embed" if is_sentence_model(name) else "generate"
    config = AutoConfig.from_pretrained(str(name), trust_remote_code=trust_remote_code)
    kind = next(iter(config.architectures or []), "")
    if kind.endswith("ForSequenceClassification"):
        return "classify"
    if kind.endswith(("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")):
        raise ConfigError(f"{name} is a {kind}, which has no endpoint; {_SERVED}")
    if kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return "embed" if is_sentence_model(name) else "generate"
    if kind.endswith(("ForMaskedLM", "ForPreTraining", "Model")):
        return "embed"
    return "generate"


def load_pooling_model(
    name: str | Path,
    *,
    task: Task,
    base: str | Path | None = None,
    dtype: str = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
) -> PoolingModel:
    """Load and capture an encoder ("embed") or a classifier ("classify"); an adapter is merged.

    Raises ConfigError for steps of a sentence model that are not served, CaptureError for models
    that cannot be captured.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    recipe = read_recipe(_base_of(name, base)) if task == "embed" else Recipe()
    if task == "classify":
        model: Any = load_torch_model(
            name, base=base, task="sequence-classification", dtype=dtype, **options
        )
        model = model.merge_and_unload(safe_merge=True) if _is_peft(model) else model
    else:
        kind = "auto" if dtype == "auto" else getattr(torch, dtype)
        model = _load_encoder(name, base, recipe, {**options, "dtype": kind})
    tokenizer = load_tokenizer(
        _inside(name, recipe), base=base, trust_remote_code=trust_remote_code
    )
    title = Path(str(name)).name or str(name)
    served = capture_for_pooling(model, tokenizer, task=task, recipe=recipe, name=title)
    if served.module.program.dynamic:
        model.to("meta")  # the weights live on the device now, and no shape is captured again
    return served


def capture_for_pooling(
    model: Any, tokenizer: Any, *, task: Task, recipe: Recipe | None = None, name: str
) -> PoolingModel:
    """Capture a loaded encoder or classifier; copies its weights."""
    config: Any = model.config
    if config.is_encoder_decoder and task == "embed":
        raise CaptureError(f"{type(model).__name__} is an encoder-decoder; encoders are served")
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = (
            tokenizer.pad_token_id
        )  # decoder classifiers find the last token by it
    names = ("input_ids", "attention_mask", "token_type_ids")
    if "token_type_ids" not in tokenizer.model_input_names:
        names = names[:2]
    ids = torch.ones(2, 16, dtype=torch.int64)
    examples = {"input_ids": ids, "attention_mask": ids, "token_type_ids": torch.zeros_like(ids)}
    module = to_jax(model.eval(), {n: examples[n] for n in names})
    recipe = recipe or Recipe()
    served = PoolingModel(
        name=name,
        task=task,
        module=module,
        params=module.params(),
        buffers=module.buffers(),
        tokenizer=tokenizer,
        inputs=names,
        vocab_size=int(model.get_input_embeddings().num_embeddings),
        max_tokens=_max_tokens(model, tokenizer, recipe),
        recipe=recipe,
    )
    if task == "embed":
        return served
    return replace(served, labels=_labels(config), activation=_activation(config))


def _is_peft(model: Any) -> bool:
    return isinstance(model, PeftModel)


def _base_of(name: str | Path, base: str | Path | None) -> str | Path:
    """Where a recipe is looked for: beside the adapter, else beside its base."""
    adapter = find_adapter(name)
    if adapter is None or is_sentence_model(name):
        return name
    return base or adapter.base_model_name_or_path or name


def _inside(name: str | Path, recipe: Recipe) -> str | Path:
    return Path(name) / recipe.subfolder if recipe.subfolder and Path(name).is_dir() else name


def _load_encoder(
    name: str | Path, base: str | Path | None, recipe: Recipe, options: dict[str, Any]
) -> nn.Module:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    adapter = find_adapter(name)
    source = str(name) if adapter is None else str(base or adapter.base_model_name_or_path)
    for folder in dict.fromkeys((str(name), source, str(Path(source) / recipe.subfolder))):
        check_sums(folder)
    if adapter is not None:
        options = {k: v for k, v in options.items() if k != "revision"}
    if recipe.subfolder:
        options = {**options, "subfolder": recipe.subfolder}
    model: Any = AutoModel.from_pretrained(source, **options)
    if adapter is None:
        return model.eval()
    # An adapter of language modelling was made around the head: its names begin with the backbone's
    # own.
    headed = _names_begin_with(Path(name) / ADAPTER_WEIGHTS, model.base_model_prefix)
    if headed:
        trust: bool = options["trust_remote_code"]
        writes = _task_of_adapter(adapter, base, trust) == "generate"
        kind = AutoModelForCausalLM if writes else AutoModelForMaskedLM
        model = kind.from_pretrained(source, **options)
    tuned: Any = PeftModel.from_pretrained(model, str(name), autocast_adapter_dtype=False)
    merged = tuned.merge_and_unload(safe_merge=True)
    return (merged.base_model if headed else merged).eval()


def _names_begin_with(weights: Path, prefix: str) -> bool:
    from safetensors import safe_open

    with safe_open(str(weights), framework="pt") as tensors:
        names: Sequence[str] = list(tensors.keys())
    return bool(prefix) and any(n.startswith(f"base_model.model.{prefix}.") for n in names)


def _max_tokens(model: Any, tokenizer: Any, recipe: Recipe) -> int:
    """The least of what positions, tokenizer and recipe allow; XLA reads past a table quietly."""
    config = model.config.get_text_config()
    limits = [
        DEFAULT_MAX_TOKENS,
        tokenizer.model_max_length,
        recipe.max_length,
        getattr(config, "max_position_embeddings", None),
    ]
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding) and name.endswith("position_embeddings"):
            first = 0 if layer.padding_idx is None else layer.padding_idx + 1  # RoBERTa's positions
            limits.append(layer.num_embeddings - first)
    return int(min(limit for limit in limits if limit is not None and limit > 0))


def _labels(config: Any) -> tuple[str, ...]:
    by_id: Mapping[Any, Any] = config.id2label or {}
    return tuple(str(by_id.get(i, f"LABEL_{i}")) for i in range(config.num_labels))


def _activation(config: Any) -> Activation:
    """As transformers' pipelines and vLLM read problem_type."""
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"

"""What differs between learning the next token and learning a label: model class, loss, metrics.

Knows: Hugging Face auto classes, the two losses, scikit-learn's scores. Does not know: the loop.
Shapes: N = evaluated rows, C = classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from peft import TaskType
from torch import nn

from headrace.config import TrainConfig
from headrace.data.labels import Labels
from headrace.errors import ConfigError
from headrace.train.losses import ClassificationLoss, Loss, causal_loss

EvalSums = Sequence[Mapping[str, np.ndarray]]


class Objective(Protocol):
    """One kind of training."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Model inputs that a batch may hold."""
        ...

    @property
    def task_type(self) -> TaskType:
        """PEFT's name of the task."""
        ...

    def load_model(
        self, config: TrainConfig, labels: Labels | None
    ) -> tuple[nn.Module, list[str]]: ...

    def check_model(self, model: nn.Module, labels: Labels | None) -> None: ...

    def loss(self, module: Any, *, trainable: frozenset[str], remat: str) -> Loss: ...

    def metrics(self, sums: EvalSums, batches: EvalSums) -> dict[str, float]: ...


def _dtype(config: TrainConfig) -> Any:
    return "auto" if config.dtype == "auto" else getattr(torch, config.dtype)


def _load_options(config: TrainConfig) -> dict[str, Any]:
    return {
        "revision": config.model_revision,
        "trust_remote_code": config.trust_remote_code,
        "dtype": _dtype(config),
    }


def _mean_loss(sums: EvalSums) -> float:
    weight = math.fsum(float(s["weight"]) for s in sums)
    return math.fsum(float(s["loss_sum"]) for s in sums) / weight if weight else math.nan


class CausalObjective:
    """Next-token training of a causal language model."""

    inputs = ("input_ids", "position_ids")
    task_type = TaskType.CAUSAL_LM

    def load_model(self, config: TrainConfig, labels: Labels | None) -> tuple[nn.Module, list[str]]:
        """The model; weights its checkpoint lacks are an error, they would start as noise."""
        from transformers import AutoModelForCausalLM

        del labels
        name = str(config.model_name_or_path)
        auto: Any = AutoModelForCausalLM
        model, info = auto.from_pretrained(name, output_loading_info=True, **_load_options(config))
        missing = sorted(info["missing_keys"])
        if missing:
            raise ConfigError(
                f"{name} lacks {len(missing)} weights of {type(model).__name__} "
                f"({', '.join(missing[:3])}, ...). Give the folder of a causal language model."
            )
        return model, []

    def check_model(self, model: nn.Module, labels: Labels | None) -> None:
        del model, labels

    def loss(self, module: Any, *, trainable: frozenset[str], remat: str) -> Loss:
        return causal_loss(module, trainable=trainable, remat=remat)

    def metrics(self, sums: EvalSums, batches: EvalSums) -> dict[str, float]:
        """loss and perplexity; accuracy where the loss saw logits."""
        del batches
        loss = _mean_loss(sums)
        found = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
        if sums and "correct" in sums[0]:
            weight = math.fsum(float(s["weight"]) for s in sums)
            found["mean_token_accuracy"] = math.fsum(float(s["correct"]) for s in sums) / weight
        return found


class ClassificationObjective:
    """One label, or one number, for a whole text."""

    inputs = ("input_ids", "attention_mask", "token_type_ids")
    task_type = TaskType.SEQ_CLS

    def load_model(self, config: TrainConfig, labels: Labels | None) -> tuple[nn.Module, list[str]]:
        """The model with a head for the labels; the note names what is new in it."""
        from transformers import AutoModelForSequenceClassification

        assert labels is not None
        names = {"id2label": labels.id2label, "label2id": labels.label2id} if labels.names else {}
        auto: Any = AutoModelForSequenceClassification
        model, info = auto.from_pretrained(
            str(config.model_name_or_path),
            num_labels=labels.num_labels,
            problem_type=labels.problem_type,
            ignore_mismatched_sizes=True,  # a head for other labels is replaced, and named below
            output_loading_info=True,
            **names,
            **_load_options(config),
        )
        replaced = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
        new = sorted({*info["missing_keys"], *replaced})
        notes = [f"new weights, from seed {config.seed}: {', '.join(new[:6])}"] if new else []
        if len(new) > 6:
            notes[0] += f" and {len(new) - 6} more"
        return model, notes

    def check_model(self, model: nn.Module, labels: Labels | None) -> None:
        """The model's head must fit the labels; its config learns their names."""
        assert labels is not None
        config: Any = getattr(model, "config", None)
        has = getattr(config, "num_labels", None)
        if has is not None and has != labels.num_labels:
            names = ", ".join((labels.names or ())[:5])
            raise ConfigError(
                f"the model has {has} outputs, the data {labels.num_labels} labels ({names}). "
                f"Build the model with num_labels={labels.num_labels}, or give its name instead."
            )
        if config is not None:
            config.problem_type = labels.problem_type
            if labels.names:
                config.id2label, config.label2id = labels.id2label, labels.label2id
        self._problem_type = labels.problem_type

    def loss(self, module: Any, *, trainable: frozenset[str], remat: str) -> Loss:
        del trainable
        kind: Any = self._problem_type
        return ClassificationLoss(module=module, problem_type=kind, remat=remat)

    def metrics(self, sums: EvalSums, batches: EvalSums) -> dict[str, float]:
        """loss, with accuracy and macro F1 for classes, or mse, mae and R2 for numbers."""
        found = {"loss": _mean_loss(sums)}
        logits_NC, labels_N = gather_predictions(sums, batches)
        if not len(labels_N):
            return found
        # Imported here: a run without evaluation is spared what evaluation loads.
        from headrace.evaluate.metrics import classification_scores, regression_scores

        if self._problem_type == "regression":
            return found | regression_scores(logits_NC.reshape(labels_N.shape), labels_N)
        return found | classification_scores(logits_NC.argmax(axis=-1), labels_N)


def gather_predictions(sums: EvalSums, batches: EvalSums) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N, C] and labels [N] of all real rows, filler rows left out."""
    logits, labels = [], []
    for result, batch in zip(sums, batches, strict=True):
        real = batch["weights"] > 0 if "weights" in batch else slice(None)
        logits.append(np.asarray(result["logits"])[real])
        labels.append(batch["labels"][real])
    if not logits:
        return np.zeros((0, 1), np.float32), np.zeros(0, np.float32)
    return np.concatenate(logits), np.concatenate(labels)


def make_objective(task: str) -> Objective:
    """The objective of a config's `task`."""
    return CausalObjective() if task == "causal" else ClassificationObjective()

"""What differs between the tasks: the model class, the loss, the metrics of an evaluation.

Knows: Hugging Face auto classes, the losses, scores of scikit-learn and seqeval. Does not
know: the loop.
Shapes: N = evaluated rows, C = classes.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jax import Array
from peft import TaskType
from torch import nn

from headrace.config import TrainConfig
from headrace.data.labels import Labels
from headrace.errors import ConfigError
from headrace.train import preference
from headrace.train.losses import (
    IGNORE_INDEX,
    ClassificationLoss,
    Loss,
    TokenClassificationLoss,
    causal_loss,
)
from headrace.weights.checksums import check_sums
from headrace.weights.files import model_folder

EvalSums = Sequence[Mapping[str, np.ndarray]]
Names = Mapping[str, tuple[str, ...]]
ENCODER_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Objective(Protocol):
    """One kind of training."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Model inputs that a batch may hold."""
        ...

    @property
    def task_type(self) -> TaskType | None:
        """PEFT's name of the task; None where it has none."""
        ...

    def load_model(
        self, config: TrainConfig, labels: Labels | None
    ) -> tuple[nn.Module, list[str]]: ...

    def check_model(self, model: nn.Module, labels: Labels | None) -> None: ...

    def reference_values(
        self, layout_keys: Names, compute: Mapping[str, Array], *, adapter: bool
    ) -> dict[str, Array]:
        """Frozen copies of trainable parameters that the loss compares with; called once."""
        ...

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


def load_pretrained(
    auto: Any, config: TrainConfig, **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """from_pretrained and its loading report; ConfigError says what a name lacks."""
    name = str(config.model_name_or_path)
    with explained(name, "model_name_or_path", "model"):
        folder = model_folder(name, config.model_revision) if config.verify_weights else Path(name)
    check_sums(folder, hub=config.verify_weights)
    with explained(name, "model_name_or_path", "model"):
        return auto.from_pretrained(
            name, output_loading_info=True, **options, **_load_options(config)
        )


@contextmanager
def explained(name: str, setting: str, what: str) -> Generator[None, None, None]:
    """transformers' many errors of loading, as one ConfigError that says what to look at."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(_not_loaded(name, setting, what, error)) from error


def _not_loaded(name: str, setting: str, what: str, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    place = Path(name).expanduser()
    given = f"{setting} {name}"
    if place.is_dir():
        files = ", ".join(sorted(file.name for file in place.iterdir())[:8]) or "nothing"
        return f"{given}: the folder holds no {what} that can be loaded ({reason}). It has {files}."
    if place.exists():
        return f"{given} is a file; give the folder of the {what}, or a hub id."
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        near = [p.name for p in place.parent.iterdir()] if place.parent.is_dir() else []
        close = difflib.get_close_matches(place.name, near, n=1)
        hint = f" Did you mean {place.parent / close[0]}?" if close else ""
        return f"{given}: there is no such folder.{hint}"
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
    network = " The hub is switched off (HF_HUB_OFFLINE)." if offline else ""
    return (
        f"{given}: no folder of that name is here, and as a hub id it failed: {reason}{network} "
        "Look at the spelling, log in for gated models, or give a folder."
    )


def _new_weights(info: Mapping[str, Any], seed: int) -> list[str]:
    """A note that names what the checkpoint lacks, or has in another shape."""
    replaced = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    new = sorted({*info["missing_keys"], *replaced})
    if not new:
        return []
    more = f" and {len(new) - 6} more" if len(new) > 6 else ""
    return [f"new weights, from seed {seed}: {', '.join(new[:6])}{more}"]


class _Objective:
    """What most tasks share."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def check_model(self, model: nn.Module, labels: Labels | None) -> None:
        del model, labels

    def reference_values(
        self, layout_keys: Names, compute: Mapping[str, Array], *, adapter: bool
    ) -> dict[str, Array]:
        del layout_keys, compute, adapter
        return {}

    @property
    def smoothing(self) -> float:
        return self.config.label_smoothing_factor


class CausalObjective(_Objective):
    """Next-token training of a causal language model."""

    inputs = ("input_ids", "position_ids")
    task_type: TaskType | None = TaskType.CAUSAL_LM
    auto_class = "AutoModelForCausalLM"

    def load_model(self, config: TrainConfig, labels: Labels | None) -> tuple[nn.Module, list[str]]:
        """The model; weights its checkpoint lacks are an error, they would start as noise."""
        import transformers

        del labels
        model, info = load_pretrained(getattr(transformers, self.auto_class), config)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ConfigError(
                f"{config.model_name_or_path} lacks {len(missing)} weights of "
                f"{type(model).__name__} ({', '.join(missing[:3])}, ...). Give the folder of a "
                f"{'masked' if config.task == 'masked-lm' else 'causal'} language model."
            )
        return model, []

    def loss(self, module: Any, *, trainable: frozenset[str], remat: str) -> Loss:
        return causal_loss(module, trainable=trainable, remat=remat, label_smoothing=self.smoothing)

    def metrics(self, sums: EvalSums, batches: EvalSums) -> dict[str, float]:
        """loss, perplexity and the share of tokens whose arg-max is right."""
        del batches
        loss = _mean_loss(sums)
        found = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
        if sums and "correct" in sums[0]:
            weight = math.fsum(float(s["weight"]) for s in sums)
            found["mean_token_accuracy"] = math.fsum(float(s["correct"]) for s in sums) / weight
        return found


class MaskedObjective(CausalObjective):
    """Predicting masked tokens from both sides."""

    inputs = ENCODER_INPUTS
    task_type = None
    auto_class = "AutoModelForMaskedLM"

    def loss(self, module: Any, *, trainable: frozenset[str], remat: str) -> Loss:
        return causal_loss(
            module, trainable=trainable, remat=remat, model_inputs=self.inputs, shift=False,
            label_smoothing=self.smoothing,
        )  # fmt: skip


class ClassificationObjective(_Objective):
    """One label, or one number, for a whole text."""

    inputs = ENCODER_INPUTS
    task_type: TaskType | None = TaskType.SEQ_CLS
    auto_class = "AutoModelForSequenceClassification"

    def load_model(self, config: TrainConfig, labels: Labels | None) -> tuple[nn.Module, list[str]]:
        """The model with a head for the labels; the note names what is new in it."""
        import transformers

        names: dict[str, Any] = {"num_labels": 1}
        if labels is not None:
            names = {"num_labels": labels.num_labels}
            if config.task == "sequence-classification":
                names["problem_type"] = labels.problem_type
            if labels.names:
                names |= {"id2label": labels.id2label, "label2id": labels.label2id}
        auto = getattr(transformers, self.auto_class)
        # a head for other labels is replaced, and named in the note
        model, info = load_pretrained(auto, config, ignore_mismatched_sizes=True, **names)
        return model, _new_weights(info, config.seed)

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
            if self.config.task == "sequence-classification":
                config.problem_type = labels.problem_type
            if labels.names:
                config.id2label, config.label2id = labels.id2label, labels.label2id
        self._problem_type = labels.problem_type

    def loss(self, module: Any, *, trainable: frozenset[str], remat: str) -> Loss:
        del trainable
        kind: Any = self._problem_type
        return ClassificationLoss(
            module=module, problem_type=kind, remat=remat, label_smoothing=self.smoothing
        )

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


class TaggingObjective(ClassificationObjective):
    """One label for each word."""

    task_type = TaskType.TOKEN_CLS
    auto_class = "AutoModelForTokenClassification"

    def check_model(self, model: nn.Module, labels: Labels | None) -> None:
        super().check_model(model, labels)
        assert labels is not None and labels.names is not None
        self._names = labels.names

    def loss(self, module: Any, *, trainable: frozenset[str], remat: str) -> Loss:
        del trainable
        return TokenClassificationLoss(module=module, remat=remat, label_smoothing=self.smoothing)

    def metrics(self, sums: EvalSums, batches: EvalSums) -> dict[str, float]:
        """loss and accuracy over words; precision, recall and F1 of entities for B-/I- tags."""
        from headrace.evaluate.metrics import tagging_scores

        predicted: list[list[str]] = []
        expected: list[list[str]] = []
        for result, batch in zip(sums, batches, strict=True):
            found_BS = result["logits"].argmax(axis=-1)
            for row, labels_S in enumerate(batch["labels"]):
                (places,) = np.nonzero(labels_S != IGNORE_INDEX)
                if len(places):
                    predicted.append([self._names[i] for i in found_BS[row, places]])
                    expected.append([self._names[i] for i in labels_S[places]])
        found = {"loss": _mean_loss(sums)}
        return found | tagging_scores(predicted, expected) if expected else found


def _named_means(sums: EvalSums) -> dict[str, float]:
    """What a loss names, over all batches."""
    names = [name.removesuffix(":sum") for name in (sums[0] if sums else ()) if ":sum" in name]
    found: dict[str, float] = {}
    for name in names:
        count = math.fsum(float(s[f"{name}:count"]) for s in sums)
        total = math.fsum(float(s[f"{name}:sum"]) for s in sums)
        found[name] = total / count if count else math.nan
    return found


class PreferenceObjective(CausalObjective):
    """A causal model learns which of two answers is better."""

    def reference_values(
        self, layout_keys: Names, compute: Mapping[str, Array], *, adapter: bool
    ) -> dict[str, Array]:
        """Copies for the losses that compare with the model before training."""
        self._adapter_off: frozenset[str] = frozenset()
        if self.config.preference_loss not in preference.WITH_REFERENCE:
            return {}
        copies, self._adapter_off = preference.reference_values(layout_keys, compute, adapter)
        return copies

    def loss(self, module: Any, *, trainable: frozenset[str], remat: str) -> Loss:
        config = self.config
        settings = preference.Settings(
            kind=config.preference_loss,
            beta=config.beta,
            gamma=config.simpo_gamma,
            label_smoothing=config.preference_label_smoothing,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        return preference.preference_loss(
            module, settings, trainable=trainable, remat=remat, adapter_off=self._adapter_off
        )

    def metrics(self, sums: EvalSums, batches: EvalSums) -> dict[str, float]:
        """loss, and rewards, margins and log-probabilities under TRL's names."""
        del batches
        return {"loss": _mean_loss(sums)} | _named_means(sums)


class RewardObjective(ClassificationObjective):
    """One number a text, higher for better answers."""

    inputs = ("input_ids", "attention_mask")

    def check_model(self, model: nn.Module, labels: Labels | None) -> None:
        del labels
        has = getattr(getattr(model, "config", None), "num_labels", None)
        if has not in (None, 1):
            raise ConfigError(
                f"the model has {has} outputs, a reward model needs one. Build it with "
                "num_labels=1, or give its name instead."
            )

    def loss(self, module: Any, *, trainable: frozenset[str], remat: str) -> Loss:
        del trainable
        center = self.config.center_rewards_coefficient
        return preference.RewardLoss(module=module, center=center, remat=remat)

    def metrics(self, sums: EvalSums, batches: EvalSums) -> dict[str, float]:
        """loss, rewards, margins, and how often the better answer has the higher reward."""
        del batches
        return {"loss": _mean_loss(sums)} | _named_means(sums)


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


_OBJECTIVES: dict[str, Any] = {
    "causal": CausalObjective,
    "masked-lm": MaskedObjective,
    "sequence-classification": ClassificationObjective,
    "token-classification": TaggingObjective,
    "preference": PreferenceObjective,
    "reward": RewardObjective,
}


def make_objective(config: TrainConfig) -> Objective:
    """The objective of a config's `task`."""
    return _OBJECTIVES[config.task](config)

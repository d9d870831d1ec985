"""Evaluate a model on the evaluation data of a configuration.

Knows: which rows are evaluation rows, which numbers a task has. Does not know: training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import TrainConfig
from headrace.data.labels import label_names
from headrace.data.load import LABELLED_TASKS, TrainingData, load_data, load_tables
from headrace.data.loader import Loader
from headrace.data.table import Table
from headrace.errors import ConfigError
from headrace.evaluate.decode import greedy_generate
from headrace.evaluate.metrics import perplexity
from headrace.evaluate.model import EvalModel, load_eval_model, load_tokenizer
from headrace.evaluate.score import score_causal

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row, answered: token ids decoded to text."""

    prompt: str
    expected: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """metrics: name -> value. num_rows: rows that were scored. samples: answered rows, if asked."""

    source: str
    num_rows: int
    metrics: Mapping[str, float]
    samples: tuple[Sample, ...] = ()


def evaluate(
    config: TrainConfig,
    *,
    model: str | Path | EvalModel | None = None,
    base: str | Path | None = None,
    eval_dataset: Any = None,
    num_samples: int = 0,
    max_new_tokens: int = 128,
) -> EvalReport:
    """Score a model on a configuration's evaluation rows.

    model: a folder with a model or adapter, a hub id, or a loaded EvalModel; None takes
    config.model_name_or_path. base: the adapter's base, when it has moved. eval_dataset: rows in
    place of the configuration's. num_samples: rows to answer by greedy generation.

    Causal: loss (nats a supervised token), perplexity, mean_token_accuracy, and exact_match where
    only the answer is supervised (see score.py). The other tasks: what training evaluates
    (docs/training.md). Compiles once a row length. Raises DataError without evaluation rows,
    ConfigError for a model of another task.
    """
    name = model if isinstance(model, (str, Path)) else config.model_name_or_path
    if isinstance(model, EvalModel):
        loaded, tokenizer = model, model.tokenizer
    elif name is None:
        raise ConfigError("no model: set model_name_or_path, or name the folder to evaluate")
    else:
        loaded = None
        tokenizer = load_tokenizer(name, base=base, trust_remote_code=config.trust_remote_code)
    if loaded is None:
        assert name is not None
        loaded = load_eval_model(
            name,
            base=base,
            task=config.task,
            dtype=config.dtype,
            tokenizer=tokenizer,
            revision=config.model_revision,
            trust_remote_code=config.trust_remote_code,
        )
    data = _evaluation_rows(config, loaded, eval_dataset)
    loader = Loader(
        rows=data.train.rows, batch_size=config.per_device_eval_batch_size, shuffle=False
    )
    if config.task != "causal":
        # Imported here: training uses this package's decoding, and comes before it.
        from headrace.evaluate.tasks import score_task

        return EvalReport(
            source=data.train.report.source,
            num_rows=len(data.train.rows),
            metrics=score_task(config, loaded, data.labels, loader),
        )
    return _causal(data, loaded, loader, num_samples=num_samples, max_new_tokens=max_new_tokens)


def _evaluation_rows(config: TrainConfig, model: EvalModel, given: Any) -> TrainingData:
    """The evaluation rows, one example a row, as the `train` part of TrainingData."""
    names: Sequence[str] | None = None
    training: Table | None = None
    if given is None:
        strategy = "epoch" if config.eval_strategy == "no" else config.eval_strategy
        training, given = load_tables(config.replace(eval_strategy=strategy))
    if config.task in LABELLED_TASKS:
        names = label_names(model.torch_model)
        if names is None and training is not None:  # an adapter of PEFT's own: no names are saved
            found = load_data(config, model.tokenizer, train_dataset=training, eval_dataset=given)
            names = None if found.labels is None else found.labels.names
    changes: dict[str, Any] = {"packing": False} if config.task == "causal" else {}
    once = config.replace(
        eval_strategy="no", eval_dataset_name=None, test_split_size=None,
        load_best_model_at_end=False, eval_on_start=False, **changes,
    )  # fmt: skip
    text_config: Any = model.torch_model.config.get_text_config()
    return load_data(
        once,
        model.tokenizer,
        train_dataset=given,
        model_max_length=getattr(text_config, "max_position_embeddings", None),
        label_names=names,
    )


def _one_epoch(loader: Loader) -> Iterator[dict[str, np.ndarray]]:
    """Every row once: steps of one micro-batch, the micro-batch axis taken off."""
    from headrace.data.loader import LoaderState

    for step in loader.epoch(LoaderState()):
        yield {name: array[0] for name, array in step.batch.items()}


def _causal(
    data: TrainingData,
    model: EvalModel,
    loader: Loader,
    *,
    num_samples: int,
    max_new_tokens: int,
) -> EvalReport:
    scores = score_causal(model, _one_epoch(loader))
    metrics = {
        "loss": scores.loss,
        "perplexity": perplexity(scores.loss),
        "mean_token_accuracy": scores.num_correct / max(scores.num_tokens, 1),
    }
    examples = data.train.rows.examples
    if _answers_only(examples):
        metrics["exact_match"] = float(scores.exact.mean())
    return EvalReport(
        source=data.train.report.source,
        num_rows=len(scores.exact),
        metrics=metrics,
        samples=_samples(model, examples, num_samples, max_new_tokens),
    )


def _answers_only(examples: Any) -> bool:
    """Whether every example is a prompt followed by one supervised answer."""
    for i in range(len(examples)):
        supervised = examples.token_labels[examples.span(i)] != -100
        first = int(supervised.argmax())
        if first < 2 or not supervised[first:].all():
            return False
    return True


def _samples(
    model: EvalModel, examples: Any, count: int, max_new_tokens: int
) -> tuple[Sample, ...]:
    """The first `count` rows, answered by greedy generation."""
    if not count:
        return ()
    pairs: list[tuple[list[int], list[int]]] = []
    for i in range(min(count, len(examples))):
        span = examples.span(i)
        ids = examples.input_ids[span].tolist()
        first = int((examples.token_labels[span] != -100).argmax())
        pairs.append((ids[:first], ids[first:]))
    answers = greedy_generate(model, [p for p, _ in pairs], max_new_tokens=max_new_tokens)

    def text(ids: list[int]) -> str:
        return str(model.tokenizer.decode(ids, skip_special_tokens=True))

    return tuple(
        Sample(prompt=text(prompt), expected=text(expected), answer=text(answer))
        for (prompt, expected), answer in zip(pairs, answers, strict=True)
    )

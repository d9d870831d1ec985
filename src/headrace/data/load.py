"""TrainConfig + tokenizer -> everything training reads: rows, labels, reports, loaders.

Decides which splits there are and where they come from (configuration or Python); what happens to
one split stands in dataset.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.config import TrainConfig
from headrace.data import cache
from headrace.data.chat import load_chat_template
from headrace.data.dataset import (
    LONGEST_CHOSEN,
    Dataset,
    causal_dataset,
    labelled_dataset,
    masked_dataset,
    preference_dataset,
    tagged_dataset,
)
from headrace.data.growing import PieceLoader, growing_dataset
from headrace.data.labels import Labels
from headrace.data.loader import Loader
from headrace.data.mixture import mixture_files, read_mixture
from headrace.data.prepare import require_fast
from headrace.data.read import concatenate, from_python, local_files, read_table
from headrace.data.stream import streamed_dataset
from headrace.data.table import Table
from headrace.errors import ConfigError, DataError

LABELLED_TASKS = ("sequence-classification", "token-classification")


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a trainer needs. labels is None for tasks without classes."""

    train: Dataset
    eval: Dataset | None
    labels: Labels | None

    def train_loader(
        self, config: TrainConfig, *, num_devices: int = 1, **options: Any
    ) -> Loader | PieceLoader:
        """Shuffled steps of gradient_accumulation_steps micro-batches; options go to Loader."""
        growing = self.train.growing
        make: Any = Loader if growing is None else PieceLoader
        return make(
            rows=growing or self.train.rows,
            batch_size=config.per_device_train_batch_size * num_devices,
            accumulation=config.gradient_accumulation_steps,
            seed=config.seed if config.data_seed is None else config.data_seed,
            **options,
        )

    def eval_loader(self, config: TrainConfig, *, num_devices: int = 1, **options: Any) -> Loader:
        """Every evaluation row once, in order, as steps of one micro-batch."""
        if self.eval is None:
            raise DataError("there is no evaluation data; set eval_dataset_name or test_split_size")
        return Loader(
            rows=self.eval.rows,
            batch_size=config.per_device_eval_batch_size * num_devices,
            shuffle=False,
            **options,
        )


def set_chat_template(tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> None:
    """Apply chat_template_path and eos_token to the tokenizer, which is saved with the model."""
    if config.chat_template_path is not None:
        tokenizer.chat_template = load_chat_template(config.chat_template_path)
    if config.eos_token is not None:
        if config.eos_token not in tokenizer.get_vocab():
            raise ConfigError(
                f"eos_token {config.eos_token!r} is not in the tokenizer's vocabulary"
            )
        tokenizer.eos_token = config.eos_token


def load_data(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    model_max_length: int | None = None,
    label_names: Sequence[str] | None = None,
) -> TrainingData:
    """Read, tokenise and shape the data of a run.

    model_max_length: positions of the model; a larger max_length is refused. label_names: names by
    id of a model that is already a classifier. Raises DataError for whatever the data lacks. No
    device is touched.
    """
    require_fast(tokenizer)
    set_chat_template(tokenizer, config)
    limit = _length_limit(config, tokenizer, model_max_length)
    files = _source_files(config) if train_dataset is None and eval_dataset is None else None
    if files is None or config.data_cache_dir is None:
        return _prepare(config, tokenizer, train_dataset, eval_dataset, label_names, limit)
    folder = Path(config.data_cache_dir).expanduser()
    key = cache.cache_key(config, tokenizer, files, limit=limit, label_names=label_names)
    found = cache.load(folder, key)
    if found is not None:
        datasets, labels = found
        data = TrainingData(train=datasets["train"], eval=datasets.get("eval"), labels=labels)
        return _with_note(data, f"prepared before: read from {folder / key}")
    data = _prepare(config, tokenizer, None, None, label_names, limit)
    if not cache.store(folder, key, {"train": data.train, "eval": data.eval}, data.labels):
        return _with_note(data, f"not kept for the next run: {folder} is full or not writable")
    return _with_note(data, f"prepared now; the next run reads it from {folder / key}")


def _source_files(config: TrainConfig) -> list[Path] | None:
    """All local files the data comes from; None when some of it is not local, or streamed."""
    if config.dataset_streaming:
        return None
    if config.datasets:
        files = mixture_files(config.datasets)
    else:
        files = local_files(config.dataset_name) if config.dataset_name else None
    if files is not None and config.eval_dataset_name is not None:
        more = local_files(config.eval_dataset_name)
        files = None if more is None else [*files, *more]
    if files is None:
        return None
    saved = [file.parent for file in files if file.name == "state.json"]  # Dataset.save_to_disk
    return [*files, *(part for folder in saved for part in sorted(folder.glob("*.arrow")))]


def _with_note(data: TrainingData, note: str) -> TrainingData:
    report = replace(data.train.report, notes=(*data.train.report.notes, note))
    return replace(data, train=replace(data.train, report=report))


def _prepare(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    train_dataset: Any,
    eval_dataset: Any,
    label_names: Sequence[str] | None,
    limit: int,
) -> TrainingData:
    if config.dataset_streaming and train_dataset is None:
        return _streamed(config, tokenizer, eval_dataset, limit)
    train, held = load_tables(config, train_dataset=train_dataset, eval_dataset=eval_dataset)
    if config.task in LABELLED_TASKS:
        return _with_labels(
            config, tokenizer, train, held, eval_dataset is None, label_names, limit
        )
    first = _unlabelled(train, config, tokenizer, limit=limit)
    second: Dataset | None = None
    if held is not None:
        size = first.report.max_length
        second = _unlabelled(held, config, tokenizer, name="eval", max_length=size)
    return TrainingData(train=first, eval=second, labels=None)


def _streamed(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, eval_dataset: Any, limit: int
) -> TrainingData:
    """Training rows in pieces; evaluation rows, which are few, as ever."""
    starts_early = config.packing and config.max_steps > 0
    first = (growing_dataset if starts_early else streamed_dataset)(config, tokenizer, limit=limit)
    second: Dataset | None = None
    if eval_dataset is not None:
        held: Table | None = from_python(eval_dataset, source="eval_dataset")
    elif config.eval_dataset_name:
        held = read_table(config.eval_dataset_name, split=config.dataset_test_split)
    else:
        held = None
    if held is not None:
        size = first.report.max_length
        second = _unlabelled(held, config, tokenizer, name="eval", max_length=size)
    return TrainingData(train=first, eval=second, labels=None)


def _unlabelled(
    table: Table, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> Dataset:
    """The dataset of a task without classes."""
    if config.task == "causal":
        packing = config.eval_packing if options.get("name") == "eval" else None
        return causal_dataset(table, config, tokenizer, packing=packing, **options)
    if config.task == "masked-lm":
        return masked_dataset(table, config, tokenizer, **options)
    return preference_dataset(table, config, tokenizer, **options)


def _with_labels(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: Table,
    held: Table | None,
    held_is_ours: bool,
    label_names: Sequence[str] | None,
    limit: int,
) -> TrainingData:
    """Classification, of texts or of words: the labels of the training rows serve evaluation."""
    make: Any = labelled_dataset if config.task == "sequence-classification" else tagged_dataset
    same_source = config.test_split_size is not None and held_is_ours
    first, labels = make(
        train,
        config,
        tokenizer,
        label_names=label_names,
        held=held if same_source else None,
        limit=limit,
    )
    second: Dataset | None = None
    if held is not None:
        size = first.report.max_length
        second, _ = make(held, config, tokenizer, name="eval", labels=labels, max_length=size)
    return TrainingData(train=first, eval=second, labels=labels)


def load_tables(
    config: TrainConfig, *, train_dataset: Any = None, eval_dataset: Any = None
) -> tuple[Table, Table | None]:
    """Training and evaluation rows as they were read; evaluation is None when not asked for."""
    if train_dataset is not None:
        train = from_python(train_dataset)
    elif config.datasets:
        train = read_mixture(config.datasets, seed=config.seed)
    elif config.dataset_name:
        split = config.dataset_train_split
        train = read_table(config.dataset_name, split=split, config=config.dataset_config)
    else:
        raise DataError("no training data is given; set dataset_name, or pass train_dataset")
    if eval_dataset is not None:
        held = from_python(eval_dataset, source="eval_dataset")
    else:
        train, held = _with_evaluation(config, train, from_config=train_dataset is None)
    empty = [table.source for table in (train, held) if table is not None and not len(table)]
    if empty:
        raise DataError(f"{' and '.join(empty)} holds no rows; needs at least one")
    return train, held


def _with_evaluation(
    config: TrainConfig, train: Table, *, from_config: bool
) -> tuple[Table, Table | None]:
    split = config.dataset_test_split
    if config.eval_dataset_name:
        return train, read_table(config.eval_dataset_name, split=split)
    if config.test_split_size is not None:
        return _hold_out(train, config)
    if config.eval_strategy == "no":
        return train, None
    name = config.dataset_name if from_config else None
    if name is not None and len(local_files(name) or ()) != 1:  # a folder or a hub dataset
        return train, read_table(name, split=split, config=config.dataset_config)
    raise DataError(
        f"eval_strategy is {config.eval_strategy}, but {train.source} has no split {split!r}. Set "
        "eval_dataset_name, or test_split_size (such as 0.1) to hold out training rows"
    )


def _hold_out(train: Table, config: TrainConfig) -> tuple[Table, Table]:
    size = config.test_split_size or 0
    if size >= 1 and train.parts:
        config = config.replace(test_split_size=size / len(train))
    count = round(size * len(train)) if size < 1 else int(size)
    if not 0 < count < len(train):
        raise DataError(
            f"test_split_size {size} of {len(train):,} rows leaves {len(train) - count:,} to train "
            f"on and {count:,} to evaluate; both need at least one"
        )
    if train.parts:  # the same share of every part
        pairs = [_hold_out(part, config) for part in train.parts]
        kept_parts, held_parts = zip(*pairs, strict=True)
        return (
            concatenate(kept_parts, train.source, keep_parts=True),
            concatenate(held_parts, train.source, keep_parts=True),
        )
    order = np.random.default_rng(config.seed).permutation(len(train))
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    return train.take(kept.tolist()), train.take(held.tolist())


def _length_limit(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, model_max_length: int | None
) -> int:
    limits = [n for n in (model_max_length, tokenizer.model_max_length) if n and n < 10**9]
    limit = model_max_length or min(limits, default=LONGEST_CHOSEN)
    longest = config.max_length or (config.length_buckets or (0,))[-1]
    if model_max_length is not None and longest > model_max_length:
        raise ConfigError(
            f"max_length is {longest:,}; the model has {model_max_length:,} positions"
        )
    return min(limit, LONGEST_CHOSEN)

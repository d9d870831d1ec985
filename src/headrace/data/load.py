"""TrainConfig + tokenizer -> everything training reads: loaders, labels, reports.

The one place that knows the order of the stages: read, detect, tokenise, choose lengths, apply the
policy, pack or bucket, load. Data may come from the configuration or from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.config import TrainConfig
from headrace.data.batches import Rows
from headrace.data.buckets import bucket_of, choose_buckets, padding_share, round_up
from headrace.data.chat import load_chat_template
from headrace.data.classify import cut_labelled, labelled_rows, tokenize_labelled
from headrace.data.examples import Examples
from headrace.data.formats import Format, detect_causal, detect_labelled
from headrace.data.labels import Labels, find_labels
from headrace.data.loader import Loader
from headrace.data.packing import one_each, pack
from headrace.data.prepare import (
    LengthPolicy,
    Outcome,
    apply_policy,
    decoded_example,
    require_fast,
    tokenize_causal,
)
from headrace.data.read import from_python, local_splits, read_table
from headrace.data.report import DataReport, length_percentiles
from headrace.data.table import Table
from headrace.errors import ConfigError, DataError

LONGEST_CHOSEN = 2048  # max_length is never chosen above this; longer needs to be asked for
SHORTEST_PACKED = 1024  # chosen row length of packed data: shorter rows pack badly


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One split, ready to be loaded: rows of fixed lengths and what was done to get there."""

    rows: Rows
    report: DataReport


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a trainer needs. labels is None for causal training."""

    train: Dataset
    eval: Dataset | None
    labels: Labels | None

    def train_loader(self, config: TrainConfig, *, num_devices: int = 1, **options: Any) -> Loader:
        """Shuffled steps of gradient_accumulation_steps micro-batches; options go to Loader."""
        return Loader(
            rows=self.train.rows,
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
    train, evaluation = load_tables(config, train_dataset=train_dataset, eval_dataset=eval_dataset)
    limit = _length_limit(config, tokenizer, model_max_length)
    if config.task == "causal":
        return _causal_data(config, tokenizer, train, evaluation, limit)
    return _labelled_data(config, tokenizer, train, evaluation, limit, label_names)


def load_tables(
    config: TrainConfig, *, train_dataset: Any = None, eval_dataset: Any = None
) -> tuple[Table, Table | None]:
    """Training and evaluation rows as they were read; evaluation is None when not asked for."""
    if train_dataset is not None:
        train = from_python(train_dataset)
    elif config.dataset_name:
        split = config.dataset_train_split
        train = read_table(config.dataset_name, split=split, config=config.dataset_config)
    else:
        raise DataError("no training data is given; set dataset_name, or pass train_dataset")
    if not len(train):
        raise DataError(f"{train.source} holds no rows; needs at least one")
    if eval_dataset is not None:
        return train, from_python(eval_dataset, source="eval_dataset")
    return _with_evaluation(config, train, from_config=train_dataset is None)


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
    if name is not None and (local_splits(name) or not _is_single_file(name)):
        return train, read_table(name, split=split, config=config.dataset_config)
    raise DataError(
        f"eval_strategy is {config.eval_strategy}, but {train.source} has no split {split!r}. Set "
        "eval_dataset_name, or test_split_size (such as 0.1) to hold out training rows"
    )


def _is_single_file(name: str) -> bool:
    from headrace.data.read import local_files

    return len(local_files(name) or ()) == 1


def _hold_out(train: Table, config: TrainConfig) -> tuple[Table, Table]:
    size = config.test_split_size or 0
    count = round(size * len(train)) if size < 1 else int(size)
    if not 0 < count < len(train):
        raise DataError(
            f"test_split_size {size} of {len(train):,} rows leaves {len(train) - count:,} to train "
            f"on and {count:,} to evaluate; both need at least one"
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


def _max_length(config: TrainConfig, longest: int, limit: int, *, packing: bool) -> int:
    """The given length, or the shortest that loses nothing, within what is chosen unasked."""
    if config.max_length is not None:
        return config.max_length
    if config.length_buckets is not None:
        return config.length_buckets[-1]
    wanted = round_up(longest, config.pad_to_multiple_of)
    return min(limit, max(wanted, SHORTEST_PACKED) if packing else wanted)


def _shape(
    examples: Examples, config: TrainConfig, pad_token_id: int, max_length: int, *, packing: bool
) -> tuple[Rows, str]:
    """Examples as rows of fixed lengths, and a note that says how well they fill them."""
    if packing:
        packed = pack(examples.lengths, row_length=max_length)
        buckets, row_buckets = (max_length,), np.zeros(len(packed), np.int64)
        note = (
            f"packed into {len(packed):,} rows of {max_length:,} tokens, "
            f"{packed.efficiency:.1%} of them used"
        )
    else:
        packed = one_each(examples.lengths, row_length=max_length)
        buckets = config.length_buckets or choose_buckets(
            examples.lengths,
            max_buckets=config.bucket_count,
            multiple=config.pad_to_multiple_of,
            max_length=max_length,
        )
        row_buckets = bucket_of(examples.lengths, buckets)
        share = padding_share(examples.lengths, buckets)
        note = f"rows of {', '.join(f'{n:,}' for n in buckets)} tokens, {1 - share:.1%} used"
    rows = Rows(
        examples=examples,
        packing=packed,
        bucket_lengths=tuple(buckets),
        row_buckets=row_buckets,
        pad_token_id=pad_token_id,
    )
    return rows, note


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any id serves: padding is told by position. eos, or 0, where there is no pad token."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(i for i in candidates if isinstance(i, int))


def _causal_data(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: Table,
    evaluation: Table | None,
    limit: int,
) -> TrainingData:
    def dataset(table: Table, name: str, max_length: int | None, packing: bool) -> Dataset:
        form = detect_causal(table, text_column=config.text_column)
        chat = form.kind in ("messages", "sharegpt")
        answers = config.assistant_only_loss if chat else config.completion_only_loss
        tokens, notes = tokenize_causal(
            table,
            form,
            tokenizer,
            answers_only=answers,
            use_template=config.apply_chat_template,
        )
        lengths = np.asarray([len(row.input_ids) for row in tokens])
        size = max_length or _max_length(config, int(lengths.max()), limit, packing=packing)
        policy = _policy(config, size)
        examples, outcome = apply_policy(tokens, policy, table=table)
        rows, note = _shape(examples, config, _pad_token(tokenizer), size, packing=packing)
        report = _report(
            name, table, form, lengths, examples, outcome, size, [*notes, note], config,
            decoded_example(examples, tokenizer),
        )  # fmt: skip
        return Dataset(rows=rows, report=report)

    first = dataset(train, "train", None, config.packing)
    second = None
    if evaluation is not None:
        size = first.report.max_length
        second = dataset(evaluation, "eval", size, config.eval_packing)
    return TrainingData(train=first, eval=second, labels=None)


def _labelled_data(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: Table,
    evaluation: Table | None,
    limit: int,
    label_names: Sequence[str] | None,
) -> TrainingData:
    labels: Labels | None = None
    columns: dict[str, str | None] = {
        "text_column": config.text_column,
        "text_pair_column": config.text_pair_column,
        "label_column": config.label_column,
    }

    def dataset(table: Table, name: str, max_length: int | None) -> Dataset:
        nonlocal labels
        form = detect_labelled(table, **columns)
        rows = labelled_rows(table, form)
        if labels is None:
            column = form.columns[-1]
            labels = find_labels(
                [row.label for row in rows],
                declared=label_names or (table.class_names or {}).get(column),
                problem_type=config.problem_type,
                column=column,
            )
        uncut = tokenize_labelled(rows, tokenizer)
        longest = int(uncut.lengths.max())
        size = max_length or _max_length(config, longest, limit, packing=False)
        examples, outcome = cut_labelled(
            uncut, rows, labels, _policy(config, size), tokenizer, table=table, form=form
        )
        shaped, note = _shape(examples, config, _pad_token(tokenizer), size, packing=False)
        kinds = "numbers" if labels.names is None else f"{labels.num_labels} labels"
        shown = tokenizer.decode(examples.input_ids[examples.span(0)].tolist())
        report = _report(
            name, table, form, uncut.lengths, examples, outcome, size, [kinds, note], config,
            ((str(shown), False),),
        )  # fmt: skip
        return Dataset(rows=shaped, report=report)

    first = dataset(train, "train", None)
    second = (
        dataset(evaluation, "eval", first.report.max_length) if evaluation is not None else None
    )
    return TrainingData(train=first, eval=second, labels=labels)


def _policy(config: TrainConfig, max_length: int) -> LengthPolicy:
    return LengthPolicy(
        max_length=max_length,
        over_length=config.over_length,
        keep_end=config.truncation_mode == "keep_end",
    )


def _report(
    name: str,
    table: Table,
    form: Format,
    lengths: np.ndarray,
    examples: Examples,
    outcome: Outcome,
    max_length: int,
    notes: Sequence[str],
    config: TrainConfig,
    example: tuple[tuple[str, bool], ...],
) -> DataReport:
    return DataReport(
        name=name,
        source=table.source,
        format=str(form),
        rows_read=len(table),
        rows_kept=outcome.kept,
        rows_cut=outcome.cut,
        rows_dropped=outcome.dropped,
        examples=len(examples),
        tokens_before=int(lengths.sum()),
        tokens_after=examples.num_tokens,
        supervised=examples.num_supervised,
        lengths=length_percentiles(lengths),
        max_length=max_length,
        lossless_max_length=round_up(int(lengths.max()), config.pad_to_multiple_of),
        example=example,
        notes=(*notes, *outcome.notes),
    )

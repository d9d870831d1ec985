"""One Table -> one Dataset: tokenised, cut, packed or bucketed, with its report.

Knows one split at a time; load.py decides which splits there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.config import TrainConfig
from headrace.data.batches import BatchKind, Rows
from headrace.data.buckets import bucket_of, choose_buckets, round_up
from headrace.data.classify import cut_labelled, labelled_rows, tokenize_labelled
from headrace.data.examples import Examples
from headrace.data.formats import Format, detect_causal, detect_labelled, detect_text
from headrace.data.labels import Labels, find_labels
from headrace.data.masking import masking_for
from headrace.data.normal import Text
from headrace.data.packing import one_each, pack
from headrace.data.pairs import apply_answer_policy, detect_preference, tokenize_answers
from headrace.data.policy import LengthPolicy, Outcome, Tokenized, apply_policy
from headrace.data.prepare import decoded_example, normalise_rows, tokenize_causal
from headrace.data.report import DataReport, length_percentiles
from headrace.data.table import Table
from headrace.data.words import (
    detect_tagged,
    encode_tags,
    tagged_rows,
    tokenize_masked,
    tokenize_tagged,
)
from headrace.errors import DataError

LONGEST_CHOSEN = 2048  # max_length is never chosen above this; longer needs to be asked for
LONG_PACKED = 1024  # chosen row length of packed data, when there is enough of it
STEPS_PACKED = 16  # steps an epoch that a longer packed row must leave


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One split, ready to be loaded: rows of fixed lengths and what was done to get there.

    growing: a GrowingRows whose first piece is `rows`, when others are prepared during training.
    """

    rows: Rows
    report: DataReport
    growing: Any = None


def causal_dataset(
    table: Table,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "train",
    packing: bool | None = None,
    max_length: int | None = None,
    limit: int = LONGEST_CHOSEN,
) -> Dataset:
    """Rows for next-token training.

    packing: config.packing when None. max_length: tokens, when it is decided already; else the
    configuration's, else chosen from the data up to `limit`. Raises DataError.
    """
    packing = config.packing if packing is None else packing
    form, tokens, notes = _mixture_tokens(table, config, tokenizer)
    lengths = np.asarray([len(row.input_ids) for row in tokens])
    size = max_length or choose_max_length(config, lengths, limit, packing=packing)
    examples, outcome = apply_policy(tokens, length_policy(config, size), table=table)
    rows, shape = shape_rows(
        examples, config, pad_token_id(tokenizer), size, packing=packing, kind="causal"
    )
    report = make_report(
        table, form, lengths, examples, outcome, config, name=name, max_length=size,
        notes=[*notes, *_unused(table, form), shape], example=decoded_example(examples, tokenizer),
    )  # fmt: skip
    return Dataset(rows=rows, report=report)


def _mixture_tokens(
    table: Table, config: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Format, list[Tokenized], list[str]]:
    """Every part of the table in its own format; the format of the first stands for the report."""
    tokens: list[Tokenized] = []
    notes: list[str] = []
    forms: list[Format] = []
    start = 0
    for part in table.parts or (table,):
        form = detect_causal(part, text_column=config.text_column)
        chat = form.kind in ("messages", "sharegpt")
        found, said = tokenize_causal(
            part,
            form,
            tokenizer,
            answers_only=config.assistant_only_loss if chat else config.completion_only_loss,
            use_template=config.apply_chat_template,
        )
        tokens += [replace(row, row=row.row + start) for row in found] if start else found
        start += len(part)
        forms.append(form)
        notes += [note for note in said if note not in notes]
        if table.parts:
            size = sum(len(row.input_ids) for row in found)
            notes.append(f"part {part.source}: {form}, {len(part):,} rows, {size:,} tokens")
    return forms[0], tokens, notes


def labelled_dataset(
    table: Table,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "train",
    labels: Labels | None = None,
    label_names: Sequence[str] | None = None,
    held: Table | None = None,
    max_length: int | None = None,
    limit: int = LONGEST_CHOSEN,
) -> tuple[Dataset, Labels]:
    """Rows with one label each, and the labels.

    labels: those of the training data, when this is evaluation data. label_names: names by id of a
    model that is already a classifier. held: rows taken out of this table for evaluation; a label
    may occur in them only. max_length and limit as in causal_dataset.
    """
    form = detect_labelled(
        table,
        text_column=config.text_column,
        text_pair_column=config.text_pair_column,
        label_column=config.label_column,
    )
    texts = labelled_rows(table, form)
    column = form.columns[-1]
    held_labels = (
        (value for value in held.column(column) if value not in (None, "")) if held else ()
    )
    labels = labels or find_labels(
        [*(row.label for row in texts), *held_labels],
        declared=label_names or (table.class_names or {}).get(column),
        problem_type=config.problem_type,
        column=column,
    )
    uncut = tokenize_labelled(texts, tokenizer)
    size = max_length or choose_max_length(config, uncut.lengths, limit, packing=False)
    examples, outcome = cut_labelled(
        uncut, texts, labels, length_policy(config, size), tokenizer, table=table, form=form
    )
    rows, shape = shape_rows(
        examples, config, pad_token_id(tokenizer), size, packing=False, kind="labelled"
    )
    kinds = "numbers" if labels.names is None else f"{labels.num_labels} labels"
    text = str(tokenizer.decode(examples.input_ids[examples.span(0)].tolist()))
    report = make_report(
        table, form, uncut.lengths, examples, outcome, config, name=name, max_length=size,
        notes=[kinds, *_unused(table, form), shape], example=((text, False),),
    )  # fmt: skip
    return Dataset(rows=rows, report=report), labels


def preference_dataset(
    table: Table,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "train",
    max_length: int | None = None,
    limit: int = LONGEST_CHOSEN,
) -> Dataset:
    """Pairs of answers, or single judged ones for kto; arguments as in causal_dataset."""
    form = detect_preference(table, label_column=config.label_column)
    kto = config.task == "preference" and config.preference_loss == "kto"
    if form.kind == "unpaired preference" and not kto:
        raise DataError(
            f"{table.source} holds answers that are judged one by one ({', '.join(form.columns)}); "
            f"only preference_loss: kto learns from those, "
            f"{config.preference_loss if config.task == 'preference' else 'a reward model'} needs "
            "chosen and rejected"
        )
    answers = tokenize_answers(
        table, form, tokenizer, unpair=kto, use_template=config.apply_chat_template
    )
    lengths = np.asarray([len(row.input_ids) for row in answers.tokens])
    size = max_length or choose_max_length(config, lengths, limit, packing=False)
    examples, desirable, outcome = apply_answer_policy(
        answers, length_policy(config, size), table=table
    )
    kind = "pairs" if desirable is None else "unpaired"
    rows, shape = shape_rows(
        examples, config, pad_token_id(tokenizer), size, packing=False, kind=kind,
        desirable=desirable,
    )  # fmt: skip
    notes = [*answers.notes, *_unused(table, form), shape]
    if desirable is not None:
        if desirable.all() or not desirable.any():
            raise DataError(
                f"{table.source}: all {len(desirable):,} answers are "
                f"{'wanted' if desirable.all() else 'unwanted'}; kto needs both"
            )
        notes.append(f"{int(desirable.sum()):,} wanted, {int((~desirable).sum()):,} unwanted")
    example = decoded_example(examples, tokenizer)
    if kind == "pairs":
        other = decoded_example(examples, tokenizer, 1)
        answer = "".join(piece for piece, trained in other if trained)
        example = (*example, (f"\nrejected: {answer}", False))
    report = make_report(
        table, form, lengths, examples, outcome, config, name=name, max_length=size, notes=notes,
        example=example,
    )  # fmt: skip
    return Dataset(rows=rows, report=report)


def tagged_dataset(
    table: Table,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "train",
    labels: Labels | None = None,
    label_names: Sequence[str] | None = None,
    held: Table | None = None,
    max_length: int | None = None,
    limit: int = LONGEST_CHOSEN,
) -> tuple[Dataset, Labels]:
    """Words with one tag each, and the tags; arguments as in labelled_dataset."""
    form = detect_tagged(table, text_column=config.text_column, label_column=config.label_column)
    texts = tagged_rows(table, form)
    column = form.columns[1]
    more = tagged_rows(held, form) if held is not None else []
    declared = label_names or (table.class_names or {}).get(column)
    labels = labels or find_labels(
        [tag for row in (*texts, *more) for tag in row.tags], declared=declared,
        problem_type="single_label_classification", column=column,
    )  # fmt: skip
    tags = encode_tags(texts, labels, table=table, form=form)
    guess = np.asarray([len(row.words) for row in texts])
    size = max_length or config.max_length or limit
    examples, lengths, outcome = tokenize_tagged(
        texts, tags, tokenizer, length_policy(config, size), table=table
    )
    if max_length is None:
        size = choose_max_length(config, lengths, limit, packing=False)
    if not examples.num_supervised:
        raise DataError(f"{table.source}: no word within max_length {size:,} has a tag")
    rows, shape = shape_rows(
        examples, config, pad_token_id(tokenizer), size, packing=False, kind="tagged"
    )
    share = int(guess.sum()) / max(1, int(lengths.sum()))
    text = " ".join(
        f"{word}/{labels.id2label[int(tag)]}"
        for word, tag in zip(texts[0].words, tags[0], strict=True)
    )
    notes = [
        f"{labels.num_labels} tags; the first token of a word carries its tag "
        f"({1 / max(share, 1e-9):.2f} tokens a word)",
        *_unused(table, form),
        shape,
    ]
    report = make_report(
        table, form, lengths, examples, outcome, config, name=name, max_length=size, notes=notes,
        example=((text, False),),
    )  # fmt: skip
    return Dataset(rows=rows, report=report), labels


def masked_dataset(
    table: Table,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "train",
    max_length: int | None = None,
    limit: int = LONGEST_CHOSEN,
) -> Dataset:
    """Text whose tokens are masked in every epoch anew; arguments as in causal_dataset."""
    masking = masking_for(tokenizer, config.mlm_probability)
    form = detect_text(table, text_column=config.text_column)
    texts = [row for row in normalise_rows(table, form) if isinstance(row, Text)]
    size = max_length or config.max_length or limit
    examples, lengths, outcome = tokenize_masked(
        texts, tokenizer, length_policy(config, size), table=table
    )
    if max_length is None:
        size = choose_max_length(config, lengths, limit, packing=False)
    if not examples.num_supervised:
        raise DataError(f"{table.source}: no token could be masked; every row is empty")
    rows, shape = shape_rows(
        examples, config, pad_token_id(tokenizer), size, packing=False, kind="masked",
        masking=masking,
    )  # fmt: skip
    notes = [f"{config.mlm_probability:.0%} of the tokens are predicted, drawn anew in every epoch"]
    report = make_report(
        table, form, lengths, examples, outcome, config, name=name, max_length=size,
        notes=[*notes, *_unused(table, form), shape],
        example=((texts[0].text, False),),
    )  # fmt: skip
    return Dataset(rows=rows, report=report)


def choose_max_length(
    config: TrainConfig, lengths: np.ndarray, limit: int, *, packing: bool
) -> int:
    """The given length, or the shortest that loses nothing, within what is chosen unasked.

    Packed rows are longer where the data suffices: long rows pack better, but few rows would leave
    few steps.
    """
    if config.max_length is not None:
        return config.max_length
    if config.length_buckets is not None:
        return config.length_buckets[-1]
    size = round_up(int(lengths.max()), config.pad_to_multiple_of)
    if packing:
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        enough = round_up(int(lengths.sum()) // (STEPS_PACKED * rows), config.pad_to_multiple_of)
        size = max(size, min(enough, LONG_PACKED))
    return min(limit, size)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any id serves: padding is told by position. eos, or 0, where there is no pad token."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(i for i in candidates if isinstance(i, int))


def _unused(table: Table, form: Format) -> list[str]:
    """Columns that nothing reads: a label among them may mean the wrong task."""
    if table.parts:
        return []
    names = [n for n in table.names if n not in (*form.columns, "chat_template_kwargs")]
    return [f"columns not used: {', '.join(names)}"] if names else []


def length_policy(config: TrainConfig, max_length: int) -> LengthPolicy:
    """The over-length settings as apply_policy takes them."""
    return LengthPolicy(
        max_length=max_length,
        over_length=config.over_length,
        keep_end=config.truncation_mode == "keep_end",
    )


def shape_rows(
    examples: Examples,
    config: TrainConfig,
    pad: int,
    max_length: int,
    *,
    packing: bool,
    kind: BatchKind,
    **options: Any,
) -> tuple[Rows, str]:
    """Examples as rows of fixed lengths, and a line that says how well they fill them.

    options: further fields of Rows.
    """
    if packing:
        packed = pack(examples.lengths, row_length=max_length)
        buckets, index = (max_length,), np.zeros(len(packed), np.int64)
        rows = f"{len(packed):,} rows of {max_length:,} tokens"
        line = f"packed into {rows}, {packed.efficiency:.1%} of them used"
    else:
        group = 2 if kind == "pairs" else 1
        packed = one_each(examples.lengths, row_length=max_length, group=group)
        lengths = examples.lengths.reshape(-1, group).max(axis=1)
        buckets = config.length_buckets or choose_buckets(
            lengths,
            max_buckets=config.bucket_count,
            multiple=config.pad_to_multiple_of,
            max_length=max_length,
        )
        index = bucket_of(lengths, buckets)
        used = examples.num_tokens / (group * int(np.asarray(buckets)[index].sum()))
        line = f"rows of {', '.join(f'{n:,}' for n in buckets)} tokens, {used:.1%} of them used"
    return Rows(
        kind=kind,
        examples=examples,
        packing=packed,
        bucket_lengths=tuple(buckets),
        row_buckets=index,
        pad_token_id=pad,
        **options,
    ), line


def make_report(
    table: Table,
    form: Format,
    lengths: np.ndarray,
    examples: Examples,
    outcome: Outcome,
    config: TrainConfig,
    *,
    name: str,
    max_length: int,
    notes: Sequence[str],
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
        supervised=None
        if form.kind == "labelled" or config.task == "masked-lm"
        else examples.num_supervised,
        lengths=length_percentiles(lengths),
        max_length=max_length,
        lossless_max_length=round_up(int(lengths.max()), config.pad_to_multiple_of),
        example=example,
        notes=(*notes, *outcome.notes),
    )

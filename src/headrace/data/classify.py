"""Table -> tokenised Examples with one label a row, for sequence classification.

The tokenizer adds its own special tokens and joins pairs; when a text is cut, they stay. Knows
labels and tokens; batching comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.data.examples import Examples, ragged
from headrace.data.formats import Format
from headrace.data.labels import Labels, encode_labels
from headrace.data.normal import Labelled
from headrace.data.policy import LengthPolicy, Outcome
from headrace.data.prepare import normalise_rows
from headrace.data.table import SHOWN, Table
from headrace.errors import DataError

_BATCH = 1000


def labelled_rows(table: Table, form: Format) -> list[Labelled]:
    """All rows as text, pair and label value; one DataError for all that are not."""
    rows = normalise_rows(table, form)
    return [row for row in rows if isinstance(row, Labelled)]


def tokenize_labelled(rows: Sequence[Labelled], tokenizer: PreTrainedTokenizerBase) -> Examples:
    """Uncut examples without labels: input_ids and, where the tokenizer makes them, token types."""
    ids: list[list[int]] = []
    types: list[list[int]] = []
    for start in range(0, len(rows), _BATCH):
        encoded = _encode(rows[start : start + _BATCH], tokenizer)
        ids.extend(encoded["input_ids"])
        types.extend(encoded.get("token_type_ids", ()))
    return _examples(ids, types)


def cut_labelled(
    uncut: Examples,
    rows: Sequence[Labelled],
    labels: Labels,
    policy: LengthPolicy,
    tokenizer: PreTrainedTokenizerBase,
    *,
    table: Table,
    form: Format,
) -> tuple[Examples, Outcome]:
    """The examples within max_length, labelled.

    Long rows are tokenised again with the tokenizer's own truncation, which keeps special tokens.
    Raises DataError for labels that do not fit, and for long rows when over_length is error.
    """
    values = [row.label for row in rows]
    encoded = encode_labels(
        labels, values, table=table, column=form.columns[-1], good_row=form.good_row
    )
    long = np.flatnonzero(uncut.lengths > policy.max_length)
    outcome = Outcome(kept=len(rows))
    if not len(long):
        return _with_labels(uncut, encoded), outcome
    if policy.over_length == "error":
        shown = ", ".join(f"{table.where(int(i))} ({uncut.lengths[i]:,})" for i in long[:SHOWN])
        raise DataError(
            f"{len(long):,} of {len(rows):,} rows are over max_length {policy.max_length:,} "
            f"tokens: {shown}. Raise max_length, or set over_length to truncate or drop"
        )
    if policy.over_length == "drop":
        kept = np.flatnonzero(uncut.lengths <= policy.max_length)
        if not len(kept):
            raise DataError(f"{table.source}: every row is over max_length {policy.max_length:,}")
        return _with_labels(uncut.take(kept), encoded[kept]), Outcome(
            kept=len(kept), dropped=len(long)
        )
    outcome.cut = len(long)
    return _with_labels(_truncate(uncut, rows, long, policy, tokenizer), encoded), outcome


def _truncate(
    uncut: Examples,
    rows: Sequence[Labelled],
    long: np.ndarray,
    policy: LengthPolicy,
    tokenizer: PreTrainedTokenizerBase,
) -> Examples:
    ids = [uncut.input_ids[uncut.span(i)] for i in range(len(uncut))]
    types = uncut.token_type_ids
    parts = [] if types is None else [types[uncut.span(i)] for i in range(len(uncut))]
    side = tokenizer.truncation_side
    tokenizer.truncation_side = "left" if policy.keep_end else "right"
    try:
        chosen = [rows[int(i)] for i in long]
        cut = _encode(chosen, tokenizer, truncation=True, max_length=policy.max_length)
    finally:
        tokenizer.truncation_side = side
    for at, i in enumerate(long):
        ids[i] = np.asarray(cut["input_ids"][at], np.int32)
        if parts:
            parts[i] = np.asarray(cut["token_type_ids"][at], np.int32)
    return _examples(ids, parts)


def _encode(rows: Sequence[Labelled], tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
    pairs = [row.pair for row in rows if row.pair is not None]
    second = pairs or None  # a format has pairs in all rows or in none
    texts = [row.text for row in rows]
    return tokenizer(texts, second, return_attention_mask=False, verbose=False, **options)


def _examples(ids: Sequence[Any], types: Sequence[Any]) -> Examples:
    flat, offsets = ragged(ids)
    token_types = ragged(types)[0] if len(types) else None
    return Examples(input_ids=flat, offsets=offsets, token_type_ids=token_types)


def _with_labels(examples: Examples, labels: np.ndarray) -> Examples:
    return Examples(
        input_ids=examples.input_ids,
        offsets=examples.offsets,
        row_labels=labels,
        token_type_ids=examples.token_type_ids,
    )

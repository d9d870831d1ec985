"""Words with tags, and plain text for masking -> examples with one label a token.

A tag stands on the first token of its word; the word's other tokens and special tokens have none.
Long rows are cut by the tokenizer, which keeps its special tokens. Knows tokenizers and labels;
which tokens are masked is drawn later (masking.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.data.examples import IGNORED, Examples, ragged
from headrace.data.formats import Format, first_name, require_column
from headrace.data.labels import Labels, encode_labels
from headrace.data.normal import RowProblem, Tagged, Text
from headrace.data.policy import LengthPolicy, Outcome
from headrace.data.prepare import normalise_rows
from headrace.data.table import SHOWN, Row, Table
from headrace.errors import DataError

_WORDS = ("tokens", "words", "sentence", "text")
_TAGS = ("ner_tags", "tags", "labels", "pos_tags", "chunk_tags", "label")
_BATCH = 1000


def detect_tagged(
    table: Table, *, text_column: str | None = None, label_column: str | None = None
) -> Format:
    """The columns of words and tags; DataError when unclear."""
    for name in (text_column, label_column):
        if name is not None:
            require_column(table, name)
    words = text_column or first_name(table.names, _WORDS)
    tags = label_column or first_name(table.names, _TAGS)
    if words is None or tags is None:
        raise DataError(
            f"{table.source} has columns {', '.join(table.names)}; which hold the words and their "
            "tags is not clear. Needed: tokens and ner_tags (lists of the same length), or set "
            "text_column and label_column"
        )
    good = {words: ["Anna", "lives", "in", "Paris"], tags: ["B-PER", "O", "O", "B-LOC"]}
    return Format(
        kind="tagged",
        columns=(words, tags),
        normalise=lambda row: _tagged(row, words, tags),
        good_row=good,
    )


def _tagged(row: Row, words: str, tags: str) -> Tagged:
    found, marks = (_list(row, name) for name in (words, tags))
    if not found or not all(isinstance(word, str) for word in found):
        raise RowProblem(words, row.get(words), "needs a list of words that is not empty")
    if len(marks) != len(found):
        needed = f"needs {len(found)} tags, one a word; there are {len(marks)}"
        raise RowProblem(tags, row.get(tags), needed)
    return Tagged(words=tuple(found), tags=tuple(marks))


def _list(row: Row, column: str) -> list[Any]:
    """A list, or words separated by blanks (as csv files hold them)."""
    value = row.get(column)
    if isinstance(value, str):
        return value.split()
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list | tuple):
        raise RowProblem(column, value, "needs a list, one entry a word")
    return list(value)


def tagged_rows(table: Table, form: Format) -> list[Tagged]:
    """All rows as words and tags; one DataError for all that are not."""
    return [row for row in normalise_rows(table, form) if isinstance(row, Tagged)]


def encode_tags(
    rows: Sequence[Tagged], labels: Labels, *, table: Table, form: Format
) -> list[np.ndarray]:
    """Tag ids int32 by row; DataError for unknown tags, with the rows they stand in."""
    sizes = [len(row.tags) for row in rows]
    row_of = np.repeat(np.arange(len(rows)), sizes)
    flat = Table(
        rows=[{}] * len(row_of),
        names=table.names,
        source=table.source,
        where=lambda i: table.where(int(row_of[i])),
    )
    values = [tag for row in rows for tag in row.tags]
    ids = encode_labels(labels, values, table=flat, column=form.columns[1], good_row=form.good_row)
    return np.split(ids, np.cumsum(sizes)[:-1])


def tokenize_tagged(
    rows: Sequence[Tagged],
    tags: Sequence[np.ndarray],
    tokenizer: PreTrainedTokenizerBase,
    policy: LengthPolicy,
    *,
    table: Table,
) -> tuple[Examples, np.ndarray, Outcome]:
    """Examples within max_length, the lengths before cutting, and counts."""
    _split_words(tokenizer)
    words = [list(row.words) for row in rows]
    side = tokenizer.truncation_side
    tokenizer.truncation_side = "left" if policy.keep_end else "right"
    try:
        uncut = _encode(words, tokenizer, is_split_into_words=True)
        lengths = np.asarray([len(row.ids) for row in uncut])
        keep, outcome = _by_length(lengths, policy, table)
        cut = uncut
        if outcome.cut:
            cut = _encode(
                words, tokenizer, is_split_into_words=True, truncation=True,
                max_length=policy.max_length,
            )  # fmt: skip
    finally:
        tokenizer.truncation_side = side
    labels = [_first_of_word(cut[i], tags[i]) for i in keep]
    return _examples([cut[i] for i in keep], labels, tokenizer), lengths, outcome


def tokenize_masked(
    rows: Sequence[Text], tokenizer: PreTrainedTokenizerBase, policy: LengthPolicy, *, table: Table
) -> tuple[Examples, np.ndarray, Outcome]:
    """As tokenize_tagged, for text; labels are the ids that may be masked (special tokens not)."""
    texts = [row.text for row in rows]
    uncut = _encode(texts, tokenizer)
    lengths = np.asarray([len(row.ids) for row in uncut])
    keep, outcome = _by_length(lengths, policy, table)
    pieces = [uncut[i] for i in keep]
    if policy.over_length == "split" and outcome.cut:
        pieces = list(_split(texts, tokenizer, policy.max_length))
    elif outcome.cut:
        side = tokenizer.truncation_side
        tokenizer.truncation_side = "left" if policy.keep_end else "right"
        try:
            pieces = _encode(texts, tokenizer, truncation=True, max_length=policy.max_length)
        finally:
            tokenizer.truncation_side = side
    labels = [
        np.where(np.asarray(p.special_tokens_mask) == 0, np.asarray(p.ids), IGNORED) for p in pieces
    ]
    return _examples(pieces, labels, tokenizer), lengths, outcome


def _split(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[Any]:
    """Every text as pieces of max_length tokens, special tokens of their own in each."""
    for encoding in _encode(texts, tokenizer, truncation=True, max_length=max_length):
        yield encoding
        yield from encoding.overflowing


def _encode(texts: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[Any]:
    found: list[Any] = []
    for start in range(0, len(texts), _BATCH):
        encoded: Any = tokenizer(
            texts[start : start + _BATCH], return_attention_mask=False, verbose=False, **options
        )
        found.extend(encoded.encodings)
    return found


def _split_words(tokenizer: PreTrainedTokenizerBase) -> None:
    """Byte-level tokenizers see a word as inside a text only when a blank is put before it."""
    if hasattr(tokenizer, "add_prefix_space") and not getattr(tokenizer, "add_prefix_space", True):
        backend: Any = tokenizer.backend_tokenizer
        if hasattr(backend.pre_tokenizer, "add_prefix_space"):
            backend.pre_tokenizer.add_prefix_space = True
        tokenizer.add_prefix_space = True


def _first_of_word(encoding: Any, tags: np.ndarray) -> np.ndarray:
    labels = np.full(len(encoding.ids), IGNORED, np.int32)
    before = None
    for place, word in enumerate(encoding.word_ids):
        if word is not None and word != before:
            labels[place] = tags[word]
        before = word
    return labels


def _by_length(
    lengths: np.ndarray, policy: LengthPolicy, table: Table
) -> tuple[list[int], Outcome]:
    """Rows that stay under drop and error; how many are cut."""
    long = np.flatnonzero(lengths > policy.max_length)
    if len(long) and policy.over_length == "error":
        shown = ", ".join(f"{table.where(int(i))} ({lengths[i]:,})" for i in long[:SHOWN])
        raise DataError(
            f"{len(long):,} of {len(lengths):,} rows are over max_length {policy.max_length:,} "
            f"tokens: {shown}. Raise max_length, or set over_length to truncate or drop"
        )
    if policy.over_length != "drop":
        return list(range(len(lengths))), Outcome(kept=len(lengths), cut=len(long))
    keep = np.flatnonzero(lengths <= policy.max_length).tolist()
    if not keep:
        raise DataError(f"{table.source}: every row is over max_length {policy.max_length:,}")
    return keep, Outcome(kept=len(keep), dropped=len(long))


def _examples(
    encodings: Sequence[Any], labels: Sequence[np.ndarray], tokenizer: PreTrainedTokenizerBase
) -> Examples:
    flat, offsets = ragged([encoding.ids for encoding in encodings])
    types = None
    if "token_type_ids" in tokenizer.model_input_names:
        types = ragged([encoding.type_ids for encoding in encodings])[0]
    return Examples(
        input_ids=flat, offsets=offsets, token_labels=ragged(labels)[0], token_type_ids=types
    )

"""What happens to examples over max_length, and to those without a trained token.

The first token of an example has no label, since nothing predicts it; packed and unpacked losses
are equal for that reason. Knows tokens, not text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.data.examples import IGNORED, Examples, ragged
from headrace.data.table import SHOWN, Table
from headrace.errors import DataError

OverLength = Literal["truncate", "drop", "split", "error"]


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """One row as tokens; trained[i] says whether token i is. where: row index in the table."""

    row: int
    input_ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True, kw_only=True)
class LengthPolicy:
    """What happens to examples over max_length tokens."""

    max_length: int
    over_length: OverLength = "truncate"
    keep_end: bool = False


@dataclass(kw_only=True)
class Outcome:
    """Counts of what the policy did, for the report."""

    kept: int = 0
    cut: int = 0
    dropped: int = 0
    notes: list[str] = field(default_factory=list)


def apply_policy(
    rows: Sequence[Tokenized], policy: LengthPolicy, *, table: Table
) -> tuple[Examples, Outcome]:
    """Cut, drop, split or refuse what is over max_length; drop what has no trained token left.

    Raises DataError when over_length is error and a row is, and when nothing is left to train.
    """
    outcome = Outcome()
    refuse_long(rows, policy, table=table)
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    unsupervised = 0
    for row in rows:
        pieces = list(cut_pieces(row, policy))
        used = [(i, t) for i, t in pieces if t[1:].any()]
        unsupervised += bool(pieces) and not used
        outcome.kept += bool(used)
        outcome.cut += bool(used) and len(row.input_ids) > policy.max_length
        for piece, trained in used:
            ids.append(piece)
            labels.append(token_labels(piece, trained))
    outcome.dropped = len(rows) - outcome.kept
    if unsupervised:
        outcome.notes.append(f"{unsupervised:,} dropped: no trained token within max_length")
    if not ids:
        raise DataError(_nothing_left(rows, policy, table))
    flat, offsets = ragged(ids)
    return Examples(input_ids=flat, offsets=offsets, token_labels=ragged(labels)[0]), outcome


def refuse_long(rows: Sequence[Tokenized], policy: LengthPolicy, *, table: Table) -> None:
    """DataError that names the long rows when over_length is error and there are any."""
    long = [row for row in rows if len(row.input_ids) > policy.max_length]
    if long and policy.over_length == "error":
        shown = ", ".join(f"{table.where(r.row)} ({len(r.input_ids):,})" for r in long[:SHOWN])
        raise DataError(
            f"{len(long):,} of {len(rows):,} rows are over max_length {policy.max_length:,} "
            f"tokens: {shown}. Raise max_length, or set over_length to truncate, drop or split"
        )


def cut_pieces(row: Tokenized, policy: LengthPolicy) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, trained) of a row within max_length: none when dropped, several when split."""
    size, ids, trained = policy.max_length, row.input_ids, row.trained
    if len(ids) <= size:
        yield ids, trained
    elif policy.over_length == "truncate":
        keep = slice(-size, None) if policy.keep_end else slice(size)
        yield ids[keep], trained[keep]
    elif policy.over_length == "split":
        for start in range(0, len(ids), size):
            yield ids[start : start + size], trained[start : start + size]


def token_labels(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """int32 labels, -100 where not trained; the first token never is."""
    labels = np.where(trained, ids, IGNORED).astype(np.int32)
    labels[:1] = IGNORED  # nothing predicts the first token
    return labels


def _nothing_left(rows: Sequence[Tokenized], policy: LengthPolicy, table: Table) -> str:
    trained = sum(int(row.trained[1:].sum()) for row in rows)
    longest = max(len(row.input_ids) for row in rows)
    if not trained:
        return (
            f"{table.source}: none of the tokens of {len(rows):,} rows would be trained. Answers "
            "(assistant turns, completions) are needed; to train prompts too set "
            "assistant_only_loss: false and completion_only_loss: false"
        )
    return (
        f"{table.source}: with max_length {policy.max_length:,} and over_length "
        f"{policy.over_length} no trained token is left in {len(rows):,} rows; the longest has "
        f"{longest:,} tokens. Raise max_length, or set truncation_mode: keep_end"
    )

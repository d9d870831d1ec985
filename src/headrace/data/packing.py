"""Examples -> rows of one fixed length, several examples a row, by best-fit decreasing.

Each example goes, longest first, into the fullest row that still has room. Free room is a small
whole number, so rows wait in one stack per amount of room, and a Python integer is the set of
amounts in use: finding the best row is a shift and a lowest-bit test, not a search.

Knows lengths only. Examples are never cut, lost or doubled here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Packing:
    """members: example indices, row after row; offsets int64 [rows + 1]; row_length in tokens."""

    members: np.ndarray
    offsets: np.ndarray
    row_length: int
    num_tokens: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> np.ndarray:
        """The example indices of row i."""
        return self.members[self.offsets[i] : self.offsets[i + 1]]

    @property
    def efficiency(self) -> float:
        """Share of row tokens that are not padding."""
        return self.num_tokens / max(1, len(self) * self.row_length)


def pack(lengths: np.ndarray, *, row_length: int) -> Packing:
    """Pack examples of these lengths (tokens, each 1..row_length) into rows of row_length tokens.

    Costs O(n log n + n * row_length / 64): about a second for a million examples. Deterministic:
    equal lengths keep their order.
    """
    lengths = np.asarray(lengths)
    assert not len(lengths) or 0 < lengths.min() <= lengths.max() <= row_length
    rows: list[list[int]] = []
    waiting: list[list[int]] = [[] for _ in range(row_length + 1)]  # by free room
    in_use = 0  # bit r: a row with r free tokens waits
    for example in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[example])
        fitting = in_use >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = waiting[room].pop()
            if not waiting[room]:
                in_use ^= 1 << room
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(example)
        if room > length:
            waiting[room - length].append(row)
            in_use |= 1 << (room - length)
    return _packing(rows, lengths, row_length)


def one_each(lengths: np.ndarray, *, row_length: int, group: int = 1) -> Packing:
    """Every example (or group of neighbours) in a row of its own, in order: no packing."""
    count = len(lengths)
    return Packing(
        members=np.arange(count),
        offsets=np.arange(0, count + 1, group),
        row_length=row_length,
        num_tokens=int(np.sum(lengths)),
    )


def _packing(rows: list[list[int]], lengths: np.ndarray, row_length: int) -> Packing:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    members = np.fromiter((i for row in rows for i in row), np.int64, count=int(offsets[-1]))
    total = int(lengths.sum()) if len(lengths) else 0
    return Packing(members=members, offsets=offsets, row_length=row_length, num_tokens=total)

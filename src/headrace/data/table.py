"""Rows as they were read, each with the place it came from, and errors about them.

A Table is the only thing the readers hand on. It knows nothing of formats or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import DataError

Row = Mapping[str, Any]
SHOWN = 5  # problems spelled out before "and n more"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows with their origin.

    names: columns in order. where(i): "train.jsonl, row 12" (rows count from 1; lines for jsonl).
    class_names: label names the source itself declares, by column. parts: the tables of a mixture,
    in order, when each has a format of its own.
    """

    rows: Sequence[Row]
    names: tuple[str, ...]
    source: str
    where: Callable[[int], str]
    class_names: Mapping[str, Sequence[str]] | None = None
    parts: tuple[Table, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int) -> Table:
        """Rows start..stop, still with their own origin."""
        return self.take(range(len(self))[start:stop])

    def take(self, indices: Sequence[int]) -> Table:
        """The rows at these indices, in this order."""
        rows = [self.rows[i] for i in indices]
        return Table(
            rows=rows,
            names=self.names,
            source=self.source,
            where=lambda i: self.where(indices[i]),
            class_names=self.class_names,
        )

    def column(self, name: str) -> Iterator[Any]:
        """The values of one column; None where a row lacks it."""
        return (row.get(name) for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """One row that cannot be used: where it is, what it holds, what a good one looks like."""

    where: str
    column: str
    value: Any
    needed: str


def raise_bad_rows(bad: Sequence[BadRow], *, example: Row, total: int) -> None:
    """Raise one DataError for all bad rows, with a good one; nothing when there are none."""
    if not bad:
        return
    rows = "1 row" if len(bad) == 1 else f"{len(bad)} of {total} rows"
    lines = [f"{rows} cannot be used."]
    for item in bad[:SHOWN]:
        lines.append(f"  {item.where}, column {item.column}: {short(item.value)}; {item.needed}")
    if len(bad) > SHOWN:
        lines.append(f"  and {len(bad) - SHOWN} more")
    lines.append(f"A good row: {json.dumps(example, ensure_ascii=False)}")
    raise DataError("\n".join(lines))


def short(value: Any, width: int = 60) -> str:
    """repr on one line, cut to width characters."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def column_names(rows: Iterable[Row]) -> tuple[str, ...]:
    """All keys in order of first appearance; rows of jsonl may differ."""
    return tuple(dict.fromkeys(key for row in rows for key in row))

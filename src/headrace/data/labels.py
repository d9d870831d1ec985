"""Label values -> class ids or numbers, with names that are saved with the model.

Names are sorted, so that ids do not depend on row order. Knows values only, not texts or tokens.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.data.table import BadRow, Row, Table, raise_bad_rows
from headrace.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The classes of a problem, or None names for regression."""

    names: tuple[str, ...] | None

    @property
    def num_labels(self) -> int:
        """What goes into the model's config: classes, or 1 for regression."""
        return 1 if self.names is None else len(self.names)

    @property
    def id2label(self) -> dict[int, str]:
        return dict(enumerate(self.names or ()))

    @property
    def label2id(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names or ())}

    @property
    def problem_type(self) -> str:
        return "regression" if self.names is None else "single_label_classification"


def find_labels(
    values: Sequence[Any],
    *,
    declared: Sequence[str] | None = None,
    problem_type: str | None = None,
    column: str = "label",
) -> Labels:
    """Labels from the training values.

    declared: names by id from the source (ClassLabel) or the model's config; they win. Floats mean
    regression unless problem_type says otherwise. Whole numbers are classes named after themselves.
    Raises DataError for one class only, or for nearly as many classes as rows.
    """
    if problem_type == "regression":
        return Labels(names=None)
    if declared is not None:
        return Labels(names=tuple(declared))
    numbers = [_number(value) for value in values]
    if all(number is not None for number in numbers):
        if problem_type is None and any(isinstance(v, float) or not _is_whole(v) for v in values):
            return Labels(names=None)
        names = [str(i) for i in sorted({int(n) for n in numbers if n is not None})]
    else:
        names = sorted({str(value) for value in values})
    if len(names) < 2:
        raise DataError(f"column {column} holds one label only ({names[0]!r}); needs two or more")
    if len(names) > 50 and len(names) > 0.5 * len(values):
        raise DataError(
            f"column {column} holds {len(names)} different labels in {len(values)} rows; set "
            "label_column to the right column, or problem_type: regression for numbers"
        )
    return Labels(names=tuple(names))


def label_names(model: Any) -> list[str] | None:
    """Names by id of a model that is a classifier already; LABEL_0, ... are placeholders.

    model: a transformers model, or None.
    """
    names = getattr(getattr(model, "config", None), "id2label", None) or {}
    ordered = [str(names[i]) for i in sorted(names)]
    placeholders = all(name == f"LABEL_{i}" for i, name in enumerate(ordered))
    return None if placeholders or len(ordered) < 2 else ordered


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or str(value).strip().lstrip("+-").isdigit()


def encode_labels(
    labels: Labels, values: Sequence[Any], *, table: Table, column: str, good_row: Row
) -> np.ndarray:
    """int32 [rows] of class ids, or float32 [rows] of numbers; one DataError for all misfits."""
    encode = _encode_number if labels.names is None else _class_encoder(labels)
    bad: list[BadRow] = []
    encoded: list[float] = []
    for i, value in enumerate(values):
        try:
            encoded.append(encode(value))
        except ValueError as error:
            bad.append(BadRow(where=table.where(i), column=column, value=value, needed=str(error)))
    raise_bad_rows(bad, example=good_row, total=len(table))
    return np.asarray(encoded, dtype=np.float32 if labels.names is None else np.int32)


def _encode_number(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise ValueError("needs a finite number")
    return number


def _class_encoder(labels: Labels) -> Any:
    ids: Mapping[str, int] = labels.label2id
    positional = not all(_is_whole(name) for name in ids)

    def encode(value: Any) -> int:
        if str(value) in ids:
            return ids[str(value)]
        number = _number(value)
        whole = number is not None and number == int(number)
        if whole and str(int(number or 0)) in ids:
            return ids[str(int(number or 0))]
        if whole and positional:  # ids given where names are declared
            if 0 <= int(number or 0) < len(ids):
                return int(number or 0)
            raise ValueError(f"is outside 0..{len(ids) - 1}")
        near = difflib.get_close_matches(str(value), ids, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"is none of the {len(ids)} labels{hint}")

    return encode

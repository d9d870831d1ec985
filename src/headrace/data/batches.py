"""Rows -> arrays of a fixed shape.

Shapes: B = rows, S = the row length of the bucket. Causal: input_ids, labels, position_ids,
segment_ids int32 [B, S]. Classification: input_ids, attention_mask (token_type_ids) int32 [B, S],
labels [B] int32 or float32, weights float32 [B]. Filler rows (index -1) are padding that nothing
counts: segment 0 and labels -100, or weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.data.examples import IGNORED, Examples
from headrace.data.packing import Packing

Batch = dict[str, np.ndarray]
FILLER = -1


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Everything the loader draws from: examples, how they share rows, and each row's length."""

    examples: Examples
    packing: Packing
    bucket_lengths: tuple[int, ...]
    row_buckets: np.ndarray  # index into bucket_lengths, by row
    pad_token_id: int

    def __len__(self) -> int:
        return len(self.packing)

    def batch(self, rows: Sequence[int] | np.ndarray, length: int) -> Batch:
        """These rows (-1 = filler) as arrays of `length` tokens."""
        if self.examples.token_labels is not None:
            return _causal_batch(self, rows, length)
        return _classification_batch(self, rows, length)


def _causal_batch(rows: Rows, chosen: Sequence[int] | np.ndarray, length: int) -> Batch:
    examples = rows.examples
    assert examples.token_labels is not None
    shape = (len(chosen), length)
    batch = {
        "input_ids": np.full(shape, rows.pad_token_id, np.int32),
        "labels": np.full(shape, IGNORED, np.int32),
        "position_ids": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
    }
    for b, row in enumerate(chosen):
        at = 0
        for segment, example in enumerate(rows.packing.row(row) if row != FILLER else (), start=1):
            span = examples.span(int(example))
            stop = at + span.stop - span.start
            batch["input_ids"][b, at:stop] = examples.input_ids[span]
            batch["labels"][b, at:stop] = examples.token_labels[span]
            batch["position_ids"][b, at:stop] = np.arange(stop - at)
            batch["segment_ids"][b, at:stop] = segment
            at = stop
    return batch


def _classification_batch(rows: Rows, chosen: Sequence[int] | np.ndarray, length: int) -> Batch:
    examples = rows.examples
    assert examples.row_labels is not None
    shape = (len(chosen), length)
    batch = {
        "input_ids": np.full(shape, rows.pad_token_id, np.int32),
        "attention_mask": np.zeros(shape, np.int32),
        "labels": np.zeros(len(chosen), examples.row_labels.dtype),
        "weights": np.zeros(len(chosen), np.float32),
    }
    if examples.token_type_ids is not None:
        batch["token_type_ids"] = np.zeros(shape, np.int32)
    for b, row in enumerate(chosen):
        if row == FILLER:
            batch["attention_mask"][b, 0] = 1  # a row that may attend to nothing gives NaN
            continue
        example = int(rows.packing.row(row)[0])
        span = examples.span(example)
        size = span.stop - span.start
        batch["input_ids"][b, :size] = examples.input_ids[span]
        batch["attention_mask"][b, :size] = 1
        batch["labels"][b] = examples.row_labels[example]
        batch["weights"][b] = 1.0
        if examples.token_type_ids is not None:
            batch["token_type_ids"][b, :size] = examples.token_type_ids[span]
    return batch

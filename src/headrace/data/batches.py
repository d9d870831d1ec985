"""Rows -> arrays of a fixed shape.

Shapes: B = rows, S = the row length of the bucket. int32 [B, S] where nothing else is said.
  causal     input_ids, labels, position_ids, segment_ids
  labelled   input_ids, attention_mask (token_type_ids); labels int32 or float32 [B], weights [B]
  tagged     input_ids, attention_mask (token_type_ids), labels
  masked     as tagged; tokens to predict are drawn anew in every epoch
  pairs      the causal four for the chosen answer, and as rejected_* for the other; weights [B]
  unpaired   the causal four; as kl_* the prompt with another row's answer; desirable, weights [B]
weights and desirable are float32. Filler rows (index -1) are padding that nothing counts: segment
0 and labels -100, or weight 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.data.examples import IGNORED, Examples
from headrace.data.masking import Masking
from headrace.data.packing import Packing

Batch = dict[str, np.ndarray]
BatchKind = Literal["causal", "labelled", "tagged", "masked", "pairs", "unpaired"]
FILLER = -1


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Everything the loader draws from: examples, how they share rows, and each row's length.

    desirable: bool by row, of unpaired preference rows. masking: of masked rows.
    """

    kind: BatchKind = "causal"
    examples: Examples
    packing: Packing
    bucket_lengths: tuple[int, ...]
    row_buckets: np.ndarray  # index into bucket_lengths, by row
    pad_token_id: int
    desirable: np.ndarray | None = None
    masking: Masking | None = None
    _others: dict[str, np.ndarray] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.packing)

    def batch(
        self, rows: Sequence[int] | np.ndarray, length: int, *, draw: Sequence[int] = (0, 0)
    ) -> Batch:
        """These rows (-1 = filler) as arrays of `length` tokens. draw: (seed, epoch) of masks."""
        if self.kind == "causal":
            return _causal_batch(self, rows, length)
        if self.kind == "pairs":
            return _pair_batch(self, rows, length)
        if self.kind == "unpaired":
            return _unpaired_batch(self, rows, length)
        batch = _encoder_batch(self, rows, length)
        if self.kind == "masked":
            assert self.masking is not None
            self.masking.apply(batch, rows, draw)
        return batch

    def other(self, row: int) -> int:
        """Another row, drawn once for every row: whose answer stands in for the KL estimate."""
        if "next" not in self._others:
            order = np.random.default_rng(0).permutation(len(self))
            following = np.empty(len(self), np.int64)
            following[order] = np.roll(order, -1)
            self._others["next"] = following
        return int(self._others["next"][row])


def fingerprint(rows: Rows) -> str:
    """Changes when a token, a label, or the way rows are made changes."""
    digest = hashlib.sha256()
    examples = rows.examples
    for array in (
        examples.input_ids, examples.offsets, examples.token_labels, examples.row_labels,
        rows.row_buckets, np.asarray(rows.bucket_lengths),
    ):  # fmt: skip
        if array is not None:
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _empty_causal(rows: Rows, count: int, length: int) -> Batch:
    shape = (count, length)
    return {
        "input_ids": np.full(shape, rows.pad_token_id, np.int32),
        "labels": np.full(shape, IGNORED, np.int32),
        "position_ids": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
    }


def _put(batch: Batch, b: int, at: int, ids: np.ndarray, labels: np.ndarray, segment: int) -> int:
    """One example into row b from position `at`; where the next one may start."""
    stop = at + len(ids)
    batch["input_ids"][b, at:stop] = ids
    batch["labels"][b, at:stop] = labels
    batch["position_ids"][b, at:stop] = np.arange(len(ids))
    batch["segment_ids"][b, at:stop] = segment
    return stop


def _example(rows: Rows, example: int) -> tuple[np.ndarray, np.ndarray]:
    examples, span = rows.examples, rows.examples.span(int(example))
    assert examples.token_labels is not None
    return examples.input_ids[span], examples.token_labels[span]


def _causal_batch(rows: Rows, chosen: Sequence[int] | np.ndarray, length: int) -> Batch:
    batch = _empty_causal(rows, len(chosen), length)
    for b, row in enumerate(chosen):
        at = 0
        for segment, example in enumerate(rows.packing.row(row) if row != FILLER else (), start=1):
            at = _put(batch, b, at, *_example(rows, example), segment)
    return batch


def _weights(chosen: Sequence[int] | np.ndarray) -> np.ndarray:
    return (np.asarray(chosen) != FILLER).astype(np.float32)


def _pair_batch(rows: Rows, chosen: Sequence[int] | np.ndarray, length: int) -> Batch:
    sides = [_empty_causal(rows, len(chosen), length) for _ in range(2)]
    for b, row in enumerate(chosen):
        for side, example in zip(
            sides, rows.packing.row(row) if row != FILLER else (), strict=False
        ):
            _put(side, b, 0, *_example(rows, example), 1)
    rejected = {f"rejected_{name}": value for name, value in sides[1].items()}
    return {**sides[0], **rejected, "weights": _weights(chosen)}


def _unpaired_batch(rows: Rows, chosen: Sequence[int] | np.ndarray, length: int) -> Batch:
    assert rows.desirable is not None
    batch, mixed = (_empty_causal(rows, len(chosen), length) for _ in range(2))
    desirable = np.zeros(len(chosen), np.float32)
    for b, row in enumerate(chosen):
        if row == FILLER:
            continue
        ids, labels = _example(rows, rows.packing.row(row)[0])
        _put(batch, b, 0, ids, labels, 1)
        others, answers = _example(rows, rows.packing.row(rows.other(int(row)))[0])
        prompt = int(np.argmax(labels != IGNORED))
        answer = slice(int(np.argmax(answers != IGNORED)), None)
        ids = np.concatenate([ids[:prompt], others[answer]])[:length]
        labels = np.concatenate([labels[:prompt], answers[answer]])[:length]
        _put(mixed, b, 0, ids, labels, 1)
        desirable[b] = rows.desirable[row]
    kl = {f"kl_{name}": value for name, value in mixed.items()}
    return {**batch, **kl, "desirable": desirable, "weights": _weights(chosen)}


def _encoder_batch(rows: Rows, chosen: Sequence[int] | np.ndarray, length: int) -> Batch:
    """Labels by row, or by token where the examples have them."""
    examples = rows.examples
    by_token = examples.token_labels is not None
    shape = (len(chosen), length)
    batch: Batch = {
        "input_ids": np.full(shape, rows.pad_token_id, np.int32),
        "attention_mask": np.zeros(shape, np.int32),
    }
    if examples.token_type_ids is not None:
        batch["token_type_ids"] = np.zeros(shape, np.int32)
    if by_token:
        batch["labels"] = np.full(shape, IGNORED, np.int32)
    else:
        assert examples.row_labels is not None
        batch["labels"] = np.zeros(len(chosen), examples.row_labels.dtype)
        batch["weights"] = _weights(chosen)
    for b, row in enumerate(chosen):
        if row == FILLER:
            batch["attention_mask"][b, 0] = 1  # a row that may attend to nothing gives NaN
            continue
        example = int(rows.packing.row(row)[0])
        span = examples.span(example)
        size = span.stop - span.start
        batch["input_ids"][b, :size] = examples.input_ids[span]
        batch["attention_mask"][b, :size] = 1
        if examples.token_type_ids is not None:
            batch["token_type_ids"][b, :size] = examples.token_type_ids[span]
        if examples.token_labels is not None:
            batch["labels"][b, :size] = examples.token_labels[span]
        elif examples.row_labels is not None:
            batch["labels"][b] = examples.row_labels[example]
    return batch

"""Batches: contract of shapes and values, order, exact resume, filler rows, processes, prefetch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from headrace.data.batches import Rows
from headrace.data.buckets import bucket_of, choose_buckets
from headrace.data.examples import IGNORED, Examples, ragged
from headrace.data.loader import Loader, LoaderState, Step
from headrace.data.packing import one_each, pack
from headrace.data.prefetch import Prefetch

PAD = 99


def causal_rows(count: int, *, packed: int | None = None, buckets: int = 3, seed: int = 0) -> Rows:
    """Example i holds its own number i + 100 in every token: rows can be told apart."""
    rng = np.random.default_rng(seed)
    ids = [np.full(rng.integers(2, 33), i + 100, np.int32) for i in range(count)]
    labels = [np.concatenate([[IGNORED], part[1:]]) for part in ids]
    flat, offsets = ragged(ids)
    examples = Examples(input_ids=flat, offsets=offsets, token_labels=ragged(labels)[0])
    if packed:
        packing = pack(examples.lengths, row_length=packed)
        lengths, index = (packed,), np.zeros(len(packing), np.int64)
    else:
        packing = one_each(examples.lengths, row_length=32)
        lengths = choose_buckets(examples.lengths, max_buckets=buckets, multiple=8)
        index = bucket_of(examples.lengths, lengths)
    return Rows(
        examples=examples,
        packing=packing,
        bucket_lengths=lengths,
        row_buckets=index,
        pad_token_id=PAD,
    )


def labelled_rows(count: int, *, types: bool = False) -> Rows:
    ids = [np.full(i % 7 + 1, i + 100, np.int32) for i in range(count)]
    flat, offsets = ragged(ids)
    examples = Examples(
        input_ids=flat,
        offsets=offsets,
        row_labels=np.arange(count, dtype=np.int32),
        token_type_ids=np.ones_like(flat) if types else None,
    )
    return Rows(
        kind="labelled",
        examples=examples,
        packing=one_each(examples.lengths, row_length=8),
        bucket_lengths=(4, 8),
        row_buckets=bucket_of(examples.lengths, (4, 8)),
        pad_token_id=PAD,
    )


def seen_examples(steps: list[Step]) -> list[int]:
    found: list[int] = []
    for step in steps:
        ids, real = step.batch["input_ids"], step.batch["segment_ids"] > 0
        found.extend(np.unique(ids[real]).tolist())
    return sorted(found)


def same(a: Step, b: Step) -> bool:
    return a.state == b.state and all(np.array_equal(a.batch[k], b.batch[k]) for k in a.batch)


@pytest.mark.parametrize("packed", [None, 64])
def test_an_epoch_holds_every_example_once_in_the_fixed_shapes(packed: int | None) -> None:
    loader = Loader(rows=causal_rows(101, packed=packed), batch_size=4, accumulation=3)
    steps = list(loader.epoch(LoaderState()))
    assert len(steps) == loader.steps_per_epoch == len(loader.plan(0))
    assert seen_examples(steps) == list(range(100, 201))
    shapes = {step.batch["input_ids"].shape for step in steps}
    assert shapes == set(loader.shapes)
    for step in steps:
        assert {v.dtype for v in step.batch.values()} == {np.dtype(np.int32)}
        assert {v.shape for v in step.batch.values()} == {(3, 4, step.length)}


def test_packed_rows_restart_positions_and_pad_with_segment_zero() -> None:
    rows = causal_rows(30, packed=64)
    batch = rows.batch(range(len(rows)), 64)
    for b in range(len(rows)):
        segments = batch["segment_ids"][b]
        lengths = [int(rows.examples.lengths[i]) for i in rows.packing.row(b)]
        for segment, length in enumerate(lengths, start=1):
            at = segments == segment
            assert at.sum() == length
            assert batch["position_ids"][b][at].tolist() == list(range(length))
            assert (batch["labels"][b][at][0], len(set(batch["input_ids"][b][at]))) == (IGNORED, 1)
            assert (batch["labels"][b][at][1:] == batch["input_ids"][b][at][1:]).all()
        padding = segments == 0
        assert padding.sum() == 64 - sum(lengths)
        assert (batch["input_ids"][b][padding] == PAD).all()
        assert (batch["labels"][b][padding] == IGNORED).all()


@pytest.mark.parametrize("seed", range(4))
def test_at_most_one_step_has_filler_rows(seed: int) -> None:
    loader = Loader(rows=causal_rows(67, seed=seed), batch_size=4, accumulation=2, seed=seed)
    fillers = [int((part == -1).sum()) for _, part in loader.plan(0)]
    assert sum(n > 0 for n in fillers) <= 1
    assert sum(fillers) == -67 % 8


def test_filler_rows_count_for_nothing() -> None:
    rows = causal_rows(3)
    batch = rows.batch([0, -1], 32)
    assert (batch["labels"][1] == IGNORED).all()
    assert (batch["segment_ids"][1] == 0).all()
    batch = labelled_rows(3).batch([2, -1], 8)
    assert batch["weights"].tolist() == [1.0, 0.0]
    assert batch["attention_mask"][1].sum() == 1  # attending to nothing at all would give NaN


def test_classification_batches() -> None:
    loader = Loader(rows=labelled_rows(20, types=True), batch_size=4, accumulation=2, seed=1)
    labels: list[int] = []
    for step in loader.epoch(LoaderState()):
        batch = step.batch
        assert batch["input_ids"].shape == (2, 4, step.length)
        assert batch["labels"].shape == batch["weights"].shape == (2, 4)
        real = batch["weights"] == 1.0
        labels.extend(batch["labels"][real].tolist())
        assert (batch["attention_mask"].sum(-1)[real] == batch["labels"][real] % 7 + 1).all()
        assert (batch["input_ids"][..., 0][real] == batch["labels"][real] + 100).all()
        assert (batch["token_type_ids"][batch["attention_mask"] == 0] == 0).all()
        assert step.num_supervised == real.sum()
    assert sorted(labels) == list(range(20))


def test_order_depends_on_seed_and_epoch_only() -> None:
    rows = causal_rows(50)
    first = list(islice(Loader(rows=rows, batch_size=4, seed=1).steps(), 5))
    again = list(islice(Loader(rows=rows, batch_size=4, seed=1).steps(), 5))
    other = list(islice(Loader(rows=rows, batch_size=4, seed=2).steps(), 5))
    assert all(map(same, first, again))
    assert not all(map(same, first, other))
    loader = Loader(rows=rows, batch_size=4, seed=1)
    assert not all(map(same, loader.epoch(LoaderState()), loader.epoch(LoaderState(epoch=1))))


@pytest.mark.parametrize("packed", [None, 64])
def test_resume_continues_exactly_from_any_state(packed: int | None) -> None:
    loader = Loader(rows=causal_rows(40, packed=packed), batch_size=2, accumulation=2, seed=3)
    total = 2 * loader.steps_per_epoch + 3
    whole = list(islice(loader.steps(), total))
    for cut in range(1, total):
        resumed = islice(loader.steps(whole[cut - 1].state), total - cut)
        assert all(map(same, whole[cut:], resumed))
    assert whole[loader.steps_per_epoch - 1].state == LoaderState(epoch=1, step=0)


def test_resume_builds_none_of_the_steps_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = Rows.batch

    def counted(self: Rows, rows: np.ndarray, length: int, **draw: Any) -> dict[str, np.ndarray]:
        built.append(length)
        return build(self, rows, length, **draw)

    monkeypatch.setattr(Rows, "batch", counted)
    loader = Loader(rows=causal_rows(40), batch_size=2)
    next(loader.steps(LoaderState(epoch=3, step=7)))
    assert len(built) == 1


def test_evaluation_order_is_the_row_order() -> None:
    loader = Loader(rows=causal_rows(20, buckets=1), batch_size=8, shuffle=False)
    ids = np.concatenate([part for _, part in loader.plan(0)])
    assert ids.tolist() == [*range(20), -1, -1, -1, -1]


def test_processes_share_every_micro_batch() -> None:
    rows = causal_rows(40)
    whole = Loader(rows=rows, batch_size=4, accumulation=2, seed=5)
    parts = [
        Loader(rows=rows, batch_size=4, accumulation=2, seed=5, process=(i, 2)) for i in range(2)
    ]
    for step, left, right in zip(
        whole.epoch(LoaderState()), *(p.epoch(LoaderState()) for p in parts), strict=True
    ):
        for key, value in step.batch.items():
            joined = np.concatenate([left.batch[key], right.batch[key]], axis=1)
            assert np.array_equal(value, joined)
        assert step.num_supervised == left.num_supervised + right.num_supervised
    assert parts[0].shapes == tuple((a, b // 2, s) for a, b, s in whole.shapes)
    with pytest.raises(ValueError, match="needs a multiple of 3"):
        Loader(rows=rows, batch_size=4, process=(0, 3))


def test_counts() -> None:
    loader = Loader(rows=causal_rows(33), batch_size=4)
    steps = list(loader.epoch(LoaderState()))
    assert sum(step.num_tokens for step in steps) == loader.rows.examples.num_tokens
    assert sum(step.num_supervised for step in steps) == loader.rows.examples.num_supervised


def test_prefetch_keeps_order_and_ends() -> None:
    with Prefetch(range(100), size=3) as items:
        assert list(items) == list(range(100))
        assert next(items, None) is None


def test_prefetch_raises_the_error_where_the_item_would_have_come() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk is gone")

    with Prefetch(broken()) as items:
        assert next(items) == 1
        with pytest.raises(OSError, match="disk is gone"):
            next(items)


def test_prefetch_is_bounded_and_stops_when_left_early() -> None:
    made: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            made.append(len(made))
            yield made[-1]

    with pytest.raises(KeyboardInterrupt), Prefetch(endless(), size=2) as items:
        assert next(items) == 0
        time.sleep(0.2)
        assert len(made) <= 4  # one taken, two ready, one waiting to be put
        raise KeyboardInterrupt
    count = len(made)
    time.sleep(0.1)
    assert len(made) == count
    assert not [t for t in threading.enumerate() if t.name == "headrace-prefetch"]

"""Rows that are prepared while others are trained on: order, resuming, errors, how far ahead."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import byte_tokenizer

from headrace.config import SFTConfig
from headrace.data import growing
from headrace.data.batches import Batch
from headrace.data.growing import PieceLoader, growing_dataset
from headrace.data.loader import LoaderState
from headrace.data.stream import prepared_pieces, streamed_dataset
from headrace.errors import CheckpointError, DataError

ROWS = [{"prompt": f"{i:03d}", "completion": "x" * (i % 7 + 1)} for i in range(60)]


def config_for(path: Path, rows: list[dict[str, Any]] = ROWS) -> SFTConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SFTConfig(
        dataset_name=str(path), dataset_streaming=True, max_length=24, max_steps=10, seed=3,
        per_device_train_batch_size=2,
    )  # fmt: skip


def loader_for(config: SFTConfig, rows: int = 2) -> PieceLoader:
    data = growing_dataset(config, byte_tokenizer(), piece=8)
    return PieceLoader(rows=data.growing, batch_size=1, accumulation=rows, seed=config.seed)


def texts(batch: Batch) -> list[str]:
    """The examples of a step."""
    ids, segments = (batch[n].reshape(-1, 24) for n in ("input_ids", "segment_ids"))
    found = []
    for row, marks in zip(ids, segments, strict=True):
        for segment in range(1, int(marks.max()) + 1):
            found.append(byte_tokenizer().decode(row[marks == segment].tolist()))
    return found


def test_every_example_comes_once_an_epoch_and_the_report_is_that_of_the_whole(
    tmp_path: Path,
) -> None:
    config = config_for(tmp_path / "rows.jsonl")
    loader = loader_for(config)
    assert loader.steps_per_epoch is None
    epochs = []
    for epoch in range(2):
        steps = list(loader.epoch(LoaderState(epoch=epoch)))
        assert len(steps) == loader.steps_per_epoch
        assert steps[-1].state == LoaderState(epoch=epoch + 1)
        seen = [text for step in steps for text in texts(step.batch)]
        assert len(seen) == len(set(seen)) == 60
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    report = loader.rows.report()
    assert report is not None and loader.rows.report() is None, "it is said once"
    whole = streamed_dataset(config, byte_tokenizer(), piece=8).report
    for name in ("rows_read", "tokens_after", "supervised", "lengths", "lossless_max_length"):
        assert getattr(report, name) == getattr(whole, name), name


def test_going_on_anywhere_gives_the_batches_that_would_have_come(tmp_path: Path) -> None:
    config = config_for(tmp_path / "rows.jsonl")
    whole = list(itertools.islice(loader_for(config).steps(), 20))
    for at in (1, 5, 13):
        rest = itertools.islice(loader_for(config).steps(whole[at - 1].state), 3)
        for ours, theirs in zip(rest, whole[at:], strict=False):
            assert ours.state == theirs.state
            for name, array in ours.batch.items():
                assert np.array_equal(array, theirs.batch[name])


def test_the_first_step_waits_for_the_first_piece_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, made = threading.Event(), list[int]()

    def gated(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for number, part in enumerate(prepared_pieces(*args, **kwargs)):
            assert number == 0 or gate.wait(20)
            made.append(number)
            yield part

    monkeypatch.setattr(growing, "prepared_pieces", gated)
    loader = loader_for(config_for(tmp_path / "rows.jsonl"), rows=1)
    steps = loader.steps()
    next(steps)
    assert made == [0], "a step came while the second piece was not there"
    gate.set()
    threading.Event().wait(0.3)
    assert max(made) <= growing.AHEAD + 1, "no further ahead than that"
    assert loader.rows.known_rows is None
    list(loader.epoch(LoaderState()))
    assert loader.rows.known_rows is not None


def test_a_bad_row_is_raised_where_its_piece_comes(tmp_path: Path) -> None:
    rows = [*ROWS[:30], {"prompt": 3, "completion": None}]
    loader = loader_for(config_for(tmp_path / "rows.jsonl", rows))
    steps = loader.steps()
    next(steps)
    with pytest.raises(DataError, match=r"rows\.jsonl, row 31"):
        list(steps)


def test_other_rows_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    first = loader_for(config_for(tmp_path / "rows.jsonl"))
    list(itertools.islice(first.steps(), 4))
    changed = [*ROWS[:20], {"prompt": "new", "completion": "row"}, *ROWS[21:]]
    second = loader_for(config_for(tmp_path / "rows.jsonl", changed))
    second.rows.expect(first.rows.fingerprints)
    steps = second.steps()
    next(steps)
    with pytest.raises(CheckpointError, match=r"piece 3 of .* has other rows"):
        list(itertools.islice(steps, 5))

"""Data larger than memory: read, tokenised and written to disk in pieces, then mapped.

Rows exist a piece at a time; what stays in memory is one length a row. The result is an ordinary
Dataset whose arrays are files, so packing, order and resuming are those of any other run; or the
pieces one by one, for training that starts with the first (growing.py).

Knows: how each kind of file is read in pieces. Does not know: batches, the loop.
"""

from __future__ import annotations

import csv
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from headrace.config import TrainConfig
from headrace.data.buckets import round_up
from headrace.data.dataset import (
    LONGEST_CHOSEN,
    Dataset,
    choose_max_length,
    length_policy,
    make_report,
    pad_token_id,
    shape_rows,
)
from headrace.data.examples import Examples
from headrace.data.formats import Format, detect_causal
from headrace.data.policy import Outcome, apply_policy
from headrace.data.prepare import decoded_example, tokenize_causal
from headrace.data.read import files_of_split, local_files, parse_split
from headrace.data.report import DataReport, length_percentiles
from headrace.data.table import Row, Table, column_names, short
from headrace.errors import DataError

PIECE = 10_000  # rows in memory at a time


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A piece, tokenised and cut. lengths: tokens before cutting; example: decoded, with marks."""

    table: Table
    form: Format
    examples: Examples
    lengths: np.ndarray
    outcome: Outcome
    max_length: int
    notes: list[str]
    example: tuple[tuple[str, bool], ...]


def prepared_pieces(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int = LONGEST_CHOSEN,
    piece: int = PIECE,
) -> Iterator[Prepared]:
    """The rows of `dataset_name`, tokenised in pieces of `piece` rows.

    max_length is chosen from the first piece when it is not set. Raises DataError as
    causal_dataset does, at the first piece that has bad rows.
    """
    source, size = str(config.dataset_name), config.max_length or 0
    form: Format | None = None
    for table in tables(source, config, piece=piece):
        form = form or detect_causal(table, text_column=config.text_column)
        chat = form.kind in ("messages", "sharegpt")
        answers = config.assistant_only_loss if chat else config.completion_only_loss
        tokens, notes = tokenize_causal(
            table, form, tokenizer, answers_only=answers, use_template=config.apply_chat_template
        )
        lengths = np.asarray([len(row.input_ids) for row in tokens])
        size = size or choose_max_length(config, lengths, limit, packing=config.packing)
        examples, outcome = apply_policy(tokens, length_policy(config, size), table=table)
        yield Prepared(
            table=table, form=form, examples=examples, lengths=lengths, outcome=outcome,
            max_length=size, notes=notes, example=decoded_example(examples, tokenizer),
        )  # fmt: skip
    if form is None:
        raise DataError(f"{source} holds no rows; give a file with at least one")


def streamed_dataset(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int = LONGEST_CHOSEN,
    piece: int = PIECE,
    folder: Path | None = None,
) -> Dataset:
    """The training rows of `dataset_name` for next-token training, prepared in pieces.

    folder: where the arrays go; a temporary folder that is removed with the process by default.
    Raises what prepared_pieces raises.
    """
    arrays, totals = Arrays(folder or temporary_folder()), Totals(config, piece)
    for part in prepared_pieces(config, tokenizer, limit=limit, piece=piece):
        arrays.add(part.examples)
        totals.add(part)
    rows, shape = shape_rows(
        arrays.examples(), config, pad_token_id(tokenizer), totals.max_length,
        packing=config.packing, kind="causal",
    )  # fmt: skip
    return Dataset(rows=rows, report=totals.report(shape))


def temporary_folder() -> Path:
    """A folder that is removed with the process."""
    holder = tempfile.TemporaryDirectory(prefix="headrace-data-")
    _FOLDERS.append(holder)
    return Path(holder.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # kept until the process ends


class Totals:
    """The report of all pieces that were added."""

    def __init__(self, config: TrainConfig, piece: int) -> None:
        self._config, self._piece = config, piece
        self._first: DataReport | None = None
        self._lengths: list[np.ndarray] = []
        self.max_length = 0

    def add(self, part: Prepared) -> None:
        now = make_report(
            part.table, part.form, part.lengths, part.examples, part.outcome, self._config,
            name="train", max_length=part.max_length, notes=part.notes, example=part.example,
        )  # fmt: skip
        self._lengths.append(part.lengths)
        if self._first is None:
            self._first, self.max_length = now, part.max_length
            return
        summed = (
            "rows_read", "rows_kept", "rows_cut", "rows_dropped", "examples", "tokens_before",
            "tokens_after",
        )  # fmt: skip
        sums = {name: getattr(self._first, name) + getattr(now, name) for name in summed}
        trained = (self._first.supervised or 0) + (now.supervised or 0)
        self._first = replace(self._first, **sums, supervised=trained)

    def report(self, note: str) -> DataReport:
        """Everything so far; `note` says how rows were shaped."""
        assert self._first is not None
        lengths = np.concatenate(self._lengths)
        return replace(
            self._first,
            lengths=length_percentiles(lengths),
            lossless_max_length=round_up(int(lengths.max()), self._config.pad_to_multiple_of),
            notes=(*self._first.notes, f"read in pieces of {self._piece:,} rows", note),
        )


class Arrays:
    """Flat int32 files that grow by examples, and are read as if they were in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lengths: list[np.ndarray] = []
        for name in ("input_ids", "labels"):
            (folder / f"{name}.bin").write_bytes(b"")

    def add(self, examples: Examples) -> Examples:
        """Write these at the end; returns them as they are on disk."""
        assert examples.token_labels is not None
        start = sum(int(lengths.sum()) for lengths in self._lengths)
        self._lengths.append(examples.lengths)
        arrays = {"input_ids": examples.input_ids, "labels": examples.token_labels}
        for name, array in arrays.items():
            with (self._folder / f"{name}.bin").open("ab") as file:
                array.astype(np.int32).tofile(file)
        return self._mapped(examples.lengths, start)

    def lengths(self) -> np.ndarray:
        """Tokens of every example."""
        return np.concatenate(self._lengths)

    def examples(self) -> Examples:
        """All of them."""
        return self._mapped(self.lengths(), 0)

    def _mapped(self, lengths: np.ndarray, start: int) -> Examples:
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        count = int(offsets[-1])
        ids, labels = (
            np.memmap(self._folder / f"{name}.bin", np.int32, "r", start * 4, (count,))
            if count
            else np.zeros(0, np.int32)
            for name in ("input_ids", "labels")
        )
        return Examples(input_ids=ids, offsets=offsets, token_labels=labels)


def tables(source: str, config: TrainConfig, *, piece: int = PIECE) -> Iterator[Table]:
    """The rows of a split as tables of at most `piece` rows."""
    wanted = parse_split(config.dataset_train_split)
    files = local_files(source)
    if wanted.start is not None or (wanted.stop or "").endswith("%"):
        raise DataError(
            f"split {config.dataset_train_split!r}: a stream has no length; only train[:1000] works"
        )
    if files is None:
        rows: Iterable[tuple[str, Row]] = _hub_rows(source, config, wanted.name)
    else:
        chosen = files_of_split(files, wanted.name, source)
        rows = itertools.chain.from_iterable(_file_rows(path) for path in chosen)
    if wanted.stop is not None:
        rows = itertools.islice(rows, int(wanted.stop))
    stream = iter(rows)
    while part := list(itertools.islice(stream, piece)):
        yield _table(source, part)


def _table(source: str, part: list[tuple[str, Row]]) -> Table:
    rows = [row for _, row in part]
    return Table(rows=rows, names=column_names(rows), source=source, where=lambda i: part[i][0])


def _file_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(place, row) of every row of a file; one row is in memory, or one batch of columns."""
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        yield from _json_lines(path)
    elif kind in (".csv", ".tsv"):
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t" if kind == ".tsv" else ",")
            for number, row in enumerate(reader, start=1):
                yield f"{path.name}, row {number}", row
    elif kind == ".txt":
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path.name}, row {number}", {"text": line.rstrip("\n")}
    elif kind == ".parquet":
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(1000)
        yield from _batches(path, batches)
    elif kind == ".arrow":
        with pa.memory_map(str(path)) as memory:
            yield from _batches(path, pyarrow.ipc.open_stream(memory))
    else:
        raise DataError(
            f"{path} cannot be streamed: a {kind or 'nameless'} file is read whole. Convert it to "
            ".jsonl or .parquet, or leave dataset_streaming out"
        )


def _batches(path: Path, batches: Iterable[Any]) -> Iterator[tuple[str, Row]]:
    numbers = itertools.count(1)
    for batch in batches:
        for row in batch.to_pylist():
            yield f"{path.name}, row {next(numbers)}", row


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path.name}, row {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                reason = f"{error.msg} at column {error.colno}: {short(line.strip())}"
                raise DataError(f"{place}: {reason}; needs one JSON object a line") from error
            if not isinstance(row, dict):
                raise DataError(f"{place}: {short(row)} is no object; needs one a line")
            yield place, row


def _hub_rows(source: str, config: TrainConfig, split: str) -> Iterator[tuple[str, Row]]:
    import datasets

    try:
        found: Any = datasets.load_dataset(
            source, config.dataset_config, split=split, streaming=True
        )
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise DataError(
            f"{source} is no local file or folder, and as a hub dataset it failed: "
            f"{str(error).splitlines()[0]}"
        ) from error
    for number, row in enumerate(found, start=1):
        yield f"{source} {split}, row {number}", row

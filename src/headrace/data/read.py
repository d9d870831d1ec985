"""Files, folders, globs and hub ids -> Table.

Local paths are looked at first; only a name that is not there and looks like a hub id goes to
`datasets`. json, jsonl, csv and txt are read here, tolerant of mixed types and exact about rows,
because `datasets` infers one schema and reports neither file nor row. Knows files; what the columns
mean stands in formats.py.
"""

from __future__ import annotations

import csv
import glob
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from headrace.data.table import SHOWN, Row, Table, column_names, short
from headrace.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

SPLIT_NAMES = ("train", "training", "test", "validation", "valid", "val", "dev", "eval")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


class SplitSlice(NamedTuple):
    """`train[:10%]` in parts; slice(n) are the row bounds for n rows."""

    name: str
    start: str | None
    stop: str | None

    def bounds(self, num_rows: int) -> tuple[int, int]:
        def place(text: str | None, default: int) -> int:
            if text is None:
                return default
            share = text.endswith("%")
            number = round(num_rows * int(text[:-1]) / 100) if share else int(text)
            return max(0, number + num_rows) if number < 0 else min(number, num_rows)

        return place(self.start, 0), place(self.stop, num_rows)


def parse_split(text: str) -> SplitSlice:
    """`train`, `train[:1000]`, `train[10%:20%]`; DataError otherwise."""
    match = _SPLIT.fullmatch(text.strip())
    if match is None:
        raise DataError(
            f"split {text!r} is not understood; write train, train[:1000] or train[:10%]"
        )
    return SplitSlice(match["name"], match["start"], match["stop"])


def read_table(source: str, *, split: str = "train", config: str | None = None) -> Table:
    """Read one split of a file, folder, glob or hub dataset.

    A single file has no splits: any split name means the whole file, and a slice applies to it.
    Raises DataError that names the files, splits or rows in question.
    """
    wanted = parse_split(split)
    files = local_files(source)
    if files is None:
        return from_dataset(_load_hub(source, config, split), source=f"{source} {split}")
    if files and files[0].name == "state.json":
        table = from_dataset(_load_from_disk(files[0].parent), source=source)
    else:
        table = concatenate(
            [_read_file(file) for file in files_of_split(files, wanted.name, source)], source
        )
    if not len(table):
        raise DataError(f"{source} holds no rows; give a file with at least one")
    start, stop = wanted.bounds(len(table))
    if start >= stop:
        raise DataError(f"split {split!r} of {source} is empty; it has {len(table)} rows")
    return table if (start, stop) == (0, len(table)) else table.slice(start, stop)


def local_splits(source: str) -> tuple[str, ...]:
    """Split names a local folder or glob offers by its file names; () for files and hub ids."""
    files = local_files(source) or []
    return tuple(dict.fromkeys(s for s in map(_split_of, files) if s)) if len(files) > 1 else ()


def local_files(source: str) -> list[Path] | None:
    """The files behind a local path or glob; None when `source` can only be a hub id."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            return [path / "state.json"]
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix.lower() in READERS)
        if not files:
            raise DataError(f"folder {source} holds no data file; known are {_known_suffixes()}")
        return files
    if glob.has_magic(source):
        files = [Path(f) for f in sorted(glob.glob(str(path), recursive=True)) if Path(f).is_file()]
        if not files:
            raise DataError(f"no file matches {source}")
        return files
    if _HUB_ID.fullmatch(source) and path.suffix.lower() not in READERS:
        return None
    raise DataError(f"{source} does not exist; give a file, folder, glob or hub id (owner/name)")


def files_of_split(files: Sequence[Path], name: str, source: str) -> Sequence[Path]:
    """The files that hold one split; DataError names the splits there are."""
    if len(files) == 1:
        return files
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file), []).append(file)
    if set(by_split) == {None}:
        if name == "train":
            return files
        raise DataError(f"{source} has no split {name!r}; its file names name no splits")
    if name not in by_split:
        there = ", ".join(sorted(split for split in by_split if split))
        raise DataError(f"{source} has no split {name!r}; there are {there}")
    return by_split[name]


def _split_of(file: Path) -> str | None:
    """train-00000-of-00002.parquet -> train; also a folder named after the split."""
    stem = re.split(r"[-_.]", file.stem.lower())[0]
    return next((word for word in (stem, file.parent.name.lower()) if word in SPLIT_NAMES), None)


def _read_file(path: Path) -> Table:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} has an unknown ending {path.suffix!r}; known are {_known_suffixes()}"
        )
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {error.start}; convert it to UTF-8"
        ) from error
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def concatenate(tables: Sequence[Table], source: str, *, keep_parts: bool = False) -> Table:
    """All rows one after the other. keep_parts: each table has a format of its own."""
    if len(tables) == 1 and not keep_parts:
        return tables[0]
    origin = [(table, i) for table in tables for i in range(len(table))]
    return Table(
        rows=[table.rows[i] for table, i in origin],
        names=tuple(dict.fromkeys(name for table in tables for name in table.names)),
        source=source,
        where=lambda i: origin[i][0].where(origin[i][1]),
        parts=tuple(tables) if keep_parts else (),
    )


def _table(path: Path, rows: Sequence[Row], numbers: Sequence[int] | None = None) -> Table:
    def where(i: int) -> str:
        return f"{path.name}, row {numbers[i] if numbers else i + 1}"

    return Table(rows=rows, names=column_names(rows), source=str(path), where=where)


def _read_jsonl(path: Path) -> Table:
    """One JSON object a line; blank lines are skipped; every bad line is reported."""
    rows: list[Row] = []
    numbers: list[int] = []
    problems: list[str] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                problems.append(
                    f"row {number}: {error.msg} at column {error.colno}: {short(line.strip())}"
                )
                continue
            if not isinstance(row, dict):
                problems.append(f"row {number}: {short(row)} is no object")
                continue
            rows.append(row)
            numbers.append(number)
    _raise_problems(path, problems, 'each line needs to be one JSON object such as {"text": "..."}')
    return _table(path, rows, numbers)


def _read_json(path: Path) -> Table:
    """A list of objects, {"data": [...]}, or JSON lines in a file called .json."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _read_jsonl(path)
        line = f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{path} is not JSON: {error.msg} at {line}") from error
    rows = _rows_of(content)
    if rows is None:
        raise DataError(f"{path} holds {short(content)}; needs a list of objects")
    problems = [
        f"row {number}: {short(row)} is no object"
        for number, row in enumerate(rows, start=1)
        if not isinstance(row, dict)
    ]
    _raise_problems(path, problems, 'each element needs to be an object such as {"text": "..."}')
    return _table(path, rows)


def _rows_of(content: Any) -> list[Any] | None:
    """The list itself, or the one list in an object, or the object as the only row."""
    if isinstance(content, list):
        return content
    if not isinstance(content, dict):
        return None
    lists = [value for value in content.values() if isinstance(value, list)]
    if isinstance(content.get("data"), list):
        return content["data"]
    return lists[0] if len(content) == 1 and lists else [content]


def _read_csv(path: Path) -> Table:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        header = next(reader, None)
        if not header:
            raise DataError(f"{path} is empty; the first line needs to name the columns")
        doubles = sorted({name for name in header if header.count(name) > 1})
        if doubles:
            raise DataError(f"{path} names columns twice: {', '.join(doubles)}; rename them")
        rows: list[Row] = []
        problems: list[str] = []
        for number, cells in enumerate(filter(None, reader), start=1):
            if len(cells) != len(header):
                problems.append(
                    f"row {number} (line {reader.line_num}): {len(cells)} cells: {short(cells)}"
                )
                continue
            rows.append(dict(zip(header, cells, strict=True)))
    _raise_problems(path, problems, f"each row needs {len(header)} cells; quote text with commas")
    return _table(path, rows)


def _read_txt(path: Path) -> Table:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    numbers = [i for i, line in enumerate(lines, start=1) if line.strip()]
    return _table(path, [{"text": lines[i - 1]} for i in numbers], numbers)


def _read_parquet(path: Path) -> Table:
    return _table(path, pyarrow.parquet.read_table(path).to_pylist())


def _read_arrow(path: Path) -> Table:
    with pa.memory_map(str(path)) as source:
        try:
            table = pyarrow.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:  # two layouts share the ending: stream (datasets' caches) and file
            table = pyarrow.ipc.open_file(source).read_all()
    return _table(path, table.to_pylist())


READERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_txt,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}


def _known_suffixes() -> str:
    return ", ".join(suffix[1:] for suffix in READERS)


def _raise_problems(path: Path, problems: Sequence[str], needed: str) -> None:
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:SHOWN])
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        count = "1 bad row" if len(problems) == 1 else f"{len(problems)} bad rows"
        raise DataError(f"{path} has {count}; {needed}\n{shown}{more}")


def from_dataset(dataset: Dataset, *, source: str) -> Table:
    """A `datasets.Dataset` as a Table; ClassLabel columns keep their names."""
    from datasets import ClassLabel

    features = dataset.features or {}
    kinds = {k: getattr(v, "feature", v) for k, v in features.items()}  # of a list: its elements
    names = {k: v.names for k, v in kinds.items() if isinstance(v, ClassLabel)}
    return Table(
        rows=dataset.to_list(),
        names=tuple(dataset.column_names),
        source=source,
        where=lambda i: f"{source}, row {i + 1}",
        class_names=names,
    )


def from_python(data: Any, *, source: str = "train_dataset") -> Table:
    """What a trainer is given in Python: a Table, a datasets.Dataset, or a sequence of dicts."""
    if isinstance(data, Table):
        return data
    if hasattr(data, "column_names") and hasattr(data, "to_list"):
        return from_dataset(data, source=source)
    rows = list(data)
    wrong = next((row for row in rows if not isinstance(row, dict)), None)
    if wrong is not None:
        raise DataError(f"{source} holds {short(wrong)}; needs dicts or a datasets.Dataset")
    return Table(
        rows=rows, names=column_names(rows), source=source, where=lambda i: f"{source}, row {i + 1}"
    )


def _load_hub(source: str, config: str | None, split: str) -> Dataset:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    try:
        return datasets.load_dataset(source, config, split=split)  # type: ignore[return-value]
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{source} is no local file or folder, and as a hub dataset it failed: {reason}"
        ) from error


def _load_from_disk(folder: Path) -> Dataset:
    import datasets

    return datasets.load_from_disk(str(folder))  # type: ignore[return-value]

"""Files, folders, globs, splits -> Table; every bad input names file and row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from headrace.data.read import from_python, local_splits, parse_split, read_table
from headrace.errors import DataError

ROWS = [{"text": "a"}, {"text": "b"}, {"text": "c"}]


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def make_file(folder: Path, kind: str) -> str:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind in ("arrow", "file.arrow"):
        make = pyarrow.ipc.new_stream if kind == "arrow" else pyarrow.ipc.new_file
        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        text = {
            "jsonl": "\n".join(map(json.dumps, ROWS)),
            "json": json.dumps(ROWS, indent=1),
            "csv": "text\na\nb\nc\n",
            "tsv": "text\na\nb\nc\n",
            "txt": "a\n\nb\nc\n",
        }[kind]
        path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "csv", "tsv", "txt", "parquet", "arrow", "file.arrow"]
)
def test_every_file_kind_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    table = read_table(make_file(tmp_path, kind))
    assert [dict(row) for row in table.rows] == ROWS
    assert table.names == ("text",)
    assert table.where(1) == f"rows.{kind}, row {3 if kind == 'txt' else 2}"


def test_jsonl_takes_mixed_types_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '\ufeff{"x": 1}\n\n{"x": "one", "y": [1, "b"]}\n')
    table = read_table(path)
    assert [dict(row) for row in table.rows] == [{"x": 1}, {"x": "one", "y": [1, "b"]}]
    assert table.names == ("x", "y")
    assert table.where(1) == "a.jsonl, row 3"  # the line, blank ones counted


def test_json_lines_in_a_json_file_and_a_list_inside_an_object(tmp_path: Path) -> None:
    lines = write(tmp_path, "lines.json", "\n".join(map(json.dumps, ROWS)))
    nested = write(tmp_path, "nested.json", json.dumps({"version": 1, "data": ROWS}))
    assert len(read_table(lines)) == len(read_table(nested)) == 3


def test_bad_jsonl_lines_are_all_reported_with_their_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "bad.jsonl", '{"text": "a"}\n{"text": "b"\n[1]\n')
    with pytest.raises(DataError) as error:
        read_table(path)
    message = str(error.value)
    assert "2 bad rows" in message
    assert "row 2: " in message
    assert "row 3: [1] is no object" in message


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "[{]", "is not JSON"),
        ("a.json", "3", "needs a list of objects"),
        ("a.json", "[1, 2]", "2 bad rows"),
        ("a.json", "[]", "holds no rows"),
        ("a.jsonl", "", "holds no rows"),
        ("a.csv", "", "is empty"),
        ("a.csv", "text,text\na,b\n", "names columns twice: text"),
        ("a.csv", "text,label\nhello, world,1\n", r"row 1 \(line 2\): 3 cells"),
        ("a.xlsx", "x", "unknown ending '.xlsx'"),
        ("a.parquet", "not parquet", "cannot be read"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_table(write(tmp_path, name, text))


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("text\ncafé\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        read_table(str(path))


def test_csv_with_quotes_commas_and_newlines(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'text,label\n"one, two\nthree",1\n')
    assert read_table(path).rows == [{"text": "one, two\nthree", "label": "1"}]


@pytest.mark.parametrize(
    ("split", "texts"),
    [
        ("train", "abc"),
        ("train[:2]", "ab"),
        ("train[1:]", "bc"),
        ("train[-1:]", "c"),
        ("train[:34%]", "a"),
        ("train[1:2]", "b"),
    ],
)
def test_split_slices(tmp_path: Path, split: str, texts: str) -> None:
    table = read_table(make_file(tmp_path, "jsonl"), split=split)
    assert "".join(row["text"] for row in table.rows) == texts
    assert table.where(0).endswith(f"row {'abc'.index(texts[0]) + 1}")


@pytest.mark.parametrize("split", ["train[", "train[1]", "", "a b"])
def test_a_split_that_is_not_understood(split: str) -> None:
    with pytest.raises(DataError, match="is not understood"):
        parse_split(split)


def test_an_empty_slice_says_how_many_rows_there_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty; it has 3 rows"):
        read_table(make_file(tmp_path, "jsonl"), split="train[5:9]")


def test_folder_splits_by_file_name_and_shards_are_joined(
    tmp_path: Path, jsonl: Callable[..., str]
) -> None:
    jsonl([{"text": "1"}], "train-00000-of-00002.jsonl")
    jsonl([{"text": "2"}], "train-00001-of-00002.jsonl")
    jsonl([{"text": "3"}], "test.jsonl")
    (tmp_path / "README.md").write_text("not data")
    table = read_table(str(tmp_path))
    assert [row["text"] for row in table.rows] == ["1", "2"]
    assert table.where(1) == "train-00001-of-00002.jsonl, row 1"
    assert [row["text"] for row in read_table(str(tmp_path), split="test").rows] == ["3"]
    assert local_splits(str(tmp_path)) == ("test", "train")
    with pytest.raises(DataError, match="no split 'validation'; there are test, train"):
        read_table(str(tmp_path), split="validation")
    assert len(read_table(str(tmp_path / "train*.jsonl"))) == 2


def test_folder_without_split_names_is_all_training_data(
    tmp_path: Path, jsonl: Callable[..., str]
) -> None:
    jsonl([{"text": "1"}], "part1.jsonl")
    jsonl([{"text": "2"}], "part2.jsonl")
    assert len(read_table(str(tmp_path))) == 2
    with pytest.raises(DataError, match="no split 'test'"):
        read_table(str(tmp_path), split="test")


def test_missing_places(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_table(str(tmp_path / "no" / "such.jsonl"))
    with pytest.raises(DataError, match="does not exist"):
        read_table("such.csv")  # a file name is never taken for a hub id
    with pytest.raises(DataError, match="no file matches"):
        read_table(str(tmp_path / "*.jsonl"))
    with pytest.raises(DataError, match="holds no data file"):
        read_table(str(tmp_path))


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\ndetails")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match="no local file or folder, and as a hub dataset it failed"):
        read_table("owner/name")


def test_hub_id_split_and_config_reach_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[object] = []

    def load(name: str, config: str | None, *, split: str) -> datasets.Dataset:
        asked.extend([name, config, split])
        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
        )
        return datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load)
    table = read_table("owner/name", split="train[:2]", config="small")
    assert asked == ["owner/name", "small", "train[:2]"]
    assert table.class_names == {"label": ["no", "yes"]}
    assert len(table) == 2


def test_saved_dataset_folder(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert len(read_table(str(tmp_path / "saved"))) == 3


def test_python_data() -> None:
    assert from_python(ROWS).where(2) == "train_dataset, row 3"
    with pytest.raises(DataError, match="needs dicts"):
        from_python(["just text"])

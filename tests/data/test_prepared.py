"""Mixtures, the cache of prepared data, and data that is read in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import CHATML, byte_tokenizer, turns
from transformers import PreTrainedTokenizerFast

from headrace.config import ClassificationConfig, DPOConfig, SFTConfig, TrainConfig
from headrace.data import TrainingData, load, load_data
from headrace.data.loader import LoaderState
from headrace.data.stream import streamed_dataset
from headrace.errors import ConfigError, DataError

Write = Callable[..., str]
PAIRS = [{"prompt": f"card {i}", "completion": " late" * (i % 5 + 1)} for i in range(40)]
TEXTS = [{"text": f"the capital number {i}"} for i in range(20)]
CHATS = [{"messages": turns(f"question {i}", "Paris")} for i in range(10)]


def steps(data: TrainingData, config: TrainConfig, count: int = 6) -> list[dict[str, np.ndarray]]:
    stream = data.train_loader(config).steps(LoaderState())
    return [next(stream).batch for _ in range(count)]


def same(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> bool:
    return all(
        x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x)
        for x, y in zip(a, b, strict=True)
    )


# -- mixtures ------------------------------------------------------------------------------------


def test_each_part_keeps_its_format_and_its_share(
    jsonl: Write, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = SFTConfig(
        datasets=[
            {"path": jsonl(CHATS, "chats.jsonl"), "type": "chat_template"},
            {"path": jsonl(PAIRS, "pairs.jsonl"), "split": "train[:20]", "weight": 0.5},
            {"dataset_name": jsonl(TEXTS, "texts.jsonl"), "fraction": 2},
        ],
        data_cache_dir=None,
    )
    data = load_data(config, chat_tokenizer)
    report = str(data.train.report)
    assert data.train.report.rows_read == 10 + 10 + 40
    for part in ("messages", "prompt-completion", "text"):
        assert part in report
    decoded = chat_tokenizer.decode(data.train.rows.examples.input_ids)
    assert decoded.count("the capital number 7<") == 2, "a fraction of 2 takes every row twice"
    assert same(steps(data, config), steps(load_data(config, chat_tokenizer), config))


def test_rows_are_held_out_of_every_part(jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    config = SFTConfig(
        datasets=[jsonl(PAIRS, "pairs.jsonl"), jsonl(TEXTS, "texts.jsonl")],
        test_split_size=0.25, eval_strategy="epoch", data_cache_dir=None,
    )  # fmt: skip
    data = load_data(config, tokenizer)
    assert data.eval is not None
    assert (data.train.report.rows_read, data.eval.report.rows_read) == (45, 15)
    assert "card" in tokenizer.decode(data.eval.rows.examples.input_ids)
    assert "capital" in tokenizer.decode(data.eval.rows.examples.input_ids)


def test_wrong_entries_are_all_named(tokenizer: PreTrainedTokenizerFast) -> None:
    config = SFTConfig(datasets=[{"pth": "a.jsonl"}, {"path": "b.jsonl", "fraction": -1}])
    with pytest.raises(ConfigError) as error:
        load_data(config, tokenizer)
    for part in ("pth is unknown; did you mean path", "path is missing", "fraction is -1"):
        assert part in str(error.value)


def test_a_bad_row_names_the_part_it_stands_in(
    jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    bad = jsonl([*TEXTS, {"text": None}], "texts.jsonl")
    config = SFTConfig(datasets=[jsonl(PAIRS, "pairs.jsonl"), bad], data_cache_dir=None)
    with pytest.raises(DataError, match=r"texts\.jsonl, row 21, column text: None"):
        load_data(config, tokenizer)


# -- cache ---------------------------------------------------------------------------------------


def cached(path: str, folder: Path, **settings: Any) -> SFTConfig:
    return SFTConfig(dataset_name=path, data_cache_dir=str(folder), **settings)


def test_the_second_run_tokenises_nothing_and_gives_the_same_steps(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cached(jsonl(PAIRS), tmp_path / "cache", max_length=64, test_split_size=4)
    first = load_data(config, byte_tokenizer())

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("prepared again")

    monkeypatch.setattr(load, "load_tables", fail)
    second = load_data(config, byte_tokenizer())
    assert same(steps(first, config), steps(second, config))
    assert second.eval is not None and first.eval is not None
    assert np.array_equal(second.eval.rows.examples.input_ids, first.eval.rows.examples.input_ids)
    assert "prepared now; the next run reads it from" in str(first.train.report)
    assert "prepared before: read from" in str(second.train.report)
    assert "prepared now" not in str(second.train.report)
    assert second.train.report.rows_kept == first.train.report.rows_kept
    assert second.train.report.example == first.train.report.example


@pytest.mark.parametrize("change", ["rows", "settings", "template", "tokenizer"])
def test_what_the_data_depends_on_makes_another_key(
    change: str, jsonl: Write, tmp_path: Path
) -> None:
    path, tokenizer = jsonl(PAIRS), byte_tokenizer()
    config = cached(path, tmp_path / "cache")
    load_data(config, tokenizer)
    if change == "rows":
        jsonl([{**PAIRS[0], "completion": " lost"}, *PAIRS[1:]])
    elif change == "settings":
        config = config.replace(completion_only_loss=False)
    elif change == "template":
        tokenizer.chat_template = CHATML
    else:
        tokenizer = byte_tokenizer(adds_bos=True)
    assert "prepared before" not in str(load_data(config, tokenizer).train.report)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_damaged_folder_is_made_anew(jsonl: Write, tmp_path: Path) -> None:
    config = cached(jsonl(PAIRS), tmp_path / "cache")
    first = load_data(config, byte_tokenizer())
    (place,) = (tmp_path / "cache").iterdir()
    (place / "train-input_ids.npy").write_bytes(b"broken")
    again = load_data(config, byte_tokenizer())
    assert "prepared before" not in str(again.train.report)
    assert same(steps(first, config), steps(again, config))
    assert "prepared before" in str(load_data(config, byte_tokenizer()).train.report)


def test_an_unwritable_cache_costs_nothing_but_the_cache(jsonl: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = cached(jsonl(PAIRS), tmp_path / "file" / "cache")
    assert len(load_data(config, byte_tokenizer()).train.rows) > 0


def test_labels_and_pairs_come_back_from_the_cache(jsonl: Write, tmp_path: Path) -> None:
    labelled = [{"text": f"card {i}", "label": ("late", "lost")[i % 2]} for i in range(10)]
    pairs = [{"prompt": "a", "chosen": " b", "rejected": " c"}] * 5
    options: dict[str, Any] = {"data_cache_dir": str(tmp_path / "cache")}
    for config in (
        ClassificationConfig(dataset_name=jsonl(labelled, "l.jsonl"), **options),
        DPOConfig(dataset_name=jsonl(pairs, "p.jsonl"), preference_loss="kto", **options),
    ):
        first, second = (load_data(config, byte_tokenizer()) for _ in range(2))
        assert "prepared before" in str(second.train.report)
        assert first.labels == second.labels
        assert same(steps(first, config), steps(second, config))


# -- pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_pieces_give_the_rows_of_the_whole(kind: str, tmp_path: Path, jsonl: Write) -> None:
    path = jsonl(PAIRS)
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet

        path = str(tmp_path / "rows.parquet")
        pyarrow.parquet.write_table(pa.Table.from_pylist(PAIRS), path)
    elif kind == "csv":
        path = str(tmp_path / "rows.csv")
        lines = [f"{row['prompt']},{row['completion']}" for row in PAIRS]
        Path(path).write_text("\n".join(["prompt,completion", *lines]), encoding="utf-8")
    config = SFTConfig(
        dataset_name=path, dataset_streaming=True, max_length=24, data_cache_dir=None
    )
    piece = streamed_dataset(config, byte_tokenizer(), piece=7)
    whole = load_data(config.replace(dataset_streaming=False), byte_tokenizer()).train
    assert isinstance(piece.rows.examples.input_ids, np.memmap)
    for name in ("input_ids", "offsets", "token_labels"):
        assert np.array_equal(
            getattr(piece.rows.examples, name), getattr(whole.rows.examples, name)
        )
    assert np.array_equal(piece.rows.packing.members, whole.rows.packing.members)
    for name in ("rows_read", "rows_kept", "rows_cut", "tokens_before", "lengths"):
        assert getattr(piece.report, name) == getattr(whole.report, name), name


def test_a_stream_trains_and_says_what_it_cannot(jsonl: Write, tmp_path: Path) -> None:
    path = jsonl(PAIRS)
    config = SFTConfig(dataset_name=path, dataset_streaming=True, max_length=24)
    data = load_data(config, byte_tokenizer(), eval_dataset=PAIRS[:3])
    assert len(steps(data, config)) == 6
    assert data.eval is not None
    listed = tmp_path / "rows.json"
    listed.write_text(json.dumps(PAIRS))
    with pytest.raises(DataError, match=r"Convert it to \.jsonl or \.parquet"):
        load_data(config.replace(dataset_name=str(listed)), byte_tokenizer())
    with pytest.raises(DataError, match="a stream has no length"):
        load_data(config.replace(dataset_train_split="train[:50%]"), byte_tokenizer())
    with pytest.raises(ConfigError, match="set eval_dataset_name instead"):
        config.replace(test_split_size=0.1)


def test_a_bad_line_of_a_stream_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    config = SFTConfig(dataset_name=str(path), dataset_streaming=True)
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: Expecting value"):
        load_data(config, byte_tokenizer())

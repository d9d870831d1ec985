"""Data that is broken, odd or huge: said with its place, or taken without harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_samples import CHATML, byte_tokenizer, turns

from headrace.config import SFTConfig
from headrace.data import load_data
from headrace.data.examples import IGNORED
from headrace.errors import DataError

STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}" + CHATML
)


def load(rows: Any, *, template: str = CHATML, **settings: Any) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return load_data(SFTConfig(**settings), tokenizer, train_dataset=rows).train


def test_roles_out_of_order_are_the_templates_to_judge() -> None:
    good, bad = turns("a", "b"), list(reversed(turns("a", "b")))
    with pytest.raises(DataError, match="roles must alternate") as error:
        load([{"messages": good}, {"messages": bad}], template=STRICT)
    assert "train_dataset, row 2, column messages" in str(error.value)
    assert load([{"messages": bad}]).report.rows_kept == 1, "ChatML takes any order"


def test_unknown_roles_name_the_turn() -> None:
    rows = [{"messages": [{"role": 7, "content": "a"}]}]
    with pytest.raises(DataError, match=r"messages\[0\]\.role: 7; needs user, assistant"):
        load(rows)


def test_an_empty_answer_trains_its_end_only_and_is_said() -> None:
    data = load([{"messages": turns("a", "")}, {"messages": turns("a", "b")}])
    examples = data.rows.examples
    trained = examples.token_labels[examples.span(0)]
    assert (trained != IGNORED).sum() == 1
    assert "1 conversations have an empty answer" in str(data.report)


def test_a_conversation_without_an_answer_is_dropped_and_counted() -> None:
    data = load([{"messages": turns("a")}, {"messages": turns("a", "b")}])
    assert (data.report.rows_kept, data.report.rows_dropped) == (1, 1)
    assert "no trained token" in str(data.report)


def test_a_row_of_megabytes(jsonl: Callable[..., str]) -> None:
    path = jsonl([{"text": "the card is late. " * 120_000}, {"text": "the capital"}])
    assert Path(path).stat().st_size > 2_000_000
    config = SFTConfig(dataset_name=path, over_length="drop", max_length=64, data_cache_dir=None)
    report = load_data(config, byte_tokenizer()).train.report
    assert (report.rows_kept, report.rows_dropped) == (1, 1)
    assert report.lengths[-1] > 200_000


def test_broken_utf8_says_where(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff\xfe"}\n')
    config = SFTConfig(dataset_name=str(path), data_cache_dir=None)
    with pytest.raises(DataError, match="is not UTF-8 at byte 27; convert it"):
        load_data(config, byte_tokenizer())


def test_a_column_of_mixed_types_names_its_rows(jsonl: Callable[..., str]) -> None:
    rows = [{"text": "a"}, {"text": 3}, {"text": None}, {"text": ["b"]}]
    config = SFTConfig(dataset_name=jsonl(rows), data_cache_dir=None)
    with pytest.raises(DataError) as error:
        load_data(config, byte_tokenizer())
    text = str(error.value)
    assert "3 of 4 rows cannot be used" in text
    for place in ("row 2, column text: 3", "row 3, column text: None", "row 4, column text: ['b']"):
        assert place in text
    good = text.rpartition("A good row: ")[2]
    assert isinstance(json.loads(good)["text"], str)

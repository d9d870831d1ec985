"""Fixtures: tokenizers, files of rows, and the real data where present."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from data_samples import CHATML, byte_tokenizer
from transformers import PreTrainedTokenizerFast


def data_folder() -> Path | None:
    """The real data, by HEADRACE_DATA or beside the repository."""
    default = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("HEADRACE_DATA", default))
    return folder if folder.is_dir() else None


@pytest.fixture
def real_data() -> Path:
    folder = data_folder()
    if folder is None:
        pytest.skip("needs the real data: set HEADRACE_DATA")
    return folder


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write rows as JSON lines and give the path."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write

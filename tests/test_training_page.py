"""The table of troubles in docs/training.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_named_test_exists() -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    names = re.findall(r"`([a-z]+/test_\w+\.py)(?:::(\w+))?`", text)
    assert len(names) >= 27
    for file, test in names:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in source, f"{file}::{test}"

"""The table of troubles in docs/training.md has a row for each, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_trouble_has_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    table = text.split("## What goes wrong elsewhere")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 27, "as many as the survey has"
    for row in rows:
        names = re.findall(r"`([a-z]+/test_\w+\.py)(?:::(\w+))?`", row)
        assert names, row
        for file, test in names:
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert not test or f"def {test}(" in source, f"{file}::{test}"

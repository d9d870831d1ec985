"""The example of a compiled PyTorch loop learns what it says it learns."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "pytorch_loop" / "train.py"


def test_the_example_learns() -> None:
    assert runpy.run_path(str(EXAMPLE))["main"]() > 0.85

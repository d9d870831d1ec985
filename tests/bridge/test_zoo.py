"""A slice of the zoo, and docs/models.md is what its record says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zoo
import zoo_report

import headrace as hr

DOCS = Path(__file__).resolve().parents[2] / "docs"

# Each stands for a remedy of the bridge that works for any model.
SLICE = {
    "causal-lm/hy_v4": "sparse attention that goes through the mask",
    "causal-lm/mamba": "a state-space scan",
    "causal-lm/got_ocr2": "no cache in a nested text model, additive masks",
    "image-classification/convnext": "an image model",
    "seq2seq-lm/t5": "an encoder-decoder",
}


@pytest.mark.parametrize("name", SLICE)
def test_a_tiny_model_of_the_type_agrees_with_pytorch(name: str) -> None:
    model, inputs = zoo.build(*name.split("/"))
    report = hr.check(model, inputs, operators=False, dynamic=False)
    assert report.gradients
    assert report.ok, str(report)


def test_models_page_is_what_the_record_says() -> None:
    known = json.loads((DOCS / "models.json").read_text())
    assert (DOCS / "models.md").read_text() == zoo_report.page(known, zoo_report.sizes()), (
        "docs/models.md is stale: run scripts/sweep report"
    )


def test_the_record_knows_only_types_of_the_mappings() -> None:
    known = json.loads((DOCS / "models.json").read_text())
    every = {f"{task}/{t}" for task in zoo.LISTS for t in zoo.types(task)}
    assert set(known["types"]) <= every


def test_every_type_of_the_slice_is_recorded_as_passing() -> None:
    known = json.loads((DOCS / "models.json").read_text())["types"]
    assert {known[name]["verdict"] for name in SLICE if name in known} <= {"pass", "rounding"}

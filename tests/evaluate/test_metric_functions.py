"""Scores against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.evaluate import classification_scores, perplexity, regression_scores


def test_perplexity_is_exp_and_never_overflows() -> None:
    assert perplexity(math.log(7.0)) == pytest.approx(7.0)
    assert perplexity(1e4) == math.inf


def test_classification_scores() -> None:
    # class 0: 3 rows, 2 hit, 1 false positive -> F1 2/3; class 1: 1 row, missed -> F1 0
    scores = classification_scores(np.array([0, 0, 1, 0]), np.array([0, 0, 0, 1]))
    assert scores["accuracy"] == 0.5
    assert scores["f1_weighted"] == pytest.approx((3 * 2 / 3 + 0) / 4)
    assert scores["f1_macro"] == pytest.approx(1 / 3)


def test_regression_scores() -> None:
    scores = regression_scores(np.array([1.0, 2.0, 5.0]), np.array([1.0, 2.0, 3.0]))
    assert scores["mse"] == pytest.approx(4 / 3)
    assert scores["mae"] == pytest.approx(2 / 3)
    assert scores["r2"] == pytest.approx(1 - 4 / 2)
    assert math.isnan(regression_scores(np.array([1.0]), np.array([1.0]))["r2"])


@pytest.mark.parametrize("score", [classification_scores, regression_scores])
def test_no_rows_is_an_error(score: object) -> None:
    assert callable(score)
    with pytest.raises(ValueError, match="no rows"):
        score(np.zeros(0), np.zeros(0))

"""Sums and predictions -> numbers. scikit-learn and seqeval compute what they have.

Shapes: N = rows, C = classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def perplexity(loss: float) -> float:
    """exp(loss), loss in nats a token; infinite instead of an overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def classification_scores(predicted_N: np.ndarray, labels_N: np.ndarray) -> dict[str, float]:
    """accuracy, f1_weighted (classes weighted by their rows) and f1_macro (classes alike).

    A class that is never predicted has F1 0. Raises ValueError for no rows.
    """
    from sklearn.metrics import accuracy_score, f1_score

    if not len(labels_N):
        raise ValueError("there are no rows to score; needs at least one")

    def f1(average: str) -> float:
        nothing: Any = 0  # the stubs know only the word "warn"
        return float(f1_score(labels_N, predicted_N, average=average, zero_division=nothing))

    return {
        "accuracy": float(accuracy_score(labels_N, predicted_N)),
        "f1_weighted": f1("weighted"),
        "f1_macro": f1("macro"),
    }


def regression_scores(predicted_N: np.ndarray, values_N: np.ndarray) -> dict[str, float]:
    """mse, mae and r2; r2 is NaN where all true values are equal. Raises ValueError for no rows."""
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    if not len(values_N):
        raise ValueError("there are no rows to score; needs at least one")
    varies = len(values_N) > 1 and bool(np.ptp(values_N) > 0)
    return {
        "mse": float(mean_squared_error(values_N, predicted_N)),
        "mae": float(mean_absolute_error(values_N, predicted_N)),
        "r2": float(r2_score(values_N, predicted_N)) if varies else math.nan,
    }


def tagging_scores(
    predicted: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Tags by row and word: accuracy over words, and what of their entities was found.

    With B-/I- tags precision, recall and f1 count whole entities (seqeval, as CoNLL does); with
    other tags f1_weighted and f1_macro count words. Raises ValueError for no rows.
    """
    import seqeval.metrics

    entities: Any = seqeval.metrics  # its annotations are of another library's time

    flat_predicted = np.asarray([tag for row in predicted for tag in row])
    flat_expected = np.asarray([tag for row in expected for tag in row])
    words = classification_scores(flat_predicted, flat_expected)
    if not all(tag == "O" or tag[:2] in ("B-", "I-") for tag in set(flat_expected.tolist())):
        return words
    rows, truth = [list(row) for row in predicted], [list(row) for row in expected]
    return {
        "accuracy": words["accuracy"],
        "precision": float(entities.precision_score(truth, rows, zero_division=0)),
        "recall": float(entities.recall_score(truth, rows, zero_division=0)),
        "f1": float(entities.f1_score(truth, rows, zero_division=0)),
    }

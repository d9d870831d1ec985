"""Labels: names, ids, numbers, and values that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.data.labels import Labels, encode_labels, find_labels
from headrace.data.read import from_python
from headrace.errors import DataError


def encode(labels: Labels, values: list[Any]) -> np.ndarray:
    table = from_python([{"label": value} for value in values])
    return encode_labels(labels, values, table=table, column="label", good_row={"label": "x"})


@pytest.mark.parametrize(
    ("values", "names", "ids"),
    [
        (["no", "yes", "no"], ("no", "yes"), [0, 1, 0]),
        ([2, 0, 1], ("0", "1", "2"), [2, 0, 1]),
        (["10", "9", "8"], ("8", "9", "10"), [2, 1, 0]),  # numbers are sorted as numbers
        ([1, 5, 1], ("1", "5"), [0, 1, 0]),
        ([True, False], ("False", "True"), [1, 0]),
        (["1", "other"], ("1", "other"), [0, 1]),
    ],
)
def test_classes(values: list[Any], names: tuple[str, ...], ids: list[int]) -> None:
    labels = find_labels(values)
    assert labels.names == names
    assert labels.num_labels == len(names)
    assert labels.problem_type == "single_label_classification"
    assert encode(labels, values).tolist() == ids
    assert encode(labels, values).dtype == np.int32
    assert {labels.id2label[i] for i in ids} == {str(value) for value in values}
    assert labels.label2id == {name: i for i, name in labels.id2label.items()}


@pytest.mark.parametrize("values", [[0.5, 1.0], [3.0, 1.0], ["0.5", "2"]])
def test_floats_mean_regression(values: list[Any]) -> None:
    labels = find_labels(values)
    assert (labels.names, labels.num_labels, labels.problem_type) == (None, 1, "regression")
    assert encode(labels, values).dtype == np.float32
    assert encode(labels, values).tolist() == [float(value) for value in values]


def test_problem_type_decides() -> None:
    assert find_labels([1, 2, 3], problem_type="regression").names is None
    single = find_labels([1.0, 2.0], problem_type="single_label_classification")
    assert single.names == ("1", "2")
    assert encode(single, [2.0, 1]).tolist() == [1, 0]


def test_declared_names_take_ids_and_names() -> None:
    labels = find_labels([1, 0], declared=["no", "yes"])
    assert encode(labels, [1, 0, "yes"]).tolist() == [1, 0, 1]


def test_labels_that_do_not_fit_are_all_reported() -> None:
    with pytest.raises(DataError) as error:
        encode(find_labels([], declared=["no", "yes"]), [0, 2, -1, "yess"])
    message = str(error.value)
    assert "3 of 4 rows" in message
    assert "row 2, column label: 2; is outside 0..1" in message
    assert "'yess'; is none of the 2 labels; did you mean 'yes'?" in message
    with pytest.raises(DataError, match="needs a finite number"):
        encode(Labels(names=None), [1.0, float("nan"), "x"])
    with pytest.raises(DataError, match="none of the 2 labels"):
        encode(find_labels([0, 1]), [7])


def test_labels_that_cannot_be_classes() -> None:
    with pytest.raises(DataError, match="one label only"):
        find_labels(["a", "a"])
    with pytest.raises(DataError, match="80 different labels in 80 rows"):
        find_labels([f"text {i}" for i in range(80)])

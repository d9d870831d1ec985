"""The dataset itself, prepared by the run's own data code: rows, lengths, padding, labels.

Used when the configuration names a dataset that is at hand and `plan:` does not describe it. Loads
the tokenizer and tokenises everything, as a run would; imports what a run imports.

Knows: prepared rows. Does not know: hardware.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.config import TrainConfig
from headrace.data.examples import IGNORED
from headrace.data.load import load_data
from headrace.train.setup import load_processing_class


def measure_dataset(config: TrainConfig, *, max_positions: int | None = None) -> dict[str, Any]:
    """Settings of `plan:` and real_share, max_length as the run would have them.

    Raises DataError or ConfigError as the run would.
    """
    data = load_data(
        config, load_processing_class(config, None, None), model_max_length=max_positions
    )
    rows = data.train.rows
    lengths = np.diff(np.asarray(rows.examples.offsets))
    buckets = np.asarray(rows.bucket_lengths)
    positions = int(buckets[rows.row_buckets].sum())
    found: dict[str, Any] = {
        "dataset_rows": len(lengths),
        "dataset_mean_tokens": float(lengths.mean()),
        "real_share": float(lengths.sum() / max(positions, 1)),
        "max_length": int(buckets[-1]),
    }
    labels = rows.examples.token_labels
    if labels is not None:
        found["supervised_share"] = float((np.asarray(labels) != IGNORED).mean())
    if data.labels is not None:
        found["num_labels"] = data.labels.num_labels
    return found

"""What is to be trained: rows, tokens, epochs, and how much of every row is real.

The numbers come from `plan:` in the configuration, or are measured on the dataset by the run's own
data code (worker.py). What nobody said is an assumption and listed as one.

Knows: token counts. Does not know: models, hardware.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config import TrainConfig
from headrace.errors import ConfigError
from headrace.plan.candidate import Candidate

PACKED_SHARE = 0.96  # what first-fit packing reaches on ordinary data
BUCKETED_SHARE = 0.80
SETTINGS = {
    "dataset_rows": "rows of the training data; with --evaluate, of the evaluation data",
    "dataset_mean_tokens": "mean tokens of a row",
    "supervised_share": "share of real tokens that carry a loss, 0 to 1",
    "num_labels": "classes of a classifier",
    "prices": "YAML file with prices of your own",
    "slice": "slice or slices to plan for",
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """rows, mean_tokens: of one epoch, None when unknown. share: real tokens over positions.

    max_steps: optimizer steps when the configuration fixes them.
    """

    rows: int | None
    mean_tokens: float | None
    epochs: float
    max_steps: int
    share: float
    supervised_share: float
    assumed: tuple[str, ...]

    def num_steps(self, candidate: Candidate) -> int | None:
        """Steps of the run: packed rows by their tokens, others by their number."""
        epochs = self.epochs if candidate.trains else 1.0
        if self.max_steps > 0 and candidate.trains:
            return self.max_steps
        if self.rows is None:
            return None
        if not candidate.packing:
            each = candidate.rows * candidate.accumulation
            return max(1, math.ceil(self.rows * epochs / each))
        if self.mean_tokens is None:
            return None
        total = self.rows * self.mean_tokens * epochs
        return max(1, math.ceil(total / (candidate.step_positions * self.share)))

    def filled_length(self, candidate: Candidate) -> float:
        """Mean row length over the longest: below 1 where rows go to buckets of their length."""
        if candidate.packing or self.mean_tokens is None:
            return 1.0
        return min(1.0, self.mean_tokens / self.share / candidate.length)


def plan_settings(config: TrainConfig) -> Mapping[str, Any]:
    """`plan:` of the configuration, checked. ConfigError lists unknown and wrong entries."""
    given: Mapping[str, Any] = config.plan
    problems = [
        f"plan.{k} is not known; known: {', '.join(SETTINGS)}" for k in given if k not in SETTINGS
    ]
    for name in ("dataset_rows", "dataset_mean_tokens", "num_labels"):
        value = given.get(name)
        if value is not None and (not _is_number(value) or value <= 0):
            problems.append(f"plan.{name}: {value!r} is given; needs a positive number")
    share = given.get("supervised_share")
    if share is not None and (not _is_number(share) or not 0 < share <= 1):
        problems.append(f"plan.supervised_share: {share!r} is given; needs a number in (0, 1]")
    if problems:
        raise ConfigError("\n".join(problems))
    return given


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def make_workload(
    config: TrainConfig, length: int, *, packing: bool, measured: Mapping[str, Any] | None = None
) -> Workload:
    """From the settings, overlaid on what was measured on the dataset itself."""
    given = {**(measured or {}), **plan_settings(config)}
    mean = given.get("dataset_mean_tokens")
    assumed: list[str] = []
    share = given.get("real_share")
    if mean is not None and mean > length:
        assumed.append(f"rows of {mean:g} tokens on average are cut to {length}")
        mean = float(length)
    if share is None:
        share = _share(config, mean, length, packing, assumed)
    supervised = given.get("supervised_share")
    if supervised is None:
        supervised = 1.0
        if config.task == "causal":
            assumed.append("every token carries a loss (plan.supervised_share is not given)")
    rows = given.get("dataset_rows")
    if (rows is None or mean is None) and config.max_steps <= 0:
        assumed.append("the dataset is unknown: no hours, no price (plan.dataset_rows, ...)")
    return Workload(
        rows=None if rows is None else int(rows),
        mean_tokens=None if mean is None else float(mean),
        epochs=config.num_train_epochs,
        max_steps=config.max_steps,
        share=float(share),
        supervised_share=float(supervised),
        assumed=tuple(assumed),
    )


def _share(
    config: TrainConfig, mean: float | None, length: int, packing: bool, assumed: list[str]
) -> float:
    if packing:
        # A row longer than half of `length` leaves room that the next one does not fill.
        share = (
            PACKED_SHARE
            if mean is None or mean <= length / 4
            else max(0.75, PACKED_SHARE - mean / length / 3)
        )
        assumed.append(f"packed rows are {share:.0%} full")
        return share
    if (config.length_buckets and len(config.length_buckets) == 1) or config.bucket_count == 1:
        if mean is not None:
            return min(1.0, mean / length)
        assumed.append("rows are full (plan.dataset_mean_tokens is not given)")
        return 1.0
    assumed.append(f"rows in buckets of like length are {BUCKETED_SHARE:.0%} full")
    return BUCKETED_SHARE

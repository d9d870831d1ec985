"""Numbers of a run: read one step late, turned into speed and time left, written to a log file.

The host dispatches step n + 1 before it reads the metrics of step n, so it never waits for the
device it should be feeding. Compilation, evaluation and saving are paused out of the clock: tokens
per second and the time left speak of training steps only.

Knows: clocks, JSON lines. Does not know: models, batches, callbacks, the terminal (display.py).
Units: seconds; tokens; tokens per second of the whole run, not of one device.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

Now = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step as the host saw it; `step` counts from 1, as HF's global_step does."""

    step: int
    metrics: dict[str, float]
    padded_tokens: int
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return bool(self.metrics["finite"])


class LateMetrics:
    """Holds the newest step's device metrics and gives back those of the step before."""

    def __init__(self) -> None:
        self._pending: tuple[int, Mapping[str, Any], int] | None = None

    def push(
        self, step: int, metrics: Mapping[str, Any], *, padded_tokens: int
    ) -> StepRecord | None:
        """Remember `step`; returns the previous one, waiting for that one only."""
        previous = self.flush()
        for value in metrics.values():
            if hasattr(value, "copy_to_host_async"):
                value.copy_to_host_async()
        self._pending = (step, metrics, padded_tokens)
        return previous

    def flush(self) -> StepRecord | None:
        """The pending step, if there is one; waits for it."""
        if self._pending is None:
            return None
        step, metrics, padded_tokens = self._pending
        self._pending = None
        values = {name: np.asarray(value) for name, value in metrics.items()}
        return StepRecord(
            step=step,
            metrics={name: float(value) for name, value in values.items() if not value.ndim},
            padded_tokens=padded_tokens,
            arrays={name: value for name, value in values.items() if value.ndim},
        )


@dataclass(kw_only=True)
class TrainClock:
    """Seconds spent in training steps: wall time less what was paused."""

    now: Now = time.perf_counter
    start: float = field(init=False)
    paused: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.start = self.now()

    @contextmanager
    def pause(self) -> Generator[None, None, None]:
        """Everything inside (evaluation, saving) is left out of the speed."""
        before = self.now()
        try:
            yield
        finally:
            self.paused += self.now() - before

    def exclude(self, seconds: float) -> None:
        """Leave out seconds measured elsewhere (compilation)."""
        self.paused += seconds

    @property
    def working(self) -> float:
        return self.now() - self.start - self.paused

    @property
    def wall(self) -> float:
        return self.now() - self.start


class Window:
    """The steps since the last log line, and the speed over them."""

    def __init__(self, clock: TrainClock) -> None:
        self._clock = clock
        self._records: list[StepRecord] = []
        self._since = clock.working
        self._first: float | None = None
        self._done = 0

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        self._done += 1

    def __len__(self) -> int:
        return len(self._records)

    def close(self, *, steps_left: int) -> dict[str, float]:
        """Means over the window, speeds, ETA; starts a new window. Needs one record at least.

        A step that was skipped counts in `skipped_steps`, not in the means; with nothing else in
        the window the loss is NaN, never 0.
        """
        good = [record.metrics for record in self._records if record.finite]
        working = self._clock.working
        seconds = max(working - self._since, 1e-9)
        last = self._records[-1].metrics

        def mean(name: str) -> float:
            return math.fsum(m[name] for m in good) / len(good) if good else math.nan

        def total(name: str) -> float:
            return math.fsum(record.metrics[name] for record in self._records)

        padded = sum(record.padded_tokens for record in self._records)
        logs = {
            "loss": mean("loss"),
            "grad_norm": mean("grad_norm"),
            "learning_rate": last["learning_rate"],
            "num_tokens": total("num_tokens"),
            "num_supervised": total("num_supervised"),
            "tokens_per_second": total("num_tokens") / seconds,
            "padded_tokens_per_second": padded / seconds,
            "supervised_tokens_per_second": total("num_supervised") / seconds,
            "step_seconds": seconds / len(self._records),
            "eta_seconds": steps_left * working / max(self._done, 1),
        }
        if "accuracy" in last:
            logs["mean_token_accuracy"] = mean("accuracy")
        for name in last:
            if "/" in name or name == "kl":  # what the loss itself names: rewards/margins, ...
                found = [m[name] for m in good if math.isfinite(m[name])]
                logs[name] = math.fsum(found) / len(found) if found else math.nan
        if len(good) < len(self._records):
            logs["skipped_steps"] = float(len(self._records) - len(good))
        self._records = []
        self._since = working
        return logs


class JsonLog:
    """Appends one JSON object a line to `log.jsonl`; each line is on disk when `write` returns."""

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = self.path.open("a" if append else "w", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        """`{"event": ..., ...}`. A number that is not finite becomes null and is named."""
        bad = sorted(k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v))
        line = {"event": event} | {k: None if k in bad else v for k, v in values.items()}
        if bad:
            line["not_finite"] = bad
        self._file.write(json.dumps(line, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

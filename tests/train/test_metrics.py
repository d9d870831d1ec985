"""Late reading, speeds without compile time, the log file, the display off a terminal."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from headrace.train.display import Display, describe, format_seconds
from headrace.train.metrics import JsonLog, LateMetrics, StepRecord, TrainClock, Window


class FakeTime:
    def __init__(self) -> None:
        self.value = 100.0

    def __call__(self) -> float:
        return self.value


def record(step: int, *, loss: float = 2.0, finite: bool = True) -> StepRecord:
    metrics = {
        "loss": loss, "grad_norm": 1.0, "learning_rate": 0.1 / step, "num_tokens": 50.0,
        "num_supervised": 20.0, "finite": float(finite),
    }  # fmt: skip
    return StepRecord(step=step, metrics=metrics, padded_tokens=64)


def test_metrics_are_read_one_step_late() -> None:
    class Watched:
        """Stands for a device value: converting it to a number is what would wait."""

        def __init__(self, value: float) -> None:
            self.value, self.read = value, False

        def __array__(self, dtype: object = None, copy: object = None) -> object:
            self.read = True
            import numpy as np

            return np.asarray(self.value)

    late = LateMetrics()
    first, second = Watched(1.0), Watched(2.0)
    assert late.push(1, {"loss": first}, padded_tokens=8) is None
    assert not first.read
    got = late.push(2, {"loss": second}, padded_tokens=8)
    assert got is not None and got.step == 1 and got.metrics == {"loss": 1.0}
    assert first.read and not second.read
    last = late.flush()
    assert last is not None and last.step == 2
    assert late.flush() is None


def test_late_metrics_take_device_arrays() -> None:
    late = LateMetrics()
    late.push(1, {"loss": jnp.float32(1.5), "finite": jnp.array(True)}, padded_tokens=1)
    got = late.flush()
    assert got is not None and got.metrics == {"loss": 1.5, "finite": 1.0} and got.finite


def test_speed_and_eta_leave_out_compile_and_pauses() -> None:
    now = FakeTime()
    clock = TrainClock(now=now)
    window = Window(clock)
    now.value += 30  # compile
    clock.exclude(30)
    for step in (1, 2):
        now.value += 2
        window.add(record(step))
    with clock.pause():
        now.value += 100  # evaluation
    logs = window.close(steps_left=10)
    assert logs["tokens_per_second"] == pytest.approx(100 / 4)
    assert logs["padded_tokens_per_second"] == pytest.approx(128 / 4)
    assert logs["supervised_tokens_per_second"] == pytest.approx(40 / 4)
    assert logs["step_seconds"] == pytest.approx(2)
    assert logs["eta_seconds"] == pytest.approx(20)
    assert logs["learning_rate"] == pytest.approx(0.05)
    assert clock.wall == pytest.approx(134) and clock.working == pytest.approx(4)
    assert len(window) == 0


def test_skipped_steps_are_counted_not_averaged() -> None:
    window = Window(TrainClock(now=FakeTime()))
    window.add(record(1, loss=3.0))
    window.add(record(2, loss=math.nan, finite=False))
    logs = window.close(steps_left=0)
    assert logs["loss"] == 3.0 and logs["skipped_steps"] == 1
    assert "1 steps skipped" in describe(logs)
    window.add(record(3, loss=math.nan, finite=False))
    assert math.isnan(window.close(steps_left=0)["loss"])


def test_log_file_is_strict_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    log = JsonLog(path)
    log.write("train", step=1, loss=2.5)
    log.write("train", step=2, loss=math.nan, grad_norm=math.inf)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[0] == {"event": "train", "step": 1, "loss": 2.5}
    assert lines[1]["loss"] is None and lines[1]["not_finite"] == ["grad_norm", "loss"]
    log.close()
    again = JsonLog(path, append=True)
    again.write("train", step=3, loss=1.0)
    again.close()
    assert len(path.read_text().splitlines()) == 3


def test_display_prints_lines_off_a_terminal() -> None:
    stream = io.StringIO()
    display = Display(20, console=Console(file=stream, force_terminal=False, width=200))
    display.advance(1)
    display.advance(2)
    window = Window(TrainClock())
    window.add(record(2))
    display.log(2, window.close(steps_left=18))
    display.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 and lines[0].startswith("step 2/20  loss 2.0000  grad 1  lr 0.05")


def test_display_draws_a_bar_on_a_terminal() -> None:
    stream = io.StringIO()
    display = Display(
        20, console=Console(file=stream, force_terminal=True, width=200, highlight=False)
    )
    window = Window(TrainClock())
    window.add(record(2))
    display.log(2, window.close(steps_left=18))
    display.say("saved checkpoint-2")
    display.close()
    assert "2/20" in stream.getvalue() and "saved checkpoint-2" in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(7.6, "8 s"), (200, "3:20"), (3729, "1:02:09")])
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

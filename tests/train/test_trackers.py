"""report_to: names as transformers', a missing library is an error."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import SFTConfig
from headrace.errors import ConfigError
from headrace.train.trackers import make_trackers, tracker_names


def test_names_are_those_of_transformers() -> None:
    assert tracker_names({"loss": 1.0, "eval_loss": 2.0, "learning_rate": 3.0}) == {
        "train/loss": 1.0, "eval/loss": 2.0, "train/learning_rate": 3.0,
    }  # fmt: skip


def test_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="pip install wandb trackio"):
        make_trackers(SFTConfig(report_to=["wandb", "trackio"]))


def test_run_tracker_gets_config_and_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    library = SimpleNamespace(
        init=lambda **kw: calls.append(("init", kw)),
        log=lambda values: calls.append(("log", values)),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, "wandb", library)
    config = SFTConfig(report_to=["wandb"], output_dir=str(tmp_path / "my-run"))
    (tracker,) = make_trackers(config)
    state: Any = SimpleNamespace(global_step=4)
    tracker.on_train_begin(config, state, None)
    tracker.on_log(config, state, None, logs={"loss": 1.5, "eval_loss": 2.5})
    tracker.on_train_end(config, state, None)
    assert calls[0][1]["name"] == "my-run" and calls[0][1]["config"]["task"] == "causal"
    assert calls[1] == ("log", {"train/loss": 1.5, "eval/loss": 2.5, "train/global_step": 4})
    assert calls[2] == ("finish",)
    assert make_trackers(SFTConfig()) == []


@pytest.mark.filterwarnings("ignore")  # of its own
def test_trackio_keeps_a_run_in_its_local_database(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    config = SFTConfig(report_to=["trackio"], output_dir=str(tmp_path / "my-run"))
    (tracker,) = make_trackers(config)
    for step in (0, 4):
        state: Any = SimpleNamespace(global_step=step)
        if step == 0:
            tracker.on_train_begin(config, state, None)
        tracker.on_log(config, state, None, logs={"loss": 1.5, "eval_loss": 2.5})
    tracker.on_train_end(config, state, None)
    with sqlite3.connect(tmp_path / "trackio" / "headrace.db") as found:
        rows = found.execute("select run_name, metrics from metrics").fetchall()
    assert [name for name, _ in rows] == ["my-run", "my-run"]
    assert json.loads(rows[1][1]) == {
        "train/loss": 1.5, "eval/loss": 2.5, "train/global_step": 4,
    }  # fmt: skip

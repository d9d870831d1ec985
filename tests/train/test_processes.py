"""Two and four real processes on loopback train what one trains, and end when one of them is lost.

The two go on from a checkpoint of the four.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.train.processes import start_processes

sys.path.insert(0, str(Path(__file__).parent))
import tiny
from process_program import Ended, Task, run_together, train

STEPS = 4
pytestmark = pytest.mark.timeout(900)  # a hang, on the slowest machine


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, list[float]]:
    """The run of one process on one device, and its losses. Its capture serves the others."""
    root = tmp_path_factory.mktemp("processes")
    model = tiny.saved(tiny.llama(), root / "model")
    task = Task(out=str(root / "one"), model=model, cache=str(root / "cache"), steps=STEPS)
    return task, train(task)


@pytest.fixture(scope="module")
def four(one: tuple[Task, list[float]]) -> tuple[Task, Ended]:
    """Four processes train to the end, then again until the first one is killed."""
    task = replace(one[0], out=str(Path(one[0].out).with_name("four")), devices=4, dies=0)
    return task, run_together(task, processes=4, heartbeat=600)  # no heartbeat is waited for


@pytest.fixture(scope="module")
def two(one: tuple[Task, list[float]], four: tuple[Task, Ended]) -> tuple[Task, Ended]:
    """Two processes with one device each go on after step 2 of the four, until one is killed."""
    task = replace(
        one[0], out=str(Path(one[0].out).with_name("two")), devices=2, dies=1,
        resume=f"{four[0].out}/checkpoint-2",
    )  # fmt: skip
    return task, run_together(task, processes=2, heartbeat=15)


def test_four_processes_train_what_one_trains(
    one: tuple[Task, list[float]], four: tuple[Task, Ended]
) -> None:
    task, ended = four
    assert len(one[1]) == STEPS
    assert ended.losses == [pytest.approx(one[1], rel=1e-5)] * 4
    log = [json.loads(line) for line in Path(f"{task.out}-log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["event"] == "train"] == [1, 2, 3, 4]


def test_two_processes_go_on_where_four_were(
    one: tuple[Task, list[float]], two: tuple[Task, Ended]
) -> None:
    task, ended = two
    assert ended.losses == [pytest.approx(one[1], rel=1e-5)] * 2
    assert "resumed" in ended.said[0] and "after step 2" in ended.said[0]
    assert "load-back: logits" in ended.said[0]
    assert Path(task.out, "checkpoint-4", "checkpoint.json").is_file()


def test_when_the_first_process_is_lost_all_others_end_with_the_way_to_go_on(
    four: tuple[Task, Ended],
) -> None:
    task, ended = four
    assert ended.codes == [-9, 75, 75, 75]
    for said in ended.said[1:]:
        assert "ProcessLost: process 0 of 4 is gone" in said
        assert f"The last checkpoint is {task.out}/checkpoint-4" in said


def test_when_another_process_is_lost_the_first_ends_with_the_way_to_go_on(
    two: tuple[Task, Ended],
) -> None:
    task, ended = two
    assert ended.codes == [75, -9]
    assert "ProcessLost: process 1 of 2 is gone: no sign of it for 15 s" in ended.said[0]
    assert f"The last checkpoint is {task.out}/checkpoint-4" in ended.said[0]


def test_incomplete_variables_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES, JAX_PROCESS_ID is not"):
        start_processes()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(ConfigError, match="JAX_PROCESS_ID is 2 of 2"):
        start_processes()
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(ConfigError, match="whole numbers"):
        start_processes()
    monkeypatch.setenv("HEADRACE_HEARTBEAT_SECONDS", "soon")
    with pytest.raises(ConfigError, match="'soon': a number of seconds"):
        start_processes()

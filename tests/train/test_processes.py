"""Two real processes on loopback train what one process trains; one of them writes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.train.processes import start_processes

PROGRAM = """
import json, sys
sys.path.insert(0, {here!r})
import tiny
from headrace import SFTConfig, SFTTrainer
config = SFTConfig(
    output_dir={out!r}, max_steps={steps}, max_length=32, pad_to_multiple_of=32, mesh={mesh!r},
    per_device_train_batch_size={rows}, learning_rate=1e-2, logging_steps=1, save_steps=2,
    compilation_cache_dir=None, resume_from_checkpoint={resume!r},
)
trainer = SFTTrainer({model!r}, config, train_dataset=tiny.text_rows(64))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("LOSSES", json.dumps(losses), flush=True)
"""
HERE = Path(__file__).parent


def _start(out: Path, model: str, mesh: object, rows: int, devices: int, **more: str) -> object:
    resume, steps = more.pop("resume", None), more.pop("steps", "3")
    program = PROGRAM.format(
        here=str(HERE), out=str(out), mesh=mesh, rows=rows, model=model, resume=resume, steps=steps
    )
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        **more,
    }
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def _losses(process: subprocess.Popen[str]) -> list[float]:
    out, errors = process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("LOSSES ")]
    assert lines, errors[-3000:]
    return json.loads(lines[0].removeprefix("LOSSES "))


@pytest.mark.timeout(900)
def test_two_processes_train_what_one_trains_and_one_goes_on(tmp_path: Path) -> None:
    sys.path.insert(0, str(HERE))
    import tiny

    model = tiny.saved(tiny.llama(), tmp_path / "model")
    shared = _shared(2)
    two = [
        _start(tmp_path / "two", model, {"fsdp": 4}, 2, 2, JAX_PROCESS_ID=str(i), **shared)
        for i in range(2)
    ]
    first, second = (_losses(process) for process in two)  # pyright: ignore[reportArgumentType]
    one = _losses(_start(tmp_path / "one", model, None, 8, 1))  # pyright: ignore[reportArgumentType]
    assert first == second == pytest.approx(one, rel=1e-5)
    log = (tmp_path / "two" / "log.jsonl").read_text().splitlines()
    assert len([line for line in log if json.loads(line)["event"] == "train"]) == 3
    # The checkpoint of two processes and four devices goes on in one process with two devices.
    go_on = str(tmp_path / "two" / "checkpoint-2")
    later = _losses(
        _start(tmp_path / "on", model, {"fsdp": 2}, 4, 2, resume=go_on)  # pyright: ignore[reportArgumentType]
    )
    assert later == pytest.approx(one, rel=1e-5)


def _shared(count: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}


@pytest.mark.timeout(300)
def test_a_lost_process_ends_the_others_with_the_way_to_go_on(tmp_path: Path) -> None:
    sys.path.insert(0, str(HERE))
    import tiny

    model = tiny.saved(tiny.llama(), tmp_path / "model")
    out, shared = tmp_path / "out", {**_shared(2), "HEADRACE_HEARTBEAT_SECONDS": "4"}
    first, second = (
        _start(out, model, {"data": 2}, 2, 1, JAX_PROCESS_ID=str(i), steps="100000", **shared)
        for i in range(2)
    )
    assert isinstance(first, subprocess.Popen) and isinstance(second, subprocess.Popen)
    try:
        while not (out / "checkpoint-2" / "checkpoint.json").is_file():
            assert first.poll() is None and second.poll() is None, first.communicate()[1][-2000:]
            time.sleep(0.1)
        second.kill()
        second.communicate()
        start = time.monotonic()
        _, errors = first.communicate(timeout=60)
        assert time.monotonic() - start < 30
    finally:
        first.kill()
        second.kill()
    assert first.returncode == 75
    assert "ProcessLost: process 1 of 2 is gone" in errors
    assert f"The last checkpoint is {out}/checkpoint-" in errors
    named = Path(errors.split("The last checkpoint is ")[1].split(". Start")[0])
    assert (named / "checkpoint.json").is_file()


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

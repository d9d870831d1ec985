"""A run on several real processes, for test_processes: what each does, and how they ended.

Processes come from a fork server that has imported everything once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny

ROWS = 8  # of a step, however many devices share them
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run to its end, over `devices` of all processes. dies: the process that kills itself in a
    second run, which starts when the first is through."""

    out: str
    model: str
    cache: str
    steps: int
    devices: int = 1
    resume: str | None = None
    dies: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Of each process: its exit code, what it wrote, the losses of its first run."""

    codes: list[int | None]
    said: list[str]
    losses: list[list[float]]


def train(task: Task) -> list[float]:
    """Losses of all steps so far, from the log history."""
    from headrace import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=task.out, max_steps=task.steps, max_length=32, pad_to_multiple_of=32,
        mesh={"fsdp": task.devices} if task.devices > 1 else None,
        per_device_train_batch_size=ROWS // task.devices, learning_rate=1e-2,
        logging_steps=1, save_steps=2, compilation_cache_dir=task.cache,
        resume_from_checkpoint=task.resume,
    )  # fmt: skip
    trainer = SFTTrainer(task.model, config, train_dataset=tiny.text_rows(64))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if task.dies is not None:
        index = int(os.environ["JAX_PROCESS_ID"])
        _losses_file(task, index).write_text(json.dumps(losses))
        if index == 0:  # the second run writes another
            shutil.copy(f"{task.out}/log.jsonl", f"{task.out}-log.jsonl")
        trainer.add_callback(_dying(task.dies))
        trainer.train(resume_from_checkpoint=False)
    return losses


def _dying(index: int) -> Any:
    import jax
    from transformers import TrainerCallback

    class Dies(TrainerCallback):
        # The numbers of a step are here: every process is inside the second run.
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if jax.process_index() == index:
                os.kill(os.getpid(), signal.SIGKILL)

    return Dies()


def run_together(task: Task, *, processes: int, heartbeat: float) -> Ended:
    """Train on several processes with an equal share of the task's devices each; wait for them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headrace.train.trainer", "tiny"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={task.devices // processes} {_QUICK}"
    shared = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(processes),
        "HEADRACE_HEARTBEAT_SECONDS": str(heartbeat),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
    }
    started = [
        context.Process(target=_one, args=(task, shared | {"JAX_PROCESS_ID": str(index)}))
        for index in range(processes)
    ]
    try:
        for each in started:
            each.start()
        for each in started:
            each.join()
    finally:
        for each in started:
            each.kill()
    said = [Path(f"{task.out}-{i}.txt").read_text(errors="replace") for i in range(processes)]
    files = [_losses_file(task, index) for index in range(processes)]
    assert all(file.is_file() for file in files), "\n".join(text[-3000:] for text in said)
    losses = [json.loads(file.read_text()) for file in files]
    return Ended(codes=[each.exitcode for each in started], said=said, losses=losses)


def _one(task: Task, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    index = int(environment["JAX_PROCESS_ID"])
    for stream in (1, 2):
        os.dup2(os.open(f"{task.out}-{index}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    losses = train(task)
    _losses_file(task, index).write_text(json.dumps(losses))


def _losses_file(task: Task, index: int) -> Path:
    return Path(f"{task.out}-{index}.json")

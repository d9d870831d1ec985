"""Several processes that train one run: how they find each other, who writes, how they stop.

A launcher starts one process a host. Cloud TPU slices, SLURM, Open MPI and Kubernetes are detected
by JAX (on Cloud TPU machines without a launcher set HEADRACE_PROCESSES=auto); anything else sets
three variables:

    JAX_COORDINATOR_ADDRESS=host0:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 headrace train ...

Knows: jax.distributed. Does not know: runs, files' contents.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from headrace.errors import ConfigError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
HEARTBEAT = "HEADRACE_HEARTBEAT_SECONDS"
DEFAULT_HEARTBEAT = 60.0
# What says that a launcher started several processes, and how many.
_COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


def start_processes() -> bool:
    """Join the other processes of the run, if there are any. Call before JAX is used.

    Returns whether there are several. Raises ConfigError when the variables are incomplete or the
    coordinator does not answer.
    """
    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if given and len(given) < len(_VARIABLES):
        missing = ", ".join(name for name in _VARIABLES if name not in given)
        raise ConfigError(
            f"{', '.join(given)} is set, but {missing} is not; a run of several processes needs "
            "all three in every process"
        )
    if not given and not _detected():
        return False
    # JAX's own heartbeats are the second line, behind train.watch, which says more.
    options: dict[str, Any] = {"heartbeat_timeout_seconds": max(10, round(2 * heartbeat_seconds()))}
    if given:
        numbers = {name: given[name] for name in _VARIABLES[1:]}
        wrong = [f"{name}={value!r}" for name, value in numbers.items() if not value.isdigit()]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: whole numbers are needed")
        count, index = int(given["JAX_NUM_PROCESSES"]), int(given["JAX_PROCESS_ID"])
        if not 0 <= index < count:
            raise ConfigError(f"JAX_PROCESS_ID is {index} of {count} processes; the first is 0")
        if count == 1:
            return False
        options |= {
            "coordinator_address": given["JAX_COORDINATOR_ADDRESS"],
            "num_processes": count,
            "process_id": index,
        }
    try:
        jax.distributed.initialize(**options)
    except RuntimeError as error:
        raise ConfigError(
            f"the processes of this run did not find each other ({error}). Is process 0 up and "
            f"{given.get('JAX_COORDINATOR_ADDRESS', 'the coordinator')} reachable from here?"
        ) from error
    return jax.process_count() > 1


def heartbeat_seconds() -> float:
    """Seconds without a sign of a process after which it is lost. Raises ConfigError."""
    text = os.environ.get(HEARTBEAT, "")
    try:
        value = float(text) if text else DEFAULT_HEARTBEAT
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{HEARTBEAT}={text!r}: a number of seconds above 0 is needed")
    return value


def _detected() -> bool:
    if os.environ.get("HEADRACE_PROCESSES") == "auto":
        return True  # a launcher knows that there are several, and JAX finds out which
    if any(int(os.environ.get(name) or 1) > 1 for name in _COUNTS):
        return True
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return len([host for host in hosts.split(",") if host]) > 1


def is_first() -> bool:
    """Whether this process writes files and speaks."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Go on when every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def stop_is_due(step: int, received: bool) -> bool:
    """Whether the run is to stop after this step: all processes give the same answer.

    A SIGTERM to any host reaches all of them through JAX's coordination service.
    """
    if jax.process_count() == 1:
        return received
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(step))

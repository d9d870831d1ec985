"""A process that disappears ends the others, with the way to go on, instead of a hang.

Every process writes a number that rises into JAX's coordination service, and reads those of the
others. One that stands still is lost: a collective with it never ends and its part of the state is
gone, so the run can only go on from its last checkpoint. JAX's own heartbeats end processes too,
later and without that word.

The first process holds the service. When it is gone, JAX calls abort() in all others, from a thread
of its own (what JAX 0.10 has for this, missed_heartbeat_callback, ends in std::bad_cast when it is
given a Python function). The watch takes that signal and says what it says of any other process.

Knows: jax.distributed's key-value store. Does not know: runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from headrace.train.processes import heartbeat_seconds

EXIT_LOST = 75  # EX_TEMPFAIL: starting again is the answer
_PREFIX, _DONE = "headrace/beat/", "done"
_FIRST_GONE = "process 0 of {} is gone, through which all others meet"


@contextmanager
def watched_processes(last_checkpoint: Callable[[], str | None]) -> Generator[None]:
    """While inside, a lost process ends this one within HEADRACE_HEARTBEAT_SECONDS (60).

    last_checkpoint: the folder that a new start goes on from. Nothing happens with one process.
    """
    if jax.process_count() == 1:
        yield
        return
    watch = _Watch(heartbeat_seconds(), last_checkpoint)
    watch.beat()  # here, so that a process that is lost at once is missed too
    watch.start()
    with _abort_taken(watch.aborted):
        try:
            yield
        except jax.errors.JaxRuntimeError:
            # A collective that failed: most likely because of a process that is gone. Then the
            # watch ends this process with a message before this time is over.
            time.sleep(watch.seconds + 2 * watch.interval)
            raise
        else:
            watch.finish()
        finally:
            watch.stop()


class _Watch(threading.Thread):
    def __init__(self, seconds: float, last_checkpoint: Callable[[], str | None]) -> None:
        super().__init__(name="headrace-watch", daemon=True)
        from jax._src.distributed import global_state  # no public door to the store in JAX 0.10

        self.seconds = seconds
        self.interval = min(seconds / 4, 5.0)
        self._client: Any = global_state.client
        self._address = str(global_state.coordinator_address)
        self._answered = time.monotonic()
        self._last_checkpoint = last_checkpoint
        self._own = f"{_PREFIX}{jax.process_index()}"
        self._stopped = threading.Event()
        self._seen: dict[str, tuple[str, float]] = {}
        self._beats = 0

    def run(self) -> None:
        while not self._stopped.wait(self.interval):
            try:
                self.beat()
                beats = dict(self._client.key_value_dir_get(_PREFIX))
            except Exception as error:
                if not self._stopped.is_set():
                    self._end(f"{_FIRST_GONE.format(jax.process_count())} ({error})")
                return
            self._answered = time.monotonic()
            lost = self._lost(beats)
            if lost and not self._stopped.is_set():
                self._end(self._gone(lost, self.seconds))

    def _lost(self, beats: dict[str, str]) -> list[str]:
        """Processes whose number has not changed for too long; those that never wrote are not."""
        now = time.monotonic()
        for key, value in beats.items():
            if self._seen.get(key, ("", 0.0))[0] != value:
                self._seen[key] = (value, now)
        return self._silent(self.seconds)

    def _silent(self, seconds: float) -> list[str]:
        """Processes without a sign for so long when the numbers were last read."""
        now = time.monotonic()
        return sorted(
            key.rpartition("/")[2]
            for key, (value, since) in dict(self._seen).items()
            if value != _DONE and now - since > seconds and key != self._own
        )

    def beat(self) -> None:
        """Say that this process is alive."""
        self._beats += 1
        self._write(str(self._beats))

    def _write(self, value: str) -> None:
        self._client.key_value_set(self._own, value, allow_overwrite=True)

    def aborted(self) -> None:
        """Called when something calls abort(): ends the process if it is JAX that misses another
        one, returns if not. On a busy machine JAX can be earlier than this watch."""
        silent = time.monotonic() - self._answered > self.seconds
        if silent or not _listens(self._address):
            self._leave(_FIRST_GONE.format(jax.process_count()))
        if lost := self._silent(self.seconds / 2):
            self._leave(self._gone(lost, self.seconds / 2))

    def _gone(self, lost: list[str], seconds: float) -> str:
        return (
            f"process {', '.join(lost)} of {jax.process_count()} is gone: no sign of it for "
            f"{seconds:g} s"
        )

    def _end(self, reason: str) -> None:
        sys.stdout.flush()
        self._leave(reason)

    def _leave(self, reason: str) -> None:
        folder = self._last_checkpoint()
        onwards = (
            "No checkpoint was saved yet; start the run again"
            if folder is None
            else f"The last checkpoint is {folder}. Start the run again with "
            "resume_from_checkpoint: true, on as many processes as there are"
        )
        os.write(2, f"\nProcessLost: {reason}.\n{onwards}.\n".encode())
        # Not an exception: the main thread may be inside a collective that never ends.
        os._exit(EXIT_LOST)

    def finish(self) -> None:
        """This process is through; the others need not wait for its numbers."""
        self.stop()
        self.join()
        with suppress(jax.errors.JaxRuntimeError):  # the first process may be through already
            self._write(_DONE)

    def stop(self) -> None:
        self._stopped.set()


def _listens(address: str) -> bool:
    """Whether a process takes connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


@contextmanager
def _abort_taken(first: Callable[[], None]) -> Generator[None]:
    """Inside, abort() calls `first` before it ends the process.

    Python's own signal handlers run in the main thread, which may be inside a collective, and after
    the fact; this one is called by C in the thread that aborts.
    """
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]

    def take(number: int) -> None:
        libc.signal(number, None)  # abort() goes on as always when this returns
        first()

    handler = handler_type(take)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, before)

"""A process that disappears ends the others, with the way to go on, instead of a hang.

Every process writes a number that rises into JAX's coordination service, and reads those of the
others. One that stands still is lost: a collective with it never ends and its part of the state is
gone, so the run can only go on from its last checkpoint. JAX's own heartbeats end processes too,
later and without that word.

Knows: jax.distributed's key-value store. Does not know: runs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from headrace.errors import ConfigError

VARIABLE = "HEADRACE_HEARTBEAT_SECONDS"
DEFAULT_SECONDS = 60.0
EXIT_LOST = 75  # EX_TEMPFAIL: starting again is the answer
_PREFIX, _DONE = "headrace/beat/", "done"


@contextmanager
def watched_processes(last_checkpoint: Callable[[], str | None]) -> Generator[None]:
    """While inside, a lost process ends this one within HEADRACE_HEARTBEAT_SECONDS (60).

    last_checkpoint: the folder that a new start goes on from. Nothing happens with one process.
    """
    if jax.process_count() == 1:
        yield
        return
    watch = _Watch(_seconds(), last_checkpoint)
    watch.start()
    try:
        yield
    except jax.errors.JaxRuntimeError:
        # A collective that failed: most likely because of a process that is gone. Then the watch
        # ends this process with a message before this time is over.
        time.sleep(watch.seconds + 2 * watch.interval)
        raise
    else:
        watch.finish()
    finally:
        watch.stop()


def _seconds() -> float:
    text = os.environ.get(VARIABLE, "")
    try:
        value = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{VARIABLE}={text!r}: a number of seconds above 0 is needed")
    return value


class _Watch(threading.Thread):
    def __init__(self, seconds: float, last_checkpoint: Callable[[], str | None]) -> None:
        super().__init__(name="headrace-watch", daemon=True)
        from jax._src.distributed import global_state  # no public door to the store in JAX 0.10

        self.seconds = seconds
        self.interval = min(seconds / 4, 5.0)
        self._client: Any = global_state.client
        self._last_checkpoint = last_checkpoint
        self._own = f"{_PREFIX}{jax.process_index()}"
        self._stopped = threading.Event()
        self._seen: dict[str, tuple[str, float]] = {}

    def run(self) -> None:
        beat = 0
        while not self._stopped.wait(self.interval):
            beat += 1
            try:
                self._write(str(beat))
                beats = dict(self._client.key_value_dir_get(_PREFIX))
            except Exception as error:
                if not self._stopped.is_set():
                    self._end(f"the first process of this run is gone ({error})")
                return
            lost = self._lost(beats)
            if lost and not self._stopped.is_set():
                self._end(f"process {', '.join(lost)} of {jax.process_count()} is gone: no sign of "
                          f"it for {self.seconds:g} s")  # fmt: skip

    def _lost(self, beats: dict[str, str]) -> list[str]:
        """Processes whose number has not changed for too long; those that never wrote are not."""
        now = time.monotonic()
        for key, value in beats.items():
            if self._seen.get(key, ("", 0.0))[0] != value:
                self._seen[key] = (value, now)
        return sorted(
            key.rpartition("/")[2]
            for key, (value, since) in self._seen.items()
            if value != _DONE and now - since > self.seconds and key != self._own
        )

    def _write(self, value: str) -> None:
        self._client.key_value_set(self._own, value, allow_overwrite=True)

    def _end(self, reason: str) -> None:
        folder = self._last_checkpoint()
        onwards = (
            "no checkpoint was saved yet; start the run again"
            if folder is None
            else f"the last checkpoint is {folder}. Start the run again with "
            "resume_from_checkpoint: true, on as many processes as there are"
        )
        sys.stdout.flush()
        print(f"\nProcessLost: {reason}.\n{onwards[0].upper()}{onwards[1:]}.", file=sys.stderr)
        sys.stderr.flush()
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

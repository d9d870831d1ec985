"""Ctrl-C and SIGTERM during training: finish the step, save, leave.

The first signal is remembered; a second Ctrl-C interrupts at once, wherever the program is.

Knows: signals. Does not know: what a step is.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import jax

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """`with Interrupt() as interrupt: ... if interrupt.received: ...`

    Outside the main thread signals cannot be handled and stay as they are.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # With several processes JAX watches SIGTERM, so that all stop after the same step.
            signals = _SIGNALS if jax.process_count() == 1 else (signal.SIGINT,)
            for number in signals:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt(
                "Ctrl-C again: stopped at once; what was not in a checkpoint is lost"
            )
        self.received = signal.Signals(number)
        if number == signal.SIGINT:  # os.write: safe inside a handler
            os.write(2, b"\nCtrl-C: finishing the step, then saving; once more stops at once\n")

    def leave(self, message: str) -> None:
        """End the program: KeyboardInterrupt after Ctrl-C; exit code 0 after SIGTERM.

        SIGTERM is how a preempted machine says goodbye; everything is saved, so nothing failed.
        """
        if self.received in (signal.SIGTERM, None):  # None: another process was told to stop
            raise SystemExit(0)
        raise KeyboardInterrupt(message)

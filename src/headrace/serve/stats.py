"""Numbers that an engine keeps: counters and lists of durations, read by the metrics page.

Knows: nothing of the engine. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Observer = Callable[[str, float], None]


@dataclass(kw_only=True)
class EngineStats:
    """Counters since the start. observe(name, value) is told every duration and length.

    host_seconds: time in which the device waited for the host (between tokens and the next step);
    wait_seconds: time in which the host waited for the device.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    host_seconds: float = 0.0
    wait_seconds: float = 0.0
    text_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    observers: list[Observer] = field(default_factory=list)

    def observe(self, name: str, value: float) -> None:
        """Tell everyone who listens."""
        for observer in self.observers:
            observer(name, value)

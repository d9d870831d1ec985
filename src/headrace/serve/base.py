"""What the engine of decoders and the engine of encoders have in common: settings of loading and
queueing, and one thread that lives, dies and is closed.

Knows: options, threads. Does not know: models, requests.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import jax

from headrace.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """max_model_len: most tokens of a sequence; None takes the model's own. max_num_seqs: sequences
    computed at once. max_queue: sequences that may wait; more are refused. base: replaces the base
    that an adapter names. dtype: of weights, "auto" is the files'. warm_up: compile every program
    before the engine is ready. compilation_cache: a folder where compiled programs are kept for the
    next start, None leaves JAX's own setting.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_queue: int = 256
    base: str | None = None
    dtype: str = "auto"
    revision: str = "main"
    trust_remote_code: bool = False
    warm_up: bool = True
    compilation_cache: str | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}; it is at least {least}{self._left_out(name)}"
            for name, least in self.least().items()
            if (value := getattr(self, name)) is not None and value < least
        ]
        problems += self.problems()
        if problems:
            raise ConfigError("; ".join(problems))

    def _left_out(self, name: str) -> str:
        """For settings that may be left to the engine: that 0 is not the way to say so."""
        chosen = {each.name for each in fields(self) if each.default is None}
        return ". Leave it out to have it chosen" if name in chosen else ""

    def least(self) -> dict[str, int]:
        """The smallest values of settings that are numbers; None passes."""
        return {"max_model_len": 1, "max_num_seqs": 1, "max_queue": 1}

    def problems(self) -> list[str]:
        """What else is wrong with these settings."""
        return []

    def use_compilation_cache(self) -> None:
        """Point JAX at the folder; for the whole process."""
        if self.compilation_cache is not None:
            jax.config.update("jax_compilation_cache_dir", self.compilation_cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class ThreadedEngine(ABC):
    """An engine whose work one thread does. dead: what ended the thread, None while all is well.

    Use as a context manager or call `close()`.
    """

    def __init__(self) -> None:
        self.dead: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread()

    def _start(self, name: str, loop: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=loop, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self.dead is None and not self._closing and self._thread.is_alive()

    @abstractmethod
    def close(self) -> None:
        """End what runs and stop the thread; a second call does nothing."""

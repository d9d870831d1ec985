"""transformers' TrainerCallback, called at its known hooks with its known arguments.

`args` is our config (same field names), `state` and `control` are transformers' own classes, so
`EarlyStoppingCallback` and other people's callbacks work as they are.

Knows: hook names, saved callback state. Does not know: when a hook is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from headrace.config import TrainConfig

CallbackLike = TrainerCallback | type[TrainerCallback]


class Callbacks:
    """Callbacks of a run, in the order they were added."""

    def __init__(self, callbacks: Iterable[CallbackLike] = ()) -> None:
        self.callbacks: list[TrainerCallback] = []
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: CallbackLike) -> None:
        """A callback, or its class."""
        made: Any = callback() if isinstance(callback, type) else callback
        if not isinstance(made, TrainerCallback):
            raise TypeError(
                f"{type(made).__name__} is not a transformers.TrainerCallback; derive it from that."
            )
        self.callbacks.append(made)

    def remove(self, callback: CallbackLike) -> None:
        """Remove this callback, or all of this class."""
        kind = callback if isinstance(callback, type) else None
        self.callbacks = [
            c for c in self.callbacks if c is not callback and not (kind and type(c) is kind)
        ]

    def fire(
        self,
        hook: str,
        args: TrainConfig,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl:
        """Call `hook` of every callback; what one returns is the control of the next."""
        for callback in self.callbacks:
            result = getattr(callback, hook)(args, state, control, **kwargs)
            control = control if result is None else result
        return control

    def state_dict(self) -> dict[str, Any]:
        """Counters of callbacks that export them (EarlyStoppingCallback does)."""
        return {
            type(c).__name__: c.state()["attributes"]
            for c in self.callbacks
            if isinstance(c, ExportableState)
        }

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Put saved counters back into the callbacks of the same class."""
        for callback in self.callbacks:
            for name, value in saved.get(type(callback).__name__, {}).items():
                setattr(callback, name, value)

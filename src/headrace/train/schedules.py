"""Learning-rate schedules by their Hugging Face names, as plain functions of the step.

A schedule is `step -> learning rate`, computed on the host in float64; the compiled step takes the
rate as an argument, so no schedule ever causes a recompilation. Values follow
`transformers.get_scheduler` step by step (compared in tests). Step 0 is the first optimizer step.

Knows: warm-up, decay shapes, the plateau rule. Does not know: optimizers, JAX, the training loop.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import ConfigError

Schedule = Callable[[int], float]
Shape = Callable[[float], float]


def _with_warmup(decay: Callable[[int], float], *, base: float, warmup: int) -> Schedule:
    """Linear ramp from 0 for `warmup` steps, then `decay(step)`; both are factors of `base`."""

    def learning_rate(step: int) -> float:
        return base * (step / max(1, warmup) if step < warmup else decay(step))

    return learning_rate


def _over(shape: Shape, *, warmup: int, total: int) -> Callable[[int], float]:
    """`shape(progress)` with progress 0 at the end of the warm-up and 1 at `total`."""
    span = max(1, total - warmup)
    return lambda step: max(0.0, shape((step - warmup) / span))


def _cosine_wave(progress: float, *, num_cycles: float = 0.5) -> float:
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress))


def _constant(*, base: float, warmup: int, total: int) -> Schedule:
    del warmup, total
    return lambda step: base


def _constant_with_warmup(*, base: float, warmup: int, total: int) -> Schedule:
    del total
    return _with_warmup(lambda step: 1.0, base=base, warmup=warmup)


def _linear(*, base: float, warmup: int, total: int) -> Schedule:
    # Counted from the end: with warmup == total the first rate after the ramp is 0, not 1.
    span = max(1, total - warmup)
    return _with_warmup(lambda step: max(0.0, (total - step) / span), base=base, warmup=warmup)


def _cosine(*, base: float, warmup: int, total: int, num_cycles: float = 0.5) -> Schedule:
    decay = _over(lambda p: _cosine_wave(p, num_cycles=num_cycles), warmup=warmup, total=total)
    return _with_warmup(decay, base=base, warmup=warmup)


def _cosine_with_restarts(*, base: float, warmup: int, total: int, num_cycles: int = 1) -> Schedule:
    def shape(progress: float) -> float:
        return 0.0 if progress >= 1.0 else _cosine_wave((num_cycles * progress) % 1.0)

    return _with_warmup(_over(shape, warmup=warmup, total=total), base=base, warmup=warmup)


def _polynomial(
    *, base: float, warmup: int, total: int, lr_end: float = 1e-7, power: float = 1.0
) -> Schedule:
    if base <= lr_end:
        raise ConfigError(
            f"lr_scheduler_type polynomial: learning_rate {base} is not above lr_end {lr_end}. "
            "Raise learning_rate or lower lr_end in lr_scheduler_kwargs."
        )

    def decay(step: int) -> float:
        if step > total:
            return lr_end / base
        remaining = 1.0 - (step - warmup) / max(1, total - warmup)
        return ((base - lr_end) * remaining**power + lr_end) / base

    return _with_warmup(decay, base=base, warmup=warmup)


def _inverse_sqrt(
    *, base: float, warmup: int, total: int, timescale: int | None = None
) -> Schedule:
    del total
    scale = timescale or warmup or 10_000

    def decay(step: int) -> float:
        return 1.0 / math.sqrt((step + scale - warmup) / scale)

    return _with_warmup(decay, base=base, warmup=warmup)


def _floor(base: float, min_lr: float | None, min_lr_rate: float | None) -> float:
    """The lowest rate as a share of `base`; exactly one of the two spellings must be given."""
    if (min_lr is None) == (min_lr_rate is None):
        raise ConfigError(
            f"cosine with a minimum: min_lr={min_lr} and min_lr_rate={min_lr_rate} were given; "
            "exactly one is needed. Set one of them in lr_scheduler_kwargs."
        )
    return min_lr / base if min_lr is not None else float(min_lr_rate or 0.0)


def _cosine_with_min_lr(
    *,
    base: float,
    warmup: int,
    total: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Schedule:
    low = _floor(base, min_lr, min_lr_rate)

    def shape(progress: float) -> float:
        return low + (1.0 - low) * _cosine_wave(progress, num_cycles=num_cycles)

    return _with_warmup(_over(shape, warmup=warmup, total=total), base=base, warmup=warmup)


def _cosine_warmup_with_min_lr(
    *,
    base: float,
    warmup: int,
    total: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Schedule:
    """As `cosine_with_min_lr`, but the first rate is above 0 and the last step gets the lowest."""
    low = _floor(base, min_lr, min_lr_rate)

    def learning_rate(step: int) -> float:
        if step < warmup:
            if warmup_lr_rate is None:
                return base * (step + 1) / max(1, warmup)
            return base * (warmup_lr_rate + (1 - warmup_lr_rate) * step / max(1, warmup - 1))
        progress = (step - warmup + 1) / max(1, total - warmup)
        return base * max(0.0, low + (1 - low) * _cosine_wave(progress, num_cycles=num_cycles))

    return learning_rate


Curve = Literal["linear", "cosine", "1-sqrt"]


def _rise(kind: str, progress: float) -> float:
    if kind == "linear":
        return progress
    if kind == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * progress))
    return 1.0 - math.sqrt(1.0 - progress)


def _fall(kind: str, progress: float, num_cycles: float) -> float:
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return _cosine_wave(progress, num_cycles=num_cycles)
    return 1.0 - math.sqrt(progress)


def _warmup_stable_decay(
    *,
    base: float,
    warmup: int,
    total: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: Curve = "linear",
    decay_type: Curve = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Schedule:
    for name, kind in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if kind not in ("linear", "cosine", "1-sqrt"):
            raise ConfigError(
                f"warmup_stable_decay: {name}={kind!r}; use 'linear', 'cosine' or '1-sqrt'."
            )
    stable = total - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    decay_start = warmup + stable

    def factor(step: int) -> float:
        if step < warmup:
            raw = _rise(warmup_type, step / max(1, warmup))
        elif step < decay_start:
            return 1.0
        elif step < decay_start + num_decay_steps:
            progress = (step - decay_start) / max(1, num_decay_steps)
            raw = _fall(decay_type, progress, num_cycles)
        else:
            return min_lr_ratio
        return max(0.0, raw * (1.0 - min_lr_ratio) + min_lr_ratio)

    return lambda step: base * factor(step)


@dataclass
class ReduceOnPlateau:
    """Lower the rate when the watched metric stops improving (torch's `ReduceLROnPlateau` rule).

    Call `observe(metric)` after each evaluation. `state_dict`/`load_state_dict` make it resumable.
    """

    base: float
    mode: Literal["min", "max"] = "min"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8
    _state: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        worst = math.inf if self.mode == "min" else -math.inf
        self._state = {"rate": self.base, "best": worst, "bad": 0, "cooling": 0}

    def __call__(self, step: int) -> float:
        return self._state["rate"]

    def _improved(self, metric: float) -> bool:
        best, sign = self._state["best"], 1.0 if self.mode == "min" else -1.0
        margin = self.threshold * (best if self.threshold_mode == "rel" else 1.0)
        if math.isinf(best):
            return sign * metric < sign * best
        # "rel" moves the bar by best * threshold even when best is negative, as torch does.
        return metric < best - margin if self.mode == "min" else metric > best + margin

    def observe(self, metric: float) -> None:
        state = self._state
        if self._improved(metric):
            state["best"], state["bad"] = metric, 0
        else:
            state["bad"] += 1
        if state["cooling"] > 0:
            state["cooling"] -= 1
            state["bad"] = 0
        if state["bad"] > self.patience:
            lower = max(state["rate"] * self.factor, self.min_lr)
            if state["rate"] - lower > self.eps:
                state["rate"] = lower
            state["cooling"], state["bad"] = self.cooldown, 0

    def state_dict(self) -> dict[str, float]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._state = dict(state)


def _reduce_lr_on_plateau(*, base: float, warmup: int, total: int, **kwargs: Any) -> Schedule:
    del warmup, total
    return ReduceOnPlateau(base, **kwargs)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "inverse_sqrt": _inverse_sqrt,
    "reduce_lr_on_plateau": _reduce_lr_on_plateau,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}


def _options(make: Callable[..., Schedule]) -> list[str]:
    target = ReduceOnPlateau if make is _reduce_lr_on_plateau else make
    hidden = {"base", "warmup", "total", "_state", "self"}
    return [name for name in inspect.signature(target).parameters if name not in hidden]


def make_schedule(
    name: str,
    *,
    learning_rate: float,
    num_training_steps: int,
    num_warmup_steps: int = 0,
    **kwargs: Any,
) -> Schedule:
    """The schedule `lr_scheduler_type` names; `kwargs` are transformers' `lr_scheduler_kwargs`.

    Raises ConfigError for an unknown name or option, with the nearest known one.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"lr_scheduler_type {name!r} is not known. Use one of {', '.join(SCHEDULES)}.{hint}"
        )
    make = SCHEDULES[name]
    options = _options(make)
    unknown = sorted(set(kwargs) - set(options))
    if unknown:
        allowed = ", ".join(options) or "no options"
        raise ConfigError(
            f"lr_scheduler_kwargs {unknown} are not known to {name!r}; it takes {allowed}."
        )
    if name == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        raise ConfigError("warmup_stable_decay needs num_decay_steps in lr_scheduler_kwargs.")
    return make(base=learning_rate, warmup=num_warmup_steps, total=num_training_steps, **kwargs)

"""`torch.amp.GradScaler` inside a training step.

Its scale and growth count are state of the step, on the device like parameters. A step it skips is
computed and not taken: parameters and optimizer state keep their values where gradients were not
finite. The optimizer's own counters live on the host, so it has to be told which steps were
skipped, as eager PyTorch has.

Does not know: how the step is traced or run.
"""

# A scaler's state has no public door in torch.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from headrace.errors import CaptureError

STATE = ("_scale", "_growth_tracker")


def start(scalers: Sequence[GradScaler]) -> None:
    """Make the state that a scaler makes at its first `scale()`."""
    for scaler in scalers:
        if scaler._enabled and scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))


def settings(scalers: Sequence[GradScaler]) -> tuple[Any, ...]:
    """What is part of the program: factors and interval, which users change seldom."""
    return tuple(
        (s._enabled, s._growth_factor, s._backoff_factor, s._growth_interval) for s in scalers
    )


@contextlib.contextmanager
def traceable(
    scalers: Sequence[GradScaler], optimizers: Sequence[Optimizer], skips: dict[int, torch.Tensor]
) -> Generator[None]:
    """Inside, scalers work without asking for a value.

    `skips` gets, for the index of each optimizer, a 0-dim float tensor that is above zero when its
    step is not taken.
    """
    index = {id(o): i for i, o in enumerate(optimizers)}

    def step_or_keep(
        scaler: GradScaler, optimizer: Optimizer, state: Any, *args: Any, **kwargs: Any
    ) -> None:
        o = index.get(id(optimizer))
        if o is None or scaler not in scalers:
            raise CaptureError(
                "the step calls GradScaler.step with a scaler or an optimizer that compile_step "
                "does not know.\nNeeded: optimizers passed as optimizer=[...], and a scaler that "
                "is a variable the step's function names."
            )
        if o in skips:
            raise CaptureError(
                "GradScaler.step is called twice for one optimizer in a step.\n"
                "Needed: one call a step. Split the step in two."
            )
        found = torch.stack(list(state["found_inf_per_device"].values())).sum()
        skips[o] = found
        before = _values(optimizer)
        optimizer.step(*args, **kwargs)
        _keep(optimizer, before, found > 0)

    fused = [o for o in optimizers if getattr(o, "_step_supports_amp_scaling", False)]
    patched = [
        (GradScaler, "_maybe_opt_step", step_or_keep),
        (torch, "_amp_foreach_non_finite_check_and_unscale_", _unscale),
        (torch, "_amp_update_scale_", _update_scale),
        *[(o, "_step_supports_amp_scaling", False) for o in fused],
    ]
    originals = [getattr(target, name) for target, name, _ in patched]
    try:
        for target, name, value in patched:
            setattr(target, name, value)
        for scaler in scalers:
            scaler._per_optimizer_states = defaultdict(_fresh)
        yield
        _refuse_open(scalers)
    finally:
        for (target, name, _), value in zip(patched, originals, strict=True):
            setattr(target, name, value)


def _fresh() -> dict[str, Any]:
    return torch.amp.grad_scaler._refresh_per_optimizer_state()


def _refuse_open(scalers: Sequence[GradScaler]) -> None:
    if any(s._per_optimizer_states for s in scalers):
        raise CaptureError(
            "the step calls GradScaler.unscale_ or .step and not .update(), which has to know "
            "what they found.\nNeeded: scaler.update() inside the step, after scaler.step()."
        )


def _values(optimizer: Optimizer) -> dict[Any, torch.Tensor]:
    """Copies of what a step of the optimizer changes, without the counters of the host."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    values: dict[Any, torch.Tensor] = {(p, None): p.detach().clone() for p in params}
    for p in params:
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, FunctionalTensor):
                values[p, key] = value.clone()
    return values


def _keep(optimizer: Optimizer, before: dict[Any, torch.Tensor], skipped: torch.Tensor) -> None:
    with torch.no_grad():
        for (p, key), old in before.items():
            tensor = p if key is None else optimizer.state[p][key]
            tensor.copy_(torch.where(skipped, old, tensor))


def _unscale(grads: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    for grad in grads:
        found.copy_(torch.maximum(found, (~grad.isfinite()).any().to(found.dtype)))
        grad.mul_(inverse.to(grad.dtype))


def _update_scale(
    scale: torch.Tensor,
    tracker: torch.Tensor,
    found: torch.Tensor,
    growth: float,
    backoff: float,
    interval: int,
) -> torch.Tensor:
    skipped, grows = found > 0, tracker + 1 == interval
    grown = scale * growth
    grown = torch.where(grows & grown.isfinite(), grown, scale)
    scale.copy_(torch.where(skipped, scale * backoff, grown))
    tracker.copy_(torch.where(skipped | grows, 0, tracker + 1))
    return scale

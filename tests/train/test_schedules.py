"""Schedules against transformers.get_scheduler, step by step."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from headrace.errors import ConfigError
from headrace.train.schedules import SCHEDULES, ReduceOnPlateau, make_schedule

BASE, WARMUP, TOTAL = 3e-4, 7, 40

CASES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 20}),
    ("cosine_with_min_lr", {"min_lr": 1e-5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 2e-5, "warmup_lr_rate": 0.3}),
    ("warmup_stable_decay", {"num_decay_steps": 10}),
    ("warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "cosine"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "linear"}),
]


def reference(name: str, warmup: int, kwargs: dict[str, object]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = get_scheduler(name, optimizer, warmup, TOTAL, dict(kwargs))
    rates = []
    for _ in range(TOTAL + 5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_equals_transformers(name: str, kwargs: dict[str, object], warmup: int) -> None:
    schedule = make_schedule(
        name,
        learning_rate=BASE,
        num_training_steps=TOTAL,
        num_warmup_steps=warmup,
        **kwargs,
    )
    ours = [schedule(step) for step in range(TOTAL + 5)]
    assert ours == pytest.approx(reference(name, warmup, kwargs), rel=1e-7, abs=1e-12)


def test_every_schedule_is_compared() -> None:
    assert {name for name, _ in CASES} | {"reduce_lr_on_plateau"} == set(SCHEDULES)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
def test_plateau_equals_torch(mode: str, threshold_mode: str) -> None:
    kwargs = {
        "mode": mode, "threshold_mode": threshold_mode, "patience": 1, "cooldown": 1,
        "factor": 0.5, "min_lr": 2e-5, "threshold": 0.05,
    }  # fmt: skip
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **kwargs)
    ours = make_schedule(
        "reduce_lr_on_plateau", learning_rate=BASE, num_training_steps=TOTAL, **kwargs
    )
    assert isinstance(ours, ReduceOnPlateau)
    metrics = [1.0, 0.9, 0.89, 0.95, 0.5, -0.2, -0.21, -0.1, 0.0, 0.3, 0.3, 2.0, 2.1, 2.0, 1, 1, 1]
    for step, metric in enumerate(metrics):
        theirs.step(metric)
        ours.observe(metric)
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
    assert ours(0) < BASE

    restored = ReduceOnPlateau(BASE)
    restored.load_state_dict(ours.state_dict())
    assert restored(0) == ours(0)


def test_unknown_names_are_refused() -> None:
    common = {"learning_rate": 1.0, "num_training_steps": 3}
    with pytest.raises(ConfigError, match="Did you mean 'cosine'"):
        make_schedule("cosin", **common)
    with pytest.raises(ConfigError, match=r"\['cycles'\] are not known to 'cosine'"):
        make_schedule("cosine", cycles=2, **common)
    with pytest.raises(ConfigError, match="exactly one is needed"):
        make_schedule("cosine_with_min_lr", **common)
    with pytest.raises(ConfigError, match="num_decay_steps"):
        make_schedule("warmup_stable_decay", **common)
    with pytest.raises(ConfigError, match="not above lr_end"):
        make_schedule("polynomial", lr_end=2.0, **common)

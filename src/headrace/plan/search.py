"""Which slice, mesh, remat policy and micro-batch: the analytic model prunes, the compiler decides.

Every candidate computes at least the positions of the configuration's own step on one device, so
that learning stays comparable; smaller micro-batches are accumulated.

Knows: plans. Does not know: terminals, how a program is compiled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import ConfigError
from headrace.plan.candidate import Candidate, check_mesh, meshes
from headrace.plan.compiler import Say
from headrace.plan.hardware import Slice, all_slices, parse_slice
from headrace.plan.planner import (
    Plan,
    Subject,
    analytic_plan,
    compiled_plans,
    default_candidate,
    obstacle,
)

Objective = Literal["cost", "time"]
MOST_CHIPS = 64
_ROOM = 0.92
_TRIES = 3  # compiles for one slice before it is shown as too large


@dataclass(frozen=True, kw_only=True)
class Found:
    """plans: best first; finalists compiled, the others analytic. pareto: names of plans that no
    other beats in both time and money. considered: candidates looked at."""

    plans: tuple[Plan, ...]
    considered: int
    notes: tuple[str, ...] = ()

    @property
    def pareto(self) -> tuple[Plan, ...]:
        best = math.inf
        found: list[Plan] = []
        for plan in sorted(self.plans, key=lambda p: (p.time_key, p.money_key)):
            if plan.fits and plan.money_key < best:
                found.append(plan)
                best = plan.money_key
        return tuple(found)


def parse_budget(text: str) -> float:
    """`20usd`, `$20` or `20` as dollars."""
    match = re.fullmatch(r"\$?\s*(\d+(?:\.\d+)?)\s*(?:usd|\$)?", text.strip().lower())
    if not match:
        raise ConfigError(f"--budget {text!r} cannot be read; write it as 20usd")
    return float(match.group(1))


def parse_deadline(text: str) -> float:
    """`3h`, `90m`, `2d` as hours."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(m|min|h|hours?|d|days?)", text.strip().lower())
    if not match:
        raise ConfigError(f"--deadline {text!r} cannot be read; write it as 3h, 90m or 2d")
    unit = {"m": 1 / 60, "h": 1.0, "d": 24.0}[match.group(2)[0]]
    return float(match.group(1)) * unit


def search(
    subject: Subject,
    *,
    slices: Sequence[str] = (),
    objective: Objective = "cost",
    budget: float | None = None,
    deadline: float | None = None,
    finalists: int = 3,
    workers: int = 1,
    say: Say = lambda text: None,
    cache: str | Path | None = None,
) -> Found:
    """The best plan of every slice, finalists compiled.

    slices: names; by default every TPU slice and GPU machine of up to 64 chips. finalists: how many
    of the best are compiled (minutes each), 0 for none; where the compiler finds one too large, the
    next best of its slice takes its place. Raises ConfigError when nothing fits.
    """
    chosen = [parse_slice(name) for name in slices] or [
        each for each in all_slices().values() if each.num_chips <= MOST_CHIPS
    ]
    considered, ranked = 0, dict[str, list[Plan]]()
    for hardware in chosen:
        plans = [analytic_plan(subject, each) for each in candidates(subject, hardware)]
        considered += len(plans)
        fitting = [p for p in plans if p.hbm_bytes <= _ROOM * p.limit]
        if fitting:
            order = sorted(fitting, key=lambda p: (_key(p, objective), len(p.candidate.mesh)))
            ranked[hardware.name] = order
    if not ranked:
        raise ConfigError(_nothing_fits(subject, chosen))
    best = [order[0] for order in ranked.values()]
    allowed = [p for p in best if _within(p, budget, deadline)]
    notes: list[str] = []
    if not allowed:
        notes.append("nothing keeps within the budget and the deadline; all are shown")
        allowed = best
    allowed.sort(key=lambda p: _key(p, objective))
    compiled = [p for p in allowed if not obstacle(subject, p.hardware)][:finalists]
    why = next(
        (w for p in allowed if (w := obstacle(subject, p.hardware)) and p.hardware.is_tpu), ""
    )
    if why and finalists:
        notes.append(why)
    by_slice: dict[str, Plan] = {}
    for _ in range(_TRIES):
        done = compiled_plans(
            subject, [p.candidate for p in compiled], say=say, workers=workers, cache=cache
        )
        by_slice |= {p.candidate.slice_name: p for p in done if p.report is not None}
        large = [p for p in done if p.report is not None and not p.fits]
        again = (_next_best(plan, ranked[plan.hardware.name]) for plan in large)
        compiled = [plan for plan in again if plan is not None]
    plans = [by_slice.get(plan.candidate.slice_name, plan) for plan in allowed]
    plans.sort(key=lambda p: (not p.fits, _key(p, objective)))
    return Found(plans=tuple(plans), considered=considered, notes=tuple(notes))


def _next_best(large: Plan, order: list[Plan]) -> Plan | None:
    """What to compile after a plan that the compiler found too large: the next in order, those of
    the same remat policy only if they fit once they are as far off as this one."""
    scale = large.hbm_bytes / large.estimate.hbm_bytes
    policy = large.candidate.remat
    at = next(i for i, plan in enumerate(order) if plan.candidate == large.candidate)
    return next(
        (
            plan
            for plan in order[at + 1 :]
            if plan.candidate.remat != policy or scale * plan.hbm_bytes <= _ROOM * plan.limit
        ),
        None,
    )


def candidates(subject: Subject, hardware: Slice) -> Iterator[Candidate]:
    """Every candidate on a slice: meshes, remat policies, micro-batches, packed row lengths."""
    own = default_candidate(subject, hardware.name)
    target = own.batch_size * own.accumulation * own.length
    layers = subject.shape.layers
    heads = math.gcd(*(kind.heads for kind in layers))
    kv_heads = math.gcd(*(kind.kv_heads for kind in layers))
    given = getattr(subject.config, "mesh", None)
    grid = list(meshes(hardware, heads=heads, kv_heads=kv_heads))
    if isinstance(given, dict):
        grid = [check_mesh(given, hardware)]
    lengths = [own.length]
    if own.packing and subject.config.max_length is None:
        lengths += [n for n in (4096, 8192) if n <= subject.shape.max_positions]
    for mesh in grid:
        for length in lengths:
            for remat in ("none", "dots", "full"):
                for batch in (1, 2, 4, 8, 16, 32):
                    each = own.but(mesh=mesh, length=length, remat=remat, batch_size=batch)
                    positions = each.rows * length
                    if positions > 4 * max(target, each.batch_devices * length):
                        break
                    yield each.but(accumulation=max(1, math.ceil(target / positions)))


def _key(plan: Plan, objective: Objective) -> float:
    return plan.money_key if objective == "cost" else plan.time_key


def _within(plan: Plan, budget: float | None, deadline: float | None) -> bool:
    usd, hours = plan.usd(), plan.hours
    if budget is not None and (usd is None or usd > budget):
        return False
    return deadline is None or (hours is not None and hours <= deadline)


def _nothing_fits(subject: Subject, chosen: Sequence[Slice]) -> str:
    largest = max(chosen, key=lambda s: s.num_devices * s.chip.hbm_bytes)
    least = min(
        (analytic_plan(subject, each) for each in candidates(subject, largest)),
        key=lambda plan: plan.hbm_bytes,
    )
    return (
        f"{subject.shape.name} ({subject.shape.size / 1e9:.1f}B parameters) fits none of the "
        f"{len(chosen)} slices looked at. The largest, {largest.name}, needs "
        f"{least.hbm_bytes / 2**30:.1f} GiB a device and has {least.limit / 2**30:.1f}. Train an "
        "adapter (use_peft: true), shorten max_length, or name larger slices with --slice."
    )

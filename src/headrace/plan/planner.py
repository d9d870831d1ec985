"""A plan: does it fit, how long, how much, and where every number comes from.

    configuration -> candidate -> analytic estimate (at once) -> compiled report (minutes) -> Plan

Knows: all parts of this folder. Does not know: terminals, files, HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import TrainConfig
from headrace.errors import ConfigError, PlanError
from headrace.plan.analytic import Estimate, Training, estimate, training_of
from headrace.plan.automatic import Here, automatic_settings, least_remat, local_candidate
from headrace.plan.candidate import Candidate, Work, check_mesh
from headrace.plan.compiler import Answer, Say, compile_all
from headrace.plan.hardware import Slice, parse_slice
from headrace.plan.prices import Price, read_prices, slice_price
from headrace.plan.shape import ModelShape, model_shape, read_model_config
from headrace.plan.topology import compiler_obstacle
from headrace.plan.workload import Workload, make_workload, plan_settings

COMPILED_SPREAD = 1.15  # how far published step times lay from the replay, see docs/planning.md


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned for every slice: the configuration, the model, the data, the prices."""

    config: TrainConfig
    model_config: Mapping[str, Any]
    shape: ModelShape
    training: Training
    prices: Mapping[str, Price]
    measured: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def num_labels(self) -> int | None:
        found = {**self.measured, **plan_settings(self.config)}.get("num_labels")
        return None if found is None else int(found)

    def workload(self, candidate: Candidate) -> Workload:
        return make_workload(
            self.config, candidate.length, packing=candidate.packing, measured=self.measured
        )


def read_subject(
    config: TrainConfig,
    *,
    prices: str | Path | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Subject:
    """Read config.json and prices. Raises ConfigError for what is missing or wrong."""
    if config.model_name_or_path is None:
        raise ConfigError("no model: set model_name_or_path to a folder with a config.json.")
    settings = plan_settings(config)
    found = read_model_config(config.model_name_or_path, config.model_revision)
    shape = model_shape(found, config.model_name_or_path)
    return Subject(
        config=config,
        model_config=found,
        shape=shape,
        training=training_of(config, shape),
        prices=read_prices(prices or settings.get("prices")),
        measured=dict(measured or {}),
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One candidate's answer. `report` is the compiled one, None when only the analytic model ran;
    then `why_not` says why."""

    subject: Subject
    candidate: Candidate
    estimate: Estimate
    workload: Workload
    price: Price
    report: Mapping[str, Any] | None = None
    why_not: str = ""
    cached: bool = False
    changes: tuple[Change, ...] = ()

    @property
    def hardware(self) -> Slice:
        return self.candidate.hardware

    @property
    def compiled(self) -> bool:
        return self.report is not None

    @property
    def timed(self) -> bool:
        """Whether the time is the replay of a compiled program."""
        return self.report is not None and "seconds" in self.report

    @property
    def memory(self) -> Mapping[str, int]:
        return self.report["memory"] if self.report is not None else self.estimate.memory

    @property
    def hbm_bytes(self) -> int:
        """Bytes needed on one device."""
        return sum(self.memory.values())

    @property
    def limit(self) -> int:
        return self.hardware.chip.hbm_bytes

    @property
    def fits(self) -> bool:
        if self.report is not None:
            return bool(self.report["fits"])
        return self.hbm_bytes <= self.limit

    @property
    def seconds(self) -> float:
        return (
            float(self.report["seconds"]) if self.timed and self.report else self.estimate.seconds
        )

    @property
    def seconds_range(self) -> tuple[float, float]:
        """Compiled: the busiest resource alone at best; at worst the published errors' spread, or
        nothing overlapping, whichever is less. Analytic: a factor either way."""
        if not self.timed or self.report is None:
            return self.estimate.low, self.estimate.high
        low = min(self.report["best_seconds"], self.seconds)
        return low, max(
            self.seconds, min(self.report["worst_seconds"], COMPILED_SPREAD * self.seconds)
        )

    @property
    def padded_tokens_per_second(self) -> float:
        return self.candidate.step_positions / self.seconds

    @property
    def real_tokens_per_second(self) -> float:
        return self.padded_tokens_per_second * self.workload.share

    @property
    def mfu(self) -> float:
        """Model FLOPs (nothing recomputed, all computed positions) over the slice's peak."""
        peak = self.hardware.chip.flops * self.hardware.num_devices
        return self.estimate.model_flops / self.seconds / peak

    @property
    def num_steps(self) -> int | None:
        return self.workload.num_steps(self.candidate)

    @property
    def hours(self) -> float | None:
        """Hours of training steps; loading, compiling and saving are not in it."""
        if self.num_steps is None:
            return None
        # shorter buckets take less time; the step that is planned is that of the longest
        return self.num_steps * self.seconds * self.workload.filled_length(self.candidate) / 3600

    def usd(self, *, spot: bool = False) -> float | None:
        rate = self.price.spot if spot else self.price.on_demand
        return None if rate is None or self.hours is None else rate * self.hours

    def usd_per_million(self, *, spot: bool = False) -> float | None:
        """Dollars for a million real tokens."""
        rate = self.price.spot if spot else self.price.on_demand
        return None if rate is None else rate / (self.real_tokens_per_second * 3600) * 1e6

    @property
    def time_key(self) -> float:
        """Seconds a real token: orders plans by time also when the dataset is unknown."""
        return 1.0 / self.real_tokens_per_second

    @property
    def money_key(self) -> float:
        """Dollars a million real tokens; infinite where no price is known."""
        found = self.usd_per_million()
        return math.inf if found is None else found

    @property
    def bound(self) -> str:
        """What the step mostly waits for."""
        if not self.timed or self.report is None:
            slow = max(self.estimate.parts, key=lambda name: self.estimate.parts[name])
            return "interconnect" if slow.startswith("links") else "compute"
        shares: dict[str, float] = {}
        for part in self.report["parts"].values():
            shares[part["bound"]] = shares.get(part["bound"], 0.0) + part["seconds"]
        return max(shares, key=lambda name: shares[name])

    def settings(self) -> dict[str, Any]:
        """What the plan assumed, as settings that `headrace train` takes."""
        each = self.candidate
        mesh = {name: size for name, size in each.mesh.items() if size > 1}
        found: dict[str, Any] = {"mesh": mesh} if mesh else {}
        if not each.trains:
            return found | {
                "per_device_eval_batch_size": each.batch_size,
                "max_length": each.length,
                "eval_packing": each.packing,
            }
        return found | {
            "per_device_train_batch_size": each.batch_size,
            "gradient_accumulation_steps": each.accumulation,
            "max_length": each.length,
            "packing": each.packing,
            "activation_checkpointing": each.remat,
            "compiler_flags": each.flags,
        }

    def as_json(self) -> dict[str, Any]:
        """Every number of the plan, with plain names; None where unknown."""
        low, high = self.seconds_range
        per_chip = self.hardware.chip.devices_per_chip
        report = self.report or {}
        return {
            "work": self.candidate.work,
            "slice": self.hardware.name,
            "chips": self.hardware.num_chips,
            "model": self.subject.shape.name,
            "compiled": self.compiled,
            "not_compiled_because": self.why_not,
            "cached": self.cached,
            "fits": self.fits,
            "hbm_bytes_per_chip": self.hbm_bytes * per_chip,
            "hbm_bytes_available_per_chip": self.limit * per_chip,
            "memory": {name: size * per_chip for name, size in self.memory.items()},
            "step_seconds": self.seconds,
            "step_seconds_range": [low, high],
            "real_tokens_per_second": self.real_tokens_per_second,
            "padded_tokens_per_second": self.padded_tokens_per_second,
            "real_share": self.workload.share,
            "mfu": self.mfu,
            "bound": self.bound,
            "steps": self.num_steps,
            "hours": self.hours,
            "usd": self.usd(),
            "usd_spot": self.usd(spot=True),
            "usd_per_million_tokens": self.usd_per_million(),
            "usd_per_million_tokens_spot": self.usd_per_million(spot=True),
            "usd_per_hour": self.price.on_demand,
            "price_source": self.price.source,
            "compile_seconds": report.get("compile_seconds"),
            "parts": report.get("parts")
            or {k: {"seconds": v} for k, v in self.estimate.parts.items()},
            "settings": self.settings(),
            "assumed": [
                *self.workload.assumed,
                *report.get("assumed", []),
                *self.subject.shape.notes,
            ],
            "changes": [change.as_json() for change in self.changes],
            "program": report.get("program"),
            "analytic_hbm_bytes_per_chip": self.estimate.hbm_bytes * per_chip,
            "analytic_step_seconds": self.estimate.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Change:
    """A way to make a plan fit. verified: by a compile; None when that was not tried."""

    text: str
    candidate: Candidate
    hbm_bytes: int
    verified: bool | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "change": self.text,
            "hbm_bytes_per_device": self.hbm_bytes,
            "verified": self.verified,
        }


def default_candidate(subject: Subject, slice_name: str, work: Work = "train") -> Candidate:
    """The candidate that the configuration itself describes, on a slice."""
    hardware = parse_slice(slice_name)
    config = subject.config.replace(mesh=subject.config.mesh or "auto", max_length=_length(subject))
    if isinstance(config.mesh, dict):
        config = config.replace(mesh=check_mesh(config.mesh, hardware))
    here = Here(count=hardware.num_devices, memory=hardware.chip.hbm_bytes, hardware=hardware)
    config, _ = automatic_settings(config, subject.model_config, here)
    found = local_candidate(config, here)
    if work == "evaluate":
        return found.but(
            work=work,
            batch_size=config.per_device_eval_batch_size,
            accumulation=1,
            packing=config.eval_packing,
            remat="none",
            flags="default",
        )
    if config.activation_checkpointing == "auto":
        found = found.but(remat=least_remat(subject.training, found, here))
    return found


def _length(subject: Subject) -> int:
    config = subject.config
    if config.max_length is not None:
        return config.max_length
    measured = subject.measured.get("max_length")
    if measured:
        return int(measured)
    usual = 2048 if config.task == "causal" else 512
    mean = plan_settings(config).get("dataset_mean_tokens")
    if mean and config.task != "causal":
        step = config.pad_to_multiple_of
        usual = min(usual, math.ceil(2 * mean / step) * step)
    return min(usual, subject.shape.max_positions or usual)


def analytic_plan(subject: Subject, candidate: Candidate, *, why_not: str = "") -> Plan:
    """The answer without a compiler."""
    workload = subject.workload(candidate)
    return Plan(
        subject=subject,
        candidate=candidate,
        estimate=estimate(subject.training, candidate, supervised_share=workload.supervised_share),
        workload=workload,
        price=slice_price(candidate.hardware, subject.prices),
        why_not=why_not or "the analytic model was asked for",
    )


def obstacle(subject: Subject, hardware: Slice) -> str:
    """Why a plan for this slice cannot be compiled here; empty when it can."""
    if not hardware.is_tpu:
        return "GPU programs are not compiled ahead of time"
    if subject.config.task not in ("causal", "sequence-classification"):
        return f"task {subject.config.task} has the analytic model only"
    return compiler_obstacle() or ""


def compiled_plans(
    subject: Subject,
    candidates: Sequence[Candidate],
    *,
    say: Say = lambda text: None,
    cache: str | Path | None = None,
    workers: int = 1,
    keep_text: str | None = None,
    save_programs: str | None = None,
) -> list[Plan]:
    """Plans from the compiler; those that it refused carry the reason in `why_not`.

    Raises PlanError when nothing can be compiled at all.
    """
    if not candidates:
        return []
    share = subject.workload(candidates[0]).supervised_share
    answers = compile_all(
        subject.config,
        candidates,
        model_config=subject.model_config,
        num_labels=subject.num_labels,
        supervised_share=share * subject.workload(candidates[0]).share,
        cache=cache,
        workers=workers,
        say=say,
        keep_text=keep_text,
        save_programs=save_programs,
    )
    return [
        _from_answer(subject, candidate, answer)
        for candidate, answer in zip(candidates, answers, strict=True)
    ]


def _from_answer(subject: Subject, candidate: Candidate, answer: Answer) -> Plan:
    base = analytic_plan(subject, candidate, why_not=answer.error or "")
    return Plan(
        subject=subject,
        candidate=candidate,
        estimate=base.estimate,
        workload=base.workload,
        price=base.price,
        report=answer.report,
        why_not=answer.error or "",
        cached=answer.cached,
    )


def make_plan(
    config: TrainConfig,
    slice_name: str,
    *,
    compile: bool = True,
    prices: str | Path | None = None,
    measured: Mapping[str, Any] | None = None,
    say: Say = lambda text: None,
    first: Callable[[Plan], None] = lambda plan: None,
    cache: str | Path | None = None,
    all_flags: bool = False,
    keep_text: str | None = None,
    work: Work = "train",
    save_programs: str | None = None,
) -> Plan:
    """Plan one configuration for one slice: its training, or the evaluation of its eval data.

    first: called with the analytic plan at once. all_flags: compile every flag set worth trying on
    the slice and keep the fastest; otherwise the configuration's own. save_programs: a folder
    that a run on the slice may use as its compilation cache. When it does not fit, the
    plan's `changes` say what would, each compiled.
    """
    subject = read_subject(config, prices=prices, measured=measured)
    candidate = default_candidate(subject, slice_name, work)
    why_not = obstacle(subject, candidate.hardware)
    if save_programs is not None:
        _check_saving(candidate, why_not if compile else "--no-compile was given", all_flags)
    quick = analytic_plan(subject, candidate, why_not=why_not)
    first(quick)
    from headrace.plan.advice import smallest_changes

    if why_not or not compile:
        return _with_changes(quick, smallest_changes(quick))
    flags = [candidate.flags]
    if all_flags:
        from headrace.train.compiler_flags import flag_sets

        flags = list(flag_sets(candidate.hardware.chip.name, candidate.num_devices))
    tried = [candidate.but(flags=name) for name in flags]
    plans = compiled_plans(
        subject, tried, say=say, cache=cache, keep_text=keep_text, save_programs=save_programs
    )
    usable = [plan for plan in plans if plan.report is not None]
    if not usable:
        raise PlanError(plans[0].why_not)
    best = min(usable, key=lambda plan: (not plan.fits, plan.seconds))
    if best.fits:
        return best
    changes = smallest_changes(best)
    checked = compiled_plans(subject, [c.candidate for c in changes], say=say, cache=cache)
    return _with_changes(best, _verified(changes, checked))


def _check_saving(candidate: Candidate, why_not: str, all_flags: bool) -> None:
    """Raise ConfigError, all reasons at once, where no program could be saved that a run finds."""
    problems: list[str] = []
    if why_not:
        problems.append(f"nothing is compiled: {why_not}")
    if all_flags:
        problems.append("--all-flags compiles several programs; set compiler_flags")
    if candidate.num_devices == 1:
        problems.append(
            "a run on one device does not say where arrays lie, a plan must: the programs differ"
        )
    if not candidate.trains:
        problems.append("only the training step is saved; leave out --evaluate")
    if problems:
        raise ConfigError(f"--save-programs: {'; '.join(problems)}")


def _verified(changes: Sequence[Change], plans: Sequence[Plan]) -> list[Change]:
    found: list[Change] = []
    for change, plan in zip(changes, plans, strict=True):
        ok = None if plan.report is None else plan.fits
        found.append(
            Change(
                text=change.text, candidate=change.candidate, hbm_bytes=plan.hbm_bytes, verified=ok
            )
        )
    return sorted(found, key=lambda change: change.verified is not True)


def _with_changes(plan: Plan, changes: Sequence[Change]) -> Plan:
    from dataclasses import replace

    return replace(plan, changes=tuple(changes))

"""A plan in a terminal of 100 columns.

Knows: rich tables. Does not know: how numbers come about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from headrace.plan.planner import Plan
from headrace.plan.search import Found
from headrace.plan.serving import PUBLISHED, ServingPlan

GIB = 2**30
_BAR = 26


def unknown(value: float | None, text: str) -> str:
    return "?" if value is None else text.format(value)


def show_plan(plan: Plan, console: Console, *, explain: bool = False) -> None:
    """Everything about one plan: memory, time, money, settings."""
    _heading(plan, console)
    _memory(plan, console)
    _time(plan, console)
    _money(plan, console)
    if plan.changes:
        _changes(plan, console)
    assumed = plan.as_json()["assumed"]
    for line in assumed:
        console.print(f"  assumed: {line}", style="dim", markup=False)
    if plan.fits:
        console.print("\nSettings that headrace train takes:", style="bold")
        console.print(settings_yaml(plan), markup=False, highlight=False, end="")
    if explain:
        show_explanation(plan, console)


def settings_yaml(plan: Plan) -> str:
    """One setting a line, as YAML."""
    lines = [
        f"{name}: {yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}"
        for name, value in plan.settings().items()
    ]
    return "\n".join(lines) + "\n"


def in_seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"


def _heading(plan: Plan, console: Console) -> None:
    each, hardware = plan.candidate, plan.hardware
    how = f"compiled, flags {each.flags}" if plan.compiled else "NOT COMPILED, analytic model"
    kind = "chip" if hardware.is_tpu else "GPU"
    rows = f"rows {each.rows} x {each.length}"
    rows += f" x {each.accumulation}, remat {each.remat}" if each.trains else ""
    console.print(
        f"\n{'' if each.trains else 'Evaluating '}{plan.subject.shape.name} on {hardware.name}: "
        f"{hardware.num_chips} {kind}{'s' if hardware.num_chips > 1 else ''}, "
        f"{each.mesh_text()}, {rows}",
        style="bold",
        markup=False,
    )
    console.print(f"  {how}{' (from the cache)' if plan.cached else ''}", markup=False)
    if not plan.compiled and plan.why_not:
        console.print(f"  why: {plan.why_not}", style="yellow", markup=False)


def _memory(plan: Plan, console: Console) -> None:
    used, limit = plan.hbm_bytes, plan.limit
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    console.print(
        f"\nMemory of a device: {used / GIB:.2f} of {limit / GIB:.2f} GiB, {verdict}",
        style="bold" if plan.fits else "bold red",
        markup=False,
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, size in sorted(plan.memory.items(), key=lambda kv: -kv[1]):
        if size < 2**20:
            continue
        table.add_row(f"  {name}", f"{size / GIB:8.2f} GiB", _bar(size / limit))
    console.print(table)


def _bar(share: float) -> str:
    return "█" * min(_BAR, round(share * _BAR)) or "▏"


def _time(plan: Plan, console: Console) -> None:
    low, high = plan.seconds_range
    step = "step" if plan.candidate.trains else "batch"
    console.print(
        f"\nTime of a {step}: {in_seconds(plan.seconds)} ({in_seconds(low)} to "
        f"{in_seconds(high)}), bound by {plan.bound}; "
        f"{plan.real_tokens_per_second:,.0f} real tokens/s of {plan.padded_tokens_per_second:,.0f} "
        f"computed, MFU {plan.mfu:.1%}",
        style="bold",
        markup=False,
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    parts: dict[str, Any] = plan.as_json()["parts"]
    longest = sorted(parts.items(), key=lambda kv: -kv[1]["seconds"])
    for name, part in longest[:12]:
        share = part["seconds"] / plan.seconds
        if share >= 0.002:
            table.add_row(
                f"  {name}", f"{part['seconds'] * 1e3:10.1f} ms", f"{share:6.1%}",
                part.get("bound", ""), _bar(share),
            )  # fmt: skip
    console.print(table)


def _money(plan: Plan, console: Console) -> None:
    console.print("\nThe whole run", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    steps, hours = "steps", "hours of steps"
    if not plan.candidate.trains:
        steps, hours = "batches", "hours of them"
    table.add_row(f"  {steps}", "unknown" if plan.num_steps is None else f"{plan.num_steps:,}")
    table.add_row(f"  {hours}", unknown(plan.hours, "{:.2f}"))
    for name, spot in (("on demand", False), ("spot", True)):
        rate = plan.price.spot if spot else plan.price.on_demand
        if rate is None:
            table.add_row(f"  {name}", "price unknown (give one with --prices)")
            continue
        total = unknown(plan.usd(spot=spot), "${:,.2f}")
        million = unknown(plan.usd_per_million(spot=spot), "${:,.3f}")
        table.add_row(f"  {name}, ${rate:,.2f}/h", f"{total}; {million} a million real tokens")
    console.print(table)


def _changes(plan: Plan, console: Console) -> None:
    console.print("\nSmallest changes that make it fit", style="bold")
    words = {True: "compiled: fits", False: "compiled: does not fit", None: "not compiled"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for change in plan.changes:
        size = f"{change.hbm_bytes / GIB:.2f} GiB"
        table.add_row(f"  {change.text}", size, words[change.verified])
    console.print(table)


def show_explanation(plan: Plan, console: Console) -> None:
    """Where every number comes from."""
    chip = plan.hardware.chip
    console.print("\nWhere the numbers come from", style="bold")
    for line in explanation(plan):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print(
        f"  {chip.name}: {chip.flops / 1e12:,.0f} bf16 TFLOP/s, HBM "
        f"{chip.hbm_bandwidth / 1e9:,.0f} GB/s, link {chip.link_bandwidth / 1e9:.0f} GB/s one way "
        f"x {plan.hardware.usable_links} usable, {chip.hbm_bytes / GIB:.2f} GiB a program may use",
        markup=False,
        soft_wrap=True,
    )


def explanation(plan: Plan) -> list[str]:
    """One line for every number."""
    each = plan.candidate
    lines: list[str] = []
    if plan.timed:
        lines += [
            "memory: XLA's own account of the compiled program (arguments + results - reused + "
            "temporaries + code); arguments by cause from their shards, kept activations and "
            "logits read from the program",
            "step time: the compiled schedule replayed: matmuls at the compiler's cycles, other "
            "work at 85 % of HBM bandwidth, attention kernels by visible blocks, collectives by "
            "bytes over the links in use, overlap as scheduled",
            "range: from the busiest resource alone to nothing overlapping, at most 15 % more",
        ]
    else:
        lines += [
            "memory and time: sums over the matrices of config.json (plan/analytic.py); nothing "
            "was compiled",
            "range: a fixed factor either way that covers the compiled programs it was tried on",
        ]
    lines += [
        f"computed tokens/s: {each.rows} rows x {each.length} x {each.accumulation} micro-batches "
        f"/ {plan.seconds:.3f} s",
        f"real tokens/s: of those {plan.workload.share:.1%} are not padding",
        f"MFU: {plan.estimate.model_flops:.3e} model FLOPs a step (recomputation not counted) / "
        f"({plan.seconds:.3f} s x {plan.hardware.num_devices} x {plan.hardware.chip.flops:.3g})",
        f"price: {plan.price.source}",
    ]
    if plan.compiled:
        lines.append(
            f"analytic model for the same: {plan.estimate.hbm_bytes / GIB:.2f} GiB, "
            f"{plan.estimate.seconds:.3f} s"
        )
    return lines


def show_search(found: Found, console: Console) -> None:
    """The table of a search, best first; * marks plans that none beats in both time and money."""
    for note in found.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    console.print(
        f"\n{found.considered:,} candidates, the best of each slice; * none is faster and cheaper",
        style="bold",
    )
    pareto = {plan.candidate.slice_name for plan in found.pareto}
    table = Table(box=None, pad_edge=False, header_style="dim", collapse_padding=True)
    numbers = ("GiB", "s/step", "tokens/s", "hours", "usd", "usd/M")
    for name in ("", "slice", "mesh", "rows", "remat", *numbers, "compiled"):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for plan in found.plans[:24]:
        table.add_row(*_row(plan, plan.candidate.slice_name in pareto))
    console.print(table)


def _row(plan: Plan, is_pareto: bool) -> Sequence[str]:
    each = plan.candidate
    rows = f"{each.batch_size}x{each.length}"
    if each.accumulation > 1:
        rows += f"x{each.accumulation}"
    compiled = "no" if not plan.compiled else "yes" if plan.fits else "too large"
    return (
        "*" if is_pareto else "",
        each.slice_name,
        each.mesh_text().replace("one device", "-").replace(" x ", ","),
        rows,
        each.remat,
        f"{plan.hbm_bytes / GIB:.1f}",
        f"{plan.seconds:.2f}",
        f"{plan.real_tokens_per_second:,.0f}",
        unknown(plan.hours, "{:.2f}"),
        unknown(plan.usd(), "{:,.2f}"),
        unknown(plan.usd_per_million(), "{:.3f}"),
        compiled,
    )


def show_serving(plan: ServingPlan, console: Console) -> None:
    """A serving plan: memory of a device, then a row for each number of streams."""
    copies = f", {plan.replicas} copies" if plan.replicas > 1 else ""
    traffic = plan.traffic
    console.print(
        f"\nServing {plan.shape.name} on {plan.hardware.name}: tensor {plan.tensor}{copies}; "
        f"{traffic.prompt:,} tokens in, {traffic.answer:,} out",
        style="bold",
        markup=False,
    )
    console.print("  NOT COMPILED, analytic model: what the chips could do", markup=False)
    limit = plan.hardware.chip.hbm_bytes
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    console.print(
        f"\nMemory of a device: {limit / GIB:.2f} GiB, {verdict}: {plan.cache_tokens:,} tokens of "
        f"cache, {plan.most_streams:,} streams a copy",
        style="bold" if plan.fits else "bold red",
        markup=False,
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, size in plan.memory.items():
        table.add_row(f"  {name}", f"{size / GIB:8.2f} GiB", _bar(size / limit))
    console.print(table)
    if not plan.cache_tokens:
        return
    low, high = PUBLISHED
    table = Table(box=None, pad_edge=False)
    for name in (
        "  streams a copy",
        "first token",
        "a token",
        "tokens/s",
        "$/M tokens",
        "bound by",
    ):
        table.add_column(name, justify="right")
    for each in plan.loads():
        usd = plan.usd_per_million(each)
        table.add_row(
            f"{each.streams}", in_seconds(each.first), in_seconds(each.token),
            f"{each.tokens_per_second:,.0f}", unknown(usd, "{:.2f}"), each.bound,
        )  # fmt: skip
    console.print("\nAt best, whole slice:", style="bold")
    console.print(table)
    console.print(
        f"  Measured servers took {low:g} to {high:g} times as long a token "
        "(docs/planning.md). No queue counted.",
        style="dim",
        markup=False,
    )

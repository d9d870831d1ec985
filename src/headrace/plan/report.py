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
from headrace.plan.serving import ServingPlan

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


def show_serving(plan: ServingPlan, console: Console, *, explain: bool = False) -> None:
    """A serving plan: memory of a device, then a row for each number of streams."""
    copies = f", {plan.replicas} copies" if plan.replicas > 1 else ""
    traffic = plan.traffic
    console.print(
        f"\nServing {plan.shape.name} on {plan.hardware.name}: tensor {plan.tensor}{copies}; "
        f"{traffic.prompt:,} tokens in, {traffic.answer:,} out",
        style="bold",
        markup=False,
    )
    how = "NOT COMPILED, analytic model: what the chips could do"
    if plan.report is not None:
        how = f"compiled in {plan.report['compile_seconds']:.0f} s"
    console.print(f"  {how}{' (from the cache)' if plan.cached else ''}", markup=False)
    if plan.why_not:
        console.print(f"  why: {plan.why_not}", style="yellow", markup=False)
    _serving_memory(plan, console)
    if plan.changes:
        _serving_changes(plan, console)
    if plan.cache_tokens and (plan.timed or not plan.compiled):
        _serving_loads(plan, console)
    for line in (plan.report or {}).get("notes", []):
        console.print(f"  note: {line}", style="dim", markup=False)
    if explain:
        console.print("\nWhere the numbers come from", style="bold")
        for line in serving_explanation(plan):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def _serving_memory(plan: ServingPlan, console: Console) -> None:
    limit, used = plan.hardware.chip.hbm_bytes, sum(plan.memory.values())
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    console.print(
        f"\nMemory of a device: {used / GIB:.2f} of {limit / GIB:.2f} GiB, {verdict}: "
        f"{plan.cache_tokens:,} tokens of cache have room, {plan.most_streams:,} streams a copy",
        style="bold" if plan.fits else "bold red",
        markup=False,
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, size in plan.memory.items():
        if size >= 2**20:
            table.add_row(f"  {name}", f"{size / GIB:8.2f} GiB", _bar(size / limit))
    console.print(table)
    report = plan.report or {}
    if report.get("cache_tokens"):
        console.print(
            f"  The engine takes {report['cache_tokens']:,} tokens of cache in pages of "
            f"{report['engine']['page_size']} (attention: {', '.join(report['attention'])}).",
            markup=False,
        )
    if report.get("refusal"):
        console.print(f"  {report['refusal']}", markup=False, style="red")


def _serving_changes(plan: ServingPlan, console: Console) -> None:
    console.print("\nSmallest changes that make it fit", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    for change in plan.changes:
        verdict = "fits" if change.plan.fits else "does not fit"
        verdict = f"compiled: {verdict}" if change.plan.compiled else "not compiled"
        size = sum(change.plan.memory.values())
        table.add_row(f"  {change.text}", f"{size / GIB:.2f} GiB", verdict)
    console.print(table)


def _serving_loads(plan: ServingPlan, console: Console) -> None:
    low, high = plan.published
    table = Table(box=None, pad_edge=False)
    names = ("  streams a copy", "first token", "a token", "tokens/s", "$/M tokens", "bound by")
    for name in names:
        table.add_column(name, justify="right")
    for each in plan.loads():
        usd = plan.usd_per_million(each)
        table.add_row(
            f"{each.streams}", in_seconds(each.first), in_seconds(each.token),
            f"{each.tokens_per_second:,.0f}", unknown(usd, "{:.2f}"), each.bound,
        )  # fmt: skip
    title = "By the compiled schedules" if plan.timed else "At best"
    console.print(f"\n{title}, whole slice:", style="bold")
    console.print(table)
    if plan.timed and plan.report is not None:
        report = plan.report
        console.print(
            f"  A step in which every stream gets a token: {in_seconds(report['decode_seconds'])}; "
            f"with {report['prompt_tokens_a_step']:,} prompt tokens beside it: "
            f"{in_seconds(report['prompt_step_seconds'])}.",
            markup=False,
        )
        for name, part in _longest(report["programs"]["decode step"]["parts"]):
            console.print(f"    {name}: {part['seconds'] * 1e3:.2f} ms, {part['bound']}")
    console.print(
        f"  Measured servers took {low:g} to {high:g} times as long a token "
        "(docs/planning.md). No queue counted.",
        style="dim",
        markup=False,
    )


def _longest(parts: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(parts.items(), key=lambda kv: -kv[1]["seconds"])[:5]


def serving_explanation(plan: ServingPlan) -> list[str]:
    """Where the numbers of a serving plan come from."""
    chip = plan.hardware.chip
    if not plan.timed:
        lines = [
            "memory and time: sums over the matrices of config.json (plan/serving.py); nothing was "
            "compiled",
        ]
    else:
        lines = [
            "memory: weights, cache and penalties from their shards; temporaries (the largest "
            "program's), results and code from XLA's account of the compiled programs",
            "cache: tokens that have room beside all of that; the engine takes 80 % of what the "
            "weights leave, and no more than all streams at full length",
            "time: the schedules of the decode step, the step with prompts and the sampler, "
            "replayed; paged attention copies the keys and values of "
            f"{plan.traffic.prompt + plan.traffic.answer // 2:,} tokens a stream at 85 % of the "
            "HBM bandwidth, or takes as long as its products at the attention kernels' share of "
            "the peak",
            "a token: its own step, and its share of the steps that compute prompts",
        ]
    low, high = plan.published
    return [
        *lines,
        f"range: measured servers over this model, {low:g} to {high:g} (docs/planning.md)",
        f"price: {plan.price.source}",
        f"{chip.name}: {chip.flops / 1e12:,.0f} bf16 TFLOP/s, HBM {chip.hbm_bandwidth / 1e9:,.0f} "
        f"GB/s, {chip.hbm_bytes / GIB:.2f} GiB a program may use",
    ]

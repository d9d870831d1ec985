"""A self-contained HTML page of plans: memory stack, time bars, time against money. No scripts.

Knows: HTML. Does not know: how numbers come about.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.plan.pictures import pareto_png
from headrace.plan.planner import Plan
from headrace.plan.report import (
    GIB,
    explanation,
    in_seconds,
    serving_explanation,
    settings_yaml,
    unknown,
)
from headrace.plan.serving import ServingPlan

_COLOURS = ("#2563a8", "#4f9d69", "#d08c2f", "#9a5fb0", "#c2504d", "#5b8a9a", "#8a8a8a", "#b0a040")
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem} h2{font-size:1.15rem;margin-top:2rem} table{border-collapse:collapse}
td,th{padding:.15rem .7rem .15rem 0;text-align:left} td.n{text-align:right;font-variant-numeric:
tabular-nums} .stack{display:flex;height:28px;background:#eee;border-radius:4px;overflow:hidden}
.bar{height:12px;border-radius:3px;background:#2563a8} .bad{color:#b00020} pre{background:#f5f5f5;
padding:.8rem;border-radius:6px;overflow:auto} .key{display:inline-block;width:.8em;height:.8em;
border-radius:2px;margin-right:.4em} img{max-width:100%}
"""


def plan_page(plans: Sequence[Plan]) -> str:
    """The page as text. Pictures are inside; nothing is loaded from elsewhere."""
    parts = ["<h1>Headrace plan</h1>"]
    if len(plans) > 1:
        image = base64.b64encode(pareto_png(plans)).decode()
        parts.append(f'<img alt="time against money" src="data:image/png;base64,{image}">')
        parts.append(_overview(plans))
    parts += [_section(plan) for plan in plans[:12]]
    return _page("\n".join(parts))


def _page(body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Headrace plan</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def serving_page(plans: Sequence[ServingPlan]) -> str:
    """The page of serving plans as text; nothing is loaded from elsewhere."""
    return _page("\n".join(["<h1>Headrace plan</h1>", *map(_server, plans)]))


def _server(plan: ServingPlan) -> str:
    how = "compiled" if plan.compiled else f"not compiled ({plan.why_not}): analytic model"
    verdict = "fits" if plan.fits else '<span class="bad">does not fit</span>'
    title = html.escape(f"Serving {plan.shape.name} on {plan.hardware.name}")
    used, limit = sum(plan.memory.values()), plan.hardware.chip.hbm_bytes
    low, high = plan.published
    lines = [
        f"<h2>{title}</h2><p>{html.escape(how)}; tensor {plan.tensor}, copies {plan.replicas}; "
        f"{plan.traffic.prompt:,} tokens in, {plan.traffic.answer:,} out</p>",
        f"<p>Memory of a device: {used / GIB:.2f} of {limit / GIB:.2f} GiB, {verdict}; "
        f"{plan.cache_tokens:,} tokens of cache have room</p>",
        _stack(plan.memory, limit),
    ]
    if plan.timed or not plan.compiled:
        names = ("streams a copy", "first token", "a token", "tokens/s", "$/M tokens", "bound by")
        head = "".join(f"<th>{name}</th>" for name in names)
        rows = "".join(
            f"<tr><td>{x.streams}</td><td>{in_seconds(x.first)}</td><td>{in_seconds(x.token)}</td>"
            f"<td>{x.tokens_per_second:,.0f}</td>"
            f"<td>{unknown(plan.usd_per_million(x), '{:.2f}')}</td><td>{x.bound}</td></tr>"
            for x in plan.loads()
        )
        lines.append(f"<table><tr>{head}</tr>{rows}</table>")
        lines.append(f"<p>Measured servers took {low:g} to {high:g} times as long a token.</p>")
    for name, each in (plan.report or {}).get("programs", {}).items():
        lines.append(f"<p>{name}: {in_seconds(each['seconds'])}</p>")
        lines.append(_bars(each["parts"], each["seconds"]))
    if plan.changes:
        items = "".join(
            f"<li>{html.escape(c.text)}: {'fits' if c.plan.fits else 'does not fit'}</li>"
            for c in plan.changes
        )
        lines.append(f"<p>Changes</p><ul>{items}</ul>")
    why = "".join(f"<li>{html.escape(line)}</li>" for line in serving_explanation(plan))
    lines.append(f"<details><summary>Where the numbers come from</summary><ul>{why}</ul></details>")
    return "\n".join(lines)


def _overview(plans: Sequence[Plan]) -> str:
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td class="n">{html.escape(text)}</td>'
            for text in (
                plan.hardware.name, plan.candidate.mesh_text(), f"{plan.hbm_bytes / GIB:.1f} GiB",
                f"{plan.seconds:.2f}", f"{plan.real_tokens_per_second:,.0f}",
                unknown(plan.hours, "{:.2f}"), unknown(plan.usd(), "${:,.2f}"),
                "compiled" if plan.compiled else "analytic",
            )
        )
        + "</tr>"
        for plan in plans
    )  # fmt: skip
    names = ("slice", "mesh", "memory", "s/step", "real tokens/s", "hours", "price", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _section(plan: Plan) -> str:
    each = plan.candidate
    low, high = plan.seconds_range
    how = f"compiled with flags {each.flags}" if plan.compiled else "not compiled: analytic model"
    verdict = "fits" if plan.fits else '<span class="bad">does not fit</span>'
    title = html.escape(f"{plan.subject.shape.name} on {plan.hardware.name}")
    lines = [
        f"<h2>{title}</h2><p>{html.escape(how)}; {html.escape(each.mesh_text())}; rows "
        f"{each.rows} x {each.length} x {each.accumulation}; remat {each.remat}</p>",
        f"<p>Memory of a device: {plan.hbm_bytes / GIB:.2f} of {plan.limit / GIB:.2f} GiB, "
        f"{verdict}</p>",
        _stack(plan.memory, plan.limit),
        f"<p>Step: <b>{plan.seconds:.3f} s</b> ({low:.3f} to {high:.3f}), bound by {plan.bound}; "
        f"{plan.real_tokens_per_second:,.0f} real tokens/s, MFU {plan.mfu:.1%}</p>",
        _bars(plan.as_json()["parts"], plan.seconds),
        f"<p>Hours {unknown(plan.hours, '{:.2f}')}; on demand {unknown(plan.usd(), '${:,.2f}')}; "
        f"a million real tokens {unknown(plan.usd_per_million(), '${:,.3f}')}</p>",
    ]
    if plan.changes:
        items = "".join(f"<li>{html.escape(change.text)}</li>" for change in plan.changes)
        lines.append(f"<p>Changes that make it fit</p><ul>{items}</ul>")
    why = "".join(f"<li>{html.escape(line)}</li>" for line in explanation(plan))
    lines.append(f"<pre>{html.escape(settings_yaml(plan))}</pre><details><summary>Where the "
                 f"numbers come from</summary><ul>{why}</ul></details>")  # fmt: skip
    return "\n".join(lines)


def _stack(memory: Mapping[str, int], limit: int) -> str:
    entries = sorted(memory.items(), key=lambda kv: -kv[1])
    whole = max(limit, sum(memory.values()))
    boxes, keys = "", ""
    for i, (name, size) in enumerate(entries):
        if size < 2**20:
            continue
        colour = _COLOURS[i % len(_COLOURS)]
        width = 100 * size / whole
        boxes += f'<div style="width:{width:.2f}%;background:{colour}"></div>'
        keys += (
            f'<tr><td><span class="key" style="background:{colour}"></span>{html.escape(name)}</td>'
            f'<td class="n">{size / GIB:.2f} GiB</td></tr>'
        )
    return f'<div class="stack">{boxes}</div><table>{keys}</table>'


def _bars(parts: Mapping[str, Any], seconds: float) -> str:
    rows = ""
    for name, part in sorted(parts.items(), key=lambda kv: -kv[1]["seconds"])[:14]:
        share = part["seconds"] / seconds
        if share < 0.002:
            continue
        rows += (
            f'<tr><td>{html.escape(name)}</td><td class="n">{part["seconds"] * 1e3:.1f} ms</td>'
            f'<td>{part.get("bound", "")}</td><td style="width:22rem"><div class="bar" '
            f'style="width:{min(100.0, 100 * share):.1f}%"></div></td></tr>'
        )
    return f"<table>{rows}</table>"

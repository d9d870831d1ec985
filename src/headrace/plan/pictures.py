"""PNG pictures of plans, drawn by matplotlib without a display."""

from __future__ import annotations

import io
from collections.abc import Sequence

from headrace.plan.planner import Plan


def pareto_png(plans: Sequence[Plan]) -> bytes:
    """Time against money, one point a plan; filled where compiled. Plans without a price or
    hours stand by their rates instead."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    whole = all(p.hours is not None for p in plans)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), dpi=120)
    for plan in plans:
        money = plan.usd() if whole else plan.usd_per_million()
        if money is None:
            continue
        time = plan.hours if whole else plan.time_key * 1e6 / 3600
        axes.scatter(
            time or 0.0, money, s=36, edgecolors="#2563a8",
            facecolors="#2563a8" if plan.compiled else "none",
        )  # fmt: skip
        axes.annotate(plan.hardware.name, (time or 0.0, money), fontsize=7, xytext=(4, 3),
                      textcoords="offset points")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("hours" if whole else "hours a million real tokens")
    axes.set_ylabel("usd" if whole else "usd a million real tokens")
    axes.set_title("Plans (filled: compiled, open: analytic)", fontsize=9)
    axes.grid(True, which="both", alpha=0.2)
    buffer = io.BytesIO()
    figure.tight_layout()
    figure.savefig(buffer, format="png")
    pyplot.close(figure)
    return buffer.getvalue()

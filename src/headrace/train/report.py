"""report.html: what a run did, on one page that needs no other file and no network.

Curves are SVG drawn by matplotlib; everything the user's data says is escaped. Open it in any
browser or mail it.

Knows: histories, data reports, samples. Does not know: how they came about.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.report import DataReport
from headrace.train.display import format_seconds
from headrace.train.samples import Sample

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; --accent: #2563a8; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.sub { color: var(--dim); margin-top: 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem; }
.tile { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.25rem; } .tile span { color: var(--dim); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
.charts svg { width: 100%; height: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .8rem;
  border-radius: .5rem; font-size: .85rem; }
"""


@dataclass(frozen=True, kw_only=True)
class Story:
    """What the page and the model card tell.

    history: log entries with `step`. lengths: tokens of each example. samples: by step. result: the
    numbers of the end. model: one line. given: settings that were set.
    """

    title: str
    base: str | None
    model: str
    task: str
    given: Mapping[str, Any]
    reports: Sequence[DataReport]
    lengths: np.ndarray
    history: Sequence[Mapping[str, float]]
    samples: Mapping[int, Sequence[Sample]]
    result: Mapping[str, float]
    versions: Mapping[str, str]

    @property
    def training(self) -> list[Mapping[str, float]]:
        return [entry for entry in self.history if "loss" in entry]

    @property
    def evaluations(self) -> list[Mapping[str, float]]:
        return [entry for entry in self.history if "eval_loss" in entry]


def number(value: Any) -> str:
    """A number as people read it: 4 significant digits, thousands apart."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.4g}" if abs(value) >= 1e-3 else f"{value:.3g}"


def write_report(story: Story, path: Path) -> Path:
    """Write the page; takes about a second, most of it matplotlib's."""
    path.write_text(page(story), encoding="utf-8")
    return path


def page(story: Story) -> str:
    """The whole document."""
    parts = [
        f"<h1>{_text(story.title)}</h1>",
        f'<p class="sub">{_text(story.task)} from {_text(story.base or "a model given in Python")}'
        "</p>",
        _tiles(story),
        "<h2>Curves</h2>",
        f'<div class="charts">{"".join(_charts(story))}</div>',
        _evaluation_table(story),
        _samples(story),
        "<h2>Data</h2>",
        *(f"<pre>{_text(str(report).rstrip())}</pre>" for report in story.reports),
        "<h2>Settings that were given</h2>",
        _table(["setting", "value"], [[name, str(value)] for name, value in story.given.items()]),
        f'<p class="sub">{_text(story.model)}<br>'
        + _text(", ".join(f"{name} {version}" for name, version in story.versions.items()))
        + "</p>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(story.title)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _tiles(story: Story) -> str:
    training, evaluations = story.training, story.evaluations
    tiles: list[tuple[str, str]] = [("steps", number(story.result.get("steps", 0)))]
    if training:
        tiles.append(
            ("loss, first to last", f"{training[0]['loss']:.3f} → {training[-1]['loss']:.3f}")
        )
    if evaluations:
        best = min(entry["eval_loss"] for entry in evaluations)
        tiles.append(("best evaluation loss", f"{best:.4f}"))
    if "train_runtime" in story.result:
        tiles.append(("time", format_seconds(story.result["train_runtime"])))
    if "compile_seconds" in story.result:
        tiles.append(("of it compiling", format_seconds(story.result["compile_seconds"])))
    if training:
        rate = np.median([entry["tokens_per_second"] for entry in training])
        tiles.append(("tokens per second", number(round(float(rate)))))
    inner = "".join(
        f'<div class="tile"><b>{_text(value)}</b><span>{_text(name)}</span></div>'
        for name, value in tiles
    )
    return f'<div class="tiles">{inner}</div>'


def _charts(story: Story) -> list[str]:
    training, evaluations = story.training, story.evaluations
    charts: list[str] = []
    if training:
        steps = [entry["step"] for entry in training]
        lines = [("training", steps, [entry["loss"] for entry in training])]
        if evaluations:
            marks = [entry["step"] for entry in evaluations]
            lines.append(("evaluation", marks, [entry["eval_loss"] for entry in evaluations]))
        charts.append(_lines("Loss", lines))
        charts.append(_one(training, "Learning rate", "learning_rate"))
        charts.append(_one(training, "Tokens per second", "tokens_per_second"))
        charts.append(_one(training, "Gradient norm", "grad_norm"))
        for name in ("rewards/margins", "rewards/accuracies"):
            if name in training[-1]:
                charts.append(_one(training, name, name))
    if len(story.lengths):
        charts.append(_histogram(story.lengths))
    return charts


def _one(entries: Sequence[Mapping[str, float]], title: str, name: str) -> str:
    found = [(entry["step"], entry[name]) for entry in entries if name in entry]
    return _lines(title, [("", [s for s, _ in found], [v for _, v in found])])


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 2.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, color="#777777")
    axes.tick_params(colors="#777777", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.grid(alpha=0.25)
    return figure, axes


def _svg(figure: Any, title: str) -> str:
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # the XML head has no place inside a page


def _lines(title: str, lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> str:
    figure, axes = _figure(title)
    for (name, steps, values), color in zip(lines, ("#2563a8", "#d97706"), strict=False):
        mark = "o" if len(steps) < 12 else None
        axes.plot(steps, values, color=color, linewidth=1.5, marker=mark, markersize=3, label=name)
    axes.set_xlabel("step", fontsize=8, color="#777777")
    if len(lines) > 1:
        axes.legend(fontsize=8, frameon=False, labelcolor="#777777")
    return _svg(figure, title)


def _histogram(lengths: np.ndarray) -> str:
    figure, axes = _figure("Tokens of an example")
    axes.hist(np.asarray(lengths), bins=40, color="#2563a8", alpha=0.8)
    axes.set_ylabel("examples", fontsize=8, color="#777777")
    axes.yaxis.get_major_locator().set_params(integer=True)
    return _svg(figure, "lengths")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    kind = ' class="n"' if numbers else ""
    top = "".join(f"<th{kind}>{_text(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _evaluation_table(story: Story) -> str:
    if not story.evaluations:
        return ""
    skipped = ("step", "epoch", "eval_runtime", "eval_tokens_per_second")
    names = [name for name in story.evaluations[-1] if name not in skipped]
    rows = [
        [number(entry["step"]), *(number(entry.get(name, math.nan)) for name in names)]
        for entry in story.evaluations[-20:]
    ]
    head = ["step", *(name.removeprefix("eval_") for name in names)]
    return "<h2>Evaluation</h2>" + _table(head, rows, numbers=True)


def _samples(story: Story) -> str:
    if not story.samples:
        return ""
    first, last = min(story.samples), max(story.samples)
    rows = [
        [before.prompt, before.expected, before.answer, after.answer]
        for before, after in zip(story.samples[first], story.samples[last], strict=True)
    ]
    head = ["prompt", "expected", f"answer at step {first}", f"answer at step {last}"]
    return "<h2>Samples</h2>" + _table(head, rows)

"""What people see of a run: a progress bar on a terminal, plain lines elsewhere.

Knows: the terminal, how numbers read well. Does not know: where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn


def format_seconds(seconds: float) -> str:
    """`8 s`, `3:20`, `1:02:09`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{left:02d}"
    return f"{minutes}:{left:02d}" if minutes else f"{left} s"


def describe(logs: Mapping[str, float]) -> str:
    """The part of a log line that people read."""
    parts = [f"loss {logs['loss']:.4f}"]
    if "mean_token_accuracy" in logs:
        parts.append(f"accuracy {logs['mean_token_accuracy']:.3f}")
    parts.append(f"grad {logs['grad_norm']:.3g}")
    parts.append(f"lr {logs['learning_rate']:.3g}")
    if "rewards/margins" in logs:
        parts.append(f"margin {logs['rewards/margins']:.3g}")
    parts.append(f"{logs['tokens_per_second']:,.0f} tok/s")
    parts.append(f"{logs['step_seconds']:.3g} s/step")
    for name, short in (("device_peak_bytes", "mem"), ("process_peak_bytes", "process")):
        if name in logs:
            parts.append(f"{short} {logs[name] / 2**30:.1f} GiB")
    if "mfu" in logs:
        parts.append(f"mfu {logs['mfu']:.1%}")
    parts.append(f"left {format_seconds(logs['eta_seconds'])}")
    if "skipped_steps" in logs:
        parts.append(f"{logs['skipped_steps']:.0f} steps skipped, not finite")
    return "  ".join(parts)


class Display:
    """A progress bar on a terminal, plain lines elsewhere (log files, notebooks' pipes).

    quiet: no bar even on a terminal; what is said is still printed.
    """

    def __init__(self, total: int, *, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=False, highlight=False)
        self.total = total
        self._text = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if self.console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self._task = self._bar.add_task("train", total=total, text="")
            self._bar.start()

    @property
    def width(self) -> int:
        """Characters in a line; a log file has 100."""
        return self.console.width if self.console.is_terminal else 100

    def advance(self, step: int) -> None:
        """The run has done `step` steps; draws only on a terminal."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        """New numbers: text beside the bar, or a line of its own."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, text=describe(logs))
        else:
            self.say(f"step {step}/{self.total}  {describe(logs)}")

    def say(self, text: str) -> None:
        """A line for people; above the bar when there is one."""
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

"""What was read and what will be trained on, said before the first step.

Only numbers and text; it computes nothing from tokens except percentiles of lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

PERCENTILES = (50, 95, 99, 100)
_EXAMPLE_CHARACTERS = 1500


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """One dataset, before and after the over-length policy.

    lengths: tokens at the 50th, 95th, 99th and 100th percentile, before cutting.
    example: pieces of one decoded example, each with whether it is trained.
    """

    name: str
    source: str
    format: str
    rows_read: int
    rows_kept: int
    rows_cut: int
    rows_dropped: int
    examples: int
    tokens_before: int
    tokens_after: int
    supervised: int | None  # trained tokens; None for classification
    lengths: tuple[int, ...]
    max_length: int
    lossless_max_length: int
    example: tuple[tuple[str, bool], ...]
    notes: tuple[str, ...] = ()

    @property
    def share_supervised(self) -> float:
        """Trained tokens of all that are kept; 1 for classification."""
        return 1.0 if self.supervised is None else self.supervised / max(1, self.tokens_after)

    def _lossless(self) -> str:
        if max(self.lengths) <= self.max_length:
            return "no example is longer"
        return f"{self.lossless_max_length:,} would lose nothing"

    def lines(self) -> list[tuple[str, str]]:
        """(subject, text) pairs, as printed."""
        cut = f"{self.rows_cut:,} cut, {self.rows_dropped:,} dropped"
        made = "" if self.examples == self.rows_kept else f", as {self.examples:,} examples"
        lost = 1 - self.tokens_after / max(1, self.tokens_before)
        trained = "" if self.supervised is None else f", {self.share_supervised:.1%} trained"
        rows = [
            ("source", self.source),
            ("format", self.format),
            ("rows", f"{self.rows_read:,} read, {self.rows_kept:,} kept ({cut}){made}"),
            (
                "tokens",
                f"{self.tokens_before:,} -> {self.tokens_after:,} ({lost:.1%} lost){trained}",
            ),
            (
                "length",
                ", ".join(
                    f"{p} % <= {n:,}" for p, n in zip(PERCENTILES, self.lengths, strict=True)
                ),
            ),
            ("max_length", f"{self.max_length:,}; {self._lossless()}"),
        ]
        return rows + [("note", note) for note in self.notes]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Grid.grid(padding=(0, 2))
        grid.title, grid.title_justify = f"Data: {self.name}", "left"
        for subject, text in self.lines():
            grid.add_row(Text(subject, style="bold"), Text(text))
        if self.example:
            grid.add_row(Text("example", style="bold"), self.marked_example())
        yield grid

    def marked_example(self) -> Text:
        """The decoded example; trained text is green and stands between >> and <<."""
        text = Text()
        for piece, trained in self.example:
            text.append(f">>{piece}<<" if trained else piece, "green" if trained else "dim")
        if len(text) > _EXAMPLE_CHARACTERS:
            text.truncate(_EXAMPLE_CHARACTERS)
            text.append(" ... (cut here)")
        return text

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 100) -> str:
        """The report in lines of at most `width` characters, nothing trailing."""
        console = Console(width=width, no_color=True, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def length_percentiles(lengths: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Lengths at PERCENTILES, as lengths that occur."""
    if not len(lengths):
        return (0,) * len(PERCENTILES)
    return tuple(int(n) for n in np.percentile(lengths, PERCENTILES, method="higher"))

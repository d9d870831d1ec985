"""Words of the command line -> a checked configuration, and how it is shown.

Knows: which word is the YAML file. Does not know: what a setting means (`headrace.config`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.config import ResolvedConfig


def read_settings(words: Sequence[str]) -> ResolvedConfig:
    """`[config.yaml] --field value ...` -> settings with sources; ConfigError lists problems."""
    from headrace.config import load_config

    rest = list(words)
    has_file = bool(rest) and not rest[0].startswith("--") and "=" not in rest[0]
    path = rest.pop(0) if has_file else None
    return load_config(path, rest)


def show_settings(resolved: ResolvedConfig) -> None:
    """Notes about foreign names, then every setting that was given, with where."""
    from rich.console import Console

    console = Console(highlight=False)
    for note in resolved.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    given = resolved.config.as_given()
    wide = max((len(name) for name in given), default=0)
    for name, value in given.items():
        source = resolved.sources.get(name, "flag")
        console.print(f"  {name:<{wide}}  {value}", end="  ", markup=False)
        console.print(source, style="dim", markup=False)


def show_everything(resolved: ResolvedConfig) -> None:
    """Every setting by group, with its value and where that came from."""
    from rich.console import Console

    from headrace.config.reference import fields_by_group

    console = Console(highlight=False)
    for note in resolved.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    for group, fields in fields_by_group().items():
        console.print(group, style="bold", markup=False)
        wide = max(len(name) for name in fields)
        for name in fields:
            source = resolved.sources[name]
            value = getattr(resolved.config, name)
            shown = "none" if value in (None, (), {}) else str(value)
            style = "dim" if source == "default" else ""
            console.print(f"  {name:<{wide}}  {shown}", end="  ", style=style, markup=False)
            console.print(source, style="dim", markup=False)


def show_reference() -> None:
    """Every setting by group: name, default, one line of help."""
    from rich.console import Console
    from rich.table import Table

    from headrace.config.reference import default_text, fields_by_group

    console = Console(highlight=False)
    for group, fields in fields_by_group().items():
        table = Table(title=group, title_justify="left", box=None, show_header=False)
        for name, field in fields.items():
            table.add_row(f"--{name}", default_text(field), field.description or "")
        console.print(table)

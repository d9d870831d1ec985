"""The commands by name, and what happens when one fails.

Knows: typer, exit codes, how an error is shown. Does not know: what the commands do. An error of
Headrace's own tree is shown as a panel with its message; any other exception keeps its traceback,
because it is our mistake. HEADRACE_DEBUG=1 shows tracebacks always.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from headrace.cli import (
    bench,
    chat,
    check,
    doctor,
    evaluate,
    generate,
    launch,
    memory,
    merge,
    plan,
    serve,
    shard,
    train,
)
from headrace.cli.huge_pages import restart_with_huge_pages
from headrace.errors import HeadraceError

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130

# New versions of typer carry their own click, older ones use the package: ask typer itself.
UsageProblem: Any = typer.BadParameter.__mro__[2]

ANY_FIELD = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="headrace",
    help="Fine-tune, evaluate and serve unmodified Hugging Face models through JAX/XLA.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]  # typer keeps it
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


app.command("train", context_settings=ANY_FIELD)(train.train)
app.command("eval", context_settings=ANY_FIELD)(evaluate.evaluate)
app.command("merge")(merge.merge)
app.command("shard")(shard.shard)
app.command("memory", context_settings=ANY_FIELD)(memory.memory)
app.command("launch", context_settings=ANY_FIELD)(launch.launch)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.add_typer(bench.app, name="bench")
app.command("plan", context_settings=ANY_FIELD)(plan.plan)
app.command("check")(check.check)
app.command("doctor")(doctor.doctor)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    args: the words after `headrace`, by default those of the process, which then may start again
    with huge pages for its arrays.
    """
    if args is None:
        restart_with_huge_pages()
    # peft 0.21 asks transformers for an attribute that was renamed; users cannot mend that
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: Sequence[str]) -> int:
    """Run one command; errors become a message and an exit code.

    args: the words after `headrace`. Returns the exit code. Raises what is not Headrace's own
    error, and everything when HEADRACE_DEBUG is set.
    """
    try:
        result = app(args=list(args), prog_name="headrace", standalone_mode=False)
    except UsageProblem as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("\nStopped.\n")
        return EXIT_INTERRUPTED
    except HeadraceError as error:
        if os.environ.get("HEADRACE_DEBUG"):
            raise
        _show(error)
        return EXIT_USER if isinstance(error, ValueError) else EXIT_FAILED
    return result if isinstance(result, int) else 0


def _show(error: HeadraceError) -> None:
    """One panel on standard error: the kind of error as title, its message as text."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    title = type(error).__name__
    panel = Panel(Text(str(error)), title=title, title_align="left", border_style="red")
    console = Console(stderr=True)
    console.print(panel)
    console.print("HEADRACE_DEBUG=1 shows where it was raised.", style="dim")

"""`headrace check MODEL`: what to expect of a model before anything is trained.

Knows: words, how findings are shown. Does not know: how they are found (`examine.py`).
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.cli.examine import Finding

_WIDTH = 100


def check(
    model: Annotated[str, typer.Argument(help="Folder, hub id, or module:function.")],
    factory: Annotated[
        bool,
        typer.Option("--factory", help="MODEL is module:function; runs that Python code."),
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(help="causal, sequence-classification or a transformers auto class."),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="auto, own or random: what numbers are compared on.")
    ] = "auto",
    mesh: Annotated[str, typer.Option(help="Mesh that the sharding is shown for.")] = (
        "fsdp=2,tensor=2"
    ),
    structure_only: Annotated[
        bool, typer.Option("--structure-only", help="Compare no numbers; loads no weights.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> int:
    """Say what a model can do here: capture, numbers, loops, LoRA, sharding, packing, serving.

    Exit code 0 when it captures and agrees with PyTorch, 1 otherwise.
    """
    import transformers

    from headrace.cli.examine import examine, from_factory, from_name
    from headrace.errors import ConfigError

    transformers.logging.set_verbosity_error()  # pyright: ignore

    if weights not in ("auto", "own", "random"):
        raise ConfigError(f"--weights {weights!r} is not known; use auto, own or random")
    if ":" in model and not factory:
        raise ConfigError(f"{model!r} names Python code; add --factory to import and run it")
    if factory:
        subject = from_factory(model)
    else:
        subject = from_name(
            model, task=task, weights=weights, dtype="auto", trust_remote_code=trust_remote_code
        )
    findings = examine(subject, mesh=mesh, compare=not structure_only)
    if as_json:
        _print_json(subject.name, findings)
    else:
        _show(subject.name, type(subject.structure).__name__, findings)
    needed = [f for f in findings if f.subject in ("capture", "numbers")]
    return 1 if any(f.verdict == "no" for f in needed) else 0


def _print_json(name: str, findings: list[Finding]) -> None:
    import json

    rows = {
        f.subject: {"verdict": f.verdict, "lines": list(f.lines), **dict(f.data)} for f in findings
    }
    typer.echo(json.dumps({"model": name, "findings": rows}, default=str))


def _show(name: str, kind: str, findings: list[Finding]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    console.print(f"{name} ({kind})", style="bold", markup=False)
    styles = {"yes": "green", "partly": "yellow", "no": "bold red", "skipped": "dim"}
    for finding in findings:
        console.print(
            f"{finding.subject}: {finding.verdict}", style=styles[finding.verdict], markup=False
        )
        for line in finding.lines:
            wrapped = textwrap.wrap(
                line,
                width,
                initial_indent=" " * 4,
                subsequent_indent=" " * 6,
                break_long_words=False,
                break_on_hyphens=False,
            )
            console.print("\n".join(wrapped), markup=False)

"""`headrace eval config.yaml`: loss, perplexity, accuracy, exact match of a model or adapter.

Knows: words, the table that is printed. Does not know: how scores are made (`headrace.evaluate`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.settings import read_settings

if TYPE_CHECKING:
    from headrace.config import TrainConfig
    from headrace.evaluate import EvalReport


def evaluate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model or adapter folder.", show_default="output_dir"),
    ] = None,
    base: Annotated[
        bool, typer.Option("--base", help="Evaluate model_name_or_path, before training.")
    ] = False,
    samples: Annotated[int, typer.Option("--samples", help="Rows to answer and show.", min=0)] = 0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Longest answer of a shown row.", min=1)
    ] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate what a recipe trained: headrace eval config.yaml --samples 3

    Takes the recipe of the training run and the same --name value flags, and evaluates the model
    or adapter in its output_dir on its evaluation rows.
    """
    from headrace.evaluate import evaluate as run

    config = read_settings(context.args).config
    chosen = _which(config, model, base=base)
    report = run(config, model=chosen, num_samples=samples, max_new_tokens=max_new_tokens)
    if as_json:
        typer.echo(json.dumps({"model": chosen, "rows": report.num_rows, **report.metrics}))
    else:
        _show(chosen, report)


def _which(config: TrainConfig, model: str | None, *, base: bool) -> str:
    """The folder to evaluate; ConfigError says what is missing."""
    from headrace.errors import ConfigError

    if model is not None and base:
        raise ConfigError("--model and --base are both given; keep one")
    if base:
        if config.model_name_or_path is None:
            raise ConfigError("--base needs model_name_or_path")
        return config.model_name_or_path
    chosen = Path(model or config.output_dir)
    holds = ("adapter_config.json", "config.json")
    if model is None and not any((chosen / name).is_file() for name in holds):
        raise ConfigError(
            f"output_dir ({chosen}) holds no model or adapter yet; train first, name a folder with "
            "--model, or evaluate the base with --base"
        )
    return str(chosen)


def _show(name: str, report: EvalReport) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"{name} on {report.num_rows:,} rows of {report.source}", markup=False)
    for metric, value in report.metrics.items():
        console.print(f"  {metric:<20} {value:.4f}", markup=False)
    for sample in report.samples:
        right = sample.answer == sample.expected
        console.print(f"\n{sample.prompt}", markup=False)
        console.print(f"  answer   {sample.answer}", markup=False, style="green" if right else "")
        if not right:
            console.print(f"  expected {sample.expected}", markup=False, style="dim")

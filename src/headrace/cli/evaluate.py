"""`headrace eval config.yaml`: the scores of a model or adapter, for every task that is trained.

Knows: words, the table that is printed. Does not know: how scores are made (`headrace.evaluate`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", help="Tasks of lm-evaluation-harness, in place of the data."),
    ] = None,
    include_path: Annotated[
        str | None, typer.Option("--include-path", help="Folder with further task files.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Rows of each task.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate what a recipe trained: headrace eval config.yaml --samples 3

    Takes the recipe of the training run and the same --name value flags, and evaluates the model
    or adapter in its output_dir on its evaluation rows.
    """
    config = read_settings(context.args).config
    chosen = _which(config, model, base=base)
    _check_task(config, tasks, samples)
    if tasks is not None:
        _show_tasks(chosen, _run_tasks(config, chosen, tasks, include_path, limit), as_json)
        return
    from headrace.evaluate import evaluate as run

    report = run(config, model=chosen, num_samples=samples, max_new_tokens=max_new_tokens)
    if as_json:
        # NaN and infinity are no JSON
        metrics = {k: v if math.isfinite(v) else None for k, v in report.metrics.items()}
        typer.echo(json.dumps({"model": chosen, "rows": report.num_rows, **metrics}))
    else:
        _show(chosen, report)


def _check_task(config: TrainConfig, tasks: str | None, samples: int) -> None:
    from headrace.errors import ConfigError

    if tasks and config.task not in ("causal", "preference"):
        raise ConfigError(
            f"--tasks {tasks}: lm-evaluation-harness asks causal language models; task is "
            f"{config.task}. Leave --tasks out to score the recipe's evaluation rows"
        )
    if samples and config.task != "causal":
        raise ConfigError(f"--samples shows answers of task causal; task is {config.task}")


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


def _run_tasks(
    config: TrainConfig, model: str, tasks: str, include_path: str | None, limit: int | None
) -> dict[str, Any]:
    """The harness's results; ConfigError when it is not installed or knows a task not."""
    from headrace.errors import ConfigError

    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from headrace.evaluate.harness import HarnessModel
    except ImportError as error:
        raise ConfigError(
            f"--tasks needs lm-evaluation-harness ({error}); pip install lm_eval"
        ) from error
    from headrace.evaluate.model import load_eval_model

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    manager = TaskManager(include_path=include_path)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown or not names:
        raise ConfigError(
            f"--tasks {tasks}: lm-evaluation-harness does not know {', '.join(unknown) or 'it'}. "
            "`lm-eval ls tasks` lists those it knows; --include-path adds a folder"
        )
    loaded = load_eval_model(model, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    adapter = HarnessModel(loaded, batch_size=config.per_device_eval_batch_size)
    harness: Any = lm_eval
    found: Any = harness.simple_evaluate(
        model=adapter, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=0
    )
    return dict(found["results"])


def _show_tasks(name: str, results: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"model": name, "tasks": results}, default=str))
        return
    typer.echo(name)
    for task, values in results.items():
        for metric, value in values.items():
            if isinstance(value, float):
                typer.echo(f"  {task:<20} {metric.removesuffix(',none'):<20} {value:.4f}")


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

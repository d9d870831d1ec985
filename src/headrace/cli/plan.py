"""`headrace plan config.yaml --slice v5p-8`: memory, time and price before anything is rented.

Knows: words and options, progress on the terminal. Does not know: how a plan is made
(`headrace.plan`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.settings import read_settings

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.config import TrainConfig
    from headrace.plan.planner import Plan

EXIT_DOES_NOT_FIT = 3


def plan(
    context: typer.Context,
    slice_name: Annotated[
        str | None, typer.Option("--slice", help="Slice or slices: v5p-8, v6e:2x4, h100-2, ...")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Look for the best slice, mesh and batch.")
    ] = False,
    objective: Annotated[str, typer.Option(help="What --search prefers: cost or time.")] = "cost",
    budget: Annotated[str | None, typer.Option(help="Most the run may cost: 20usd.")] = None,
    deadline: Annotated[str | None, typer.Option(help="Longest it may take: 3h, 90m.")] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Ask the TPU compiler, or only estimate.")
    ] = True,
    finalists: Annotated[int, typer.Option(help="Candidates of a search to compile.", min=0)] = 3,
    all_flags: Annotated[
        bool, typer.Option("--all-flags", help="Try every compiler flag set for the slice.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where numbers come from.")
    ] = False,
    prices: Annotated[str | None, typer.Option(help="YAML file with prices of your own.")] = None,
    style: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
    html: Annotated[str | None, typer.Option(help="Also write a page with pictures here.")] = None,
    picture: Annotated[str | None, typer.Option(help="PNG of time against money.")] = None,
    save_programs: Annotated[
        str | None,
        typer.Option(
            "--save-programs",
            help="Folder for the compiled step: compilation_cache_dir of a run on the slice.",
        ),
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Plan an evaluation during training.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Plan serving the model instead of training it.")
    ] = False,
    tensor: Annotated[
        int | None, typer.Option(help="With --serve: chips that share one copy.", min=1)
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="With --serve: mean prompt.", min=1)] = 1024,
    answer_tokens: Annotated[int, typer.Option(help="With --serve: mean answer.", min=1)] = 256,
    streams: Annotated[int, typer.Option(help="With --serve: answers at once.", min=1)] = 64,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="With --serve: auto, or int8 for keys and values in one byte.")
    ] = "auto",
) -> int:
    """Plan a run: headrace plan config.yaml --slice v5p-8

    Takes the same YAML file and settings as train. Needs the model's config.json, no weights, no
    TPU and, with `plan: {dataset_rows: ..., dataset_mean_tokens: ...}`, no data. Exit code 3 when
    the run does not fit.
    """
    from headrace.errors import ConfigError

    resolved = read_settings(context.args)
    _check_words(style, objective)
    names = _slices(slice_name, resolved.config)
    if not names and not search:
        raise ConfigError("no slice: give --slice v5p-8 (or several), plan.slice, or --search.")
    if serve and (search or not names or picture or all_flags):
        raise ConfigError(
            "--serve plans the slices of --slice; not with --search, --picture, --all-flags."
        )
    if evaluate and (search or serve or all_flags):
        raise ConfigError(
            "--evaluate plans the slices of --slice; not with --search, --serve, --all-flags."
        )
    if save_programs is not None and (search or serve or len(names) != 1):
        raise ConfigError("--save-programs is for one slice and training; no --search, --serve.")
    console = _console(style)
    for note in resolved.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    if serve:
        traffic = {"prompt": prompt_tokens, "answer": answer_tokens, "streams": streams}
        return _serving(
            resolved.config, names, console, style=style, traffic=traffic, html=html,
            explain=explain, compile=compiled, tensor=tensor, kv_cache_dtype=kv_cache_dtype,
            prices=prices,
        )  # fmt: skip
    config = _evaluated(resolved.config) if evaluate else resolved.config
    measured = _measured(config, console)
    if search:
        limits = {
            "budget": budget,
            "deadline": deadline,
            "finalists": finalists if compiled else 0,
        }
        return _search(
            resolved.config,
            measured,
            names,
            console,
            style=style,
            objective=objective,
            prices=prices,
            html=html,
            picture=picture,
            limits=limits,
        )
    plans = [
        _one(
            config, measured, name, console, compiled=compiled, prices=prices, style=style,
            all_flags=all_flags, explain=explain, evaluate=evaluate, save_programs=save_programs,
        )
        for name in names
    ]  # fmt: skip
    if style == "json":
        _print_json(plans[0].as_json() if len(plans) == 1 else [p.as_json() for p in plans])
    _write_pictures(plans, html, picture)
    return 0 if all(p.fits for p in plans) else EXIT_DOES_NOT_FIT


def _serving(
    config: TrainConfig,
    names: list[str],
    console: Console,
    *,
    style: str,
    traffic: dict[str, int],
    html: str | None,
    explain: bool,
    **options: Any,
) -> int:
    from headrace.plan.report import show_serving
    from headrace.plan.serving import ServingPlan, Traffic, make_serving_plan

    longest = max(config.max_length or 4096, traffic["prompt"] + traffic["answer"])
    asked = Traffic(**traffic, longest=longest)

    def first(quick: ServingPlan) -> None:
        if options["compile"] and quick.hardware.is_tpu and style == "text":
            best = quick.load(quick.candidate.streams)
            console.print(
                f"first answer for {quick.hardware.name}, NOT COMPILED: "
                f"{'fits' if quick.fits else 'does not fit'} with tensor {quick.tensor}, at best "
                f"{best.token * 1e3:.1f} ms a token and {best.tokens_per_second:,.0f} tokens/s. "
                "Compiling takes minutes.",
                style="dim",
                markup=False,
            )

    plans: list[ServingPlan] = []
    for name in names:
        with _Progress(console) as progress:
            plan = make_serving_plan(
                config, name, traffic=asked, quantization=config.quantization, say=progress.say,
                first=first, **options,
            )  # fmt: skip
        plans.append(plan)
        if style == "text":
            show_serving(plan, console, explain=explain)
    if style == "json":
        _print_json(plans[0].as_json() if len(plans) == 1 else [p.as_json() for p in plans])
    if html is not None:
        from headrace.plan.page import serving_page

        _write_page(html, serving_page(plans))
    return 0 if all(plan.fits for plan in plans) else EXIT_DOES_NOT_FIT


def _evaluated(config: TrainConfig) -> TrainConfig:
    """The configuration whose dataset is the evaluation data: what `--evaluate` measures."""
    if config.eval_dataset_name is None:
        return config
    return config.replace(dataset_name=config.eval_dataset_name, packing=config.eval_packing)


def _check_words(style: str, objective: str) -> None:
    from headrace.errors import ConfigError

    if style not in ("text", "json"):
        raise ConfigError(f"--format {style!r}: needs text or json.")
    if objective not in ("cost", "time"):
        raise ConfigError(f"--objective {objective!r}: needs cost or time.")


def _slices(given: str | None, config: TrainConfig) -> list[str]:
    value: Any = given or config.plan.get("slice") or ""
    words = [str(v) for v in value] if isinstance(value, list) else str(value).split(",")  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [word.strip() for word in words if word.strip()]


def _console(style: str) -> Console:
    """Text goes to standard output; with json that is kept for the JSON alone."""
    from rich.console import Console

    console = Console(highlight=False, stderr=style == "json")
    if not console.is_terminal:
        console = Console(highlight=False, stderr=style == "json", width=100)
    return console


def _measured(config: TrainConfig, console: Console) -> dict[str, Any]:
    """What the dataset says of itself, when it is at hand and `plan:` does not describe it."""
    if config.dataset_name is None or "dataset_rows" in config.plan:
        return {}
    from headrace.errors import HeadraceError

    console.print("reading the dataset", style="dim")
    try:
        from headrace.plan.measure import measure_dataset

        return measure_dataset(config)
    except (HeadraceError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        console.print(
            f"note: the dataset cannot be read ({first}); describe it with plan: "
            "{dataset_rows: ..., dataset_mean_tokens: ...}",
            style="yellow",
            markup=False,
        )
        return {}


def _one(
    config: TrainConfig,
    measured: dict[str, Any],
    name: str,
    console: Console,
    *,
    compiled: bool,
    prices: str | None,
    style: str,
    all_flags: bool,
    explain: bool,
    evaluate: bool,
    save_programs: str | None,
) -> Plan:
    from headrace.plan.planner import make_plan, obstacle
    from headrace.plan.report import show_plan

    def first(quick: Plan) -> None:
        if compiled and not obstacle(quick.subject, quick.hardware) and style == "text":
            console.print(
                f"first answer for {name}, not compiled: {quick.hbm_bytes / 2**30:.1f} of "
                f"{quick.limit / 2**30:.1f} GiB, {quick.seconds:.2f} s a step, "
                f"{quick.real_tokens_per_second:,.0f} real tokens/s. Compiling takes minutes.",
                style="dim",
                markup=False,
            )

    with _Progress(console) as progress:
        found = make_plan(
            config, name, compile=compiled, prices=prices, say=progress.say, first=first,
            all_flags=all_flags, measured=measured, work="evaluate" if evaluate else "train",
            save_programs=save_programs,
        )  # fmt: skip
    if style == "text":
        show_plan(found, console, explain=explain)
        for name in (found.report or {}).get("saved_programs", ()):
            console.print(f"saved {save_programs}/{name}", markup=False, soft_wrap=True)
    return found


def _search(
    config: TrainConfig,
    measured: dict[str, Any],
    names: list[str],
    console: Console,
    *,
    style: str,
    objective: str,
    prices: str | None,
    html: str | None,
    picture: str | None,
    limits: dict[str, Any],
) -> int:
    from headrace.plan.planner import read_subject
    from headrace.plan.report import settings_yaml, show_search
    from headrace.plan.search import parse_budget, parse_deadline, search

    budget, deadline = limits["budget"], limits["deadline"]
    with _Progress(console) as progress:
        found = search(
            read_subject(config, prices=prices, measured=measured),
            slices=names,
            objective="time" if objective == "time" else "cost",
            budget=None if budget is None else parse_budget(budget),
            deadline=None if deadline is None else parse_deadline(deadline),
            finalists=limits["finalists"],
            workers=_workers(),
            say=progress.say,
        )
    if style == "json":
        _print_json(
            {
                "considered": found.considered,
                "notes": list(found.notes),
                "pareto": [p.candidate.slice_name for p in found.pareto],
                "plans": [p.as_json() for p in found.plans],
            }
        )
    else:
        show_search(found, console)
        console.print(f"\nSettings of the best, {found.plans[0].hardware.name}:", style="bold")
        console.print(settings_yaml(found.plans[0]), markup=False, end="")
    _write_pictures(list(found.plans), html, picture)
    return 0 if found.plans[0].fits else EXIT_DOES_NOT_FIT


def _workers() -> int:
    import os

    return max(1, min(4, (os.cpu_count() or 1) // 2))


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def _write_pictures(plans: list[Plan], html: str | None, picture: str | None) -> None:
    if html is not None:
        from headrace.plan.page import plan_page

        _write_page(html, plan_page(plans))
    if picture is not None:
        from headrace.plan.pictures import pareto_png

        Path(picture).write_bytes(pareto_png(plans))
        typer.echo(f"wrote {picture}", err=True)


def _write_page(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")
    typer.echo(f"wrote {path}", err=True)


class _Progress:
    """One line with the present stage and its seconds; plain lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Any = None

    def __enter__(self) -> _Progress:
        if self._console.is_terminal:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._live = Progress(
                SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._live.start()
            self._task = self._live.add_task("reading config.json", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.reset(self._task, description=text, total=None)
        else:
            self._console.print(f"... {text}", style="dim", markup=False)

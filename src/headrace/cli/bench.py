"""`headrace bench serve`: load on an OpenAI-style server, as table, JSON and PNG.

Knows: words, tables. Does not know: how it is measured (`headrace.serve.bench`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headrace.serve.bench import BenchReport

app = typer.Typer(help="Measure a running server.", no_args_is_help=True)


@app.callback()
def _root() -> None:  # pyright: ignore[reportUnusedFunction]  # typer keeps it
    pass


@app.command("serve")
def serve(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", help="Model id.", show_default="the first listed")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key of the server.")] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Requests a run.", min=1)] = 100,
    max_concurrency: Annotated[
        list[int] | None,
        typer.Option("--max-concurrency", help="Open requests; repeat it for a sweep."),
    ] = None,
    request_rate: Annotated[
        list[float] | None,
        typer.Option("--request-rate", help="Arrivals a second; repeat it for a sweep."),
    ] = None,
    input_len: Annotated[
        int, typer.Option("--random-input-len", help="Prompt tokens.", min=1)
    ] = 64,
    output_len: Annotated[
        int, typer.Option("--random-output-len", help="Tokens to write.", min=1)
    ] = 64,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", help="Prompt ids are below it.", min=11)
    ] = 1000,
    text_prompts: Annotated[
        bool, typer.Option("--text-prompts", help="Words in place of token ids.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False,
    plain_body: Annotated[
        bool, typer.Option("--plain-body", help="Leave out ignore_eos, for strict servers.")
    ] = False,
    num_warmups: Annotated[
        int, typer.Option("--num-warmups", help="Requests before the clock starts.", min=0)
    ] = 2,
    seed: Annotated[int, typer.Option("--seed", help="Grows by one a run.")] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option("--goodput", help="ttft:500 tpot:50 e2el:2000, milliseconds; repeatable."),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option("--price-per-hour", help="Of all chips, for the cost of tokens.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers.")] = None,
    picture: Annotated[Path | None, typer.Option("--png", help="Draw the sweep.")] = None,
) -> int:
    """Measure a server: headrace bench serve http://127.0.0.1:8000 --max-concurrency 16"""
    import asyncio

    from headrace.errors import ConfigError
    from headrace.serve.bench import Load, measure, save_picture

    if max_concurrency and request_rate and min(len(max_concurrency), len(request_rate)) > 1:
        raise ConfigError("sweep --max-concurrency or --request-rate, not both")
    limits = _limits(goodput or [])
    runs: list[dict[str, Any]] = [
        {"concurrency": c, "request_rate": r}
        for c in max_concurrency or [16 if not request_rate else 100_000]
        for r in request_rate or [float("inf")]
    ]
    reports: list[BenchReport] = []
    for i, run in enumerate(runs):
        load = Load(
            url=url,
            model=model,
            api_key=api_key,
            num_requests=num_prompts,
            input_tokens=input_len,
            output_tokens=output_len,
            vocab_size=vocab_size,
            as_text=text_prompts,
            num_warmups=num_warmups,
            seed=seed + i,  # equal prompts would be answered from the cache
            chat=chat,
            extra={} if plain_body else {"ignore_eos": True},
            **run,
        )
        reports.append(
            asyncio.run(measure(load, goodput=limits or None, price_per_hour=price_per_hour))
        )
    _show(reports)
    if json_file is not None:
        json_file.write_text("[" + ",\n".join(r.as_json() for r in reports) + "]\n")
    if picture is not None:
        save_picture(reports, str(picture))
    return int(any(r.failed for r in reports))


def _limits(words: list[str]) -> dict[str, float]:
    from headrace.errors import ConfigError

    found: dict[str, float] = {}
    for word in [w for each in words for w in each.split()]:
        name, _, value = word.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {word!r} is not name:milliseconds") from None
    return found


def _show(reports: list[BenchReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None)
    table.add_column("", justify="left")
    for r in reports:
        rate = r.load["request_rate"]
        named = f"{r.load['concurrency']} open" if rate == "inf" else f"{rate}/s"
        table.add_column(named, justify="right")

    def row(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    row("requests done / failed", [f"{r.completed} / {r.failed}" for r in reports])
    row("output tokens/s", [f"{r.output_throughput:,.1f}" for r in reports])
    row("all tokens/s", [f"{r.total_throughput:,.1f}" for r in reports])
    row("requests/s", [f"{r.request_throughput:.2f}" for r in reports])
    if any(r.goodput is not None for r in reports):
        row("goodput requests/s", [f"{r.goodput or 0:.2f}" for r in reports])
    for kind in ("ttft", "first_text", "tpot", "itl", "e2el"):
        for rank in ("mean", "p50", "p90", "p99"):
            values = [f"{r.times[kind].get(rank, float('nan')):.1f}" for r in reports]
            row(f"{kind} {rank} ms", values)
    if any(r.cost_per_million_output_tokens is not None for r in reports):
        costs = [f"{r.cost_per_million_output_tokens or 0:.3f}" for r in reports]
        row("cost of 1M output tokens", costs)
    console.print(table)
    for r in reports:
        if r.first_error:
            console.print(f"first failure: {r.first_error}", style="red", markup=False)

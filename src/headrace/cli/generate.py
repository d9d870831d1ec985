"""`headrace generate MODEL`: answers on the terminal, or for a file of requests.

A file (JSONL) is answered line by line into another; run again, it goes on where it stopped.

Knows: words, JSON lines. Does not know: how answers are made (`headrace.serve`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import engine as shared


def generate(
    model: Annotated[str, shared.MODEL],
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to continue; '-' reads standard input.")
    ] = None,
    input_file: Annotated[
        Path | None, typer.Option("--input", help="JSONL of requests: prompt or messages a line.")
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", help="JSONL of answers; finished lines are kept.")
    ] = None,
    adapter: Annotated[list[str] | None, shared.ADAPTER] = None,
    use: Annotated[str | None, shared.USE] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to write.", min=1)] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0: most likely.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 is off.")] = 0,
    seed: Annotated[int | None, shared.SEED] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Ends the answer; may be repeated.")
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Requests of a file at once.", min=1)
    ] = 16,
    max_model_len: Annotated[int | None, shared.MAX_MODEL_LEN] = None,
    merge: Annotated[bool, shared.MERGE] = False,
    base: Annotated[str | None, shared.BASE] = None,
    dtype: Annotated[str, shared.DTYPE] = "auto",
    quantization: Annotated[str | None, shared.QUANTIZATION] = None,
    kv_cache_dtype: Annotated[str, shared.KV_CACHE_DTYPE] = "auto",
    tensor_parallel_size: Annotated[int, shared.TENSOR_PARALLEL] = 1,
    trust_remote_code: Annotated[bool, shared.TRUST] = False,
) -> None:
    """Write text with a model: headrace generate out/reminders --prompt "Reminder: ..."

    With --input requests.jsonl --output answers.jsonl every line is answered. A line has "prompt"
    (text or token ids) or "messages", and may have sampling settings of its own.
    """
    from headrace.errors import ConfigError
    from headrace.serve import SamplingParams

    if (prompt is None) == (input_file is None):
        raise ConfigError("give --prompt or --input, one of them")
    if (input_file is None) != (output_file is None):
        raise ConfigError("--input and --output go together")
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        max_tokens=max_tokens,
    )
    options = shared.one_sequence(
        max_model_len=max_model_len,
        merge=merge,
        base=base,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        trust_remote_code=trust_remote_code,
    )
    if input_file is not None:
        options["max_num_seqs"] = max_num_seqs
    with shared.engine_here(model, adapter, use, options) as (engine, chosen):
        if prompt is not None:
            text = sys.stdin.read() if prompt == "-" else prompt
            for delta in engine.stream(text, params, adapter=chosen):
                typer.echo(delta.text, nl=False)
            typer.echo()
            return
        from headrace.serve.batch import run_batch

        assert input_file is not None
        assert output_file is not None
        report = run_batch(engine, input_file, output_file, params, adapter=chosen)
        typer.echo(str(report))

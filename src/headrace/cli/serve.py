"""`headrace serve MODEL`: an OpenAI-compatible server over the captured model.

Knows: words. Does not know: how answers are made (`headrace.serve`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import engine as shared

if TYPE_CHECKING:
    from headrace.serve import Engine
    from headrace.serve.pooling import PoolingEngine
    from headrace.serve.vllm import Sizes


DEFAULT_MAX_LORA_RANK = 32


def serve(
    model: Annotated[str, shared.MODEL],
    adapter: Annotated[list[str] | None, shared.ADAPTER] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="Accepted key; may be repeated. Also HEADRACE_API_KEY."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="Model id of the base.")
    ] = None,
    max_model_len: Annotated[int | None, shared.MAX_MODEL_LEN] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Sequences computed at once.", min=1)
    ] = 16,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            help="Prompt tokens a step.",
            min=16,
            show_default="256 on CPU, 512 elsewhere",
        ),
    ] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option("--cache-tokens", help="Size of the cache.", show_default="by memory"),
    ] = None,
    max_queue: Annotated[
        int, typer.Option("--max-queue", help="Sequences that may wait; more get 503.", min=1)
    ] = 256,
    max_loras: Annotated[
        int, typer.Option("--max-loras", help="Adapter slots (also for later loading).", min=0)
    ] = 0,
    max_lora_rank: Annotated[
        int, typer.Option("--max-lora-rank", help="Largest adapter rank.", min=1)
    ] = DEFAULT_MAX_LORA_RANK,
    speculative_tokens: Annotated[
        int,
        typer.Option("--speculative-tokens", help="Guesses a step by prompt lookup.", min=0),
    ] = 0,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse equal beginnings.")
    ] = True,
    task: Annotated[
        str,
        typer.Option("--task", help="generate, embed, classify, or auto: what the files are for."),
    ] = "auto",
    merge: Annotated[bool, shared.MERGE] = False,
    base: Annotated[str | None, shared.BASE] = None,
    dtype: Annotated[str, shared.DTYPE] = "auto",
    quantization: Annotated[str | None, shared.QUANTIZATION] = None,
    kv_cache_dtype: Annotated[str, shared.KV_CACHE_DTYPE] = "auto",
    tensor_parallel_size: Annotated[int, shared.TENSOR_PARALLEL] = 1,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", help="Time for running answers after SIGTERM.")
    ] = 30.0,
    compilation_cache: Annotated[
        str | None,
        typer.Option("--compilation-cache", help="Folder for compiled programs; '' for none."),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="headrace serves here; vllm prepares a hand-over.")
    ] = "headrace",
    slice_name: Annotated[
        str, typer.Option("--slice", help="With --engine vllm: the TPU slice, such as v6e-8.")
    ] = "v6e-8",
    output: Annotated[
        str | None, typer.Option("--output", help="With --engine vllm: the merged model's folder.")
    ] = None,
    check: Annotated[
        str | None,
        typer.Option("--check", help="With --engine vllm: compare a running server."),
    ] = None,
    trust_remote_code: Annotated[bool, shared.TRUST] = False,
) -> int:
    """Serve a model or what was just trained: headrace serve out/reminders

    Speaks the OpenAI API on /v1, shows a playground page at /, Prometheus metrics at /metrics. An
    adapter folder is served as an adapter on its base: both have a model id. Encoders and sentence
    models get /v1/embeddings, classifiers /v1/classify; their adapters are merged.
    """
    from headrace.errors import ConfigError
    from headrace.weights import find_adapter

    if engine not in ("headrace", "vllm"):
        raise ConfigError(f"--engine {engine!r} is not known; it is headrace or vllm")
    of_this_engine = {
        "--adapter": adapter,
        "--cache-tokens": cache_tokens,
        "--max-loras": max_loras,
        "--max-lora-rank": max_lora_rank != DEFAULT_MAX_LORA_RANK,
        "--no-prefix-caching": not prefix_caching,
        "--speculative-tokens": speculative_tokens,
        "--quantization": quantization,
        "--kv-cache-dtype": kv_cache_dtype != "auto",
        "--tensor-parallel-size": tensor_parallel_size > 1,
    }
    if engine == "vllm":
        _refuse(of_this_engine, "give them to vLLM; --engine vllm chooses its sizes by the planner")
        return _vllm(model, base, slice_name, output, check, max_model_len, dtype)
    _refuse({"--output": output, "--check": check}, "only with --engine vllm")
    cache = shared.default_compilation_cache() if compilation_cache is None else compilation_cache
    common: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "base": base,
        "dtype": dtype,
        "compilation_cache": cache or None,
        "trust_remote_code": trust_remote_code,
    }
    listening: dict[str, Any] = {
        "host": host,
        "port": port,
        "api_keys": tuple(api_key or [])
        or tuple(filter(None, [os.environ.get("HEADRACE_API_KEY")])),
        "served_model_name": served_model_name,
        "drain_seconds": drain_seconds,
    }
    if task not in ("auto", "generate", "embed", "classify"):
        raise ConfigError(f"--task {task!r} is not known; use auto, generate, embed or classify")
    if task == "auto":
        from headrace.serve.pooling import serving_task

        task = serving_task(model, base=base, trust_remote_code=trust_remote_code)
    if task != "generate":
        _refuse(of_this_engine, "only for models that write text")
        options = {**common, "task": task, "max_queue": max_queue}
        if max_num_batched_tokens is not None:
            options["max_batched_tokens"] = max_num_batched_tokens
        return _serve_pooling(model, options, listening)
    if merge and (adapter or max_loras):
        raise ConfigError("--merge serves one adapter folded in; leave out --adapter, --max-loras")
    own = None if merge else find_adapter(model)
    adapters = shared.read_adapters(adapter)
    slots = len(adapters) + (own is not None)
    running = shared.start_engine(
        model,
        adapters,
        {
            **common,
            "max_batched_tokens": max_num_batched_tokens,
            "cache_tokens": cache_tokens,
            "max_queue": max_queue,
            "max_loras": max(max_loras, slots),
            "max_lora_rank": max_lora_rank,
            "speculative_tokens": speculative_tokens,
            "prefix_caching": prefix_caching,
            "merge": merge,
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "tensor_parallel_size": tensor_parallel_size,
        },
    )
    default = running.adapters.names[0] if own is not None else None
    cached = (running.shapes.num_pages - 1) * running.shapes.page_size
    return _listen(running, {**listening, "default_model": default}, f"cache {cached:,} tokens, ")


def _refuse(flags: dict[str, Any], why: str) -> None:
    """Raise ConfigError for flags that were given and would do nothing."""
    from headrace.errors import ConfigError

    given = [name for name, value in flags.items() if value]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}")


def _serve_pooling(model: str, options: dict[str, Any], listening: dict[str, Any]) -> int:
    from headrace.serve.pooling import PoolingEngine, PoolingOptions

    running = PoolingEngine(
        model,
        options=PoolingOptions(**options),
        progress=shared.progress_line,
    )
    lengths = ", ".join(map(str, running.lengths))
    return _listen(running, listening, f"batches padded to {lengths} tokens, ")


def _listen(running: Engine | PoolingEngine, listening: dict[str, Any], sizes: str) -> int:
    from headrace.serve.api import ServerOptions, run_server

    options = ServerOptions(**listening)

    def show(url: str) -> None:
        base = options.served_model_name or running.model.name
        typer.echo(", ".join([base, *running.adapters.names]))
        typer.echo(
            f"context {running.max_model_len} tokens, {sizes}"
            f"warm-up {running.warm_up_seconds:.1f} s"
        )
        typer.echo(f"ready on {url}  (playground: {url}/  API: {url}/v1)")

    return run_server(running, options, on_start=show)


# Held-out text of several kinds, for comparing two engines on one model.
PROBES = (
    "The quick brown fox jumps over the lazy dog while the rain keeps falling on the old roof.",
    "def add(a, b):\n    return a + b\n\nassert add(2, 3) == 5\n",
    "In 1969 two people walked on the moon; about 600 million people watched them.",
    '{"name": "Ada", "year": 1843, "tags": ["engine", "notes"]}',
)


def _vllm(
    model: str,
    base: str | None,
    slice_name: str,
    output: str | None,
    check: str | None,
    max_model_len: int | None,
    dtype: str,
) -> int:
    from headrace.serve.vllm import check_parity, prepare

    if check is None:
        sizes = _planned_sizes(model, base, slice_name, max_model_len)
        handover = prepare(model, output, sizes=sizes, base=base)
        typer.echo(str(handover))
        return 0
    options = {"base": base, "dtype": dtype, "max_num_seqs": 1, "warm_up": False}
    with shared.start_engine(model, {}, options, quiet=True) as running:
        names = running.adapters.names
        parity = check_parity(running, check, PROBES, adapter=names[0] if names else None)
    typer.echo(str(parity))
    return 0


def _planned_sizes(
    model: str, base: str | None, slice_name: str, max_model_len: int | None
) -> Sizes:
    """What the planner chooses for vLLM on a slice; reads config.json only."""
    from headrace.config import TrainConfig
    from headrace.plan.serving import Traffic, serving_plan
    from headrace.plan.shape import read_model_config
    from headrace.serve.vllm import Sizes
    from headrace.weights import find_adapter

    adapter = find_adapter(model)
    source = model if adapter is None else str(base or adapter.base_model_name_or_path)
    config = read_model_config(source)
    positions = config.get("text_config", config).get("max_position_embeddings")
    longest = max_model_len or min(int(positions or 4096), 8192)
    plan = serving_plan(
        TrainConfig(model_name_or_path=source), slice_name, traffic=Traffic(longest=longest)
    )
    chip = plan.hardware.chip
    # Prompt tokens a step at which products take as long as reading the weights: fewer waste
    # bandwidth, many more make running answers wait.
    ridge = chip.flops / chip.hbm_bandwidth * plan.item / 2
    streams = min(256, max(1, plan.most_streams))
    sequences = 1 << (streams.bit_length() - 1)
    memory = plan.memory
    share = (memory["weights"] + memory["keys and values"]) / chip.hbm_bytes
    return Sizes(
        slice_name=plan.hardware.name,
        chips=plan.hardware.num_devices,
        tensor=plan.tensor,
        max_model_len=longest,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(sequences, 1 << (int(ridge) - 1).bit_length()),
        memory_share=round(share, 2),
        fits=plan.cache_tokens >= longest,
    )

"""`headrace merge adapter output_dir`: an adapter folded into its base, as a whole model.

Knows: words. Does not know: how merging works (`headrace.weights.merge`).
"""

from __future__ import annotations

from typing import Annotated

import typer


def merge(
    adapter: Annotated[str, typer.Argument(help="Folder with adapter_config.json.")],
    output_dir: Annotated[str, typer.Argument(help="New folder for the whole model.")],
    base: Annotated[
        str | None, typer.Option("--base", help="Base model.", show_default="the adapter's own")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto (the base's), float32, bfloat16 or float16.")
    ] = "auto",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Largest file, such as 500MB.")
    ] = "5GB",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Merge a LoRA adapter into its base model: headrace merge out merged

    Merges in float32, rounds once, writes safetensors that AutoModel...from_pretrained loads, and
    compares the logits of what it wrote with those of base + adapter.
    """
    from headrace.errors import ConfigError

    known = ("auto", "float32", "bfloat16", "float16")
    if dtype not in known:
        raise ConfigError(f"--dtype {dtype!r} is not known; use {', '.join(known)}")
    from headrace.weights import merge_adapter

    report = merge_adapter(
        adapter,
        output_dir,
        base=base,
        dtype=dtype,
        max_shard_size=max_shard_size,
        trust_remote_code=trust_remote_code,
    )
    typer.echo(str(report))

"""Flags that `serve`, `generate` and `chat` share, and how they become an engine.

Knows: words, progress lines. Does not know: HTTP, sampling.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from headrace.serve import Engine

MODEL: Any = typer.Argument(help="Model folder, adapter folder or hub id.")
ADAPTER: Any = typer.Option("--adapter", help="name=folder of a LoRA adapter; may be repeated.")
BASE: Any = typer.Option("--base", help="Base model.", show_default="the adapter's own")
MERGE: Any = typer.Option("--merge", help="Fold the adapter into its base before serving.")
DTYPE: Any = typer.Option("--dtype", help="auto (the files'), float32, bfloat16 or float16.")
MAX_MODEL_LEN: Any = typer.Option(
    "--max-model-len", help="Most tokens of prompt and answer.", show_default="the model's"
)
TRUST: Any = typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
USE: Any = typer.Option("--use", help="Adapter that answers.", show_default="the one given")
SEED: Any = typer.Option("--seed", help="Repeats an answer.")
QUANTIZATION: Any = typer.Option(
    "--quantization", help="int8, int4 or nf4 for linear layers.", show_default="as stored"
)
KV_CACHE_DTYPE: Any = typer.Option(
    "--kv-cache-dtype", help="auto (the model's) or int8 for keys and values."
)
TENSOR_PARALLEL: Any = typer.Option(
    "--tensor-parallel-size", help="Devices that share weights and heads.", min=1
)
DTYPES = ("auto", "float32", "bfloat16", "float16")


def default_compilation_cache() -> str:
    """Where compiled programs are kept between starts."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(root) / "headrace" / "compiled")


def read_adapters(words: list[str] | None) -> dict[str, str]:
    """name=folder words as a mapping. Raises ConfigError for what is not that."""
    from headrace.errors import ConfigError

    found: dict[str, str] = {}
    for word in words or []:
        name, equals, folder = word.partition("=")
        if not equals or not name or not folder:
            raise ConfigError(f"--adapter {word!r} is not name=folder")
        if name in found:
            raise ConfigError(f"two adapters are named {name!r}")
        found[name] = folder
    return found


def one_sequence(**settings: Any) -> dict[str, Any]:
    """EngineOptions of a command that answers by itself: one sequence, compiled when needed."""
    return {
        "max_num_seqs": 1,
        "warm_up": False,
        "compilation_cache": default_compilation_cache(),
        **settings,
    }


@contextmanager
def engine_here(
    model: str, adapter: list[str] | None, use: str | None, options: dict[str, Any]
) -> Generator[tuple[Engine, str | None]]:
    """An engine in this process, and the adapter that answers: `use`, else the only one there is.

    Raises ConfigError when `use` names none of the adapters.
    """
    from headrace.errors import ConfigError

    with start_engine(model, read_adapters(adapter), options, quiet=True) as engine:
        names = engine.adapters.names
        if use is not None and use not in names:
            there = ", ".join(names) or "none"
            raise ConfigError(f"--use {use!r} is no adapter that was given; there are: {there}")
        yield engine, use or (names[0] if len(names) == 1 else None)


def start_engine(
    model: str, adapters: dict[str, str], options: dict[str, Any], *, quiet: bool = False
) -> Engine:
    """An engine with a progress line on standard error. options: fields of EngineOptions."""
    from headrace.errors import ConfigError
    from headrace.serve import Engine, EngineOptions

    if options.get("dtype", "auto") not in DTYPES:
        raise ConfigError(f"--dtype {options['dtype']!r} is not known; use {', '.join(DTYPES)}")
    progress = None if quiet else progress_line
    return Engine(model, adapters=adapters, options=EngineOptions(**options), progress=progress)


def progress_line(done: int, total: int, name: str) -> None:
    """What is being compiled, on one line of the terminal; nothing when there is none."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Kcompiling {done}/{total}  {name[:60]}")
        if done == total:
            sys.stderr.write("\r\033[K")
        sys.stderr.flush()

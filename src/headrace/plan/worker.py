"""The process that captures and compiles, so that the command itself stays quick and alive.

Reads one JSON request from standard input: the configuration, the model's config.json, candidates.
Writes JSON lines: `{"stage": ...}` while it works, `{"index": i, "report": ...}` or
`{"index": i, "error": ...}` for each candidate, in order. One capture serves all of them.

    python -m headrace.plan.worker < request.json
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.plan.topology import prepare_environment

if TYPE_CHECKING:
    from headrace.config import TrainConfig

Compiling = Callable[..., dict[str, Any]]


def main() -> int:
    request: dict[str, Any] = json.load(sys.stdin)
    # The reports own standard output; libraries that print would break the lines.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ["JAX_PLATFORMS"] = "cpu"
    prepare_environment()
    warnings.simplefilter("ignore")

    def send(**line: Any) -> None:
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    try:
        _answer(request, send)
    except Exception as error:  # shown by the parent; a compiler's own errors have many types
        if os.environ.get("HEADRACE_DEBUG"):
            raise
        send(fatal=str(error), kind=type(error).__name__)
        return 1
    return 0


def _answer(request: dict[str, Any], send: Any) -> None:
    send(stage="loading")
    from headrace.config import TrainConfig
    from headrace.errors import HeadraceError
    from headrace.plan.cache import read_report, write_report

    config = TrainConfig(**request["config"])
    folder = Path(request["cache"])
    send(stage="capturing the model")
    start = time.perf_counter()
    if request["candidates"][0]["work"] == "serve":
        compiling = _server(config)
    else:
        labels, share = request.get("num_labels"), request.get("supervised_share")
        save = request.get("save_programs")
        compiling = _step(config, int(labels or 2), float(share or 1.0), save)
    seconds = time.perf_counter() - start
    for index, given in enumerate(request["candidates"]):
        try:
            report = compiling(
                given,
                known=lambda program: read_report(f"program-{program}", folder),
                say=lambda text: send(stage=text),
                keep_text=request.get("keep_text"),
            )
        except HeadraceError as error:
            send(index=index, error=str(error), kind=type(error).__name__)
            continue
        if report["program"]:
            write_report(f"program-{report['program']}", report, folder)
        send(index=index, report={**report, "capture_seconds": seconds})


def _step(
    config: TrainConfig, num_labels: int, supervised_share: float, save: str | None
) -> Compiling:
    """Captures the model to train; compiles candidates of training and evaluation."""
    from headrace.plan.candidate import Candidate
    from headrace.plan.compiled import compile_candidate
    from headrace.plan.program import capture_model

    captured = capture_model(config, num_labels=num_labels, whole=save is not None)

    def compiling(given: dict[str, Any], **options: Any) -> dict[str, Any]:
        candidate = Candidate(**given)
        return compile_candidate(
            captured, candidate, supervised_share=supervised_share, save_programs=save, **options
        )

    return compiling


def _server(config: TrainConfig) -> Compiling:
    """Captures the model to serve; compiles servers."""
    import functools

    from headrace.plan.candidate import ServerCandidate
    from headrace.plan.serving_compiled import compile_server
    from headrace.plan.serving_program import capture_server, server_options

    capture = functools.cache(lambda: capture_server(config))

    def compiling(given: dict[str, Any], **options: Any) -> dict[str, Any]:
        candidate = ServerCandidate(**given)
        server_options(candidate)  # what the engine refuses is refused before a capture
        return compile_server(capture(), candidate, **options)

    return compiling


if __name__ == "__main__":
    sys.exit(main())

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
from pathlib import Path
from typing import Any

from headrace.plan.topology import prepare_environment


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
    from headrace.plan.candidate import Candidate
    from headrace.plan.compiled import compile_candidate
    from headrace.plan.program import capture_model

    config = TrainConfig(**request["config"])
    folder = Path(request["cache"])
    send(stage="capturing the model")
    start = time.perf_counter()
    captured = capture_model(config, num_labels=int(request.get("num_labels") or 2))
    seconds = time.perf_counter() - start
    for index, given in enumerate(request["candidates"]):
        try:
            report = compile_candidate(
                captured,
                Candidate(**given),
                supervised_share=float(request.get("supervised_share") or 1.0),
                known=lambda program: read_report(f"program-{program}", folder),
                say=lambda text: send(stage=text),
                keep_text=request.get("keep_text"),
            )
        except HeadraceError as error:
            send(index=index, error=str(error), kind=type(error).__name__)
            continue
        write_report(f"program-{report['program']}", report, folder)
        send(index=index, report={**report, "capture_seconds": seconds})


if __name__ == "__main__":
    sys.exit(main())

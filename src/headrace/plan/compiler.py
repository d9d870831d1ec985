"""Asking workers for compiled reports: the cache first, then processes, with progress.

Knows: requests, processes. Does not know: programs (they live in the workers).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import TrainConfig
from headrace.errors import PlanError
from headrace.plan.cache import (
    PROGRAM_SETTINGS,
    cache_folder,
    read_report,
    request_key,
    write_report,
)
from headrace.plan.candidate import Candidate, ServerCandidate

Say = Callable[[str], None]
AnyCandidate = Candidate | ServerCandidate


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A candidate's compiled report, or why there is none."""

    candidate: AnyCandidate
    report: dict[str, Any] | None = None
    error: str | None = None
    cached: bool = False


def compile_all(
    config: TrainConfig,
    candidates: Sequence[AnyCandidate],
    *,
    model_config: Mapping[str, Any],
    num_labels: int | None = None,
    supervised_share: float = 1.0,
    cache: str | Path | None = None,
    workers: int = 1,
    say: Say = lambda text: None,
    keep_text: str | None = None,
    save_programs: str | None = None,
) -> list[Answer]:
    """Reports in the order of the candidates, all of one kind. Minutes for each that is not in the
    cache. save_programs: folder for entries of JAX's compilation cache; all are compiled then.

    Raises PlanError when a worker dies or the model cannot be captured at all.
    """
    folder = cache_folder(cache)
    request: dict[str, Any] = {
        "config": _plain(config),
        "model_config": dict(model_config),
        "num_labels": num_labels,
        "supervised_share": round(supervised_share, 3),
        "cache": str(folder),
        "keep_text": keep_text,
        "save_programs": save_programs,
    }
    keys = [request_key(request, each.as_json()) for each in candidates]
    answers: list[Answer | None] = []
    for key, each in zip(keys, candidates, strict=True):
        found = read_report(key, folder) if save_programs is None else None
        answers.append(Answer(candidate=each, report=found, cached=True) if found else None)
    missing = [i for i, answer in enumerate(answers) if answer is None]
    shares = [share for n in range(workers) if (share := missing[n::workers])]
    failures: list[PlanError] = []

    def work(share: list[int]) -> None:
        try:
            for index, line in _run(
                {**request, "candidates": [candidates[i].as_json() for i in share]}, say
            ):
                i = share[index]
                report = line.get("report")
                if report is not None:
                    write_report(keys[i], report, folder)
                answers[i] = Answer(candidate=candidates[i], report=report, error=line.get("error"))
        except PlanError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [answer for answer in answers if answer is not None]


_PASSED = (*PROGRAM_SETTINGS, "model_name_or_path", "trust_remote_code")


def _plain(config: TrainConfig) -> dict[str, Any]:
    """The settings that a program depends on, as far as they were given, as JSON has them."""
    given = config.model_dump(mode="json", include=config.model_fields_set & set(_PASSED))
    model = given.get("model_name_or_path")
    if model and Path(model).expanduser().is_dir():
        given["model_name_or_path"] = str(Path(model).expanduser().resolve())
    return given


def _run(request: Mapping[str, Any], say: Say) -> Any:
    """Lines of one worker's answers. Its stages go to `say`; its death is a PlanError."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.plan.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdin and process.stdout and process.stderr
    noise: list[str] = []
    stderr = process.stderr
    reader = threading.Thread(target=lambda: noise.extend(stderr), daemon=True)
    reader.start()
    try:
        json.dump(request, process.stdin)
        process.stdin.close()
        for text in process.stdout:
            line: dict[str, Any] = json.loads(text)
            if "stage" in line:
                say(line["stage"])
            elif "fatal" in line:
                raise PlanError(f"the plan cannot be compiled. {line['kind']}: {line['fatal']}")
            else:
                yield line["index"], line
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(timeout=5)
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    if code != 0:
        last = "".join(noise[-6:]).strip()
        killed = " It was killed, perhaps for want of memory." if code in (-9, 137) else ""
        raise PlanError(f"the compiling process ended with code {code}.{killed}\n{last}")

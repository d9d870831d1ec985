"""A file of requests -> a file of answers, with resume.

Both are JSONL. A request line has `prompt` (text or token ids) or `messages`, optionally `id`,
`model` (an adapter) and sampling settings of its own. Answers are appended as they finish, each
with the number of its line, so an interrupted run goes on where it stopped and answers nothing
twice. A wrong line gets an error line; the others are answered.

Knows: JSON lines, the engine's door. Does not know: HTTP.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, DataError, HeadraceError, QueueFullError
from headrace.serve.answers import Collector
from headrace.serve.engine import Engine
from headrace.serve.params import SamplingParams

OWN_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "ignore_eos",
)
KNOWN = {"id", "prompt", "messages", "model", "stop", *OWN_SETTINGS}


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """What a run did. resumed: answers that were there already."""

    answered: int
    failed: int
    resumed: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.answered} answered ({self.tokens:,} tokens), {self.failed} failed, "
            f"{self.resumed} were done before"
        )


def run_batch(
    engine: Engine,
    input_file: Path,
    output_file: Path,
    params: SamplingParams,
    *,
    adapter: str | None = None,
) -> BatchReport:
    """Answer every line of input_file that output_file does not answer yet.

    Raises DataError when input_file cannot be read or output_file is not of this input.
    """
    if not input_file.is_file():
        raise DataError(f"{input_file} does not exist or is no file")
    done = _finished_lines(output_file)
    counts = {"answered": 0, "failed": 0, "tokens": 0}
    room = threading.Semaphore(engine.options.max_num_seqs * 2)
    writing = threading.Lock()
    output_file.parent.mkdir(parents=True, exist_ok=True)
    with output_file.open("a", encoding="utf-8") as out:

        def write(row: dict[str, Any]) -> None:
            with writing:
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                out.flush()

        workers: list[threading.Thread] = []
        for line, text in _lines(input_file):
            if line in done:
                continue
            room.acquire()
            try:
                collector, request_id = _start(engine, line, text, params, adapter)
            except HeadraceError as error:
                counts["failed"] += 1
                write({"line": line, "error": str(error)})
                room.release()
                continue

            def finish(line: int, request_id: Any, collector: Collector) -> None:
                try:
                    row = _row(line, request_id, collector)
                    counts["answered" if "error" not in row else "failed"] += 1
                    counts["tokens"] += sum(a.get("num_tokens", 0) for a in row.get("answers", []))
                    write(row)
                finally:
                    room.release()

            worker = threading.Thread(target=finish, args=(line, request_id, collector))
            worker.start()
            workers.append(worker)
        for worker in workers:
            worker.join()
    return BatchReport(resumed=len(done), **counts)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        for i, text in enumerate(file, start=1):
            if text.strip():
                yield i, text


def _finished_lines(path: Path) -> set[int]:
    """Lines that have an answer; a half-written last line is cut off, errors are tried again."""
    if not path.exists():
        return set()
    kept: list[str] = []
    done: set[int] = set()
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(text)
            line = row["line"]
        except (ValueError, KeyError, TypeError):
            if not kept and text.strip() and not text.startswith("{"):
                raise DataError(f"{path} is not an answer file; give another --output") from None
            continue
        if "error" not in row:
            done.add(int(line))
            kept.append(text)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(t + "\n" for t in kept), encoding="utf-8")
    partial.replace(path)
    return done


def _start(
    engine: Engine, line: int, text: str, params: SamplingParams, adapter: str | None
) -> tuple[Collector, Any]:
    try:
        row: Any = json.loads(text)
    except ValueError as error:
        raise DataError(f"line {line} is not JSON: {error}") from None
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise DataError(f"line {line} needs prompt or messages, one of them")
    unknown = sorted(set(row) - KNOWN)
    if unknown:
        raise DataError(f"line {line} has unknown fields: {', '.join(unknown)}")
    own: dict[str, Any] = {name: row[name] for name in OWN_SETTINGS if row.get(name) is not None}
    if row.get("stop"):
        own["stop"] = (row["stop"],) if isinstance(row["stop"], str) else tuple(row["stop"])
    try:
        settings = replace(params, **own)
    except TypeError as error:
        raise ConfigError(f"line {line}: {error}") from None
    ids = _ids(engine, row, line)
    collector = Collector(settings.n)
    while True:
        try:
            engine.submit(ids, settings, collector, adapter=row.get("model", adapter))
            return collector, row.get("id")
        except QueueFullError:
            threading.Event().wait(0.01)


def _ids(engine: Engine, row: dict[str, Any], line: int) -> list[int]:
    if "prompt" in row:
        try:
            return engine.encode(row["prompt"])
        except (TypeError, ValueError) as error:
            raise DataError(f"line {line}: prompt is text or token ids ({error})") from None
    tokenizer = engine.model.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"line {line} has messages, but the model has no chat template; use prompt")
    try:
        found = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except Exception as error:  # a template raises what it likes about the messages
        raise DataError(f"line {line}: the chat template refused it: {error}") from None
    return list(found["input_ids"])


def _row(line: int, request_id: Any, collector: Collector) -> dict[str, Any]:
    head = {"line": line} | ({"id": request_id} if request_id is not None else {})
    try:
        answers = collector.wait()
    except HeadraceError as error:
        return {**head, "error": str(error)}
    return {
        **head,
        "answers": [
            {
                "text": a.text,
                "finish_reason": a.finish_reason,
                "num_prompt_tokens": a.num_prompt,
                "num_tokens": len(a.token_ids),
            }
            | ({"logprobs": [e.logprob for e in a.logprobs]} if a.logprobs else {})
            for a in answers
        ],
    }

"""The engine of encoders and classifiers: texts in, one array a text out, one thread.

    with PoolingEngine("out/intents") as engine:
        print(engine.classify(["where is my card?"]))

A turn of the loop: the text that waited longest chooses the length bucket, others of the same
bucket join it, one program runs. Nothing waits for a batch to fill: while the device works the
next one gathers.

Knows: the queue, buckets, compiled programs. Does not know: HTTP.

Shapes: B = texts in a batch, S = tokens of the bucket, O = numbers a text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.errors import ConfigError, QueueFullError, ServeError
from headrace.serve.adapters import Adapters
from headrace.serve.base import CommonOptions, ThreadedEngine
from headrace.serve.pooling.model import (
    Encoded,
    PoolingModel,
    load_pooling_model,
    serving_task,
    shorten,
)
from headrace.serve.stats import EngineStats

log = logging.getLogger(__name__)

SMALLEST_BUCKET = 32
ROW_STEP = 4  # batches have 1, 4, 16, ... rows
Embedding = np.ndarray


@dataclass(frozen=True, kw_only=True)
class PoolingOptions(CommonOptions):
    """How an engine is built; `CommonOptions` has the rest.

    task: "embed", "classify" or "auto" (from the files). max_num_seqs: texts of one program.
    max_batched_tokens: most tokens of one program, padding included; a single text may be longer.
    max_queue: texts that may wait; a request of more is taken when nothing waits.
    """

    task: str = "auto"
    max_batched_tokens: int = 8192
    max_queue: int = 1024

    def least(self) -> dict[str, int]:
        return {**super().least(), "max_batched_tokens": 1}

    def problems(self) -> list[str]:
        if self.task in ("auto", "embed", "classify"):
            return []
        return [f"task is {self.task!r}; it is auto, embed or classify"]


@dataclass(kw_only=True, eq=False)
class _Job:
    text: Encoded
    length: int
    future: Future[np.ndarray] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)


class PoolingEngine(ThreadedEngine):
    """Serves one captured encoder or classifier to many requests at once.

    model: a folder or hub id (an adapter is merged into its base), or a `PoolingModel`. Building
    it compiles one program for each bucket and batch size; `progress(done, total, name)` is told.
    Use as a context manager or call `close()`.

    Raises CaptureError and ConfigError for models that cannot be served this way.
    """

    def __init__(
        self,
        model: str | Path | PoolingModel,
        *,
        options: PoolingOptions | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        super().__init__()
        self.options = options = options or PoolingOptions()
        self.model = model if isinstance(model, PoolingModel) else _open(model, options)
        self.max_model_len = _max_model_len(self.model, options)
        self.lengths = bucket_lengths(self.max_model_len)
        self.stats = EngineStats()
        self.adapters = Adapters(max_loras=0)
        self.late_compilations = 0
        self.num_running = 0
        self._waiting: deque[_Job] = deque()
        self._news = threading.Condition()
        self._compiled: dict[tuple[int, int], Any] = {}
        self.warm_up_seconds = self._warm_up(progress) if options.warm_up else 0.0
        self._start("headrace-pooling", self._loop)

    # requests -----------------------------------------------------------------------------------

    def submit(self, texts: Sequence[Encoded]) -> list[Future[np.ndarray]]:
        """Queue the texts of one request; each future gives float32 [O].

        Cancelling a future that did not start takes its text out. Raises ConfigError for texts
        that are empty, too long or out of the vocabulary, QueueFullError, and ServeError when the
        engine died.
        """
        for i, text in enumerate(texts):
            self._check(i, text)
        jobs = [_Job(text=t, length=self._bucket(len(t.ids))) for t in texts]
        with self._news:
            if not self.alive:
                raise ServeError("the engine has stopped")
            waiting = len(self._waiting)
            if waiting and waiting + len(jobs) > self.options.max_queue:
                raise QueueFullError(
                    f"{waiting} texts wait already; the queue takes {self.options.max_queue}. "
                    "Try again later"
                )
            self._waiting.extend(jobs)
            self.stats.prompt_tokens += sum(len(t.ids) for t in texts)
            self._news.notify()
        return [job.future for job in jobs]

    def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> np.ndarray:
        """float32 [B, O], normalised when the model's recipe says so. Blocks."""
        found_BO = self._run_all(texts, "embed")
        return shorten(found_BO, dimensions=dimensions, normalize=self.model.recipe.normalize)

    def classify(self, texts: Sequence[str]) -> list[dict[str, float]]:
        """Label -> probability, for each text. Blocks."""
        found_BO = self.model.probabilities(self._run_all(texts, "classify"))
        return [dict(zip(self.model.labels, row.tolist(), strict=True)) for row in found_BO]

    def _run_all(self, texts: Sequence[str], task: str) -> np.ndarray:
        if self.model.task != task:
            raise ConfigError(f"{self.model.name} is served to {self.model.task}, not to {task}")
        futures = self.submit([self.model.encode(text) for text in texts])
        return np.stack([future.result() for future in futures])

    def _check(self, index: int, text: Encoded) -> None:
        if not text.ids:
            raise ConfigError(f"input {index} has no tokens; give at least one")
        if len(text.ids) > self.max_model_len:
            raise ConfigError(
                f"input {index} has {len(text.ids):,} tokens; this model takes "
                f"{self.max_model_len:,}. Shorten it or set truncate_prompt_tokens"
            )
        low, high = min(text.ids), max(text.ids)
        if low < 0 or high >= self.model.vocab_size:
            raise ConfigError(
                f"token ids are from 0 to {self.model.vocab_size - 1}; input {index} has {low} to "
                f"{high}"
            )

    # life ---------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Texts in the queue."""
        return len(self._waiting)

    def close(self) -> None:
        """Refuse what waits and stop the thread."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join()

    def _loop(self) -> None:
        jobs: list[_Job] = []
        try:
            while jobs := self._take():
                self.num_running = len(jobs)
                self._run(jobs)
                self.num_running = 0
        except BaseException as error:
            self.dead = error
            log.exception("the engine stopped")
        with self._news:
            left = [*jobs, *self._waiting]
            self._waiting.clear()
        for job in left:
            if not job.future.done():
                job.future.set_exception(ServeError("the engine has stopped"))

    def _take(self) -> list[_Job]:
        """The oldest text and others of its bucket; waits for one. Empty when closing."""
        with self._news:
            while True:
                while not self._waiting and not self._closing:
                    self._news.wait()
                if self._closing:
                    return []
                length = self._waiting[0].length
                most = self._row_counts(length)[-1]
                jobs = [job for job in self._waiting if job.length == length][:most]
                taken = set(map(id, jobs))
                self._waiting = deque(job for job in self._waiting if id(job) not in taken)
                jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
                if jobs:
                    return jobs

    # programs -----------------------------------------------------------------------------------

    def _run(self, jobs: list[_Job]) -> None:
        started, length = time.monotonic(), jobs[0].length
        rows = next(n for n in self._row_counts(length) if n >= len(jobs))
        batch = _batch(self.model, [job.text for job in jobs], rows, length)
        program = self._program(rows, length)
        found_BO = np.asarray(program(self.model.params, self.model.buffers, batch))
        now = time.monotonic()
        self.stats.steps += 1
        self.stats.observe("iteration_tokens", sum(len(job.text.ids) for job in jobs))
        for job, row_O in zip(jobs, found_BO, strict=False):
            job.future.set_result(row_O)
            self.stats.observe("request_queue_time", started - job.arrived)
            self.stats.observe("e2e_request_latency", now - job.arrived)
            self.stats.observe("request_prompt_tokens", len(job.text.ids))
            self.stats.observe("finished:stop", 1)

    def _warm_up(self, progress: Callable[[int, int, str], None] | None) -> float:
        start = time.perf_counter()
        keys = [(rows, n) for n in self.lengths for rows in self._row_counts(n)]
        for i, (rows, length) in enumerate(keys):
            if progress is not None:
                progress(i, len(keys), f"{rows} x {length} tokens")
            self._compiled[rows, length] = self._compile(rows, length)
        if progress is not None:
            progress(len(keys), len(keys), "ready")
        return time.perf_counter() - start

    def _program(self, rows: int, length: int) -> Any:
        if (rows, length) not in self._compiled:
            if self.options.warm_up:
                self.late_compilations += 1
                log.warning("compiled after warm-up: %d x %d tokens was not foreseen", rows, length)
            self._compiled[rows, length] = self._compile(rows, length)
        return self._compiled[rows, length]

    def _compile(self, rows: int, length: int) -> Any:
        batch = {n: jax.ShapeDtypeStruct((rows, length), jnp.int32) for n in self.model.inputs}
        run = jax.jit(self.model.outputs)
        return run.lower(self.model.params, self.model.buffers, batch).compile()

    def _bucket(self, num_tokens: int) -> int:
        return next(n for n in self.lengths if n >= num_tokens)

    def _row_counts(self, length: int) -> tuple[int, ...]:
        most = max(1, min(self.options.max_num_seqs, self.options.max_batched_tokens // length))
        counts = [ROW_STEP**i for i in range(16) if ROW_STEP**i < most]
        return (*counts, most)


def bucket_lengths(longest: int) -> tuple[int, ...]:
    """Powers of two from 32, and the longest text itself."""
    lengths = [SMALLEST_BUCKET << i for i in range(32) if SMALLEST_BUCKET << i < longest]
    return (*lengths, longest)


def _batch(
    model: PoolingModel, texts: Sequence[Encoded], rows: int, length: int
) -> dict[str, np.ndarray]:
    """int32 [B, S] arrays; rows that nobody asked for attend to one padding token."""
    pad = model.tokenizer.pad_token_id or 0
    ids_BS = np.full((rows, length), pad, np.int32)
    mask_BS = np.zeros((rows, length), np.int32)
    types_BS = np.zeros((rows, length), np.int32)
    mask_BS[len(texts) :, 0] = 1
    for i, text in enumerate(texts):
        ids_BS[i, : len(text.ids)] = text.ids
        mask_BS[i, : len(text.ids)] = 1
        if text.token_types is not None:
            types_BS[i, : len(text.ids)] = text.token_types
    arrays = {"input_ids": ids_BS, "attention_mask": mask_BS, "token_type_ids": types_BS}
    return {name: arrays[name] for name in model.inputs}


def _max_model_len(model: PoolingModel, options: PoolingOptions) -> int:
    wanted = model.max_tokens if options.max_model_len is None else options.max_model_len
    if wanted > model.max_tokens:
        raise ConfigError(f"max_model_len is {wanted}; {model.name} takes {model.max_tokens}")
    return wanted


def _open(name: str | Path, options: PoolingOptions) -> PoolingModel:
    options.use_compilation_cache()
    task: Any = options.task
    if task == "auto":
        trust = options.trust_remote_code
        task = serving_task(name, base=options.base, trust_remote_code=trust)
    if task == "generate":
        raise ConfigError(
            f"{name} writes text; serve it with Engine, or set task to embed for its hidden states"
        )
    return load_pooling_model(
        name,
        task=task,
        base=options.base,
        dtype=options.dtype,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )

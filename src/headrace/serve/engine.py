"""The engine: requests in, answers out, one thread that steps the device.

    with Engine("out/reminders") as engine:
        print(engine.generate(["Remind me to"], SamplingParams(temperature=0, max_tokens=20)))

A turn of the loop: plan a step, start it on the device, meanwhile turn the tokens of the step
before into text, then wait for the new tokens. Requests, cancellations and adapter changes arrive
through a queue, so no lock is held while the device works.

Knows: scheduler, programs, text. Does not know: HTTP.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import AdapterError, ConfigError, QueueFullError, ServeError
from headrace.serve import request
from headrace.serve.adapters import Adapters
from headrace.serve.answers import Answer, Collector
from headrace.serve.base import ThreadedEngine
from headrace.serve.options import EngineOptions, choose_shapes, open_model
from headrace.serve.pages import PagePool
from headrace.serve.params import SamplingParams
from headrace.serve.request import Delta, Sink
from headrace.serve.runner import Runner
from headrace.serve.stats import EngineStats
from headrace.serve.text import TextStream

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Handle:
    """A submitted request: the sequences that answer it."""

    id: str
    sequences: tuple[request.Sequence, ...]


class Engine(ThreadedEngine):
    """Serves one captured model to many requests at once.

    model: a model folder or hub id, an adapter folder (its base is served and the adapter loaded
    under the folder's name), a torch causal LM, or a `ServedModel`. adapters: name -> folder.
    Building it compiles every program; `progress(done, total, name)` is told. Use as a context
    manager or call `close()`.

    Raises CaptureError for models that cannot be served this way, ConfigError for settings that
    contradict each other, AdapterError for adapters that do not fit.
    """

    def __init__(
        self,
        model: Any,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        options: EngineOptions | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        super().__init__()
        options = options or EngineOptions()
        self.model, own = open_model(model, options, bool(adapters))
        wanted = {**own, **(adapters or {})}
        if wanted and options.max_loras < len(wanted):
            options = replace(options, max_loras=len(wanted))
        self.options = options
        self.shapes = choose_shapes(self.model, options)
        self.stats = EngineStats()
        self.adapters = Adapters(max_loras=options.max_loras)
        self._runner = Runner(self.model, self.shapes, options, self.stats, self.adapters)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._num_arriving = 0
        self._lock = threading.Lock()
        self.warm_up_seconds = 0.0
        if options.warm_up:
            self.warm_up_seconds = self._runner.programs.warm_up(progress)
        for name, folder in wanted.items():
            self._place_adapter(name, folder)
        self._start("headrace-engine", self._loop)

    # requests -----------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        adapter: str | None = None,
        request_id: str | None = None,
        loop: Any = None,
    ) -> Handle:
        """Queue a prompt; `sink` gets every `Delta` (from the engine's thread, or inside the
        asyncio `loop` when one is given).

        Raises ConfigError for a prompt that is empty, too long or out of the vocabulary,
        AdapterError for an unknown adapter, QueueFullError, and ServeError when the engine died.
        """
        limit = self._check_prompt(prompt_ids, params)
        self._check_alive(params.n)
        handle_id = request_id or f"req-{secrets.token_hex(12)}"
        held = self.adapters.hold(adapter, params.n)
        try:
            sequences = [
                self._sequence(f"{handle_id}-{i}", i, prompt_ids, params, sink, limit, loop)
                for i in range(params.n)
            ]
        except BaseException:
            self.adapters.drop(held, params.n)
            raise
        for sequence in sequences:
            sequence.held, sequence.lora_slot, sequence.root = held, held.slot, held.version
            sequence.leader = sequences[0] if sequence.index else None
        with self._lock:
            self._num_arriving += params.n
        self._inbox.put(sequences)
        return Handle(id=handle_id, sequences=tuple(sequences))

    def cancel(self, handle: Handle) -> None:
        """End a request wherever it stands; its pages are free before the next step."""
        self._inbox.put(handle)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[list[Answer]]:
        """Answers of all prompts (text or token ids), `params.n` each, in order. Blocks."""
        many = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        collectors: list[Collector] = []
        for prompt, each in zip(prompts, many, strict=True):
            each = each or SamplingParams()
            collector = Collector(each.n)
            self._submit_patiently(self.encode(prompt), each, collector, adapter)
            collectors.append(collector)
        return [collector.wait() for collector in collectors]

    def _submit_patiently(
        self, ids: Sequence[int], params: SamplingParams, collector: Collector, adapter: str | None
    ) -> None:
        while True:
            try:
                self.submit(ids, params, collector, adapter=adapter)
                return
            except QueueFullError:
                time.sleep(0.01)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> Iterator[Delta]:
        """The answer as it is written; leaving the loop early cancels it."""
        params = params or SamplingParams()
        news: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        handle = self.submit(self.encode(prompt), params, news.put, adapter=adapter)
        left = params.n
        try:
            while left:
                delta = news.get()
                left -= delta.finish_reason is not None
                yield delta
        finally:
            if left:
                self.cancel(handle)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, special tokens of the tokenizer included."""
        if not isinstance(prompt, str):
            return [int(t) for t in prompt]
        if self.model.tokenizer is None:
            raise ConfigError("this engine has no tokenizer; give token ids")
        return list(self.model.tokenizer(prompt)["input_ids"])

    # adapters -----------------------------------------------------------------------------------

    def load_adapter(self, name: str, folder: str | Path, *, replace: bool = False) -> None:
        """Load a PEFT LoRA folder into a slot while the engine runs; nothing is compiled.

        replace: take the place of an adapter of the same name; its cached pages are not reused.
        """
        self._call(lambda: self._place_adapter(name, folder, replace=replace))

    def unload_adapter(self, name: str) -> None:
        """Take an adapter out; requests that use it finish first, new ones are refused."""
        self._call(lambda: self.adapters.remove(name))

    def _place_adapter(self, name: str, folder: str | Path, *, replace: bool = False) -> None:
        from headrace.serve.lora import place_lora, read_lora

        if not self.shapes.max_loras:
            raise AdapterError("the engine was started without adapter slots; set max_loras")
        weights = read_lora(folder)
        programs = self._runner.programs

        def put(slot: int) -> None:
            programs.stacks = place_lora(
                programs.stacks, weights, self.model.targets, slot, name=name
            )

        self.adapters.add(name, put, replace=replace)

    # life ---------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.shapes.max_model_len

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, those not seen by the loop yet included."""
        return self._num_arriving + len(self._runner.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that are being computed."""
        return len(self._runner.scheduler.running)

    @property
    def cache_usage(self) -> float:
        """Share of the cache's pages that running sequences hold."""
        pool = self._runner.scheduler.pool
        return pool.num_used / max(1, pool.num_pages - 1)

    @property
    def page_pool(self) -> PagePool:
        """The cache's book-keeping, for reading."""
        return self._runner.scheduler.pool

    @property
    def late_compilations(self) -> int:
        """Programs that were compiled after warm-up; 0 when all shapes were foreseen."""
        return self._runner.programs.late_compilations

    def check_invariants(self) -> None:
        """Raise AssertionError when a page, a row or an adapter's use leaked."""
        self._call(self._runner.scheduler.check)

    def close(self) -> None:
        """Abort what runs and stop the thread."""
        if not self._closing:
            self._closing = True
            self._inbox.put(None)
            self._thread.join()

    def _call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread, between two steps."""
        if not self.alive:
            raise ServeError("the engine has stopped")
        future: Future[Any] = Future()
        self._inbox.put((function, future))
        return future.result()

    # the loop -----------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._receive():
                self._runner.turn()
        except BaseException as error:
            self.dead = error
            log.exception("the engine stopped")
        finally:
            why = "the engine stopped" if self.dead is not None else ""
            self._runner.abort_all("error" if self.dead is not None else "abort", why)
            self._refuse_rest()

    def _receive(self) -> bool:
        """Take what arrived; sleeps while there is nothing to do. False ends the loop."""
        while True:
            try:
                block = self._runner.idle
                item = self._inbox.get(timeout=IDLE_SECONDS) if block else self._inbox.get_nowait()
            except queue.Empty:
                if self._closing:
                    return False
                if self._runner.idle:
                    continue
                return True
            if item is None:
                return False
            if isinstance(item, Handle):
                self._runner.cancel(item.sequences)
            elif isinstance(item, tuple):
                _answer(*item)
            else:
                for sequence in item:
                    self._runner.add(sequence)
                with self._lock:
                    self._num_arriving -= len(item)

    def _refuse_rest(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, tuple):
                item[1].set_exception(ServeError("the engine has stopped"))
            elif isinstance(item, list):
                for sequence in item:
                    self._runner.refuse(sequence, "the engine has stopped")

    # checks -------------------------------------------------------------------------------------

    def _check_alive(self, num_new: int) -> None:
        if not self.alive:
            raise ServeError("the engine has stopped")
        if self.num_waiting + num_new > self.options.max_queue:
            raise QueueFullError(
                f"{self.num_waiting} requests wait already; the queue takes "
                f"{self.options.max_queue}. Try again later"
            )

    def _check_prompt(self, ids: Sequence[int], params: SamplingParams) -> int:
        """The most tokens the answer may have."""
        most = self.shapes.max_model_len
        if params.n > self.options.max_queue:
            raise ConfigError(f"n is {params.n}; the queue takes {self.options.max_queue} answers")
        if not ids:
            raise ConfigError("the prompt is empty; give at least one token")
        wanted = params.max_tokens or 1
        if len(ids) + wanted > most:
            raise ConfigError(
                f"the prompt has {len(ids):,} tokens and {wanted:,} are asked for; this model's "
                f"context is {most:,} tokens. Shorten the prompt or max_tokens"
            )
        if min(ids) < 0 or max(ids) >= self.model.vocab_size:
            raise ConfigError(
                f"token ids are from 0 to {self.model.vocab_size - 1}; the prompt has "
                f"{min(ids)} to {max(ids)}"
            )
        unknown = [t for t in params.logit_bias if not 0 <= t < self.model.vocab_size]
        if unknown:
            raise ConfigError(f"logit_bias names token {unknown[0]}, which does not exist")
        return params.max_tokens or most - len(ids)

    def _sequence(
        self,
        sequence_id: str,
        index: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        limit: int,
        loop: Any,
    ) -> request.Sequence:
        seed = secrets.randbits(63) if params.seed is None else params.seed + index
        stream = None
        if self.model.tokenizer is not None:
            stream = TextStream(
                self.model.tokenizer,
                prompt_ids,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        elif params.stop:
            raise ConfigError("stop strings need a tokenizer")
        return request.Sequence(
            id=sequence_id,
            tokens=list(prompt_ids),
            num_prompt=len(prompt_ids),
            params=params,
            seed=seed,
            sink=sink,
            max_tokens=limit,
            index=index,
            text=stream,
            matcher=self._runner.matcher(params),
            loop=loop,
        )


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)

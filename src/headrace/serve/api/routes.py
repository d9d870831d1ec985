"""Completions and chat: bodies in, answers or streams out.

A client that goes away, waiting or reading, ends its sequences at once. Knows: the engine's door,
the protocol. Does not know: keys, limits, life cycle (`app`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from headrace.errors import AdapterError, QueueFullError
from headrace.serve.answers import Answer
from headrace.serve.api import answer as shape
from headrace.serve.api.errors import ApiError, as_api_error
from headrace.serve.api.protocol import ChatRequest, CompletionRequest
from headrace.serve.api.service import Service, unless_left
from headrace.serve.api.text import AnswerSplitter, chat_prompt, opens_reasoning, tool_grammar
from headrace.serve.engine import Engine, Handle
from headrace.serve.params import SamplingParams
from headrace.serve.request import Delta

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE_SECONDS = 15.0


class Listener:
    """Deltas of one request, inside the event loop."""

    def __init__(self, service: Service[Engine]) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[Delta] = asyncio.Queue()
        self._handles: list[Handle] = []
        self._left = 0

    def submit(self, ids: list[int], params: SamplingParams, adapter: str | None) -> None:
        """Start answers to one prompt; their deltas are numbered after earlier prompts'."""
        first = self._left

        def sink(delta: Delta) -> None:
            self._news.put_nowait(replace(delta, index=delta.index + first))

        try:
            handle = self._service.engine.submit(
                ids, params, sink, adapter=adapter, loop=self._loop
            )
        except QueueFullError:
            self._service.metrics.rejections.inc()
            raise
        except AdapterError as error:
            raise ApiError(404, str(error), param="model") from error
        self._handles.append(handle)
        self._left += params.n

    async def deltas(self) -> AsyncIterator[Delta | None]:
        """News as they come, None when there was none for a while; cancels what is left."""
        left = self._left
        try:
            while left:
                try:
                    delta = await asyncio.wait_for(self._news.get(), KEEP_ALIVE_SECONDS)
                except TimeoutError:
                    yield None
                    continue
                left -= delta.finish_reason is not None
                yield delta
        finally:
            if left:
                self.cancel()

    def cancel(self) -> None:
        """End all answers."""
        for handle in self._handles:
            self._service.engine.cancel(handle)

    async def answers(self, request: Request) -> list[Answer]:
        """All answers, whole. Raises ApiError when one failed, 499 when the client left."""
        found = [Answer(index=i) for i in range(self._left)]

        async def collect() -> None:
            async for delta in self.deltas():
                if delta is not None:
                    found[delta.index].add(delta)

        await unless_left(request, collect())
        for each in found:
            _raise_failure(each.finish_reason, each.error)
        return found


def _raise_failure(reason: str | None, error: str) -> None:
    if reason == "error":
        raise ApiError(500, error or "the answer failed")
    if reason == "abort":
        raise ApiError(503, "the server is stopping; try again")


# completions ------------------------------------------------------------------------------------


async def completions(service: Service[Engine], request: Request) -> Response:
    """POST /v1/completions"""
    body: CompletionRequest = await service.body(request, CompletionRequest)
    body.check_stream()
    if body.suffix:
        raise ApiError(400, "suffix (filling in the middle) is not served", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of other than n is not served", param="best_of")
    adapter = service.adapter(body.model)
    only_echo = body.echo and body.max_tokens == 0
    limit = 16 if body.max_tokens is None else body.max_tokens
    params = body.sampling(
        service.engine.model.defaults,
        max_tokens=1 if only_echo else limit,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    tokenizer = service.engine.model.tokenizer
    prompts = [_prompt_ids(tokenizer, p, body) for p in body.prompts()]
    most = service.engine.options.max_queue
    if len(prompts) > most:
        raise ApiError(400, f"{len(prompts)} prompts; the queue takes {most}", param="prompt")
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": shape.now(),
        "model": body.model or service.default,
    }
    listener = Listener(service)
    try:
        for ids in prompts:
            listener.submit(ids, params, adapter)
    except BaseException:
        listener.cancel()
        raise
    writer = _CompletionWriter(service, body, prompts, params, head, only_echo=only_echo)
    if body.stream:
        return _stream(writer.chunks(listener))
    return JSONResponse(writer.whole(await listener.answers(request)))


def _prompt_ids(tokenizer: Any, prompt: str | list[int], body: CompletionRequest) -> list[int]:
    if not isinstance(prompt, str):
        ids = prompt
    elif tokenizer is None:
        raise ApiError(400, "this model has no tokenizer; send token ids", param="prompt")
    else:
        ids = tokenizer(prompt, add_special_tokens=body.add_special_tokens)["input_ids"]
    return _truncated(ids, body.truncate_prompt_tokens)


def _truncated(ids: list[int], most: int | None) -> list[int]:
    """The last `most` tokens, when the request allows that."""
    if most is None:
        return list(ids)
    if most < 1:
        raise ApiError(400, "truncate_prompt_tokens is at least 1", param="truncate_prompt_tokens")
    return list(ids[-most:])


class _CompletionWriter:
    """Deltas -> the JSON of /v1/completions."""

    def __init__(
        self,
        service: Service[Engine],
        body: CompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        head: dict[str, Any],
        *,
        only_echo: bool,
    ) -> None:
        self._tokenizer = service.engine.model.tokenizer
        self._body, self._prompts, self._n, self._head = body, prompts, params.n, head
        self._only_echo = only_echo

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [self._choice(a) for a in answers]
        written = sum(0 if self._only_echo else len(a.token_ids) for a in answers)
        prompts = sum(len(p) for p in self._prompts)
        cached = sum(a.num_cached for a in answers[:: self._n])
        return {**self._head, "choices": choices, "usage": shape.usage(prompts, written, cached)}

    def _choice(self, a: Answer) -> dict[str, Any]:
        ids, entries, text = list(a.token_ids), list(a.logprobs), a.text
        if self._only_echo:
            ids, entries, text = [], [], ""
        known: list[Any] = list(entries)
        if self._body.echo:
            prompt = self._prompts[a.index // self._n]
            ids, text = [*prompt, *ids], self._prompt_text(a.index) + text
            known = [*(a.prompt_logprobs or [None] * len(prompt)), *entries]
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = shape.completion_logprobs(self._tokenizer, known, ids=ids)
        choice: dict[str, Any] = {
            "index": a.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": a.finish_reason,
            "stop_reason": a.stop_reason,
        }
        if self._body.return_token_ids:
            choice |= {
                "token_ids": a.token_ids,
                "prompt_token_ids": self._prompts[a.index // self._n],
            }
        return choice

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // self._n]
        given = self._body.prompts()[index // self._n]
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        return self._tokenizer.decode(prompt) if self._tokenizer is not None else ""

    async def chunks(self, listener: Listener) -> AsyncIterator[str]:
        counts, cached = _Counts(), 0
        begun: set[int] = set()
        offsets: dict[int, int] = {}
        async for delta in listener.deltas():
            if delta is None:
                yield ": keep-alive\n\n"
                continue
            _raise_failure(delta.finish_reason, delta.error)
            text, entries, ids = delta.text, list(delta.logprobs), list(delta.token_ids)
            if self._only_echo:
                text, entries, ids = "", [], []
            known: list[Any] = list(entries)
            if self._body.echo and delta.index not in begun:
                prompt = self._prompts[delta.index // self._n]
                text, ids = self._prompt_text(delta.index) + text, [*prompt, *ids]
                known = [*(delta.prompt_logprobs or [None] * len(prompt)), *entries]
            if delta.index not in begun and delta.index % self._n == 0:
                cached += delta.num_cached
            begun.add(delta.index)
            counts.add(delta, written=0 if self._only_echo else len(delta.token_ids))
            if not (text or known or delta.finish_reason or self._body.return_token_ids):
                continue
            logprobs = None
            if self._body.logprobs is not None:
                start = offsets.get(delta.index, 0)
                logprobs = shape.completion_logprobs(self._tokenizer, known, ids=ids, offset=start)
                offsets[delta.index] = start + sum(len(t) for t in logprobs["tokens"])
            choice: dict[str, Any] = {
                "index": delta.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason if delta.finish_reason else None,
            }
            if self._body.return_token_ids:
                choice["token_ids"] = list(delta.token_ids)
            extra = _running_usage(self._body, counts, self._prompts, cached)
            yield shape.event({**self._head, "choices": [choice], **extra})
        if self._body.wants_usage:
            prompts = sum(len(p) for p in self._prompts)
            total = shape.usage(prompts, counts.written, cached)
            yield shape.event({**self._head, "choices": [], "usage": total})


class _Counts:
    """Tokens written over all answers of a stream."""

    def __init__(self) -> None:
        self.written = 0

    def add(self, delta: Delta, *, written: int | None = None) -> None:
        self.written += len(delta.token_ids) if written is None else written


def _running_usage(
    body: Any, counts: _Counts, prompts: list[list[int]], cached: int
) -> dict[str, Any]:
    """usage inside a chunk: null while include_usage waits for the end, as clients expect."""
    options = body.stream_options
    if options is None:
        return {}
    if options.continuous_usage_stats:
        return {"usage": shape.usage(sum(len(p) for p in prompts), counts.written, cached)}
    return {"usage": None} if options.include_usage else {}


# chat -------------------------------------------------------------------------------------------


async def chat(service: Service[Engine], request: Request) -> Response:
    """POST /v1/chat/completions"""
    body: ChatRequest = await service.body(request, ChatRequest)
    body.check_stream()
    adapter = service.adapter(body.model)
    grammar = tool_grammar(body)
    tokenizer = service.engine.model.tokenizer
    ids = _truncated(chat_prompt(tokenizer, body), body.truncate_prompt_tokens)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit is None and (default := service.engine.model.defaults.max_tokens) is not None:
        limit = min(default, max(1, service.engine.max_model_len - len(ids)))
    params = body.sampling(
        service.engine.model.defaults,
        max_tokens=limit,
        logprobs=body.wanted_logprobs(),
        grammar=grammar,
    )
    listener = Listener(service)
    listener.submit(ids, params, adapter)
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": shape.now(),
        "model": body.model or service.default,
    }
    tools = bool(body.tools) and body.tool_choice != "none"
    reasoning = opens_reasoning(tokenizer, ids)
    splitters = [
        AnswerSplitter(reasoning=reasoning, tools=tools, forced=grammar is not None)
        for _ in range(params.n)
    ]
    if body.stream:
        return _stream(_chat_chunks(service, body, listener, head, splitters, len(ids)))
    answers = await listener.answers(request)
    choices = [_chat_choice(tokenizer, body, a, s) for a, s in zip(answers, splitters, strict=True)]
    written = sum(len(a.token_ids) for a in answers)
    total = shape.usage(len(ids), written, answers[0].num_cached)
    return JSONResponse({**head, "choices": choices, "usage": total})


def _chat_choice(
    tokenizer: Any, body: ChatRequest, a: Answer, splitter: AnswerSplitter
) -> dict[str, Any]:
    reasoning, content = splitter.push(a.text, last=True)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    reason = a.finish_reason
    if splitter.calls:
        message |= {"content": content.strip() or None, "tool_calls": splitter.calls}
        reason = "tool_calls" if reason == "stop" else reason
    choice: dict[str, Any] = {
        "index": a.index,
        "message": message,
        "logprobs": shape.chat_logprobs(tokenizer, a.logprobs) if body.logprobs else None,
        "finish_reason": reason,
        "stop_reason": a.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = a.token_ids
    return choice


async def _chat_chunks(
    service: Service[Engine],
    body: ChatRequest,
    listener: Listener,
    head: dict[str, Any],
    splitters: list[AnswerSplitter],
    num_prompt: int,
) -> AsyncIterator[str]:
    tokenizer = service.engine.model.tokenizer
    counts, cached = _Counts(), 0
    begun: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        extra = _running_usage(body, counts, [[0] * num_prompt], cached)
        return shape.event({**head, "choices": [choice], **extra})

    async for news in listener.deltas():
        if news is None:
            yield ": keep-alive\n\n"
            continue
        _raise_failure(news.finish_reason, news.error)
        index, splitter = news.index, splitters[news.index]
        cached = news.num_cached if index == 0 else cached
        if index not in begun:
            begun.add(index)
            yield chunk(index, {"role": "assistant", "content": ""})
        counts.add(news)
        last = news.finish_reason is not None
        reasoning, content = splitter.push(news.text, last=last)
        logprobs = shape.chat_logprobs(tokenizer, news.logprobs) if body.logprobs else None
        ids = {"token_ids": list(news.token_ids)} if body.return_token_ids else {}
        if reasoning:
            delta = {"reasoning_content": reasoning, "reasoning": reasoning}
            yield chunk(index, delta, logprobs=logprobs, **ids)
            logprobs, ids = None, {}
        if content or logprobs is not None or (ids and not last):
            yield chunk(index, {"content": content}, logprobs=logprobs, **ids)
            ids = {}
        if last:
            reason = news.finish_reason
            if splitter.calls:
                calls = [{"index": i, **call} for i, call in enumerate(splitter.calls)]
                yield chunk(index, {"tool_calls": calls})
                reason = "tool_calls" if reason == "stop" else reason
            yield chunk(index, {}, finish_reason=reason, stop_reason=news.stop_reason, **ids)
    if body.wants_usage:
        total = shape.usage(num_prompt, counts.written, cached)
        yield shape.event({**head, "choices": [], "usage": total})


def _stream(chunks: AsyncIterator[str]) -> Response:
    """Server-sent events; an error after the beginning is an event too."""

    async def guarded() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            yield shape.event(as_api_error(error).body())
        yield shape.DONE

    return StreamingResponse(guarded(), media_type="text/event-stream", headers=STREAM_HEADERS)

"""The application: routes, keys, limits, readiness.

Knows: starlette. Does not know: sockets, signals (`server`), how answers are made.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import ConfigError
from headrace.serve.api import models, pooling, routes
from headrace.serve.api.errors import ApiError, as_api_error
from headrace.serve.api.metrics import Metrics
from headrace.serve.api.openapi import Endpoint, describe
from headrace.serve.api.protocol import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from headrace.serve.api.service import Service
from headrace.serve.engine import Engine
from headrace.serve.pooling import PoolingEngine

log = logging.getLogger(__name__)

AnyEngine = Engine | PoolingEngine
OPEN_PATHS = ("/health", "/ready", "/ping", "/")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the server listens.

    api_keys: any of them opens everything but /health, /ready and the page at /. served_model_name:
    the base's id. default_model: used when a request names none. max_body_bytes: larger bodies get
    413. head_seconds, body_seconds: how long a client may take to send a request's head, its body.
    drain_seconds: how long running answers may go on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = None
    default_model: str | None = None
    max_body_bytes: int = 4 * 1024 * 1024
    head_seconds: float = 15.0
    body_seconds: float = 30.0
    drain_seconds: float = 30.0

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class State:
    """What changes while the server runs."""

    def __init__(self) -> None:
        self.draining = False
        self.in_flight = 0


def build_app(engine: AnyEngine, options: ServerOptions | None = None) -> Starlette:
    """The ASGI application over a warm engine.

    Raises ConfigError when default_model is neither the base nor a loaded adapter.
    """
    options = options or ServerOptions()
    base = options.served_model_name or engine.model.name
    default = options.default_model or base
    if default not in (base, *engine.adapters.names):
        raise ConfigError(f"default_model {default!r} is neither the base nor a loaded adapter")
    state = State()
    service = Service(
        engine=engine,
        base_name=base,
        default=default,
        created=int(time.time()),
        metrics=Metrics(engine, base),
        adapter_api=bool(options.api_keys) or options.loopback,
        read_body=partial(_read_body, options),
    )
    app = Starlette(
        routes=_routes(service, state, keyed=bool(options.api_keys)),
        exception_handlers={Exception: _failed, HTTPException: _http_failed},
    )
    app.state.headrace = state
    app.state.service = service
    app.add_middleware(_Guard, options=options, state=state)
    return app


def _routes(service: Service[Any], state: State, *, keyed: bool) -> list[Route]:
    def route(endpoint: Endpoint) -> Route:
        async def run(request: Request) -> Response:
            try:
                return await endpoint.handler(service, request)
            except Exception as error:
                if not isinstance(error, ApiError):
                    _log_unexpected(error)
                return as_api_error(error).response()

        return Route(endpoint.path, run, methods=[endpoint.method])

    endpoints = [*_life(state), *_about_models(), *_answers(service.engine)]
    description = describe(endpoints, keyed=keyed)

    async def openapi(service: Service[Any], request: Request) -> Response:
        return JSONResponse(description)

    last = Endpoint(path="/openapi.json", handler=openapi, summary="This description.")
    return [route(endpoint) for endpoint in (*endpoints, last)]


def _life(state: State) -> list[Endpoint]:
    """Health, numbers and the page, which every server has."""

    async def health(service: Service[Any], request: Request) -> Response:
        return Response(status_code=200 if service.engine.alive else 503)

    async def ready(service: Service[Any], request: Request) -> Response:
        fine = service.engine.alive and not state.draining
        return Response(status_code=200 if fine else 503)

    async def show_version(service: Service[Any], request: Request) -> Response:
        return JSONResponse({"version": version("headrace")})

    async def load(service: Service[Any], request: Request) -> Response:
        return JSONResponse({"server_load": state.in_flight})

    async def metrics(service: Service[Any], request: Request) -> Response:
        text = await asyncio.to_thread(service.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(service: Service[Any], request: Request) -> Response:
        name = "playground.html" if isinstance(service.engine, Engine) else "pooling.html"
        folder = files("headrace.serve.api")
        return HTMLResponse("".join(folder.joinpath(n).read_text() for n in ("head.html", name)))

    return [
        Endpoint(path="/", handler=page, summary="The playground.", media="text/html"),
        Endpoint(path="/health", handler=health, summary="200 while the engine lives."),
        Endpoint(path="/ping", handler=health, summary="The same as /health."),
        Endpoint(path="/ready", handler=ready, summary="200 while requests are taken."),
        Endpoint(path="/version", handler=show_version, summary="The version."),
        Endpoint(path="/load", handler=load, summary="Requests in flight."),
        Endpoint(path="/metrics", handler=metrics, summary="Prometheus.", media="text/plain"),
    ]


def _about_models() -> list[Endpoint]:
    one = "/v1/models/{model_id:path}"
    return [
        Endpoint(path="/v1/models", handler=models.models, summary="What is served."),
        Endpoint(path=one, handler=models.models, summary="One model."),
        Endpoint(
            path="/tokenize",
            handler=models.tokenize,
            summary="Text or messages to token ids.",
            body=TokenizeRequest,
        ),
        Endpoint(
            path="/detokenize",
            handler=models.detokenize,
            summary="Token ids to text.",
            body=DetokenizeRequest,
        ),
    ]


def _answers(engine: AnyEngine) -> list[Endpoint]:
    """What this engine's model can be asked for."""
    if isinstance(engine, Engine):
        return _generation()
    if engine.model.task == "embed":
        path, handler, summary = "/v1/embeddings", pooling.embeddings, "Embeddings of texts."
        return [Endpoint(path=path, handler=handler, summary=summary, body=EmbeddingRequest)]
    summary = "Classes of texts."
    return [
        Endpoint(path=path, handler=pooling.classify, summary=summary, body=ClassifyRequest)
        for path in ("/v1/classify", "/classify")
    ]


def _generation() -> list[Endpoint]:
    return [
        Endpoint(
            path="/v1/completions",
            handler=routes.completions,
            summary="Continue a text.",
            body=CompletionRequest,
        ),
        Endpoint(
            path="/v1/chat/completions",
            handler=routes.chat,
            summary="Answer a conversation.",
            body=ChatRequest,
        ),
        Endpoint(
            path="/v1/load_lora_adapter",
            handler=models.load_adapter,
            summary="Load an adapter.",
            body=LoadAdapterRequest,
        ),
        Endpoint(
            path="/v1/unload_lora_adapter",
            handler=models.unload_adapter,
            summary="Take an adapter out.",
            body=UnloadAdapterRequest,
        ),
    ]


def _log_unexpected(error: Exception) -> None:
    if as_api_error(error).code == 500:
        log.error("a request failed", exc_info=error)


async def _failed(request: Request, error: Exception) -> Response:
    _log_unexpected(error)
    return as_api_error(error).response()


async def _http_failed(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not for this"}
    return ApiError(code, what.get(code, "the request is wrong")).response()


async def _read_body(options: ServerOptions, request: Request) -> bytes:
    """The whole body, within its limits of size and time."""
    too_large = ApiError(413, f"the body is larger than {options.max_body_bytes} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > options.max_body_bytes:
        raise too_large

    async def read() -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > options.max_body_bytes:
                raise too_large
            parts.append(part)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), options.body_seconds)
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time") from error


class _Guard:
    """Keys, draining, and the count of requests in flight, around every request."""

    def __init__(self, app: ASGIApp, *, options: ServerOptions, state: State) -> None:
        self._app, self._options, self._state = app, options, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(b"x-request-id")

        async def tagged(message: Message) -> None:
            if request_id is not None and message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message["headers"], (b"x-request-id", request_id)],
                }
            await send(message)

        self._state.in_flight += 1
        try:
            await self._app(scope, receive, tagged)
        finally:
            self._state.in_flight -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = scope["path"]
        if path in OPEN_PATHS:
            return None
        if self._state.draining:
            return ApiError(503, "the server is stopping; try again")
        keys = self._options.api_keys
        if not keys:
            return None
        given = dict(scope["headers"]).get(b"authorization", b"")
        token = given.removeprefix(b"Bearer ").strip()
        matches = [hmac.compare_digest(token, key.encode()) for key in keys]  # all, in equal time
        if any(matches):
            return None
        return ApiError(401, "an API key is needed: Authorization: Bearer ...")

"""What all endpoints share: the engine behind them, model ids, bodies, clients that leave.

Knows: the engine's names. Does not know: what an endpoint answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from headrace.serve.api.errors import ApiError
from headrace.serve.engine import Engine
from headrace.serve.pooling import PoolingEngine

E = TypeVar("E", bound=Engine | PoolingEngine)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Service(Generic[E]):
    """base_name: the base's model id; default: the model used when a request names none."""

    engine: E
    base_name: str
    default: str
    created: int
    metrics: Any
    adapter_api: bool
    read_body: Callable[[Request], Coroutine[Any, Any, bytes]]

    def adapter(self, model: str | None) -> str | None:
        """The adapter behind a model id, None for the base; 404 for an unknown id."""
        name = model or self.default
        if name == self.base_name:
            return None
        if name in self.engine.adapters.names:
            return name
        raise ApiError(404, f"the model {name!r} is not served here", param="model")

    async def body(self, request: Request, kind: Any) -> Any:
        """The request's JSON, checked."""
        media = request.headers.get("content-type", "application/json").split(";")[0].strip()
        if media.lower() != "application/json":
            raise ApiError(400, f"Unsupported Media Type: {media}; send application/json")
        raw = await self.read_body(request)
        return kind.model_validate_json(raw or b"{}")


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ApiError 499 when the client goes away."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client closed the connection")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _left(request: Request) -> None:
    """Returns when the client has gone."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return

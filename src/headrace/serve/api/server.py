"""The server around the application: its socket, slow clients, signals, an orderly end.

Knows: uvicorn, signals. Does not know: endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.serve.api.app import AnyEngine, ServerOptions, State, build_app

log = logging.getLogger(__name__)


def run_server(
    engine: AnyEngine, options: ServerOptions, *, on_start: Callable[[str], None]
) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the process's exit code.

    on_start gets the address once it listens. The first signal refuses new requests and lets
    running ones finish for drain_seconds, the second ends at once. When the engine dies, /health
    says so and the server ends with code 1.
    """
    server = build_server(engine, options, on_start=on_start)
    watcher = threading.Thread(target=_watch, args=(engine, server), daemon=True)
    watcher.start()
    server.run()
    failed = engine.dead is not None
    engine.close()
    return 1 if failed or not server.started else 0


def build_server(
    engine: AnyEngine, options: ServerOptions, *, on_start: Callable[[str], None] | None = None
) -> Server:
    """The server of an engine, not started: `run()` blocks."""
    app = build_app(engine, options)
    protocol: Any = partial(_Protocol, head_seconds=options.head_seconds)
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 * 1024,
        http=protocol,
        lifespan="off",
    )
    return Server(config, app.state.headrace, options.drain_seconds, on_start)


def _watch(engine: AnyEngine, server: Server) -> None:
    """End the server a moment after the engine died, so that clients see why."""
    while engine.alive:
        time.sleep(0.2)
    if engine.dead is not None:
        log.error("the engine died: %r", engine.dead)
        time.sleep(2.0)
        server.should_exit = server.force_exit = True


class Server(uvicorn.Server):
    """uvicorn with a drain of our own: the first signal waits for running answers."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: State,
        drain_seconds: float,
        on_start: Callable[[str], None] | None,
    ) -> None:
        super().__init__(config)
        self._state, self._drain, self._on_start = state, drain_seconds, on_start

    async def startup(self, sockets: Any = None) -> None:
        """Listen, then say where."""
        await super().startup(sockets=sockets)
        if self.started and self._on_start is not None:
            self._on_start(self.url)

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal: the first drains, the second ends."""
        if self._state.draining:
            self.should_exit = self.force_exit = True
            return
        self._state.draining = True
        sys.stderr.write("stopping: running answers may finish; once more to end now\n")
        threading.Thread(target=self._drain_then_exit, daemon=True).start()

    def _drain_then_exit(self) -> None:
        end = time.monotonic() + self._drain
        while self._state.in_flight and time.monotonic() < end:
            time.sleep(0.05)
        self.should_exit = True
        time.sleep(1.0)
        self.force_exit = True


class _Protocol(H11Protocol):
    """One connection; closed when a request's head does not arrive in head_seconds.

    uvicorn itself waits for the rest of a head for ever (its keep-alive limit ends with the first
    byte), so that a few slow clients could hold all sockets.
    """

    def __init__(self, *args: Any, head_seconds: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_seconds = head_seconds
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client connected."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It went away."""
        self._stop_expecting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a head, of a body, or of the next request's head."""
        super().data_received(data)
        if self._answering:
            self._stop_expecting()
        elif self._late is None:
            self._expect_head()

    @property
    def _answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(self._head_seconds, self._close_late)

    def _stop_expecting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close_late(self) -> None:
        self._late = None
        if not self._answering:
            self.transport.close()

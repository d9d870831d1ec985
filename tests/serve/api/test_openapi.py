"""The published description, and requests made from it by schemathesis: no answer is a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from test_server import _Running

from headrace.serve import Engine
from headrace.serve.api import ServerOptions
from headrace.serve.api.openapi import ErrorBody

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[_Running]:
    running = _Running(engine, ServerOptions())
    yield running
    running.stop()


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", PATHS)
def test_described_and_broken_requests_never_crash(
    server: _Running, engine: Engine, path: str, mode: GenerationMode
) -> None:
    description = httpx.get(server.url + "/openapi.json").json()
    operation: Any = schemathesis.openapi.from_dict(description)[path]["POST"]
    codes: set[int] = set()

    with requests.Session() as session:

        @seed(0)
        @settings(
            max_examples=12,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Case) -> None:
            answer = case.call(base_url=server.url, session=session, timeout=120)
            assert answer.status_code < 500 or answer.status_code == 503, answer.text
            if answer.status_code >= 400:
                ErrorBody.model_validate_json(answer.content)
            codes.add(answer.status_code)

        check()
    assert engine.alive
    assert codes


def test_every_route_is_described(server: _Running) -> None:
    description = httpx.get(server.url + "/openapi.json").json()
    assert {*PATHS, "/health", "/metrics", "/v1/models/{model_id}"} <= set(description["paths"])
    body = description["components"]["schemas"]["CompletionRequest"]
    assert body["required"] == ["prompt"]
    assert "temperature" in body["properties"]
    for path, operations in description["paths"].items():
        for method in operations:
            if "{" not in path:
                answer = httpx.request(method, server.url + path, json={})
                assert answer.status_code not in (404, 405), (method, path)

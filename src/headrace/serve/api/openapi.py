"""The OpenAPI description of a server, made from the endpoints it has and the bodies they check.

Knows: OpenAPI 3.1, pydantic's JSON schemas. Does not know: what an endpoint does.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from headrace.serve.api.service import Service

Handler = Callable[[Service[Any], Request], Awaitable[Response]]

_PART = re.compile(r"\{(\w+)(?::\w+)?\}")  # {name} or {name:path} in a route


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One route. body: what a POST must send. summary: a line for readers. media: of its answer."""

    path: str
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None
    media: str = "application/json"

    @property
    def method(self) -> str:
        """POST when there is a body to send."""
        return "GET" if self.body is None else "POST"


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="forbid")
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Every refusal, in OpenAI's shape."""

    model_config = ConfigDict(extra="forbid")
    error: ErrorDetail


def describe(endpoints: Sequence[Endpoint], *, keyed: bool) -> dict[str, Any]:
    """The description as JSON. keyed: whether the server wants an API key."""
    bodies = {e.body for e in endpoints if e.body is not None}
    ordered = sorted(bodies, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in (*ordered, ErrorBody)],
        ref_template="#/components/schemas/{model}",
    )
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version("headrace")},
        "paths": {_PART.sub(r"{\1}", e.path): {e.method.lower(): _operation(e)} for e in endpoints},
        "components": components,
    }
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The answer.", "content": {endpoint.media: {}}},
            "default": {"description": "Why there is none.", "content": error},
        },
    }
    names = _PART.findall(endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if endpoint.body is not None:
        reference = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        content = {"application/json": {"schema": reference}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation

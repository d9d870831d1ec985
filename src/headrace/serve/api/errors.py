"""Every refusal in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Messages carry no file paths and no tracebacks. Knows: HTTP codes. Does not know: the engine.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from headrace.errors import (
    AdapterError,
    AdapterSlotsError,
    CheckpointError,
    ConfigError,
    QueueFullError,
    ServeError,
)

KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
MAX_ITEMS = 10
MAX_CHARACTERS = 1000
RETRY_AFTER_SECONDS = 1


class ApiError(Exception):
    """A request that gets `code` and a message."""

    def __init__(self, code: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message[:MAX_CHARACTERS], param

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = KINDS.get(self.code, "APIError")
        inner = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": inner}

    def response(self) -> JSONResponse:
        """The answer; 503 says when to try again, 401 how to sign in."""
        headers: dict[str, str] = {}
        if self.code == 503:
            headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        if self.code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.code, headers=headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an error of the engine or of parsing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        items = error.errors(include_url=False, include_context=False, include_input=False)
        lines = [
            f"{'.'.join(str(x) for x in item['loc']) or 'body'}: {item['msg']}"
            for item in items[:MAX_ITEMS]
        ]
        param = str(items[0]["loc"][0]) if items and items[0]["loc"] else None
        return ApiError(400, "; ".join(lines), param=param)
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error))
    if isinstance(error, AdapterSlotsError):
        return ApiError(409, str(error))
    if isinstance(error, (ConfigError, AdapterError, CheckpointError)):
        return ApiError(400, str(error))
    if isinstance(error, ServeError):
        return ApiError(503, str(error))
    return ApiError(500, "the server failed to answer; its log has the reason")

"""Embeddings and classification: texts in, one vector or one class a text out.

Knows: the pooling engine's door, the protocol. Does not know: keys, limits, life cycle (`app`).

Shapes: B = texts of the request, O = numbers a text.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from concurrent.futures import Future
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import QueueFullError
from headrace.serve.api import answer as shape
from headrace.serve.api.errors import ApiError
from headrace.serve.api.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    TextPair,
)
from headrace.serve.api.service import Service, unless_left
from headrace.serve.pooling import PoolingEngine
from headrace.serve.pooling.model import Encoded, shorten


async def embeddings(service: Service[PoolingEngine], request: Request) -> Response:
    """POST /v1/embeddings"""
    body: EmbeddingRequest = await service.body(request, EmbeddingRequest)
    texts, found_BO = await _run(service, request, body, body.input)
    size = found_BO.shape[1]
    if body.dimensions is not None and body.dimensions > size:
        raise ApiError(400, f"this model's embeddings have {size} numbers", param="dimensions")

    def write() -> bytes:
        normalize = service.engine.model.recipe.normalize
        vectors_BO = shorten(found_BO, dimensions=body.dimensions, normalize=normalize)
        as_text = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": _base64(row) if as_text else row.tolist(),
            }
            for i, row in enumerate(vectors_BO)
        ]
        return _answer("embd", service, body, texts, data)

    return _json(await asyncio.to_thread(write))


async def classify(service: Service[PoolingEngine], request: Request) -> Response:
    """POST /v1/classify"""
    body: ClassifyRequest = await service.body(request, ClassifyRequest)
    texts, logits_BO = await _run(service, request, body, body.input)
    model = service.engine.model
    probs_BO = logits_BO if body.use_activation is False else model.probabilities(logits_BO)
    data = [
        {
            "index": i,
            "label": model.labels[int(row.argmax())],
            "probs": row.tolist(),
            "num_classes": len(row),
        }
        for i, row in enumerate(probs_BO)
    ]
    return _json(_answer("classify", service, body, texts, data))


async def _run(
    service: Service[PoolingEngine], request: Request, body: PoolingRequest, given: Any
) -> tuple[list[Encoded], np.ndarray]:
    """The texts as tokens, and what the model gave for them, float32 [B, O]."""
    service.adapter(body.model)
    texts = await asyncio.to_thread(_encode_all, service.engine, body, given)
    try:
        futures = service.engine.submit(texts)
    except QueueFullError:
        service.metrics.rejections.inc()
        raise
    return texts, np.stack(await unless_left(request, _all_of(futures)))


async def _all_of(futures: list[Future[np.ndarray]]) -> list[np.ndarray]:
    """All results; being cancelled takes what did not start out of the queue."""
    return await asyncio.gather(*(asyncio.wrap_future(f) for f in futures))


def _encode_all(engine: PoolingEngine, body: PoolingRequest, given: Any) -> list[Encoded]:
    alone = not isinstance(given, list) or isinstance(given[0], int)
    most = body.truncate_prompt_tokens
    if most is not None:
        most = engine.max_model_len if most == -1 else min(most, engine.max_model_len)
        if most < 1:
            raise ApiError(
                400, "truncate_prompt_tokens is -1 or at least 1", param="truncate_prompt_tokens"
            )
    return [_encode(engine, body, each, most) for each in ([given] if alone else given)]


def _encode(engine: PoolingEngine, body: PoolingRequest, given: Any, most: int | None) -> Encoded:
    if isinstance(given, list):
        return Encoded(ids=tuple(given[:most]))
    text, pair = (given.text, given.text_pair) if isinstance(given, TextPair) else (given, None)
    return engine.model.encode(text, pair, add_special_tokens=body.add_special_tokens, most=most)


def _base64(row_O: np.ndarray) -> str:
    """float32, little endian: what the openai client asks for and reads."""
    return base64.b64encode(np.ascontiguousarray(row_O, "<f4").tobytes()).decode()


def _answer(
    kind: str,
    service: Service[PoolingEngine],
    body: PoolingRequest,
    texts: list[Encoded],
    data: list[dict[str, Any]],
) -> bytes:
    answer = {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "object": "list",
        "created": shape.now(),
        "model": body.model or service.default,
        "data": data,
        "usage": shape.usage(sum(len(t.ids) for t in texts), 0, 0),
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")

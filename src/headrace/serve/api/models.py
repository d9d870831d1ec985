"""The endpoints about what is served: models, tokens there and back, adapters in and out.

Knows: the doors that all engines have. Does not know: how answers are made.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from headrace.serve.api import answer as shape
from headrace.serve.api.errors import ApiError
from headrace.serve.api.protocol import (
    ChatRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from headrace.serve.api.service import Service
from headrace.serve.api.text import chat_prompt
from headrace.serve.engine import Engine
from headrace.serve.pooling import PoolingEngine


async def models(service: Service[Any], request: Request) -> Response:
    """GET /v1/models and /v1/models/{id}"""
    engine = service.engine
    task = engine.model.task if isinstance(engine, PoolingEngine) else "generate"
    tokenizer = engine.model.tokenizer
    names = [service.base_name, *engine.adapters.names]
    names.sort(key=lambda name: name != service.default)
    cards = [
        shape.model_card(
            name,
            service.created,
            parent=None if name == service.base_name else service.base_name,
            root=service.base_name,
            max_model_len=engine.max_model_len,
            task=task,
            chat=task == "generate" and bool(getattr(tokenizer, "chat_template", None)),
        )
        for name in names
    ]
    wanted = request.path_params.get("model_id")
    if wanted is None:
        return JSONResponse({"object": "list", "data": cards})
    for card in cards:
        if card["id"] == wanted:
            return JSONResponse(card)
    raise ApiError(404, f"the model {wanted!r} is not served here", param="model")


async def tokenize(service: Service[Any], request: Request) -> Response:
    """POST /tokenize"""
    body: TokenizeRequest = await service.body(request, TokenizeRequest)
    tokenizer = service.engine.model.tokenizer
    service.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them")
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    if body.prompt is not None:
        ids = tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"]
    else:
        conversation = ChatRequest(
            messages=body.messages or [], add_generation_prompt=body.add_generation_prompt
        )
        ids = chat_prompt(tokenizer, conversation)
    longest = service.engine.max_model_len
    return JSONResponse({"count": len(ids), "max_model_len": longest, "tokens": list(ids)})


async def detokenize(service: Service[Any], request: Request) -> Response:
    """POST /detokenize"""
    body: DetokenizeRequest = await service.body(request, DetokenizeRequest)
    tokenizer, size = service.engine.model.tokenizer, service.engine.model.vocab_size
    service.adapter(body.model)
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    if any(not 0 <= t < size for t in body.tokens):
        raise ApiError(400, f"token ids are from 0 to {size - 1}", param="tokens")
    return JSONResponse({"prompt": tokenizer.decode(body.tokens)})


async def load_adapter(service: Service[Engine], request: Request) -> Response:
    """POST /v1/load_lora_adapter"""
    _adapter_api(service)
    body: LoadAdapterRequest = await service.body(request, LoadAdapterRequest)
    if body.lora_name == service.base_name:
        raise ApiError(400, "an adapter cannot have the base's name", param="lora_name")
    if not (Path(body.lora_path) / "adapter_config.json").is_file():
        raise ApiError(404, f"no adapter was found for {body.lora_name!r}", param="lora_path")
    await asyncio.to_thread(
        service.engine.load_adapter, body.lora_name, body.lora_path, replace=body.load_inplace
    )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(service: Service[Engine], request: Request) -> Response:
    """POST /v1/unload_lora_adapter"""
    _adapter_api(service)
    body: UnloadAdapterRequest = await service.body(request, UnloadAdapterRequest)
    if body.lora_name not in service.engine.adapters.names:
        raise ApiError(404, f"no adapter named {body.lora_name!r} is loaded", param="lora_name")
    await asyncio.to_thread(service.engine.unload_adapter, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _adapter_api(service: Service[Engine]) -> None:
    if not service.adapter_api:
        raise ApiError(403, "adapters are managed with an API key or from this machine only")

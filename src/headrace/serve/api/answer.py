"""Answers, chunks and lists as the JSON that OpenAI clients read.

Knows: field names. Does not know: the engine's insides, HTTP.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from headrace.serve.request import TokenLogprob

DONE = "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def now() -> int:
    """Seconds since the epoch, as `created` wants it."""
    return int(time.time())


def usage(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def model_card(
    name: str,
    created: int,
    *,
    parent: str | None,
    root: str,
    max_model_len: int,
    task: str,
    chat: bool,
) -> dict[str, Any]:
    """One entry of /v1/models; adapters have their base as parent. chat: a template is there."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "task": task,
        "chat": chat,
        "permission": [],
    }


def piece(tokenizer: Any, token_id: int) -> str:
    """The text of one token alone."""
    return "" if tokenizer is None else tokenizer.decode([token_id])


def chat_logprobs(tokenizer: Any, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """choices[].logprobs of a chat."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = piece(tokenizer, token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {
            **entry(e.token_id, e.logprob),
            "top_logprobs": [entry(token, value) for token, value in e.top],
        }
        for e in entries
    ]
    return {"content": content}


def completion_logprobs(
    tokenizer: Any, entries: Sequence[TokenLogprob | None], *, ids: Sequence[int], offset: int = 0
) -> dict[str, Any]:
    """choices[].logprobs of a completion; an entry is None for the first token of an echo."""
    texts = [piece(tokenizer, token) for token in ids]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops: list[dict[str, float] | None] = []
    for e in entries:
        if e is None:
            tops.append(None)
            continue
        found = {piece(tokenizer, token): value for token, value in reversed(e.top)}
        tops.append({**found, piece(tokenizer, e.token_id): e.logprob} if e.top else {})
    return {
        "text_offset": offsets,
        "token_logprobs": [None if e is None else e.logprob for e in entries],
        "tokens": texts,
        "top_logprobs": tops,
    }

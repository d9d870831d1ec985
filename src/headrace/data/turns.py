"""Turns of a conversation, OpenAI's or ShareGPT's way -> messages that chat templates take.

Roles are renamed, function_call turns become tool_calls, text parts are joined; what a template
could not show (images) is refused. Knows one row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.data.normal import RowProblem
from headrace.data.table import Row

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
    "function_call": "function_call",
}


def read_turns(row: Row, column: str) -> tuple[tuple[Mapping[str, Any], ...], tuple[bool, ...]]:
    value = row.get(column)
    if not isinstance(value, list) or not value:
        raise RowProblem(column, value, "needs a list of turns that is not empty")
    turns = tuple(_turn(turn, f"{column}[{i}]") for i, turn in enumerate(value))
    return turns, tuple(_may_train(turn) for turn in value)


def _may_train(turn: Mapping[str, Any]) -> bool:
    """Per-turn control as axolotl (train) and OpenAI (weight) write it."""
    train = turn.get("train")
    return (train is None or bool(train)) and turn.get("weight") != 0


def _turn(turn: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowProblem(at, turn, "needs an object with role and content")
    who, what = ("from", "value") if "from" in turn else ("role", "content")
    role = _ROLES.get(turn.get(who) or "", turn.get(who))
    if not isinstance(role, str):
        raise RowProblem(f"{at}.{who}", role, "needs user, assistant, system or tool")
    content = turn.get(what)
    if role == "function_call":
        return _function_call(content, f"{at}.{what}")
    rest = {
        k: v for k, v in turn.items() if k not in (who, what, "train", "weight") and v is not None
    }
    if content is None and not turn.get("tool_calls"):
        raise RowProblem(f"{at}.{what}", content, "needs text")
    if content is not None and not isinstance(content, str):
        content = _parts_text(content, f"{at}.{what}")
    return {"role": role, "content": "" if content is None else content, **rest}


def _parts_text(content: Any, at: str) -> str:
    """OpenAI's content parts as one text; images and sound are not trained on."""
    parts: list[Any] = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise RowProblem(at, content, 'needs text, or parts of the form {"type": "text", ...}')
    return "".join(part["text"] for part in parts)


def _function_call(content: Any, at: str) -> Mapping[str, Any]:
    """ShareGPT's function_call turn -> an assistant turn with tool_calls."""
    try:
        calls = json.loads(content) if isinstance(content, str) else content
    except json.JSONDecodeError as error:
        raise RowProblem(at, content, f"needs JSON with name and arguments ({error.msg})") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise RowProblem(at, content, "needs JSON with name and arguments")
    tool_calls = [{"type": "function", "function": dict(call)} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def read_tools(row: Row) -> tuple[Any, ...] | None:
    """Tools as objects or a JSON string, bare or wrapped as OpenAI's function objects."""
    tools = row.get("tools")
    if not tools:
        return None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
    except json.JSONDecodeError as error:
        raise RowProblem("tools", row["tools"], f"needs a JSON list ({error.msg})") from None
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise RowProblem("tools", row["tools"], "needs a list of objects")
    wrapped = (t if "function" in t else {"type": "function", "function": t} for t in tools)
    return tuple(wrapped) or None

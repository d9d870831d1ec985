"""Chat messages -> prompt ids; answers -> content, reasoning and tool calls.

Knows: chat templates, the marks that models put around reasoning and tool calls. Does not know:
HTTP, the engine.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from headrace.serve.api.errors import ApiError
from headrace.serve.api.protocol import ChatRequest
from headrace.serve.params import Grammar

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


def chat_prompt(tokenizer: Any, body: ChatRequest) -> list[int]:
    """Token ids of a conversation through the model's own chat template."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions, or serve a folder whose "
            "tokenizer has one",
            param="messages",
        )
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.tools and body.tool_choice != "none":
        options["tools"] = [t.model_dump(exclude_none=True) for t in body.tools]
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    try:
        found = tokenizer.apply_chat_template(
            [_plain(m) for m in body.messages],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            tokenize=True,
            return_dict=True,
            **options,
        )
    except ApiError:
        raise
    except Exception as error:  # a template raises what it likes about the messages
        message = f"the chat template refused the messages: {' '.join(str(error).split())[:300]}"
        raise ApiError(400, message, param="messages") from error
    return list(found["input_ids"])


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts joined; other parts refused."""
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise ApiError(400, "content is a string or a list of parts", param="messages")
        return message
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ApiError(400, f"a message part of type {kind} is not served", param="messages")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def tool_grammar(body: ChatRequest) -> Grammar | None:
    """The JSON that the answer must be when a tool call is required; checks tool_choice."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    tools = {t.function.name: t.function for t in body.tools or []}
    if not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if choice != "required":
        name = _chosen_name(choice)
        if name not in tools:
            raise ApiError(
                400, f"tool_choice names {name!r}, not one of tools", param="tool_choice"
            )
        tools = {name: tools[name]}
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, function in tools.items()
    ]
    return Grammar(kind="json_schema", source=json.dumps({"anyOf": schemas}))


def _chosen_name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError(
            400, "tool_choice is none, auto, required or a function's name", param="tool_choice"
        )
    return name


def opens_reasoning(tokenizer: Any, prompt_ids: list[int]) -> bool:
    """Whether the prompt ends inside a reasoning block."""
    if THINK not in str(getattr(tokenizer, "chat_template", "")):
        return False
    end = tokenizer.decode(prompt_ids[-16:])
    return end.rfind(THINK) > end.rfind(END_THINK)


class AnswerSplitter:
    """Splits a growing answer into reasoning, content and tool calls.

    tools: look for <tool_call> blocks; forced: the whole answer is one call (tool_choice).
    """

    def __init__(self, *, reasoning: bool, tools: bool, forced: bool) -> None:
        self._state = "reasoning" if reasoning else "content"
        self._may_think = not forced
        self._tools, self._forced = tools and not forced, forced
        self._buffer = ""
        self._seen = False
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """(reasoning, content) that became certain; calls are in `calls` at the end."""
        self._buffer += text
        if self._forced:
            if last:
                self._add_call(self._buffer)
            return "", ""
        reasoning: list[str] = []
        content: list[str] = []
        while True:
            target = reasoning if self._state == "reasoning" else content
            mark, following = self._next_mark()
            at = self._buffer.find(mark) if mark else -1
            if self._state == "call":
                if at < 0:
                    if last and not self._add_call(self._buffer):
                        content.append(CALL + self._buffer)
                    if last:
                        self._buffer = ""
                    break
                if not self._add_call(self._buffer[:at]):
                    content.append(CALL + self._buffer[:at] + END_CALL)
            elif at < 0:
                keep = 0 if last else _overlap(self._buffer, self._marks())
                target.append(self._buffer[: len(self._buffer) - keep])
                self._buffer = self._buffer[len(self._buffer) - keep :]
                break
            else:
                target.append(self._buffer[:at])
            self._buffer = self._buffer[at + len(mark) :]
            if mark in (END_THINK, END_CALL):
                self._buffer = self._buffer.lstrip("\n")
            self._state = following
        self._seen = self._seen or bool("".join(content).strip())
        return "".join(reasoning), "".join(content)

    def _marks(self) -> list[str]:
        if self._state == "reasoning":
            return [END_THINK]
        return [THINK] * (self._may_think and not self._seen) + [CALL] * self._tools

    def _next_mark(self) -> tuple[str, str]:
        """The first mark in the buffer and the state after it."""
        if self._state == "call":
            return END_CALL, "content"
        found = [(at, m) for m in self._marks() if (at := self._buffer.find(m)) >= 0]
        if not found:
            return "", self._state
        mark = min(found)[1]
        return mark, {THINK: "reasoning", END_THINK: "content", CALL: "call"}[mark]

    def _add_call(self, text: str) -> bool:
        try:
            call = json.loads(re.sub(r"^\s*|\s*$", "", text))
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, KeyError, TypeError):
            return False
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": str(name), "arguments": arguments}
        self.calls.append(
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        )
        return True


def _overlap(text: str, marks: list[str]) -> int:
    """Length of the longest end of `text` that begins one of the marks."""
    longest = max((len(m) for m in marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(m.startswith(text[-size:]) for m in marks):
            return size
    return 0

"""Growing text: whole characters, stop strings, reasoning and tool calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headrace.serve.api.text import AnswerSplitter
from headrace.serve.text import TextStream


@pytest.mark.parametrize("text", ["Naïve café — 東京 🙂🚀 done", "  two  spaces\n\tand tabs"])
def test_pieces_are_whole_characters_and_join_to_the_text(tokenizer: Any, text: str) -> None:
    prompt, ids = tokenizer("Say:")["input_ids"], tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push([i]) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


def test_a_stop_string_is_found_wherever_it_is_cut(tokenizer: Any) -> None:
    text = "one two STOP three"
    ids = tokenizer(text)["input_ids"]
    for stops, want in [(["STOP"], "one two "), (["two S", "STOP"], "one "), (["absent"], text)]:
        stream = TextStream(tokenizer, [], stop=stops)
        got = "".join(stream.push([i]) for i in ids) + stream.flush()
        assert got == want
        assert (stream.stopped is not None) == (want != text)


def test_a_broken_character_at_the_end_is_given_out_at_last(tokenizer: Any) -> None:
    ids = tokenizer("ok 🙂")["input_ids"][:-1]
    stream = TextStream(tokenizer, [])
    assert "".join(stream.push([i]) for i in ids).startswith("ok")
    assert "\ufffd" in stream.flush()


def _split(text: str, rng: random.Random, **options: Any) -> tuple[str, str, list[Any]]:
    splitter = AnswerSplitter(**{"reasoning": False, "tools": True, "forced": False, **options})
    reasoning = content = ""
    while text:
        size = rng.randrange(1, 6)
        piece, text = text[:size], text[size:]
        more_reasoning, more_content = splitter.push(piece, last=not text)
        reasoning, content = reasoning + more_reasoning, content + more_content
    return reasoning, content, splitter.calls


@pytest.mark.parametrize("seed", range(8))
def test_reasoning_and_calls_are_split_however_the_text_arrives(seed: int) -> None:
    rng = random.Random(seed)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'
    reasoning, content, calls = _split(f"<think>so 1<2</think>\nFirst. {call}", rng)
    assert (reasoning, content.strip()) == ("so 1<2", "First.")
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"a": "<b>"}]
    assert _split("inside</think>out", rng, reasoning=True)[:2] == ("inside", "out")
    broken = "x <tool_call>not json</tool_call> y"
    assert _split(broken, rng)[1] == "x <tool_call>not json</tool_call> y"
    assert _split("a < b and <tool", rng)[1] == "a < b and <tool"
    text = '{"name": "g", "arguments": {}}'
    assert _split(text, rng, forced=True)[2][0]["function"]["name"] == "g"

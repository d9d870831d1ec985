"""What `headrace chat` does with typed lines, on a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.cli.chat import _read_lines, _Talk
from headrace.serve import Engine, SamplingParams


def talk(engine: Engine, monkeypatch: pytest.MonkeyPatch, *lines: str) -> _Talk:
    typed = iter(lines)

    def read(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    found = _Talk(engine=engine, params=params, adapter=None, start=[])
    _read_lines(found)
    return found


def test_a_conversation_goes_on_until_the_context_is_full(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = talk(engine, monkeypatch, "", "/help", "/nope", "/use nobody", "call Tom", "and then?")
    out = capsys.readouterr().out
    for words in ("/retry", "/nope is no command", "nobody is none of: base", "/clear starts over"):
        assert words in out
    assert [m["role"] for m in found.messages] == ["user", "assistant"]
    ids = engine.encode("user: call Tom\nassistant: ")
    wanted = engine.generate([ids], SamplingParams(
        temperature=0, max_tokens=engine.max_model_len - len(ids), ignore_eos=True
    ))[0][0].text  # fmt: skip
    assert found.messages[1]["content"] == wanted
    assert wanted in out


def test_an_interrupted_answer_stays_and_can_be_made_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stream = engine.stream, engine.stream

    def interrupted(*args: Any, **options: Any) -> Iterator[Any]:
        for i, delta in enumerate(stream(*args, **options)):
            if i == 3:
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(engine, "stream", interrupted)
    found = talk(engine, monkeypatch, "call Tom", "/quit", "never read")
    part = found.messages[1]["content"]
    assert "[stopped]" in capsys.readouterr().out
    monkeypatch.setattr(engine, "stream", whole)
    found.retry()
    assert len(found.messages) == 2
    assert found.messages[1]["content"].startswith(part)
    assert len(found.messages[1]["content"]) > len(part)
    found.clear()
    found.retry()
    assert "nothing to answer again" in capsys.readouterr().out

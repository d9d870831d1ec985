"""Formats found by looking, and bad rows reported with row, column, value and a good example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from data_samples import turns

from headrace.data.formats import detect_causal, detect_labelled
from headrace.data.normal import Chat, Labelled, PromptCompletion, RowProblem, Text, Tokens
from headrace.data.prepare import normalise_rows
from headrace.data.read import from_python
from headrace.errors import DataError


def first(row: dict[str, Any], **options: Any) -> tuple[str, Any]:
    table = from_python([row])
    form = detect_causal(table, **options)
    return form.kind, normalise_rows(table, form)[0]


def test_openai_messages_with_tools_as_text_or_objects() -> None:
    tool = {"name": "search", "parameters": {}}
    for tools in ([tool], '[{"name": "search", "parameters": {}}]'):
        kind, chat = first({"messages": turns("hi", "hello"), "tools": tools})
        assert kind == "messages"
        assert chat.tools == ({"type": "function", "function": tool},)
        assert chat.train == (True, True)


def test_sharegpt_roles_and_function_calls() -> None:
    conversation = [
        {"from": "human", "value": "find soup"},
        {"from": "function_call", "value": '{"name": "search", "arguments": {"q": "soup"}}'},
        {"from": "observation", "value": "[]"},
        {"from": "gpt", "value": "none"},
    ]
    kind, chat = first({"conversations": conversation, "system": "be brief"})
    assert kind == "sharegpt"
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    call = chat.messages[2]["tool_calls"][0]["function"]
    assert call == {"name": "search", "arguments": {"q": "soup"}}


def test_per_turn_control() -> None:
    messages = turns("a", "b", "c", "d")
    messages[1]["train"] = False  # type: ignore[assignment]
    messages[3]["weight"] = 0  # type: ignore[assignment]
    _, chat = first({"messages": messages})
    assert chat.train == (True, False, True, False)
    assert all("train" not in m and "weight" not in m for m in chat.messages)


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    _, chat = first({"messages": [{"role": "user", "content": parts}, *turns("", "c")[1:]]})
    assert chat.messages[0]["content"] == "ab"


def test_alpaca() -> None:
    kind, pair = first({"instruction": "Add.", "input": "1 2", "output": "3", "system": "math"})
    assert kind == "alpaca"
    assert pair.prompt == "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    assert (pair.user, pair.completion, pair.system) == ("Add.\n\n1 2", "3", "math")
    _, bare = first({"instruction": "Add.", "input": "", "output": "3"})
    _, more = first({"instruction": "c", "output": "d", "history": [["a", "b"]]})
    assert more.history == (("a", "b"),)
    assert (bare.prompt, bare.user) == ("### Instruction:\nAdd.\n\n### Response:\n", "Add.")


def test_prompt_completion_stands_as_written_and_questions_get_a_newline() -> None:
    kind, pair = first({"prompt": "2+2=", "completion": "4"})
    assert (kind, pair.prompt, pair.completion) == ("prompt-completion", "2+2=", "4")
    kind, pair = first({"question": "2+2?", "answer": "4"})
    assert (kind, pair.prompt, pair.user) == ("prompt-completion", "2+2?\n", "2+2?")
    assert isinstance(pair, PromptCompletion)


def test_prompt_completion_of_messages_trains_the_completion_only() -> None:
    _, chat = first({"prompt": turns("a", "b", "c"), "completion": turns("", "d")[1:]})
    assert isinstance(chat, Chat)
    assert chat.train == (False, False, False, True)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"text": "t"}, {}),
        ({"content": "t"}, {}),
        ({"odd": "t"}, {}),
        ({"text": "no", "other": "t"}, {"text_column": "other"}),
    ],
)
def test_text(row: dict[str, str], options: dict[str, str]) -> None:
    assert first(row, **options) == ("text", Text(text="t"))


def test_tokens() -> None:
    assert first({"input_ids": [1, 2]})[1] == Tokens(input_ids=(1, 2), labels=None)
    assert first({"input_ids": np.array([1, 2]), "labels": [-100, 2]})[1].labels == (-100, 2)


def test_what_cannot_be_trained_on_says_what_is_there_and_what_is_needed() -> None:
    with pytest.raises(DataError, match="has columns foo, bar, which") as error:
        detect_causal(from_python([{"foo": "a", "bar": "b"}]))
    assert "prompt + completion" in str(error.value)
    with pytest.raises(DataError, match="preference pairs"):
        detect_causal(from_python([{"prompt": "a", "chosen": "b", "rejected": "c"}]))
    with pytest.raises(DataError, match="no column 'body'; there are text"):
        detect_causal(from_python([{"text": "a"}]), text_column="body")


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": turns("a", "b"), "tools": "[not json"}, "tools"),
        ({"prompt": "a", "completion": None}, "completion"),
        ({"prompt": "a", "completion": 3}, "completion"),
        ({"instruction": "a", "output": " "}, "output"),
        ({"text": 5}, "text"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, -2]}, "input_ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels[0]"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "history"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "messages[0].content",
        ),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "conversations[0].value"),
    ],
)
def test_bad_rows_name_the_column(row: dict[str, Any], column: str) -> None:
    table = from_python([row])
    with pytest.raises(RowProblem) as problem:
        detect_causal(table).normalise(row)
    assert problem.value.column == column


def test_all_bad_rows_come_in_one_error_with_a_good_example() -> None:
    rows = [{"prompt": "a", "completion": "b"}] + [{"prompt": "a", "completion": None}] * 7
    table = from_python(rows)
    with pytest.raises(DataError) as error:
        normalise_rows(table, detect_causal(table))
    message = str(error.value)
    assert message.startswith("7 of 8 rows cannot be used.")
    assert "train_dataset, row 2, column completion: None; needs text" in message
    assert "and 2 more" in message
    assert message.splitlines()[-1].startswith('A good row: {"prompt": ')


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"text": "t", "label": 1}, ("text", "label")),
        ({"text": "t", "category": "x"}, ("text", "category")),
        ({"premise": "p", "hypothesis": "h", "label": 1}, ("premise", "hypothesis", "label")),
        ({"idx": 3, "sentence": "t", "label": 1}, ("sentence", "label")),
    ],
)
def test_labelled_columns(row: dict[str, Any], columns: tuple[str, ...]) -> None:
    form = detect_labelled(from_python([row]))
    assert form.columns == columns
    assert isinstance(form.normalise(row), Labelled)


def test_labelled_columns_by_name_and_missing_ones() -> None:
    table = from_python([{"a": "t", "b": "x"}])
    assert detect_labelled(table, text_column="a", label_column="b").columns == ("a", "b")
    with pytest.raises(DataError, match=r"columns a, b.*Set text_column and label_column"):
        detect_labelled(table)
    with pytest.raises(DataError, match="no column 'c'; there are a, b"):
        detect_labelled(table, label_column="c")
    with pytest.raises(RowProblem, match="needs a label"):
        detect_labelled(table, text_column="a", label_column="b").normalise({"a": "t", "b": None})

"""What the columns mean: found by looking, told in one line, normalised row by row.

For causal training a row becomes a Chat, a PromptCompletion, a Text or Tokens; for classification a
Labelled. The wild forms (ShareGPT, Alpaca, question/answer, ...) end here. Knows nothing of
tokenizers or templates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headrace.data.normal import (
    Chat,
    Example,
    Labelled,
    PromptCompletion,
    RowProblem,
    Text,
    Tokens,
)
from headrace.data.table import Row, Table
from headrace.data.turns import read_tools, read_turns
from headrace.errors import DataError

Kind = Literal[
    "messages",
    "sharegpt",
    "alpaca",
    "prompt-completion",
    "text",
    "tokens",
    "labelled",
    "tagged",
    "preference",
    "unpaired preference",
]

# user column, answer column; prompt/completion are joined as they stand, the others with a newline
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("input", "output"),
)
_TEXTS = ("text", "sentence", "content", "review", "utterance", "question", "query", "document")
_TEXT_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text", "text_pair"),
    ("text1", "text2"),
    ("question", "sentence"),
)
_LABELS = ("label", "labels", "category", "intent", "class", "target", "score", "stars", "rating")


@dataclass(frozen=True, kw_only=True)
class Format:
    """A detected format: how to normalise a row, how to say it, and what a good row looks like."""

    kind: Kind
    columns: tuple[str, ...]
    normalise: Callable[[Row], Example]
    good_row: Row

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(self.columns)})"


def detect_causal(table: Table, *, text_column: str | None = None) -> Format:
    """The format of data for next-token training. DataError names the columns when none fits."""
    names = set(table.names)
    if text_column is not None:
        require_column(table, text_column)
        return _text_format(text_column)
    if "chosen" in names and "rejected" in names:
        raise DataError(
            f"{table.source} holds preference pairs (chosen, rejected). Set task: preference to "
            "tune on them, task: reward for a reward model, or keep the chosen answers as messages"
        )
    if "input_ids" in names:
        return _tokens_format()
    for name in ("messages", "conversations", "conversation"):
        if name in names:
            return _chat_format(name, _first_turn(table, name), names)
    if "instruction" in names and (
        answer := first_name(names, ("output", "response", "completion"))
    ):
        return _alpaca_format(answer, names)
    for prompt, completion in _PAIRS:
        if prompt in names and completion in names:
            return _pair_format(prompt, completion, table)
    text = "text" if "text" in names else "content" if "content" in names else None
    if (
        text is None
        and len(table.names) == 1
        and isinstance(table.rows[0].get(table.names[0]), str)
    ):
        text = table.names[0]
    if text is not None:
        return _text_format(text)
    raise DataError(
        f"{table.source} has columns {', '.join(table.names)}, which are no format for "
        "next-token training. Needed: messages; conversations; instruction + output; "
        "prompt + completion; text; or input_ids. Rename the columns, or name one with text_column"
    )


def detect_text(table: Table, *, text_column: str | None = None) -> Format:
    """The column of plain text; DataError when there is none."""
    if text_column is not None:
        require_column(table, text_column)
    found = text_column or first_name(table.names, _TEXTS)
    if found is None and len(table.names) == 1:
        found = table.names[0]
    if found is None:
        raise DataError(
            f"{table.source} has columns {', '.join(table.names)}; which holds the text is not "
            "clear. Set text_column"
        )
    return _text_format(found)


def detect_labelled(
    table: Table,
    *,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
) -> Format:
    """The text, pair and label columns for classification; DataError when unclear."""
    names = table.names
    for name in (text_column, text_pair_column, label_column):
        if name is not None:
            require_column(table, name)
    label = label_column or first_name(names, _LABELS)
    pair = text_pair_column
    text = text_column
    if text is None and pair is None:
        found = next((p for p in _TEXT_PAIRS if p[0] in names and p[1] in names), None)
        text, pair = found if found else (None, None)
    if text is None:
        text = first_name([n for n in names if n not in (label, pair)], _TEXTS)
    missing = [n for n, found in (("text_column", text), ("label_column", label)) if found is None]
    if text is None or label is None:
        raise DataError(
            f"{table.source} has columns {', '.join(names)}; which hold the text and the label is "
            f"not clear. Set {' and '.join(missing)}"
        )
    return _labelled_format(text, pair, label)


def first_name(names: Sequence[str] | set[str], wanted: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def require_column(table: Table, name: str) -> None:
    if name not in table.names:
        raise DataError(
            f"{table.source} has no column {name!r}; there are {', '.join(table.names)}"
        )


def text_of(row: Row, column: str, *, empty: bool = False) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise RowProblem(column, value, "needs text")
    if not empty and not value.strip():
        raise RowProblem(column, value, "needs text that is not empty")
    return value


def _text_format(column: str) -> Format:
    return Format(
        kind="text",
        columns=(column,),
        normalise=lambda row: Text(text=text_of(row, column)),
        good_row={column: "A whole document."},
    )


def _tokens_format() -> Format:
    def normalise(row: Row) -> Tokens:
        ids = _whole_numbers(row, "input_ids", least=0)
        if row.get("labels") is None:
            return Tokens(input_ids=ids, labels=None)
        labels = _whole_numbers(row, "labels", least=-100)
        if len(labels) != len(ids):
            raise RowProblem("labels", row["labels"], f"needs {len(ids)} numbers, as input_ids has")
        wrong = [
            at for at, (i, n) in enumerate(zip(ids, labels, strict=True)) if n not in (i, -100)
        ]
        if wrong:
            raise RowProblem(
                f"labels[{wrong[0]}]", labels[wrong[0]], "needs the id at its place, or -100"
            )
        return Tokens(input_ids=ids, labels=labels)

    good = {"input_ids": [1, 5, 6, 2], "labels": [-100, -100, 6, 2]}
    return Format(
        kind="tokens", columns=("input_ids", "labels"), normalise=normalise, good_row=good
    )


def _whole_numbers(row: Row, column: str, *, least: int) -> tuple[int, ...]:
    value = row.get(column)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise RowProblem(column, value, "needs a list of whole numbers that is not empty")
    if not all(type(i) is int and i >= least for i in value):
        raise RowProblem(column, value, f"needs whole numbers, none below {least}")
    return tuple(value)


def _pair_format(prompt: str, completion: str, table: Table) -> Format:
    joiner = "" if (prompt, completion) == ("prompt", "completion") else "\n"

    def normalise(row: Row) -> Example:
        if isinstance(row.get(prompt), list):
            return _conversational_pair(row, prompt, completion)
        user = text_of(row, prompt)
        answer = text_of(row, completion)
        return PromptCompletion(prompt=user + joiner, completion=answer, user=user)

    tools = ("tools",) if "tools" in table.names else ()
    return Format(
        kind="prompt-completion",
        columns=(prompt, completion, *tools),
        normalise=normalise,
        good_row={prompt: "What is the capital of France?", completion: " Paris"},
    )


def _conversational_pair(row: Row, prompt: str, completion: str) -> Chat:
    before, _ = read_turns(row, prompt)
    after, train = read_turns(row, completion)
    return Chat(
        messages=before + after,
        train=(False,) * len(before) + train,
        tools=read_tools(row),
        template_kwargs=row.get("chat_template_kwargs") or {},
    )


def _alpaca_format(answer: str, names: set[str]) -> Format:
    def normalise(row: Row) -> PromptCompletion:
        instruction, given = text_of(row, "instruction"), row.get("input") or ""
        if not isinstance(given, str):
            raise RowProblem("input", given, "needs text, or nothing")
        middle = f"### Input:\n{given}\n\n" if given else ""
        return PromptCompletion(
            prompt=f"### Instruction:\n{instruction}\n\n{middle}### Response:\n",
            completion=text_of(row, answer),
            user=f"{instruction}\n\n{given}" if given else instruction,
            system=row.get("system") or None,
            history=_history(row),
        )

    columns = tuple(n for n in ("instruction", "input", answer, "system", "history") if n in names)
    good = {"instruction": "Translate to French.", "input": "Good morning", answer: "Bonjour"}
    return Format(kind="alpaca", columns=columns, normalise=normalise, good_row=good)


def _history(row: Row) -> tuple[tuple[str, str], ...]:
    """Earlier (question, answer) turns of an Alpaca row."""
    turns = row.get("history") or []
    if not all(len(turn) == 2 and all(isinstance(t, str) for t in turn) for turn in turns):
        raise RowProblem("history", turns, "needs a list of [question, answer]")
    return tuple((question, answer) for question, answer in turns)


def _chat_format(column: str, turn: Any, present: set[str]) -> Format:
    sharegpt = isinstance(turn, Mapping) and "from" in turn
    keys = ("from", "value") if sharegpt else ("role", "content")
    names = ("human", "gpt") if sharegpt else ("user", "assistant")
    good = {
        column: [
            {keys[0]: names[0], keys[1]: "What is the capital of France?"},
            {keys[0]: names[1], keys[1]: "Paris"},
        ]
    }

    def normalise(row: Row) -> Chat:
        turns, train = read_turns(row, column)
        if sharegpt and row.get("system"):
            turns, train = ({"role": "system", "content": row["system"]}, *turns), (False, *train)
        kwargs = row.get("chat_template_kwargs") or {}
        return Chat(messages=turns, train=train, tools=read_tools(row), template_kwargs=kwargs)

    read = ("tools", "system") if sharegpt else ("tools",)
    columns = (column, *(name for name in read if name in present))
    kind: Kind = "sharegpt" if sharegpt else "messages"
    return Format(kind=kind, columns=columns, normalise=normalise, good_row=good)


def _first_turn(table: Table, column: str) -> Any:
    turns = next((value for value in table.column(column) if value), None)
    return turns[0] if isinstance(turns, list) else None


def _labelled_format(text: str, pair: str | None, label: str) -> Format:
    def normalise(row: Row) -> Labelled:
        value = row.get(label)
        if value is None or value == "":
            raise RowProblem(label, value, "needs a label")
        second = None if pair is None else text_of(row, pair)
        return Labelled(text=text_of(row, text), pair=second, label=value)

    columns = (text, label) if pair is None else (text, pair, label)
    good = {
        text: "Where is my card?",
        **({pair: "It is late."} if pair else {}),
        label: "card_arrival",
    }
    return Format(kind="labelled", columns=columns, normalise=normalise, good_row=good)

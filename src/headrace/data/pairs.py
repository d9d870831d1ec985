"""Preference data: which columns hold it, and its answers as tokens.

    pairs       prompt, chosen, rejected: text or messages; the prompt may be inside both answers
    unpaired    prompt, completion, label: one answer, wanted or not (also messages with a label)

The prompt is never trained. Knows formats and tokenizers; the over-length rule for pairs stands
here too, since a pair is kept or dropped whole. Losses come later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.data.chat import common_length
from headrace.data.examples import Examples, ragged
from headrace.data.formats import Format, first_name, require_column, text_of
from headrace.data.normal import Answer, Chat, Judged, Pair, PromptCompletion, RowProblem
from headrace.data.policy import (
    LengthPolicy,
    Outcome,
    Tokenized,
    cut_pieces,
    refuse_long,
    token_labels,
)
from headrace.data.prepare import normalise_rows, require_template, tokenize_examples
from headrace.data.table import Row, Table
from headrace.data.turns import read_tools, read_turns
from headrace.errors import DataError

_PROMPTS = ("prompt", "conversations", "messages", "question", "instruction", "query")
_COMPLETIONS = ("completion", "response", "answer", "output")
_JUDGEMENTS = ("label", "kto_tag")
_TRUE, _FALSE = ("true", "1", "yes", "chosen"), ("false", "0", "no", "rejected")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Tokenised answers in the order of the table; desirable is None for pairs (chosen first)."""

    tokens: list[Tokenized]
    desirable: np.ndarray | None
    notes: list[str]


def detect_preference(table: Table, *, label_column: str | None = None) -> Format:
    """The format of preference data; DataError names the columns when none fits."""
    names = set(table.names)
    if "chosen" in names and "rejected" in names:
        prompt = first_name(names, _PROMPTS)
        columns = tuple(n for n in (prompt, "chosen", "rejected", "tools") if n and n in names)
        return Format(
            kind="preference",
            columns=columns,
            normalise=lambda row: _pair(row, prompt),
            good_row={"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
        )
    if label_column is not None:
        require_column(table, label_column)
    label = label_column or first_name(names, _JUDGEMENTS)
    completion = first_name(names, _COMPLETIONS)
    prompt = first_name(names, _PROMPTS)
    whole = first_name(names, ("messages", "conversations"))
    if label and (whole or (prompt and completion)):
        columns = (whole,) if whole else (str(prompt), str(completion))
        return Format(
            kind="unpaired preference",
            columns=(*columns, *(("tools",) if "tools" in names else ()), label),
            normalise=lambda row: _judged(row, columns, label),
            good_row={"prompt": "2 + 2 =", "completion": " 4", "label": True},
        )
    raise DataError(
        f"{table.source} has columns {', '.join(table.names)}, which are no preference data. "
        "Needed: chosen + rejected (with or without prompt), or prompt + completion + label"
    )


def _pair(row: Row, prompt: str | None) -> Pair:
    if prompt is None:
        return _implicit(row)
    before = row.get(prompt)
    chosen = row.get("chosen")
    if isinstance(before, str) and isinstance(chosen, list) and _role(chosen[:1]) != "assistant":
        return _implicit(row)  # the answers repeat the prompt, which stands there as text too
    return Pair(
        chosen=_answer(row, prompt, "chosen"),
        rejected=_answer(row, prompt, "rejected"),
    )


def _role(turns: Sequence[Any]) -> str | None:
    """The role of the first turn, in OpenAI's words."""
    turn = turns[0] if turns else None
    if not isinstance(turn, Mapping):
        return None
    role = turn.get("role", turn.get("from"))
    return "assistant" if role in ("assistant", "gpt", "model") else role


def _answer(row: Row, prompt: str, column: str) -> Answer:
    """A prompt and one answer in columns of their own."""
    before, after = row.get(prompt), row.get(column)
    if isinstance(before, str) and isinstance(after, str):
        user = text_of(row, prompt)
        return PromptCompletion(prompt=user, completion=text_of(row, column), user=user)
    if isinstance(before, str):
        turns: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": before},)
    else:
        turns, _ = read_turns(row, prompt)
    return _chat(row, turns, _answer_turns(row, column))


def _answer_turns(row: Row, column: str) -> tuple[Mapping[str, Any], ...]:
    """An answer as turns: a list, one turn, or its text."""
    value = row.get(column)
    if isinstance(value, str):
        return ({"role": "assistant", "content": text_of(row, column)},)
    one = {column: [value] if isinstance(value, Mapping) else value}
    return read_turns(one, column)[0]


def _chat(
    row: Row, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> Chat:
    if row.get("system") and (not before or before[0]["role"] != "system"):
        before = [{"role": "system", "content": row["system"]}, *before]
    return Chat(
        messages=(*before, *after),
        train=(*(False,) * len(before), *(turn["role"] == "assistant" for turn in after)),
        tools=read_tools(row),
        template_kwargs=row.get("chat_template_kwargs") or {},
    )


def _implicit(row: Row) -> Pair:
    """Both answers hold the prompt: it is what they begin with alike."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _implicit_text(text_of(row, "chosen"), text_of(row, "rejected"))
    good, bad = _answer_turns(row, "chosen"), _answer_turns(row, "rejected")
    same = 0
    while same < min(len(good), len(bad)) and good[same] == bad[same]:
        same += 1
    if same == len(good) or same == len(bad):
        raise RowProblem("chosen", chosen, "needs an answer that differs from rejected")
    return Pair(
        chosen=_chat(row, good[:same], good[same:]), rejected=_chat(row, bad[:same], bad[same:])
    )


def _implicit_text(chosen: str, rejected: str) -> Pair:
    if chosen == rejected:
        raise RowProblem("chosen", chosen, "needs an answer that differs from rejected")
    prompt = chosen[: common_length(chosen, rejected)]
    cut = max(prompt.rfind(" "), prompt.rfind("\n") + 1, 0)  # words stay whole, a blank leads

    def side(text: str) -> PromptCompletion:
        return PromptCompletion(
            prompt=text[:cut], completion=text[cut:], user=text[:cut], plain=True
        )

    return Pair(chosen=side(chosen), rejected=side(rejected))


def _judged(row: Row, columns: tuple[str, ...], label: str) -> Judged:
    value = row.get(label)
    word = str(value).strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise RowProblem(label, value, "needs true (wanted) or false")
    if len(columns) == 2:
        return Judged(answer=_answer(row, *columns), desirable=word in _TRUE)
    turns, _ = read_turns(row, columns[0])
    if turns[-1]["role"] != "assistant":
        raise RowProblem(columns[0], row[columns[0]], "needs an assistant turn at the end")
    return Judged(answer=_chat(row, turns[:-1], turns[-1:]), desirable=word in _TRUE)


def tokenize_answers(
    table: Table,
    form: Format,
    tokenizer: PreTrainedTokenizerBase,
    *,
    unpair: bool,
    use_template: bool,
) -> Answers:
    """All answers as tokens. unpair: a pair becomes one wanted and one unwanted answer.

    Raises DataError for bad rows, all at once, and for chats without a template.
    """
    rows = normalise_rows(table, form)
    answers: list[Answer] = []
    row_of: list[int] = []
    desirable: list[bool] = []
    for i, row in enumerate(rows):
        if isinstance(row, Pair):
            answers += [row.chosen, row.rejected]
            row_of += [i, i]
            desirable += [True, False]
        else:
            assert isinstance(row, Judged), row
            answers.append(row.answer)
            row_of.append(i)
            desirable.append(row.desirable)
    if any(isinstance(answer, Chat) for answer in answers):
        require_template(table, tokenizer)
    tokens, notes = tokenize_examples(
        answers, row_of, table, form, tokenizer, answers_only=True, use_template=use_template
    )
    single = unpair or form.kind == "unpaired preference"
    return Answers(tokens=tokens, desirable=np.asarray(desirable) if single else None, notes=notes)


def apply_answer_policy(
    answers: Answers, policy: LengthPolicy, *, table: Table
) -> tuple[Examples, np.ndarray | None, Outcome]:
    """Examples within max_length; of a pair both answers are kept, or none.

    Returns the examples (pairs: chosen and rejected in turn), who is desirable, and counts.
    Raises DataError when over_length is error and an answer is, and when nothing is left.
    """
    refuse_long(answers.tokens, policy, table=table)
    size = 1 if answers.desirable is not None else 2
    groups = [answers.tokens[i : i + size] for i in range(0, len(answers.tokens), size)]
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    kept: list[int] = []
    outcome = Outcome()
    unsupervised = 0
    for number, group in enumerate(groups):
        pieces = [next(cut_pieces(token, policy), None) for token in group]
        used = [piece for piece in pieces if piece is not None and piece[1][1:].any()]
        if len(used) < size:
            unsupervised += None not in pieces
            continue
        kept.append(number)
        outcome.cut += any(len(token.input_ids) > policy.max_length for token in group)
        for piece, trained in used:
            ids.append(piece)
            labels.append(token_labels(piece, trained))
    rows = {token.row for number in kept for token in groups[number]}
    outcome.kept = len(rows)
    outcome.dropped = len({token.row for token in answers.tokens}) - len(rows)
    if unsupervised:
        outcome.notes.append(f"{unsupervised:,} dropped: an answer is not within max_length")
    if not kept:
        raise DataError(
            f"{table.source}: with max_length {policy.max_length:,} and over_length "
            f"{policy.over_length} no answer of {len(groups):,} rows is left. Raise max_length"
        )
    flat, offsets = ragged(ids)
    chosen = None if answers.desirable is None else answers.desirable[kept]
    return (
        Examples(input_ids=flat, offsets=offsets, token_labels=ragged(labels)[0]),
        chosen,
        outcome,
    )

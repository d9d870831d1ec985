"""Table -> rows of tokens with what is trained: normalise, render, tokenise in batches.

What is trained is decided by character position (chat.py gives the spans), never by token id. Knows
tokenizers; lengths and shapes come later (policy.py, packing.py, buckets.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.data.chat import (
    ChatTemplate,
    Rendered,
    Span,
    as_chat,
    chat_template,
    render_chat,
    render_plain,
)
from headrace.data.examples import IGNORED, Examples
from headrace.data.formats import Format
from headrace.data.normal import (
    Chat,
    Example,
    PromptCompletion,
    RowProblem,
    Text,
    Tokens,
)
from headrace.data.policy import Tokenized
from headrace.data.table import BadRow, Table, raise_bad_rows
from headrace.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding

_BATCH = 1000  # rows a call of the fast tokenizer; its threads share one batch


def tokenize_causal(
    table: Table,
    form: Format,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answers_only: bool = True,
    use_template: bool = True,
) -> tuple[list[Tokenized], list[str]]:
    """Every row as tokens with what is trained, and notes for the report.

    Raises DataError for bad rows (all of them), for chats without a template, and for a tokenizer
    without its fast form.
    """
    require_fast(tokenizer)
    if form.kind in ("messages", "sharegpt"):
        require_template(table, tokenizer)
    examples = normalise_rows(table, form)
    if form.kind == "tokens":
        return _already_tokens(examples), []
    return tokenize_examples(
        examples, range(len(examples)), table, form, tokenizer,
        answers_only=answers_only, use_template=use_template,
    )  # fmt: skip


def tokenize_examples(
    examples: Sequence[Example],
    row_of: Sequence[int],
    table: Table,
    form: Format,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answers_only: bool,
    use_template: bool,
) -> tuple[list[Tokenized], list[str]]:
    """Normal forms as tokens, and notes. row_of: the table row each came from."""
    template = chat_template(tokenizer)
    render = partial(_render, template=template, pairs_as_chat=use_template, answers=answers_only)
    rows = _rendered_rows(examples, row_of, render, table, form)
    tokens = _Edges.of(tokenizer)
    result = list(_tokenize(rows, row_of, tokenizer, tokens))
    notes = _notes(table, template, rows, tokens, use_template)
    empty = sum(isinstance(example, Chat) and _has_empty_answer(example) for example in examples)
    if empty:
        notes.append(f"{empty:,} conversations have an empty answer: only its end token is trained")
    return result, notes


def _has_empty_answer(chat: Chat) -> bool:
    return any(
        turn["role"] == "assistant" and not turn.get("content") and not turn.get("tool_calls")
        for turn in chat.messages
    )


def require_template(table: Table, tokenizer: PreTrainedTokenizerBase) -> None:
    """Conversations are rendered by the tokenizer's own template or not at all."""
    if chat_template(tokenizer) is None:
        raise DataError(
            f"{table.source} holds conversations, but the tokenizer has no chat template. Set "
            "chat_template_path to a .jinja file or to the tokenizer folder of a chat model"
        )


def normalise_rows(table: Table, form: Format) -> list[Example]:
    """All rows in normal form; one DataError for all that are not."""
    examples: list[Example] = []
    bad: list[BadRow] = []
    for i, row in enumerate(table.rows):
        try:
            examples.append(form.normalise(row))
        except RowProblem as problem:
            bad.append(_bad(table, i, problem))
    raise_bad_rows(bad, example=form.good_row, total=len(table))
    return examples


def require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Character positions exist only in fast tokenizers."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} is a slow tokenizer; a fast one (tokenizer.json) is "
            "needed to tell which tokens are trained"
        )


def _bad(table: Table, i: int, problem: RowProblem) -> BadRow:
    return BadRow(
        where=table.where(i), column=problem.column, value=problem.value, needed=problem.needed
    )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A rendered row. plain: begin and end tokens are ours to add, no template wrote them."""

    rendered: Rendered
    plain: bool


def _rendered_rows(
    examples: Sequence[Example],
    row_of: Sequence[int],
    render: Callable[[Example], _Row],
    table: Table,
    form: Format,
) -> list[_Row]:
    rows: list[_Row] = []
    bad: list[BadRow] = []
    for i, example in zip(row_of, examples, strict=True):
        try:
            rows.append(render(example))
        except RowProblem as problem:
            bad.append(_bad(table, i, problem))
    raise_bad_rows(bad, example=form.good_row, total=len(table))
    return rows


def _render(
    example: Example, *, template: ChatTemplate | None, pairs_as_chat: bool, answers: bool
) -> _Row:
    if isinstance(example, PromptCompletion):
        if template is None or not pairs_as_chat or example.plain:
            return _Row(rendered=render_plain(example, answers_only=answers), plain=True)
        example = as_chat(example)
    if isinstance(example, Chat):
        if template is None:
            raise RowProblem("prompt", "messages", "needs a chat template: set chat_template_path")
        return _Row(rendered=render_chat(example, template, answers_only=answers), plain=False)
    assert isinstance(example, Text), example
    whole = Rendered(text=example.text, spans=((0, len(example.text)),))
    return _Row(rendered=whole, plain=True)


@dataclass(kw_only=True)
class _Edges:
    """The tokens that begin and end plain text, and how often a begin token was double."""

    bos: int | None
    begin: int | None  # bos, when the tokenizer adds it by itself
    end: int | None
    doubles: int = 0

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> _Edges:
        bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        bos = bos if isinstance(bos, int) else None
        adds = bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]
        return cls(bos=bos, begin=bos if adds else None, end=end if isinstance(end, int) else None)

    def around(self, ids: list[int], trained: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Plain text with its begin token and a trained end token, each once."""
        if self.begin is not None and ids[:1] != [self.begin]:
            ids, trained = [self.begin, *ids], np.concatenate([[False], trained])
        if self.end is not None and ids[-1:] != [self.end]:
            ids, trained = [*ids, self.end], np.concatenate([trained, [True]])
        return ids, trained

    def single_begin(self, ids: list[int], trained: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Without a second begin token, which template and text together may write."""
        if self.bos is None or ids[:2] != [self.bos, self.bos]:
            return ids, trained
        self.doubles += 1
        return ids[1:], trained[1:]


def _tokenize(
    rows: Sequence[_Row],
    row_of: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    edges: _Edges,
) -> Iterator[Tokenized]:
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        encoded = tokenizer(
            [row.rendered.text for row in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for i, (row, encoding) in enumerate(zip(batch, encoded.encodings or (), strict=True)):
            ids: list[int] = encoding.ids
            trained = trained_tokens(encoding, row.rendered.spans)
            if row.plain:
                ids, trained = edges.around(ids, trained)
            ids, trained = edges.single_begin(ids, trained)
            yield Tokenized(
                row=row_of[start + i], input_ids=np.asarray(ids, np.int32), trained=trained
            )


def trained_tokens(encoding: Encoding, spans: Iterable[Span]) -> np.ndarray:
    """bool [tokens]: the tokens that share a character with a span."""
    trained = np.zeros(len(encoding.ids), bool)
    for start, stop in spans:
        first = _token_at(encoding, range(start, stop))
        last = _token_at(encoding, range(stop - 1, start - 1, -1))
        if first is None or last is None:
            continue
        while last + 1 < len(trained) and _begins_before(encoding, last + 1, stop):
            last += 1  # one character may be several byte tokens
        trained[first : last + 1] = True
    return trained


def _token_at(encoding: Encoding, characters: Iterable[int]) -> int | None:
    """The token of the first of these characters that has one; blanks may have none."""
    tokens = (encoding.char_to_token(character) for character in characters)
    return next((token for token in tokens if token is not None), None)


def _begins_before(encoding: Encoding, token: int, stop: int) -> bool:
    place = encoding.token_to_chars(token)
    return place is not None and place[0] < stop and place[1] > place[0]


def _already_tokens(examples: Sequence[Example]) -> list[Tokenized]:
    result = []
    for i, example in enumerate(examples):
        assert isinstance(example, Tokens), example
        ids = np.asarray(example.input_ids, np.int32)
        labels = ids if example.labels is None else np.asarray(example.labels, np.int32)
        result.append(Tokenized(row=i, input_ids=ids, trained=labels != IGNORED))
    return result


def _notes(
    table: Table,
    template: ChatTemplate | None,
    rows: Sequence[_Row],
    edges: _Edges,
    use_template: bool,
) -> list[str]:
    notes = []
    chats = [row.rendered for row in rows if not row.plain]
    if chats and template is not None:
        how = "its generation marks" if template.marked else "rendered prefixes"
        notes.append(f"chat template of the tokenizer; trained turns found by {how}")
        if template.end_of_turn is None:
            notes.append("the template writes no end token after an answer: answers may not end")
        if "tools" in table.names and "tools" not in template.source:
            notes.append("the chat template does not show tools to the model")
    last_only = sum(row.last_turn_only for row in chats)
    if last_only:
        notes.append(
            f"last turn only in {last_only:,} of {len(chats):,} conversations: the template "
            "rewrites earlier turns, so training them would not match generation"
        )
    if edges.doubles:
        notes.append(f"a second begin token was removed from {edges.doubles:,} rows")
    if any(row.plain for row in rows) and edges.end is None:
        notes.append("the tokenizer has no end token: texts may not end")
    if rows and rows[0].plain and template is not None and use_template is False:
        notes.append("the chat template is not used (apply_chat_template: false)")
    return notes


def decoded_example(
    examples: Examples, tokenizer: PreTrainedTokenizerBase, i: int = 0
) -> tuple[tuple[str, bool], ...]:
    """Example i decoded in runs of trained and untrained tokens."""
    assert examples.token_labels is not None
    ids = examples.input_ids[examples.span(i)]
    trained = examples.token_labels[examples.span(i)] != IGNORED
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    return tuple((_decode(tokenizer, ids[a:b]), bool(trained[a])) for a, b in pairwise(edges))


def _decode(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> str:
    text: Any = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
    return str(text)

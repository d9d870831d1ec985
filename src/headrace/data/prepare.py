"""Table -> tokenised Examples and a report: render, tokenise in batches, apply the length policy.

Labels are decided by character position (chat.py gives the spans), never by token id. The first
token of an example has no label, since nothing predicts it; packed and unpacked losses are equal
for that reason. Knows tokenizers; batching and shapes come later (packing.py, buckets.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

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
from headrace.data.examples import IGNORED, Examples, ragged
from headrace.data.formats import (
    Chat,
    Example,
    Format,
    PromptCompletion,
    RowProblem,
    Text,
    Tokens,
)
from headrace.data.table import SHOWN, BadRow, Table, raise_bad_rows
from headrace.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding

_BATCH = 1000  # rows a call of the fast tokenizer; its threads share one batch
OverLength = Literal["truncate", "drop", "split", "error"]


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """One row as tokens; trained[i] says whether token i is. where: row index in the table."""

    row: int
    input_ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True, kw_only=True)
class LengthPolicy:
    """What happens to examples over max_length tokens."""

    max_length: int
    over_length: OverLength = "truncate"
    keep_end: bool = False


@dataclass(kw_only=True)
class Outcome:
    """Counts of what the policy did, for the report."""

    kept: int = 0
    cut: int = 0
    dropped: int = 0
    notes: list[str] = field(default_factory=list)


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
    template = chat_template(tokenizer)
    if form.kind in ("messages", "sharegpt") and template is None:
        raise DataError(
            f"{table.source} holds conversations, but the tokenizer has no chat template. Set "
            "chat_template_path to a .jinja file or to the tokenizer folder of a chat model"
        )
    examples = normalise_rows(table, form)
    if form.kind == "tokens":
        return _already_tokens(examples), []
    rows = _rendered_rows(examples, template if use_template else None, answers_only, table, form)
    tokens = _Edges.of(tokenizer)
    result = list(_tokenize(rows, tokenizer, tokens))
    return result, _notes(table, template, rows, tokens, use_template)


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
    template: ChatTemplate | None,
    answers_only: bool,
    table: Table,
    form: Format,
) -> list[_Row]:
    rows: list[_Row] = []
    bad: list[BadRow] = []
    for i, example in enumerate(examples):
        try:
            rows.append(_render(example, template, answers_only))
        except RowProblem as problem:
            bad.append(_bad(table, i, problem))
    raise_bad_rows(bad, example=form.good_row, total=len(table))
    return rows


def _render(example: Example, template: ChatTemplate | None, answers_only: bool) -> _Row:
    if isinstance(example, PromptCompletion):
        if template is None:
            return _Row(rendered=render_plain(example, answers_only=answers_only), plain=True)
        example = as_chat(example)
    if isinstance(example, Chat):
        if template is None:
            raise RowProblem("prompt", "messages", "needs a tokenizer with a chat template")
        return _Row(rendered=render_chat(example, template, answers_only=answers_only), plain=False)
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
    rows: Sequence[_Row], tokenizer: PreTrainedTokenizerBase, edges: _Edges
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
            yield Tokenized(row=start + i, input_ids=np.asarray(ids, np.int32), trained=trained)


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


def apply_policy(
    rows: Sequence[Tokenized], policy: LengthPolicy, *, table: Table
) -> tuple[Examples, Outcome]:
    """Cut, drop, split or refuse what is over max_length; drop what has no trained token left.

    Raises DataError when over_length is error and a row is, and when nothing is left to train.
    """
    outcome = Outcome()
    long = [row for row in rows if len(row.input_ids) > policy.max_length]
    if long and policy.over_length == "error":
        shown = ", ".join(f"{table.where(r.row)} ({len(r.input_ids):,})" for r in long[:SHOWN])
        raise DataError(
            f"{len(long):,} of {len(rows):,} rows are over max_length {policy.max_length:,} "
            f"tokens: {shown}. Raise max_length, or set over_length to truncate, drop or split"
        )
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    unsupervised = 0
    for row in rows:
        pieces = list(_pieces(row, policy))
        used = [(i, t) for i, t in pieces if t[1:].any()]
        unsupervised += bool(pieces) and not used
        outcome.kept += bool(used)
        outcome.cut += bool(used) and len(row.input_ids) > policy.max_length
        for piece, trained in used:
            ids.append(piece)
            labels.append(_labels(piece, trained))
    outcome.dropped = len(rows) - outcome.kept
    if unsupervised:
        outcome.notes.append(f"{unsupervised:,} dropped: no trained token within max_length")
    if not ids:
        raise DataError(_nothing_left(rows, policy, table))
    flat, offsets = ragged(ids)
    return Examples(input_ids=flat, offsets=offsets, token_labels=ragged(labels)[0]), outcome


def _pieces(row: Tokenized, policy: LengthPolicy) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    size, ids, trained = policy.max_length, row.input_ids, row.trained
    if len(ids) <= size:
        yield ids, trained
    elif policy.over_length == "truncate":
        keep = slice(-size, None) if policy.keep_end else slice(size)
        yield ids[keep], trained[keep]
    elif policy.over_length == "split":
        for start in range(0, len(ids), size):
            yield ids[start : start + size], trained[start : start + size]


def _labels(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    labels = np.where(trained, ids, IGNORED).astype(np.int32)
    labels[:1] = IGNORED  # nothing predicts the first token
    return labels


def _nothing_left(rows: Sequence[Tokenized], policy: LengthPolicy, table: Table) -> str:
    trained = sum(int(row.trained[1:].sum()) for row in rows)
    longest = max(len(row.input_ids) for row in rows)
    if not trained:
        return (
            f"{table.source}: none of the tokens of {len(rows):,} rows would be trained. Answers "
            "(assistant turns, completions) are needed; to train prompts too set "
            "assistant_only_loss: false and completion_only_loss: false"
        )
    return (
        f"{table.source}: with max_length {policy.max_length:,} and over_length "
        f"{policy.over_length} no trained token is left in {len(rows):,} rows; the longest has "
        f"{longest:,} tokens. Raise max_length, or set truncation_mode: keep_end"
    )


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

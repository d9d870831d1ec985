"""A conversation -> text by the tokenizer's own chat template, and which characters are trained.

Templates are never re-implemented. Trained characters come from the template's {% generation %}
marks when it has them, else from rendering prefixes: what the template adds for an assistant turn,
end-of-turn token included, is trained. Where a template rewrites earlier turns (thinking removed
from history) the prefixes no longer match and only the last turn is trained, which the report says.

Knows characters, not tokens; prepare.py maps spans to tokens by position, so that a pad token equal
to the end token does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.data.normal import Chat, PromptCompletion, RowProblem
from headrace.errors import DataError

Span = tuple[int, int]
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Text and the character spans that are trained. last_turn_only: history was rewritten."""

    text: str
    spans: tuple[Span, ...]
    last_turn_only: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A tokenizer's template with what rendering needs.

    marked: it has {% generation %} marks. end_of_turn: the special token it writes after an
    assistant turn, None when it writes none. special_tokens: variables the template may use.
    """

    source: str
    marked: bool
    end_of_turn: str | None
    special_tokens: Mapping[str, str]

    def text(self, messages: Sequence[Mapping[str, Any]], chat: Chat, *, prompt: bool) -> str:
        """The messages as the template writes them; `prompt` adds the start of an answer."""
        return self._render(messages, chat, add_generation_prompt=prompt)[0]

    def marked_text(self, chat: Chat) -> tuple[str, list[Span]]:
        """The whole conversation and the spans between its generation marks."""
        return self._render(chat.messages, chat, return_assistant_tokens_mask=True)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], chat: Chat, **options: Any
    ) -> tuple[str, list[Span]]:
        try:
            variables: dict[str, Any] = {**self.special_tokens, **chat.template_kwargs}
            rendered, spans = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=list(chat.tools) if chat.tools else None,
                chat_template=self.source,
                **options | variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            what = [message["role"] for message in messages]
            raise RowProblem("messages", what, f"the chat template refuses it: {error}") from None
        return rendered[0], [(int(start), int(stop)) for start, stop in spans[0]] if spans else []


def chat_template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """The tokenizer's template, probed for marks and its end-of-turn token; None without one."""
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("default")
    if not source:
        return None
    tokens = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if not isinstance(v, list)}
    found = ChatTemplate(
        source=source, marked=bool(_MARK.search(source)), end_of_turn=None, special_tokens=tokens
    )
    end = _end_of_turn(found, tokenizer)
    return ChatTemplate(source=source, marked=found.marked, end_of_turn=end, special_tokens=tokens)


def load_chat_template(path: str) -> str:
    """The template text of chat_template_path: a Jinja file, or a folder that holds a tokenizer."""
    place = Path(path).expanduser()
    file = place / "chat_template.jinja" if place.is_dir() else place
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if place.is_dir():
        from transformers import AutoTokenizer

        template = AutoTokenizer.from_pretrained(str(place)).chat_template
        if isinstance(template, str):
            return template
    raise DataError(f"chat_template_path {path} holds no chat template; give a .jinja file")


def _end_of_turn(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The special token between the answer "Paris" of a probe and the end of its rendering."""
    probe = Chat(
        messages=(
            {"role": "user", "content": "The capital of France?"},
            {"role": "assistant", "content": "Paris"},
        ),
        train=(True, True),
    )
    try:
        _, found, tail = template.text(probe.messages, probe, prompt=False).rpartition("Paris")
    except RowProblem:
        return None
    added: dict[str, int] = tokenizer.get_added_vocab()  # type: ignore[reportCallIssue]
    specials = [str(token) for token in (*tokenizer.all_special_tokens, *added)]
    ends = {token for token in specials if token.strip() and token in tail} if found else set()
    return min(ends, key=lambda token: (tail.index(token), -len(token)), default=None)


def render_chat(chat: Chat, template: ChatTemplate, *, answers_only: bool) -> Rendered:
    """The conversation as text with its trained spans. RowProblem when the template refuses it."""
    if not answers_only:
        text = template.text(chat.messages, chat, prompt=False)
        return Rendered(text=text, spans=((0, len(text)),))
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if template.marked:
        return _by_marks(chat, template, answers)
    return _by_prefixes(chat, template, answers)


def _by_marks(chat: Chat, template: ChatTemplate, answers: Sequence[int]) -> Rendered:
    text, spans = template.marked_text(chat)
    if len(spans) == len(answers):
        spans = [span for span, i in zip(spans, answers, strict=True) if chat.train[i]]
    elif not all(chat.train[i] for i in answers):
        needed = f"has train: false, but the template marks {len(spans)} spans for it"
        raise RowProblem("messages", f"{len(answers)} assistant turns", needed)
    return Rendered(text=text, spans=tuple(_with_end(text, span, template) for span in spans))


def _by_prefixes(chat: Chat, template: ChatTemplate, answers: Sequence[int]) -> Rendered:
    text = template.text(chat.messages, chat, prompt=False)
    spans: list[Span] = []
    rewritten = False
    for i in answers:
        span = _answer_span(chat, template, text, i)
        if span is None:
            rewritten = True
        elif chat.train[i]:
            spans.append(span)
    last = len(chat.messages) - 1
    if rewritten:
        only = _answer_span(chat, template, text, last) if answers and answers[-1] == last else None
        spans = [only] if only and chat.train[last] else []
    return Rendered(text=text, spans=tuple(spans), last_turn_only=rewritten)


def _answer_span(chat: Chat, template: ChatTemplate, text: str, i: int) -> Span | None:
    """Where turn i stands in the full text; None when the full text does not start that way."""
    before = template.text(chat.messages[:i], chat, prompt=False) if i else ""
    through = text
    if i < len(chat.messages) - 1:
        through = template.text(chat.messages[: i + 1], chat, prompt=False)
    if not text.startswith(before) or not text.startswith(through):
        return None
    start = len(before)
    if i:
        opened = template.text(chat.messages[:i], chat, prompt=True)
        start = max(start, common_length(opened, through))
    return _with_end(text, _without_tail((start, len(through)), text, template), template)


def common_length(a: str, b: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(a), len(b)))


def _without_tail(span: Span, text: str, template: ChatTemplate) -> Span:
    """Without what follows the end-of-turn token (a newline): no one generates it."""
    end = template.end_of_turn
    at = text.rfind(end, *span) if end else -1
    return (span[0], at + len(end)) if end and at >= 0 else span


def _with_end(text: str, span: Span, template: ChatTemplate) -> Span:
    """With the end-of-turn token when marks leave it out: without it answers never end."""
    end = template.end_of_turn
    if end is None or end in text[span[0] : span[1]]:
        return span
    rest = text[span[1] :]
    gap = len(rest) - len(rest.lstrip())
    return (span[0], span[1] + gap + len(end)) if rest[gap:].startswith(end) else span


def as_chat(pair: PromptCompletion) -> Chat:
    """Prompt and completion as a conversation, for tokenizers that have a chat template."""
    messages: list[Mapping[str, Any]] = []
    if pair.system:
        messages.append({"role": "system", "content": pair.system})
    for user, assistant in pair.history:
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": assistant})
    messages.append({"role": "user", "content": pair.user})
    messages.append({"role": "assistant", "content": pair.completion.strip()})
    train = tuple(i == len(messages) - 1 for i in range(len(messages)))
    return Chat(messages=tuple(messages), train=train)


def render_plain(pair: PromptCompletion, *, answers_only: bool) -> Rendered:
    """Prompt and completion joined as they stand; prepare.py appends the end token, trained."""
    system = f"{pair.system}\n\n" if pair.system else ""
    text = system + pair.prompt + pair.completion
    start = len(text) - len(pair.completion) if answers_only else 0
    return Rendered(text=text, spans=((start, len(text)),))

"""The normal forms of a row, whatever the file called them.

Causal: Chat, PromptCompletion, Text or Tokens. Classification: Labelled, Tagged. Preference: Pair,
Judged. A row that fits none of them raises RowProblem. Plain data; nothing here reads or renders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Chat:
    """messages in the form chat templates take; train[i] says whether turn i may be trained."""

    messages: tuple[Mapping[str, Any], ...]
    train: tuple[bool, ...]
    tools: tuple[Any, ...] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PromptCompletion:
    """Two texts. prompt + completion is the plain form; user, system and history are its turns as a
    chat. plain: it already has a format of its own and is never written as a chat."""

    prompt: str
    completion: str
    user: str
    system: str | None = None
    history: tuple[tuple[str, str], ...] = ()
    plain: bool = False


@dataclass(frozen=True, kw_only=True)
class Text:
    text: str


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Already tokenised; labels as in Hugging Face (-100 = not trained), or all trained."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Labelled:
    text: str
    pair: str | None
    label: Any


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """Words with one tag each (token classification)."""

    words: tuple[str, ...]
    tags: tuple[Any, ...]


Answer = Chat | PromptCompletion


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One prompt with a better and a worse answer; only the answers are trained."""

    chosen: Answer
    rejected: Answer


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One prompt with one answer that is wanted or not."""

    answer: Answer
    desirable: bool


Example = Chat | PromptCompletion | Text | Tokens | Labelled | Tagged | Pair | Judged


class RowProblem(ValueError):
    """One row is not what its format needs: column, value, what is needed. Caught by prepare.py."""

    def __init__(self, column: str, value: Any, needed: str) -> None:
        super().__init__(needed)
        self.column, self.value, self.needed = column, value, needed

"""The normal forms of a row, whatever the file called them.

Causal: Chat, PromptCompletion, Text or Tokens. Classification: Labelled. A row that fits none of
them raises RowProblem. Plain data; nothing here reads or renders.
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
    """Two texts; `plain` joins them without a chat template, `turns` are user and system text."""

    prompt: str
    completion: str
    user: str
    system: str | None = None
    history: tuple[tuple[str, str], ...] = ()


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


Example = Chat | PromptCompletion | Text | Tokens | Labelled


class RowProblem(ValueError):
    """One row is not what its format needs: column, value, what is needed. Caught by prepare.py."""

    def __init__(self, column: str, value: Any, needed: str) -> None:
        super().__init__(needed)
        self.column, self.value, self.needed = column, value, needed

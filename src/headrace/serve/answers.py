"""Deltas put together into whole answers.

Knows: deltas. Does not know: the engine, HTTP.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from headrace.errors import ServeError
from headrace.serve.request import Delta, TokenLogprob


@dataclass(kw_only=True)
class Answer:
    """One finished answer. num_cached: prompt tokens that were in the cache already."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt: int = 0
    num_cached: int = 0
    error: str = ""

    def add(self, delta: Delta) -> None:
        """Append one delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.num_prompt = delta.num_prompt
        self.num_cached = delta.num_cached
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.error = delta.error


class Collector:
    """A sink that waits for `num` answers; may be called from another thread."""

    def __init__(self, num: int) -> None:
        self.answers = [Answer(index=i) for i in range(num)]
        self._left = num
        self._done = threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.answers[delta.index].add(delta)
        if delta.finish_reason is not None:
            self._left -= 1
            if not self._left:
                self._done.set()

    def wait(self) -> list[Answer]:
        """All answers. Raises ServeError when one failed."""
        self._done.wait()
        failed = [a for a in self.answers if a.finish_reason in ("error", "abort")]
        if failed:
            raise ServeError(failed[0].error or "the request was aborted")
        return self.answers

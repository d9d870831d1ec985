"""Token ids -> text as it grows, and stop strings found in it.

Text is given out only when it cannot change any more: a character may need several tokens, and the
beginning of a stop string is held back until it is complete or broken off.

Knows: tokenizers. Does not know: devices, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one answer, piece by piece.

    prompt_ids: the last tokens before the answer, so that a leading space comes out right. stop:
    strings that end the answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt_ids[-6:])
        self._start = 0
        self._read = len(self._ids)
        self._stop, self._include_stop = tuple(stop), include_stop
        self._hold = max((len(s) for s in self._stop), default=1) - 1
        self._pending = ""
        self.stopped: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens; sets `stopped` at a stop string."""
        if self.stopped is not None:
            return ""
        fresh = "".join(self._decode(i) for i in token_ids)
        self._pending += fresh
        if self._stop:
            return self._until_stop(len(fresh))
        out, self._pending = self._pending, ""
        return out

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        if self.stopped is not None:
            return ""
        rest = self._text(self._start, len(self._ids))[len(self._text(self._start, self._read)) :]
        out, self._pending = self._pending + rest, ""
        return out

    def _decode(self, token_id: int) -> str:
        """What one more token adds; empty while a character is incomplete."""
        self._ids.append(token_id)
        before = self._text(self._start, self._read)
        whole = self._text(self._start, len(self._ids))
        if len(whole) <= len(before) or whole.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return whole[len(before) :]

    def _text(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=self._skip)

    def _until_stop(self, num_new: int) -> str:
        text = self._pending
        # A stop string that ends in the new part may begin before it.
        begin = max(0, len(text) - num_new - self._hold)
        hits = [(at, s) for s in self._stop if (at := text.find(s, begin)) >= 0]
        if hits:
            at, self.stopped = min(hits, key=lambda hit: hit[0])
            self._pending = ""
            return text[: at + len(self.stopped)] if self._include_stop else text[:at]
        keep = self._held_back(text)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _held_back(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for size in range(min(self._hold, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop):
                return size
        return 0

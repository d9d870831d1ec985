"""Guesses of the next tokens from the text so far (prompt lookup).

Answers often repeat their prompt: code, names, quotations. The last tokens are looked up where they
stood before, and what followed there is the guess. The engine computes all guesses in one step and
keeps those that it would have written itself, so the answer does not change, only its speed.
"""

from __future__ import annotations

from headrace.serve.request import Sequence

NGRAM = 3


class PromptLookup:
    """Drafts of at most `num_tokens` tokens, from the latest earlier place of the last n-gram."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_drafted = self.num_accepted = 0
        self._places: dict[str, tuple[int, dict[tuple[int, ...], int]]] = {}

    def __call__(self, sequence: Sequence) -> tuple[int, ...]:
        """The guess; empty when the n-gram is new or the sequence's logits are reshaped."""
        tokens = sequence.tokens
        room = sequence.num_prompt + sequence.max_tokens - len(tokens) - 1
        if sequence.params.shapes_logits or sequence.params.logprobs is not None or room < 1:
            return ()
        done, places = self._places.get(sequence.id, (NGRAM, {}))
        for end in range(done, len(tokens)):
            places[tuple(tokens[end - NGRAM : end])] = end
        self._places[sequence.id] = (max(done, len(tokens)), places)
        at = places.get(tuple(tokens[-NGRAM:]))
        return tuple(tokens[at : at + min(self.num_tokens, room)]) if at is not None else ()

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept of a sequence that is done."""
        self._places.pop(sequence.id, None)

"""Tokenised examples, stored ragged: one flat array of ids and where each example starts.

Shapes: T = all tokens, N = examples. A million short examples cost a few large arrays, not a
million small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IGNORED = -100  # label of a token that is not trained, as everywhere in Hugging Face


@dataclass(frozen=True, kw_only=True)
class Examples:
    """input_ids int32 [T], offsets int64 [N + 1] and one kind of label.

    token_labels: int32 [T], -100 = not trained, not shifted; the first token of an example is never
    trained, since nothing predicts it. row_labels: int32 or float32 [N]. token_type_ids: int32 [T]
    where the tokenizer makes them.
    """

    input_ids: np.ndarray
    offsets: np.ndarray
    token_labels: np.ndarray | None = None
    row_labels: np.ndarray | None = None
    token_type_ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_supervised(self) -> int:
        """Trained tokens; for classification, examples."""
        if self.token_labels is None:
            return len(self)
        return int(np.count_nonzero(self.token_labels != IGNORED))

    def span(self, i: int) -> slice:
        """Where example i stands in the flat arrays."""
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))

    def take(self, indices: Sequence[int] | np.ndarray) -> Examples:
        """These examples, in this order."""
        spans = [self.span(int(i)) for i in indices]

        def gather(flat: np.ndarray | None) -> np.ndarray | None:
            return None if flat is None else ragged([flat[span] for span in spans])[0]

        ids, offsets = ragged([self.input_ids[span] for span in spans])
        return Examples(
            input_ids=ids,
            offsets=offsets,
            token_labels=gather(self.token_labels),
            row_labels=None if self.row_labels is None else self.row_labels[np.asarray(indices)],
            token_type_ids=gather(self.token_type_ids),
        )


def ragged(parts: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sequences -> (flat int32 [T], offsets int64 [N + 1])."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    flat = np.concatenate([np.asarray(part, np.int32) for part in parts]) if parts else np.zeros(0)
    return flat.astype(np.int32, copy=False), offsets

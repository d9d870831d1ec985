"""Which tokens a masked language model has to predict, drawn anew in every epoch.

BERT's rule (Devlin et al. 2018): of the tokens drawn, 80 % become the mask token, 10 % a random
one, 10 % stay. What is drawn for a row follows from (seed, epoch, row) alone: not from the batch,
the bucket or the process it stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.data.examples import IGNORED
from headrace.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Masking:
    """probability: share of tokens drawn. vocabulary: random tokens are below it."""

    probability: float
    mask_token_id: int
    vocabulary: int
    replaced: float = 0.8
    random: float = 0.1

    def apply(
        self, batch: dict[str, np.ndarray], rows: Sequence[int] | np.ndarray, draw: Sequence[int]
    ) -> None:
        """Mask `batch` in place: its labels name what may be drawn, and after that what was."""
        for b, row in enumerate(rows):
            if row < 0:
                continue
            rng = np.random.default_rng([*draw, int(row)])
            (places,) = np.nonzero(batch["labels"][b] != IGNORED)
            fate = rng.random(len(places))
            kind = rng.random(len(places))
            noise = rng.integers(0, self.vocabulary, len(places), dtype=np.int32)
            drawn = fate < self.probability
            batch["labels"][b, places[~drawn]] = IGNORED
            masked = places[drawn & (kind < self.replaced)]
            swapped = drawn & (kind >= self.replaced) & (kind < self.replaced + self.random)
            batch["input_ids"][b, masked] = self.mask_token_id
            batch["input_ids"][b, places[swapped]] = noise[swapped]


def masking_for(tokenizer: PreTrainedTokenizerBase, probability: float) -> Masking:
    """The masking a tokenizer allows; DataError when it has no mask token."""
    mask = tokenizer.mask_token_id
    if not isinstance(mask, int):
        raise DataError(
            f"{type(tokenizer).__name__} has no mask token; task masked-lm needs one of a "
            "masked language model (BERT, RoBERTa, ...)"
        )
    return Masking(probability=probability, mask_token_id=mask, vocabulary=tokenizer.vocab_size)

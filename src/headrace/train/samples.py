"""Answers to a few fixed evaluation prompts, so that a log shows text and not only numbers.

Greedy, with the whole buffer computed for every token (evaluate/decode.py): simple, exact, and slow
for long answers. Compiled once; the weights are arguments.

Knows: prompts of evaluation rows. Does not know: when samples are due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from headrace.data.examples import IGNORED, Examples
from headrace.errors import CaptureError
from headrace.evaluate.decode import decode_greedy, default_eos_token_ids
from headrace.evaluate.model import EvalModel
from headrace.train.setup import Run
from headrace.train.state import TrainState, cast_params

PROMPT_OF_TEXT = 32  # tokens of a text without a prompt that are given to be continued
BUFFER_MULTIPLE = 32


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One evaluation row: what the model is given, what it should say, what it says."""

    prompt: str
    expected: str
    answer: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class Sampler:
    """`sampler(state) -> samples` for the first `count` evaluation rows."""

    def __init__(self, run: Run, *, count: int, max_new_tokens: int) -> None:
        assert run.data.eval is not None
        self._run = run
        rows = run.data.eval.rows
        first = [int(rows.packing.row(i)[0]) for i in range(min(count, len(rows)))]
        self._pairs = [_split(rows.examples, i) for i in first]
        self._model = _eval_model(run)
        longest = max(len(prompt) for prompt, _ in self._pairs)
        size = -(-(longest + max_new_tokens) // BUFFER_MULTIPLE) * BUFFER_MULTIPLE
        self._tokens = np.zeros((len(self._pairs), size), np.int32)
        for row, (prompt, _) in zip(self._tokens, self._pairs, strict=True):
            row[: len(prompt)] = prompt
        self._lengths = np.asarray([len(prompt) for prompt, _ in self._pairs], np.int32)
        ends = default_eos_token_ids(self._model)
        model = self._model

        def decode(params: Any, buffers: Any, tokens: Any, lengths: Any) -> Any:
            return decode_greedy(model, params, buffers, tokens, lengths, ends, max_new_tokens)

        self._decode = jax.jit(decode)

    def __call__(self, state: TrainState) -> list[Sample]:
        params = {**cast_params(state.trainable, self._run.dtypes), **self._run.frozen}
        found, stops = jax.device_get(
            self._decode(params, state.buffers, self._tokens, self._lengths)
        )
        return [
            Sample(
                prompt=self._text(prompt),
                expected=self._text(expected),
                answer=self._text(row[len(prompt) : stop].tolist()),
            )
            for (prompt, expected), row, stop in zip(self._pairs, found, stops, strict=True)
        ]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._run.processing_class.decode(ids, skip_special_tokens=True))


def _split(examples: Examples, i: int) -> tuple[list[int], list[int]]:
    """(prompt, answer) of an example; a text is cut in its first half."""
    span = examples.span(i)
    ids = examples.input_ids[span].tolist()
    assert examples.token_labels is not None
    first = int((examples.token_labels[span] != IGNORED).argmax())
    if first < 2:
        first = max(1, min(PROMPT_OF_TEXT, len(ids) // 2))
    return ids[:first], ids[first:]


def _eval_model(run: Run) -> EvalModel:
    module, head = run.module, None
    try:
        if run.module.program.dynamic:
            module, head = run.module.without_head()
    except CaptureError:
        module = run.module  # whole logits: the same numbers, more memory
    return EvalModel(
        torch_model=run.model,
        module=module,
        head=head,
        params={},
        buffers={},
        tokenizer=run.processing_class,
        inputs=run.objective.inputs,
    )

"""A model as lm-evaluation-harness takes it: `lm_eval.simple_evaluate(model=HarnessModel(model))`.

The harness (an optional dependency: pip install headrace[harness]) brings tasks and their scores;
here stand its three questions: how likely is a continuation, or a text, and what comes next.
Token ids are padded to a few lengths, longest first, so that few programs are compiled and what
does not fit in memory fails at once.

Knows: the harness's classes, scoring and greedy decoding. Does not know: tasks.
Shapes: B = requests in a batch, S = padded length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import TemplateLM

from headrace.errors import ConfigError
from headrace.evaluate.decode import decode_greedy, default_eos_token_ids
from headrace.evaluate.model import EvalModel
from headrace.evaluate.score import causal_step

_MULTIPLE = 64
_NEW_TOKENS = 256  # of a task that does not say


class HarnessModel(TemplateLM):
    """An EvalModel of a causal language model, as the harness asks it.

    batch_size: requests scored at once. max_length: longest context and continuation in tokens;
    the model's positions by default. Longer requests lose their beginning.
    """

    def __init__(
        self, model: EvalModel, *, batch_size: int = 8, max_length: int | None = None
    ) -> None:
        super().__init__()
        config: Any = model.torch_model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or 2048
        if max_length is not None and max_length > positions:
            raise ConfigError(
                f"max_length is {max_length:,}; the model has {positions:,} positions"
            )
        self.model, self.tokenizer = model, model.tokenizer
        self.batch_size, self.max_length = batch_size, min(max_length or positions, positions)
        self._decoders: dict[int, Any] = {}
        self._step = jax.jit(
            lambda params, buffers, batch: causal_step(model, params, buffers, batch)
        )

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        special = True if add_special_tokens is None else add_special_tokens
        return self.tokenizer(string, add_special_tokens=special)["input_ids"]

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding would say it) of each continuation."""
        del disable_tqdm, kwargs
        return self._scores([(context, answer) for _, context, answer in requests])

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts; long ones in windows that keep one token of context."""
        del disable_tqdm
        texts = [self.tok_encode(r.args[0], add_special_tokens=False) for r in requests]
        windows = [list(self._windows(ids)) for ids in texts]
        scores = iter(self._scores([window for parts in windows for window in parts]))
        return [sum(next(scores)[0] for _ in parts) for parts in windows]

    def _windows(self, ids: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        size = self.max_length - 1
        before = self.prefix_token_id
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            yield [before], part
            before = part[-1]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers up to a stop text; sampling is refused."""
        del disable_tqdm
        answers: list[str] = []
        for request in requests:
            context, options = request.args
            if options.get("do_sample") and options.get("temperature", 1.0) > 0:
                raise ConfigError("this task samples; only greedy decoding is exact and offered")
            until = options.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            count = int(options.get("max_gen_toks", _NEW_TOKENS))
            room = max(self.max_length - count, 1)
            prompt = self.tok_encode(context)[-room:]
            ids = self._generate(prompt, count)
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            answers.append(_until(text, stops))
        return answers

    def _generate(self, prompt: list[int], count: int) -> list[int]:
        """Greedy continuation of one prompt; compiled once for each (count, padded length)."""
        if count not in self._decoders:
            ends = default_eos_token_ids(self.model)
            self._decoders[count] = jax.jit(
                lambda params, buffers, tokens, lengths: decode_greedy(
                    self.model, params, buffers, tokens, lengths, ends, count
                )
            )
        size = -(-(len(prompt) + count) // _MULTIPLE) * _MULTIPLE
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(prompt)] = prompt
        lengths = np.asarray([len(prompt)], np.int32)
        model = self.model
        found, stop = self._decoders[count](model.params, model.buffers, tokens, lengths)
        return np.asarray(found)[0, len(prompt) : int(stop[0])].tolist()

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            batch = self._batch([pairs[i] for i in chosen])
            result = self._step(self.model.params, self.model.buffers, batch)
            nll_B, count_B, hit_B = jax.device_get(result)
            for row, i in enumerate(chosen):
                found[i] = (-float(nll_B[row]), bool(hit_B[row] == count_B[row]))
        return found

    def _batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, np.ndarray]:
        rows = [(context + answer)[-self.max_length :] for context, answer in pairs]
        longest = max(len(row) for row in rows)
        size = min(-(-longest // _MULTIPLE) * _MULTIPLE, self.max_length)
        shape = (self.batch_size, size)
        batch = {
            "input_ids": np.zeros(shape, np.int32),
            "labels": np.full(shape, -100, np.int32),
            "position_ids": np.tile(np.arange(size, dtype=np.int32), (self.batch_size, 1)),
        }
        for b, (row, (_, answer)) in enumerate(zip(rows, pairs, strict=True)):
            batch["input_ids"][b, : len(row)] = row
            first = max(len(row) - len(answer), 1)
            batch["labels"][b, first : len(row)] = row[first:]
        return batch


def _until(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop that occurs."""
    places = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(places)] if places else text

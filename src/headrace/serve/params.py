"""What a request asks of sampling, checked once, with all problems in one message.

Names and ranges are those of the OpenAI API and of vLLM's extensions to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import ConfigError

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_N = 64

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """What an answer must match. source: a JSON schema as text, a regular expression, ..."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one answer is drawn.

    temperature: 0 takes the most likely token. top_k: 0 or -1 is off. min_p: least probability as a
    share of the largest. repetition_penalty: 1 is off; counts the prompt too, as in transformers.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens already written, as in
    the OpenAI API. seed: same seed and prompt, same answer, whoever else is in the batch; None
    draws one. max_tokens: None is what the context leaves. stop: strings that end the answer and
    are kept out of it. logprobs: alternatives a token, None for none at all. prompt_logprobs: the
    same for the tokens of the prompt. logit_bias: token id -> added to its logit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def shapes_logits(self) -> bool:
        """Whether penalties, biases or a grammar change the logits before a token is drawn."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
            or self.min_tokens > 0
            or self.grammar is not None
        )


def _problems(p: SamplingParams) -> list[str]:
    found: list[str] = []

    def need(holds: bool, name: str, value: Any, wanted: str) -> None:
        if not holds:
            found.append(f"{name} is {value!r}; {wanted}")

    def number(name: str, low: float, high: float, wanted: str, *, open_low: bool = False) -> None:
        value = getattr(p, name)
        inside = low < value <= high if open_low else low <= value <= high
        need(inside, name, value, wanted)  # NaN compares false, so it is refused too

    number("temperature", 0.0, 100.0, "it is a number from 0 to 100")
    number("top_p", 0.0, 1.0, "it is above 0 and at most 1", open_low=True)
    number("min_p", 0.0, 1.0, "it is from 0 to 1")
    number("repetition_penalty", 0.0, 100.0, "it is above 0, at most 100", open_low=True)
    number("presence_penalty", -2.0, 2.0, "it is from -2 to 2")
    number("frequency_penalty", -2.0, 2.0, "it is from -2 to 2")
    need(p.top_k >= -1, "top_k", p.top_k, "it is 0 or -1 (off), or the number of tokens kept")
    need(1 <= p.n <= MAX_N, "n", p.n, f"it is from 1 to {MAX_N}")
    need(p.n == 1 or not p.greedy, "n", p.n, "it must be 1 with temperature 0: all would be equal")
    need(p.max_tokens is None or p.max_tokens >= 1, "max_tokens", p.max_tokens, "it is at least 1")
    need(p.min_tokens >= 0, "min_tokens", p.min_tokens, "it is at least 0")
    enough = p.max_tokens is None or p.min_tokens <= p.max_tokens
    need(enough, "min_tokens", p.min_tokens, f"max_tokens is {p.max_tokens}")
    need(len(p.stop) <= MAX_STOPS, "stop", len(p.stop), f"at most {MAX_STOPS} strings are allowed")
    need(all(p.stop), "stop", p.stop, "a stop string cannot be empty")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        need(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"0 to {MAX_LOGPROBS}")
    need(p.seed is None or -(2**63) <= p.seed < 2**63, "seed", p.seed, "it has 64 bits")
    bias = list(p.logit_bias.values())
    need(all(-100 <= b <= 100 for b in bias), "logit_bias", bias, "values are from -100 to 100")
    return found

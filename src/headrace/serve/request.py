"""One answer in the making, and what is told about it.

Knows: tokens, pages it holds, why it ended. Does not know: devices, HTTP, other requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.serve.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token's log-probability and the most likely ones: (id, log-probability) pairs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """News of one answer: tokens and text since the last one.

    finish_reason: None while it goes on. stop_reason: the stop string or token id that ended it.
    prompt_logprobs: with the first news, one entry a prompt token (None for the first).
    num_cached: prompt tokens whose keys and values were already there.
    """

    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt: int = 0
    num_generated: int = 0
    num_cached: int = 0
    error: str = ""


Sink = Callable[[Delta], None]


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One answer. `computed`: tokens whose keys and values are in the cache.

    held: the adapter it uses, lora_slot its slot. slot: row of the engine's tables while running,
    -1 before. root: what its cached pages hang on (version of the adapter), node: what its next
    full page hangs on. leader: the sequence of the same prompt that prefills first (n > 1).
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    sink: Sink
    max_tokens: int
    index: int = 0
    held: Any = None
    lora_slot: int = 0
    root: Any = None
    leader: Sequence | None = None
    text: Any = None
    matcher: Any = None
    matcher_done: bool = False
    loop: Any = None
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    node: Any = None
    computed: int = 0
    num_cached: int = 0
    cancelled: bool = False
    prompt_told: bool = False
    ended: bool = False
    finished: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_scores: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def ready_to_decode(self) -> bool:
        """Whether all but the last token are in the cache."""
        return self.computed == len(self.tokens) - 1

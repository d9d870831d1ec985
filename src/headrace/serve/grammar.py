"""Answers that must match a JSON schema, a regular expression or a grammar, through llguidance.

llguidance walks the grammar by tokens and says, before each token, which ones may follow; the
sampler masks all others. Knows: llguidance, tokenizers. Does not know: devices, requests.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.serve.params import Grammar


class GrammarCompiler:
    """Turns grammars into matchers for one tokenizer; made once, it reads the whole vocabulary."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError(
                "structured output needs the package llguidance; install headrace[serve]"
            ) from error
        self._vocab_size = vocab_size
        try:
            self._tokenizer: Any = from_tokenizer(tokenizer, n_vocab=vocab_size)
        except Exception as error:
            raise ConfigError(
                f"structured output does not work with this model's tokenizer: {error}"
            ) from error

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of the grammar. Raises ConfigError for a wrong grammar."""
        from llguidance import LLMatcher

        source = _to_llguidance(grammar)
        problem = LLMatcher.validate_grammar(source, self._tokenizer)
        if problem:
            raise ConfigError(f"the {grammar.kind} cannot be used: {_short(problem)}")
        return Matcher(LLMatcher(self._tokenizer, source), self._vocab_size)


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, inner: Any, vocab_size: int) -> None:
        self._inner = inner
        self._words = -(-vocab_size // 32)

    def fill(self, bits_W: np.ndarray) -> None:
        """Set the bits of the tokens that may come next."""
        import llguidance.numpy as bitmask

        row = np.zeros((1, self._words), np.int32)
        bitmask.fill_next_token_bitmask(self._inner, row, 0)
        bits_W[: self._words] = row[0]
        if self._inner.is_error():
            raise ConfigError(f"the grammar failed: {_short(self._inner.get_error())}")

    def take(self, token_id: int) -> bool:
        """Move on by a token; True when the answer is complete and nothing may follow."""
        self._inner.consume_token(token_id)
        return bool(self._inner.is_stopped())


def _to_llguidance(grammar: Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            values: list[str] = json.loads(grammar.source)
            return grammar_from("lark", "start: " + " | ".join(json.dumps(v) for v in values))
        case "lark":
            return grammar_from("lark", grammar.source)


def _short(text: str) -> str:
    return " ".join(str(text).split())[:300]

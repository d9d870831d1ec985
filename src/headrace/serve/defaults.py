"""What a model's authors put into generation_config.json, as settings of a request that has none.

Greedy only where the file says do_sample: false; a file that does not say leaves the API's own
default, temperature 1. Knows: transformers' GenerationConfig. Does not know: requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.serve.params import SamplingParams

_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Settings that change which tokens are drawn and that the engine does not have, with the value that
# turns each off (None and False always do).
_NOT_HERE: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "force_words_ids": None,
    "constraints": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "token_healing": None,
    "dola_layers": None,
}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """sampling: fields of SamplingParams. stop: strings that always end an answer. max_tokens: of
    a chat that asks for no number. unused: settings that the engine does not have.
    """

    sampling: dict[str, Any]
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    unused: tuple[str, ...] = ()


def generation_defaults(config: Any) -> GenerationDefaults:
    """The defaults of a GenerationConfig, or of None.

    Raises ConfigError when a value is out of range.
    """
    if config is None:
        return GenerationDefaults(sampling={})
    given: dict[str, Any] = config.to_diff_dict()
    sampling = {n: v for n in _SAME_NAME if (v := given.get(n)) is not None}
    if given.get("do_sample") is False:
        sampling["temperature"] = 0.0
    SamplingParams(**sampling)  # refuses what no request could use
    unused = [n for n, off in _NOT_HERE.items() if given.get(n) not in (None, False, off)]
    return GenerationDefaults(
        sampling=sampling,
        stop=_strings(given.get("stop_strings")),
        max_tokens=given.get("max_new_tokens"),
        unused=tuple(unused),
    )


def end_ids(config: Any, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of the generation configuration and the tokenizer together."""
    found = getattr(config, "eos_token_id", None)
    listed: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found]
    listed.append(getattr(tokenizer, "eos_token_id", None))
    return tuple(sorted({int(each) for each in listed if each is not None}))


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)

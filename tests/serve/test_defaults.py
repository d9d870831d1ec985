"""generation_config.json as it is found on the hub, against transformers' own reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from headrace.errors import ConfigError
from headrace.serve.api.protocol import ChatRequest
from headrace.serve.defaults import end_ids, generation_defaults

# The files of Llama 3.1 Instruct, Qwen 3, Gemma 3, GPT-2, a greedy one, and one with much in it.
LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [128001, 128008]}
QWEN = {"do_sample": True, "eos_token_id": [5, 3], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
GEMMA = {"do_sample": True, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 106]}
GPT2 = {"_from_model_config": True, "bos_token_id": 50256, "eos_token_id": 50256}
GREEDY = {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1, "eos_token_id": 2}
MUCH = {
    "do_sample": True,
    "num_beams": 4,
    "no_repeat_ngram_size": 3,
    "typical_p": 0.9,
    "num_return_sequences": 1,
    "bad_words_ids": [[1]],
    "max_new_tokens": 40,
    "stop_strings": "END",
}


def read(folder: Path, values: dict[str, Any]) -> GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return GenerationConfig.from_pretrained(str(folder))


@pytest.mark.parametrize("values", [LLAMA, QWEN, GEMMA, GPT2, GREEDY], ids=str)
def test_defaults_are_those_that_transformers_reads(tmp_path: Path, values: dict[str, Any]) -> None:
    config = read(tmp_path, values)
    found = generation_defaults(config)
    params = ChatRequest(messages=[{"role": "user", "content": "x"}]).sampling(
        found, max_tokens=None, logprobs=None
    )
    assert params.greedy == (values.get("do_sample") is False)
    if not params.greedy:
        assert params.temperature == (config.temperature or 1.0)
    assert params.top_p == (config.top_p or 1.0)
    assert params.top_k == (config.top_k or 0)
    assert params.repetition_penalty == (config.repetition_penalty or 1.0)
    assert found.unused == ()
    given = config.eos_token_id
    assert end_ids(config, None) == tuple(sorted(given if isinstance(given, list) else [given]))


def test_what_the_engine_lacks_is_named_and_limits_are_taken(tmp_path: Path) -> None:
    found = generation_defaults(read(tmp_path, MUCH))
    assert set(found.unused) == {"num_beams", "no_repeat_ngram_size", "typical_p", "bad_words_ids"}
    assert (found.max_tokens, found.stop) == (40, ("END",))
    assert found.sampling == {}
    request = ChatRequest(
        messages=[{"role": "user", "content": "x"}], stop=["\n", "END"], temperature=0.3, seed=1
    )
    params = request.sampling(found, max_tokens=7, logprobs=None)
    assert (params.temperature, params.stop, params.max_tokens) == (0.3, ("\n", "END"), 7)
    assert generation_defaults(None).sampling == {}


def test_values_that_no_request_could_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="temperature is -1"):
        generation_defaults(read(tmp_path, {"temperature": -1, "do_sample": True}))

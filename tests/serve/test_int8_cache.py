"""Keys and values in int8: token for token against transformers with the same rounding, and close
to the float cache on a trained model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from conftest import BASE, tiny_llama
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headrace.errors import ConfigError
from headrace.serve import Engine, EngineOptions, SamplingParams, capture_for_serving
from headrace.serve.model import ServedModel
from headrace.serve.options import choose_shapes
from headrace.serve.shapes import choose_forms

OPTIONS = EngineOptions(
    max_model_len=96,
    max_num_seqs=2,
    page_size=4,
    max_batched_tokens=32,
    kv_cache_dtype="int8",
    warm_up=False,
)
TASK = BASE.parent / "test.jsonl"
PROMPTS = [[5, 9, 200, 17, 33, 8, 4, 91, 12] * 5, [7, 7, 300, 41]]


def _rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


def _rounding_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> Any:
    return sdpa_attention_forward(module, query, _rounded(key), _rounded(value), mask, **options)


@pytest.fixture
def rounding() -> Iterator[str]:
    """The name of an attention of transformers that rounds keys and values."""
    AttentionInterface.register("sdpa_rounded", _rounding_attention)
    yield "sdpa_rounded"
    del AttentionInterface._global_mapping["sdpa_rounded"]


@pytest.mark.parametrize("form", ["gather", "triton"])
def test_greedy_tokens_equal_those_of_rounded_keys(
    rounding: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`triton` is what a GPU takes; here its kernel is interpreted."""
    monkeypatch.setattr("headrace.serve.shapes._form", lambda *_: form)
    model = tiny_llama()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with Engine(model, options=replace(OPTIONS, roll=True)) as engine:
        first = [a[0].token_ids for a in engine.generate(PROMPTS, params)]
        again = [a[0].token_ids for a in engine.generate(PROMPTS, params)]
        assert engine.stats.cached_tokens > 0
        engine.check_invariants()
    model.set_attn_implementation(rounding)
    model.generation_config.eos_token_id = None
    want = [
        model.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False)[0, len(p) :].tolist()
        for p in PROMPTS
    ]
    assert first == want
    assert again == want


def test_a_trained_model_says_nearly_the_same() -> None:
    rows = [json.loads(line) for line in TASK.read_text().splitlines()[:3]]
    model: Any = AutoModelForCausalLM.from_pretrained(str(BASE), dtype="float32")
    options = replace(OPTIONS, dtype="float32", page_size=16, max_num_seqs=1)
    with Engine(str(BASE), options=options) as engine:
        texts = [engine.encode(row["prompt"] + row["completion"]) for row in rows]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        scored = engine.generate(texts, params)
    apart: list[float] = []
    for ids, answers in zip(texts, scored, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        want = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        got = [p.logprob for p in answers[0].prompt_logprobs[1:]]
        apart += np.abs(np.array(got) - want).tolist()
    assert 1e-4 < np.mean(apart) < 0.02  # 0.011 over 24 rows; bfloat16 weights move it by 0.013
    assert max(apart) < 0.4


@pytest.fixture(scope="module")
def served(llama: Any) -> ServedModel:
    return capture_for_serving(llama)


def test_the_same_memory_holds_more_pages(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.serve.options._host_memory", lambda: 4 * 400_000)
    numbers = {
        kind: choose_shapes(
            served, replace(OPTIONS, max_num_seqs=1000, kv_cache_dtype=kind)
        ).num_pages
        - 1
        for kind in ("auto", "int8")
    }
    # 2 layers of 2 heads of 8 numbers, key and value: 256 bytes a token against 64 and 32 of scales
    assert numbers == {"auto": 400_000 // (4 * 256), "int8": 400_000 // (4 * 96)}


def test_what_cannot_be_is_refused(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int4'; it is one of auto, int8"):
        replace(OPTIONS, kv_cache_dtype="int4")  # pyright: ignore[reportArgumentType]
    shapes = choose_shapes(served, OPTIONS)
    entries = list(served.entries.values())
    assert set(choose_forms(entries, shapes).values()) == {"gather"}
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ConfigError, match="takes one number for all keys"):
        choose_forms(entries, shapes)

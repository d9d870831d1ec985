"""Serving plans against sums by hand and published runs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig

from headrace.cli.app import run
from headrace.config import TrainConfig
from headrace.errors import ConfigError
from headrace.plan.serving import PUBLISHED, Traffic, serving_plan

MODELS = Path(__file__).parents[2] / "examples" / "planning"


def plan_of(model: str | Path, slice_name: str, **options):
    return serving_plan(TrainConfig(model_name_or_path=str(model)), slice_name, **options)


def llama(folder: Path) -> Path:
    LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, dtype="bfloat16", tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    return folder


# https://docs.vllm.ai TPU recipes, sglang-jax cookbook: mean time of an output token in ms
@pytest.mark.parametrize(
    ("model", "slice_name", "prompt", "answer", "streams", "measured"),
    [
        ("llama-3.1-70b", "v6e-8", 1000, 1000, 64, 25.35),
        ("llama-3.1-70b", "v6e-8", 1000, 1000, 128, 35.12),
        ("llama-3.1-8b", "v6e-4", 512, 512, 16, 9.94),
    ],
)
def test_published_runs_lie_in_the_range(model, slice_name, prompt, answer, streams, measured):
    traffic = Traffic(prompt=prompt, answer=answer, streams=streams)
    plan = plan_of(MODELS / model, slice_name, traffic=traffic, tensor=int(slice_name[-1]))
    best = plan.load(streams).token * 1e3
    assert PUBLISHED[0] * best <= measured <= PUBLISHED[1] * best
    assert plan.fits


def test_bytes_by_hand(tmp_path):
    plan = plan_of(llama(tmp_path), "v5e-4", tensor=4)
    head = 256 // 8
    # two key/value heads on four chips: each chip keeps one whole head, twice copied
    assert plan.token_bytes == 4 * 2 * 1 * head * 2
    attention = 256 * 256 * 2 + 2 * 256 * 2 * head
    size = 4 * (attention + 3 * 256 * 512 + 2 * 256) + 1000 * 256 + 256
    assert plan.weights == size * 2 // 4
    assert sum(plan.memory.values()) <= plan.hardware.chip.hbm_bytes
    one = plan_of(tmp_path, "v5e-4", tensor=1)
    assert (one.replicas, one.token_bytes) == (4, 4 * 2 * 2 * head * 2)
    eight_bits = plan_of(tmp_path, "v5e-4", tensor=1, quantization="int8")
    assert (eight_bits.token_bytes, eight_bits.weights * 2) == (one.token_bytes, one.weights)
    cached = plan_of(tmp_path, "v5e-4", tensor=1, kv_cache_dtype="int8")
    assert cached.token_bytes == 4 * 2 * 2 * (head + 4)
    assert cached.cache_tokens > 1.7 * one.cache_tokens
    assert cached.load(64).step < one.load(64).step
    with pytest.raises(ConfigError, match="kv_cache_dtype 'fp8' is not known; it is auto or int8"):
        plan_of(tmp_path, "v5e-4", kv_cache_dtype="fp8")


def test_more_streams_give_more_tokens_and_slower_ones(tmp_path):
    loads = plan_of(llama(tmp_path), "v5e-1").loads()
    assert [x.streams for x in loads[:3]] == [1, 8, 16]
    assert all(a.token < b.token for a, b in itertools.pairwise(loads))
    rates = [x.tokens_per_second for x in loads]
    assert rates == sorted(rates)


def test_experts_that_no_token_chose_are_not_read(tmp_path):
    MixtralConfig(num_hidden_layers=2, num_local_experts=8, dtype="bfloat16").save_pretrained(
        tmp_path
    )
    plan = plan_of(tmp_path, "v6e-1", tensor=1)
    one, many = plan.load(1), plan.load(64)
    # one token reads two of eight experts, sixty-four read all
    assert 2.0 < many.step / one.step < 4.0


def test_too_small_a_slice_and_wrong_sizes(tmp_path):
    assert not plan_of(MODELS / "llama-3.1-70b", "v5e-4").fits
    with pytest.raises(ConfigError, match=r"tensor 3 does not divide 4 devices"):
        plan_of(llama(tmp_path), "v5e-4", tensor=3)
    with pytest.raises(ConfigError, match="encoder"):
        plan_of(MODELS / "bert-base-uncased", "v5e-1")


def test_the_command(tmp_path, capsys):
    recipe = ["plan", "--model_name_or_path", str(llama(tmp_path)), "--serve", "--no-compile"]
    assert (
        run([*recipe, "--slice", "v6e-1,h100-1", "--format", "json", "--kv-cache-dtype", "int8"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [entry["slice"] for entry in found] == ["v6e-1", "h100-1"]
    assert found[0]["kv_bytes_per_token_per_device"] == 4 * 2 * 2 * (32 + 4)
    assert found[0]["loads"][0]["usd_per_million_tokens"] > 0
    assert run([*recipe, "--slice", "v6e-1"]) == 0
    text = capsys.readouterr().out
    assert "NOT COMPILED" in text
    assert "tokens/s" in text
    assert max(map(len, text.splitlines())) <= 100
    recipe[2] = str(MODELS / "llama-3.1-70b")
    assert run([*recipe, "--slice", "v5e-4"]) == 3

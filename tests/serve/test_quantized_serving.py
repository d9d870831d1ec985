"""Weights stored in 8 and 4 bits, with an adapter in a slot, against transformers and PEFT on the
same rounded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model

from headrace.errors import ConfigError
from headrace.kernels.quantized import Quantization, dequantize, quantize
from headrace.serve import Engine, EngineOptions, SamplingParams

PROMPTS = [[5, 9, 200, 17, 33, 8, 4, 91, 12], [7, 7, 300, 41]]


def rounded(format_name: str) -> Any:
    """The tiny Llama with every linear weight but the head's as its codes say."""
    model = tiny_llama()
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            stored = quantize(
                jnp.asarray(layer.weight.detach().numpy()), Quantization(format=format_name)
            )
            layer.weight.data = torch.tensor(np.array(dequantize(stored)))
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.eval().generate(input_ids=ids, max_new_tokens=8, do_sample=False, pad_token_id=1)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("format_name", ["int4", "nf4"])
def test_four_bits_answer_as_their_rounded_weights(format_name: str) -> None:
    options = EngineOptions(
        max_model_len=16,
        max_num_seqs=1,
        page_size=4,
        max_batched_tokens=16,
        quantization=format_name,
        warm_up=False,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with Engine(tiny_llama(), options=options) as engine:
        found = engine.generate(PROMPTS[1:], params)[0][0].token_ids
    assert found == greedy(rounded(format_name), PROMPTS[1])
    assert found != greedy(tiny_llama(), PROMPTS[1])


@pytest.mark.parametrize("format_name", ["int8"])
def test_answers_equal_those_of_the_rounded_weights(format_name: str, tmp_path: Path) -> None:
    tuned: Any = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    tuned.save_pretrained(str(tmp_path / "a"))
    options = EngineOptions(
        max_model_len=32,
        max_num_seqs=2,
        page_size=4,
        max_batched_tokens=16,
        quantization=format_name,
        warm_up=False,
    )
    whole = sum(p.numel() * 4 for p in tiny_llama().parameters())
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with Engine(tiny_llama(), adapters={"a": tmp_path / "a"}, options=options) as engine:
        assert engine.model.num_bytes < 0.95 * whole  # most of a tiny model is its embeddings
        plain = [a[0].token_ids for a in engine.generate(PROMPTS, params)]
        adapted = [a[0].token_ids for a in engine.generate(PROMPTS, params, adapter="a")]
    assert plain == [greedy(rounded(format_name), p) for p in PROMPTS]
    wanted: Any = PeftModel.from_pretrained(rounded(format_name), str(tmp_path / "a"))
    assert adapted == [greedy(wanted, p) for p in PROMPTS]
    assert adapted != plain


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="quantization is 'int3'; it is int8, int4, nf4"):
        EngineOptions(quantization="int3")
    with pytest.raises(ConfigError, match="leave out tensor_parallel_size"):
        EngineOptions(quantization="int8", tensor_parallel_size=2)

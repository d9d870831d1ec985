"""A tiny Llama with the tokenizer that ships with the demo, and one engine for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from headrace.serve import Engine, EngineOptions, capture_for_serving

BASE = Path(__file__).parents[2] / "examples" / "reminders" / "base"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_llama(seed: int = 0) -> Any:
    """Random float32 weights, large enough that logits differ clearly; no end token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=1,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
    return model


@pytest.fixture(scope="session")
def llama() -> Any:
    return tiny_llama()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(str(BASE))
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="session")
def engine(llama: Any, tokenizer: Any) -> Iterator[Engine]:
    """Four rows, pages of four tokens, 16 prompt tokens a step, three guesses a step."""
    served = capture_for_serving(llama, tokenizer=tokenizer, name="tiny")
    options = EngineOptions(
        max_model_len=160,
        max_num_seqs=4,
        page_size=4,
        max_batched_tokens=32,
        cache_tokens=480,
        max_queue=16,
        max_loras=2,
        max_lora_rank=4,
        speculative_tokens=3,
        warm_up=False,
    )
    with Engine(served, options=options) as running:
        yield running
        running.check_invariants()

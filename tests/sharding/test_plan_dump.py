"""The plan of every family, against a dump in the repository.

To write the dumps anew after a deliberate change: HEADRACE_UPDATE=1 pytest tests/sharding.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from headrace.bridge.module import to_jax
from headrace.sharding import MeshConfig, plan_params
from headrace.sharding.table import shard_table, shard_totals
from headrace.train.lora import apply_lora
from headrace.weights import meta_model

DUMPS = Path(__file__).parent / "plans"
DECODER: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
MESH = MeshConfig(fsdp=2, tensor=4)


def _lora_llama() -> Any:
    from peft import LoraConfig

    model = meta_model(tf.LlamaConfig(**DECODER))
    return apply_lora(model, LoraConfig(r=4, target_modules="all-linear"))[0].get_base_model()


CASES: dict[str, Any] = {
    "llama-lora": _lora_llama,
    "gemma3": lambda: meta_model(
        tf.Gemma3TextConfig(
            **DECODER, head_dim=16, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "qwen3_moe": lambda: meta_model(
        tf.Qwen3MoeConfig(
            **DECODER, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        )
    ),
    "bert": lambda: meta_model(
        tf.BertConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=96,
        ),
        task="sequence-classification",
    ),
    "t5": lambda: meta_model(
        tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=96),
        task="AutoModelForSeq2SeqLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_dumped_one(name: str) -> None:
    ids = torch.ones(2, 8, dtype=torch.int64)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
    mesh = MeshConfig(fsdp=2, tensor=2, expert=2) if "moe" in name else MESH
    plans = plan_params(to_jax(CASES[name]().train(), inputs), mesh)
    found = f"{shard_table(plans)}\n{shard_totals(plans, mesh)}\n"
    path = DUMPS / f"{name}.txt"
    if os.environ.get("HEADRACE_UPDATE"):
        DUMPS.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")
    whole = sum(p.bytes for p in plans.values() if p.bytes == p.bytes_per_device)
    unexplained = [
        key for key, p in plans.items() if p.bytes == p.bytes_per_device and not p.reason
    ]
    assert not unexplained and whole < 0.2 * sum(p.bytes for p in plans.values())

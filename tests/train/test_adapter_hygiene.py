"""Adapters and models that are easy to save wrongly: trained, saved, read by stock libraries.

Tied embeddings, new tokens with resized embeddings, experts of a mixture (3-D parameters).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.config import SFTConfig
from headrace.train import SFTTrainer
from headrace.train.lora import serving_notes

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def config(out: Path, **changes: Any) -> SFTConfig:
    settings: dict[str, Any] = {
        "output_dir": str(out), "max_steps": 3, "per_device_train_batch_size": 2,
        "learning_rate": 2e-2, "compilation_cache_dir": None, "max_length": 24, "logging_steps": 1,
        "activation_checkpointing": "none", "save_strategy": "no", "model_card": False,
    }  # fmt: skip
    return SFTConfig(**(settings | changes))


def llama(*, tied: bool, vocabulary: int = tiny.VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=vocabulary, max_position_embeddings=64,
            tie_word_embeddings=tied, pad_token_id=0,
        )
    )  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[2, 5, 7, 11, 6]])).logits


def test_tied_embeddings_are_one_parameter_and_stay_tied(tmp_path: Path) -> None:
    base = tiny.saved(llama(tied=True), tmp_path / "base")
    trainer = SFTTrainer(base, config(tmp_path / "out"), train_dataset=tiny.text_rows(20))
    output = trainer.train()
    assert output.metrics["load_back_max_difference"] < 1e-5
    tables = [key for key in trainer.train_state.trainable if "embed" in key or "lm_head" in key]
    assert len(tables) == 1, "one array, one optimizer slot"
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stock.lm_head.weight is stock.model.embed_tokens.weight
    assert torch.allclose(logits(stock), logits(trainer.model), atol=1e-6)
    assert not torch.allclose(logits(stock), logits(llama(tied=True)), atol=1e-2)


def test_new_tokens_are_trained_and_saved_with_the_adapter(tmp_path: Path) -> None:
    base = llama(tied=False)
    base.save_pretrained(tmp_path / "base")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<tool>", "</tool>"], special_tokens=True)
    base.resize_token_embeddings(len(tokenizer))
    rows = [{"prompt": "the cat", "completion": " <tool> sees dog </tool>"}] * 12
    trainer = SFTTrainer(
        base, config(tmp_path / "out"), train_dataset=rows, processing_class=tokenizer,
        peft_config=LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
        ),
    )  # fmt: skip
    before = base.get_input_embeddings().weight[-2:].detach().clone()
    output = trainer.train()
    assert output.metrics["load_back_max_difference"] < 1e-5
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in saved} >= {"embed_tokens", "lm_head"}
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words.convert_tokens_to_ids("<tool>") == tiny.VOCABULARY
    fresh.resize_token_embeddings(len(words))
    stock = PeftModel.from_pretrained(fresh, tmp_path / "out")
    assert torch.allclose(logits(stock), logits(trainer.model), atol=1e-5)
    learned = stock.get_input_embeddings().weight[-2:].detach()
    assert (learned - before).abs().max() > 1e-3, "the new rows moved"


def test_frozen_new_tokens_and_what_vllm_refuses_are_said_at_the_start(tmp_path: Path) -> None:
    path = tiny.saved(llama(tied=False), tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<tool>", "<unused>"], special_tokens=True)
    base.resize_token_embeddings(len(tokenizer))
    trainer = SFTTrainer(
        base, config(tmp_path / "out"), processing_class=tokenizer,
        train_dataset=[{"prompt": "the cat", "completion": " <tool> sees"}] * 12,
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
    )  # fmt: skip
    said = "\n".join(trainer.run.notes)
    assert f"tokens that {path} does not know (1: <tool>)" in said
    assert "set lora_modules_to_save: [embed_tokens, lm_head]" in said
    assert "vLLM loads no adapter with DoRA; `headrace merge`" in said


def test_notes_for_vllm_are_those_of_its_own_checks() -> None:
    assert serving_notes(LoraConfig(r=16, target_modules=["q_proj"], use_rslora=True)) == []
    (note,) = serving_notes(LoraConfig(r=64, target_modules=["q_proj"]))
    assert "--max-lora-rank 64" in note
    (note,) = serving_notes(LoraConfig(modules_to_save=["lm_head"], bias="all"))
    assert "modules_to_save, bias" in note


def test_experts_of_a_mixture_are_adapted_by_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=tiny.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=12, max_position_embeddings=64,
            pad_token_id=0, eos_token_id=3,
        )
    )  # fmt: skip
    base = tiny.saved(model, tmp_path / "base")
    trainer = SFTTrainer(
        base,
        config(
            tmp_path / "out", use_peft=True, lora_r=2, lora_dropout=0.0,
            lora_target_modules=("q_proj",),
            lora_target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
        train_dataset=tiny.text_rows(20),
    )  # fmt: skip
    output = trainer.train()
    assert output.metrics["load_back_max_difference"] < 1e-5
    assert "gate_up_proj" in capsys.readouterr().out, "what is reached is said"
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    expected = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert set(written["target_parameters"]) == expected
    fresh = Qwen3MoeForCausalLM.from_pretrained(base)
    untouched = logits(fresh).clone()
    stock = PeftModel.from_pretrained(fresh, tmp_path / "out")
    assert torch.allclose(logits(stock), logits(trainer.model), atol=1e-5)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    experts = {k: v for k, v in saved.items() if "experts" in k and "lora_B" in k}
    assert experts and all(np.abs(v).max() > 0 for v in experts.values()), "every expert learned"
    assert not torch.allclose(logits(stock), untouched, atol=1e-3)

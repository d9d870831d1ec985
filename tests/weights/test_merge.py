"""Merging: base + adapter and the merged files must agree, in stock libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from headrace.errors import AdapterError, ConfigError
from headrace.weights import merge_adapter

IDS = torch.arange(1, 13).reshape(1, 12)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def adapter_of(model: Any, folder: Path, **settings: Any) -> Path:
    """A random adapter on `model`, saved; A and B are both filled so that it does something."""
    torch.manual_seed(1)
    peft_model = get_peft_model(model, LoraConfig(r=4, **settings))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    peft_model.save_pretrained(str(folder))
    return folder


def logits(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**(inputs or {"input_ids": IDS})).logits.float()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text('{"a": 1}')
    return tmp_path / "base"


@pytest.mark.parametrize("dora", [False, True])
def test_merged_files_compute_what_the_adapter_computes(
    base: Path, tmp_path: Path, dora: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = adapter_of(
        model, tmp_path / "adapter", target_modules="all-linear", task_type="CAUSAL_LM",
        use_dora=dora,
    )  # fmt: skip
    report = merge_adapter(adapter, tmp_path / "merged")

    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = logits(stock)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.01
    assert report.dtype == "float32"
    assert report.difference <= 1e-4 * report.scale
    assert report.agreement == 1.0
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == '{"a": 1}'
    assert not (tmp_path / "merged.partial").exists()


def test_shards_have_an_index_and_the_base_dtype(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    tiny_llama().to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    adapter = adapter_of(model, tmp_path / "adapter", task_type="CAUSAL_LM")
    report = merge_adapter(adapter, tmp_path / "merged", max_shard_size="20KB")

    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert report.shards == len(set(index["weight_map"].values())) > 1
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    assert report.dtype == "bfloat16"
    assert report.stored_difference > report.difference  # rounding is seen, and reported


def test_a_classifier_keeps_its_head_and_labels(tmp_path: Path) -> None:
    names = {0: "no", 1: "maybe", 2: "yes"}
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, num_labels=3, id2label=names,
        label2id={name: i for i, name in names.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    adapter = adapter_of(
        model, tmp_path / "adapter", target_modules=["query", "value"], task_type="SEQ_CLS"
    )
    fresh = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    expected = logits(PeftModel.from_pretrained(fresh, str(adapter)))
    merge_adapter(adapter, tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert merged.config.id2label == names


def test_a_folder_without_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
        merge_adapter(base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_taken_output_folder_is_left_alone(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = adapter_of(model, tmp_path / "adapter", task_type="CAUSAL_LM")
    before = sorted(path.name for path in base.iterdir())
    with pytest.raises(ConfigError, match="is not empty"):
        merge_adapter(adapter, base)
    assert sorted(path.name for path in base.iterdir()) == before


def test_a_base_that_moved_is_named_in_the_error(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = adapter_of(model, tmp_path / "adapter", task_type="CAUSAL_LM")
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="was trained on it; name its present place"):
        merge_adapter(adapter, tmp_path / "merged")
    merge_adapter(adapter, tmp_path / "merged", base=tmp_path / "elsewhere")


def test_an_adapter_without_weights_is_refused(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = adapter_of(model, tmp_path / "adapter", task_type="CAUSAL_LM")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors"):
        merge_adapter(adapter, tmp_path / "merged")


def test_a_merged_folder_tells_llama_cpp_its_template_and_where_to_stop(tmp_path: Path) -> None:
    """gguf.SpecialVocab is what llama.cpp's converter reads a folder's special tokens with."""
    words = ["<s>", "<|im_start|>", "<|im_end|>", "user", "hi"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    model = tiny_llama()
    model.save_pretrained(tmp_path / "base")
    adapter = adapter_of(
        LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter",
        target_modules=["q_proj"], task_type="CAUSAL_LM",
    )  # fmt: skip
    tokenizer.save_pretrained(adapter)
    model.generation_config.eos_token_id = [2, 4]  # as training leaves it beside the adapter
    model.generation_config.to_json_file(str(adapter / "generation_config.json"))
    merge_adapter(adapter, tmp_path / "merged")
    found = gguf.SpecialVocab(tmp_path / "merged", load_merges=False)
    assert found.chat_template == tokenizer.chat_template
    assert found.special_token_ids["eos"] == 2
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert stock.generation_config.eos_token_id == [2, 4]

"""A GGUF file is refused with lines that convert it, and the lines do."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest
import torch
import transformers as tf

from headrace import SFTConfig, SFTTrainer
from headrace.errors import ConfigError
from headrace.weights import load_torch_model

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import tiny


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of ggml's rotary embedding, as llama.cpp's converter writes q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _write(model: tf.LlamaForCausalLM, path: Path) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    words = tiny.tokenizer().convert_ids_to_tokens(list(range(config.vocab_size)))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            value = _permuted(value, heads if "q_proj" in name else groups)
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(str(target), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_refusal_converts_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama().eval()
    _write(model, tmp_path / "small.gguf")
    with pytest.raises(ConfigError) as error:
        load_torch_model(tmp_path)
    text = str(error.value)
    assert "is a GGUF file" in text and "pip install gguf" in text
    monkeypatch.chdir(tmp_path)
    exec("\n".join(line[2:] for line in text.splitlines() if line.startswith("  ")))
    back = load_torch_model(tmp_path / "small-hf")
    ids = torch.tensor([[2, 5, 9, 7]])
    with torch.no_grad():
        torch.testing.assert_close(back(input_ids=ids).logits, model(input_ids=ids).logits)


def test_training_refuses_it_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "x.gguf"):
        trainer = SFTTrainer(
            str(name), SFTConfig(output_dir=str(tmp_path / "out"), max_steps=1),
            train_dataset=[{"text": "a"}],
        )  # fmt: skip
        with pytest.raises(ConfigError, match=r"x\.gguf is a GGUF file"):
            trainer.train()

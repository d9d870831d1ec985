"""LoRA on a quantised base: loss, files, memory; the base is never whole in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model

from headrace import SFTConfig, SFTTrainer
from headrace.bridge.module import JaxModule, to_jax
from headrace.errors import ConfigError
from headrace.kernels.quantized import QuantizedWeight, dequantize
from headrace.train.abstract import abstract_state
from headrace.train.memory import local_bytes
from headrace.train.optimizers import make_optimizer


def _base(folder: Path, **changes: Any) -> str:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tiny.VOCABULARY,
        "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    return tiny.saved(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes | changes)), folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _base(tmp_path_factory.mktemp("base"))


def _trainer(base: Any, out: Path, **settings: Any) -> SFTTrainer:
    config = SFTConfig(
        output_dir=str(out), max_steps=8, max_length=32, pad_to_multiple_of=32,
        per_device_train_batch_size=8, learning_rate=2e-2, logging_steps=1, save_strategy="no",
        compilation_cache_dir=None, **settings,
    )  # fmt: skip
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    return SFTTrainer(base, config, train_dataset=tiny.text_rows(96), peft_config=lora)


@pytest.fixture(scope="module")
def finished(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[SFTTrainer, Path]:
    out = tmp_path_factory.mktemp("out")
    trainer = _trainer(base, out, quantization="nf4")
    trainer.train()
    return trainer, out


def _quantized(trainer: SFTTrainer) -> dict[str, QuantizedWeight]:
    frozen: Mapping[str, Any] = trainer.run.frozen
    return {key: value for key, value in frozen.items() if isinstance(value, QuantizedWeight)}


def test_stock_peft_gives_the_same_logits_on_the_dequantised_base(
    base: str, finished: tuple[SFTTrainer, Path]
) -> None:
    trainer, out = finished
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    stock: Any = tf.AutoModelForCausalLM.from_pretrained(base)
    run, state = trainer.run, trainer.train_state
    values = {key: dequantize(value) for key, value in _quantized(trainer).items()}
    by_name = run.module.layout.unstack(values)
    assert len(by_name) == 2 * 7
    for name, value in by_name.items():
        original = stock.get_parameter(name.replace(".base_layer", "")).data
        apart = (torch.tensor(np.array(value)) - original).abs().max() / original.abs().max()
        assert 0.01 < apart < 0.16  # half of NF4's widest step is 0.152
        original.copy_(torch.tensor(np.array(value)))
    stock = PeftModel.from_pretrained(stock, out).eval()
    ids = np.random.default_rng(0).integers(4, tiny.VOCABULARY, (2, 12))
    with torch.no_grad():
        want = stock(torch.from_numpy(ids)).logits.numpy()
    params = {**state.trainable, **run.frozen}
    positions = np.tile(np.arange(12), (2, 1))
    ours = run.module.apply(
        params, state.buffers, input_ids=ids, position_ids=positions, train=False
    )[0].logits
    np.testing.assert_allclose(ours, want, atol=2e-4)


def test_the_frozen_weights_take_the_bytes_they_say(finished: tuple[SFTTrainer, Path]) -> None:
    inside = _quantized(finished[0])
    count = sum(value.size for value in inside.values())
    assert local_bytes(inside) == count * (4 + 16 / 64) / 8
    rest = sum(v.size for k, v in finished[0].run.frozen.items() if k not in inside)
    assert rest < count / 8  # embedding, head and norms


@pytest.mark.parametrize("remat", ["none", "full"])
def test_one_layer_at_a_time_is_in_full_precision(deep: JaxModule, remat: Any) -> None:
    def temporary(name: str | None) -> int:
        state, frozen = abstract_state(deep, optimizer=make_optimizer("sgd"), quantization=name)

        def loss(trainable: Any, frozen: Any, ids: Any) -> Any:
            params, buffers = {**trainable, **frozen}, deep.buffers()
            return deep.apply(params, buffers, input_ids=ids, remat=remat)[0].logits.sum()

        ids = jax.ShapeDtypeStruct((1, 8), np.int32)
        compiled = jax.jit(jax.grad(loss)).lower(state.trainable, frozen, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = 4 * sum(p.numel() for n, p in deep.module.named_parameters() if "base_layer" in n)
    assert temporary("nf4") - temporary(None) < whole / 2


@pytest.fixture(scope="module")
def deep() -> JaxModule:
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    config = tf.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=6, use_cache=False, **sizes
    )
    model = tf.LlamaForCausalLM(config)
    core = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).get_base_model()
    module = to_jax(core, {"input_ids": torch.ones(2, 8, dtype=torch.int64)})
    assert any(len(names) == 6 for names in module.layout.keys.values())
    return module


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    odd = _base(tmp_path / "odd", intermediate_size=120)
    with pytest.raises(ConfigError, match=r"layers.0.mlp.down_proj.*\[64, 120\]"):
        _ = _trainer(odd, tmp_path / "out", quantization="nf4").run
    config = SFTConfig(output_dir=str(tmp_path), quantization="int8", max_length=32)
    given = {"train_dataset": tiny.text_rows(8), "processing_class": tiny.tokenizer()}
    with pytest.raises(ConfigError, match=r"no model object; .*set use_peft: true"):
        _ = SFTTrainer(tiny.llama(), config, **given).run

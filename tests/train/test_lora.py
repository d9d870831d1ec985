"""LoRA configs: every name must match; files are PEFT's own and load back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, TaskType
from transformers import LlamaForCausalLM

from headrace.errors import AdapterError
from headrace.train.lora import apply_lora, copy_into_module, load_back_adapter, save_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": ["q_proj", "w_proj"]},
            "target_modules 'w_proj' matches nothing; did you mean .*_proj",
        ),
        (
            {"target_modules": ["zzz"]},
            "target_modules 'zzz' matches nothing; the model has .*q_proj",
        ),
        ({"target_modules": r".*\\.query"}, "a regular expression. matches nothing"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_heat"]},
            "modules_to_save 'lm_heat' matches nothing; did you mean lm_head",
        ),
        (
            {"target_modules": ["q_proj"], "rank_pattern": {"k_prj": 8}},
            "rank_pattern 'k_prj' matches no module; did you mean .*k_proj",
        ),
        (
            {"target_modules": ["q_proj"], "target_parameters": ["experts.up"]},
            "target_parameters 'experts.up' matches nothing",
        ),
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "changes base weights"),
    ],
)
def test_names_without_a_match_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        apply_lora(tiny.llama(), LoraConfig(r=2, **settings))


def test_all_problems_at_once() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "wrong"], modules_to_save=["also_wrong"])
    with pytest.raises(AdapterError) as caught:
        apply_lora(tiny.llama(), config)
    assert "'wrong'" in str(caught.value) and "'also_wrong'" in str(caught.value)


def test_other_kinds_and_second_adapters_are_refused() -> None:
    with pytest.raises(AdapterError, match="PrefixTuningConfig was given; only"):
        apply_lora(tiny.llama(), PrefixTuningConfig(num_virtual_tokens=2))
    model, _ = apply_lora(tiny.llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(AdapterError, match="already carries an adapter"):
        apply_lora(model, LoraConfig(r=2, target_modules=["q_proj"]))


def test_report_says_what_is_reached() -> None:
    base = tiny.llama()
    total = sum(p.numel() for p in base.parameters())
    weight = base.model.layers[0].self_attn.q_proj.weight.numel()
    config = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[1])
    model, report = apply_lora(base, config, task_type=TaskType.CAUSAL_LM)
    assert report.adapted == {"q_proj": (1, 2)}
    assert (report.reached, report.total) == (weight, total)
    assert report.trainable == 2 * (16 + 16)
    assert "q_proj 1 of 2" in str(report)
    assert model.active_peft_config.task_type == TaskType.CAUSAL_LM
    assert config.task_type is None, "the caller's config is not changed"


def test_adapter_keeps_the_dtype_of_the_model() -> None:
    config = LoraConfig(r=2, target_modules="all-linear")
    model, _ = apply_lora(tiny.llama(torch.bfloat16), config)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


CONFIGS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "dora, rslora": {"target_modules": ["q_proj", "up_proj"], "use_dora": True, "use_rslora": True},
    "head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_files_are_peft_files(kind: str, tmp_path: Path) -> None:
    model, _ = apply_lora(tiny.llama(), LoraConfig(r=2, task_type="CAUSAL_LM", **CONFIGS[kind]))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(1)
    arrays = {
        n: (p.detach() + 0.1 * torch.randn(p.shape, generator=generator)).numpy()
        for n, p in trained.items()
    }
    copy_into_module(model, arrays)
    save_adapter(model, tmp_path)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        base = tiny.llama()
        plain = base(input_ids=ids).logits
        stock = PeftModel.from_pretrained(base, tmp_path).eval()
        assert torch.equal(stock(input_ids=ids).logits, expected)
    assert (expected - plain).abs().max() > 1e-3
    back = load_back_adapter(model, tmp_path, {"input_ids": ids})
    assert torch.equal(back, expected)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(trained)
    assert model.active_adapter == "default" and list(model.peft_config) == ["default"]


def test_copy_checks_names_and_shapes() -> None:
    model: LlamaForCausalLM = tiny.llama()
    good = model.lm_head.weight.detach().numpy()
    with pytest.raises(AdapterError, match=r"no such tensors: lm_head.weights \[20, 16\], x"):
        copy_into_module(model, {"lm_head.weights": good, "x": good[:3], "lm_head.weight": good})

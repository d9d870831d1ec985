"""Patterns in models' code that capture answers in general, each in the smallest module with it."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
import zoo
from torch import nn

import headrace as hr
from headrace.bridge.attention import ADDITIVE_NAME, NAME


def test_our_attention_equals_the_name_it_takes_the_place_of() -> None:
    assert NAME in ("eager", "sdpa") and NAME != "eager" and NAME == "headrace"
    assert ADDITIVE_NAME in ("eager", "sdpa") and ADDITIVE_NAME != "sdpa"
    assert {"headrace": 1}[NAME] == 1
    assert "sdpa" not in {"headrace": 1}


def test_a_model_without_sdpa_gets_additive_masks() -> None:
    # DeepSeek V4 casts a bias of 0 and -inf to the mask's dtype: as booleans that is its opposite.
    model, inputs = zoo.build("causal-lm", "gemma2")
    assert not model._supports_sdpa
    jm = hr.to_jax(model, inputs, dynamic=False)
    operators = [str(node.target) for node in jm.program.nodes()]
    assert "headrace.mask.default" in operators
    assert "aten.where.self" not in operators, "attention itself still gets the pattern"
    report = hr.check(model, inputs, operators=False, dynamic=False)
    assert report.ok, str(report)


class Clamped(nn.Module):
    """Writes into a weight through `.data`, as Gemma 3n's AltUp does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.clamp_(-100, 100)
        return self.linear(x)


def test_writes_through_data_are_noted_and_gradients_stay() -> None:
    report = hr.check(Clamped(), (torch.randn(3, 4),), operators=False)
    assert report.ok, str(report)
    assert any("writes into a parameter (.data.clamp_)" in note for note in report.notes)


class Asserting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.all(x > -100).item(), "too small"
        assert (x < 100).all()
        return self.linear(x)


def test_assertions_about_values_are_noted_and_left_out() -> None:
    report = hr.check(Asserting(), (torch.randn(3, 4),), operators=False)
    assert report.ok, str(report)
    assert sum("not checked by the program: assert" in note for note in report.notes) == 2


class Casting(nn.Module):
    """A router that makes sure of its dtype at each call, as Switch Transformers' does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear = self.linear.to(torch.float32)
        return self.linear(x.to(torch.float32))


def test_a_module_cast_to_its_own_dtype_is_as_it_was() -> None:
    report = hr.check(Casting(), (torch.randn(3, 4),), operators=False)
    assert report.ok, str(report)
    assert nn.Linear(2, 2).to(torch.float64).weight.dtype is torch.float64


class Both(nn.Module):
    """A list of tensors that mixes the mask with an ordinary tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ops.headrace.mask(x.shape[0], 5, 5, True, 0)
        both = torch.cat([mask, mask.logical_not()], dim=-1)
        return self.linear(x) + both.sum((-1, -2, -3), keepdim=True)[..., 0, 0]


def test_masks_inside_lists_become_arrays() -> None:
    report = hr.check(Both(), (torch.randn(3, 4),), operators=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("keep", [True, False])
def test_config_is_as_before_after_capture(keep: bool) -> None:
    config = tf.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, use_cache=keep, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).train()
    hr.to_jax(model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)}, dynamic=False)
    assert config.use_cache is keep
    assert config._attn_implementation == "sdpa" and config._attn_implementation != "headrace"

"""The analytic model's picture of a program against the program."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from headrace.bridge.module import JaxModule, to_jax
from headrace.config import TrainConfig
from headrace.plan.analytic import RATES, Form, estimate, form_of, training_of
from headrace.plan.candidate import Candidate
from headrace.plan.shape import ModelShape, model_shape

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def products(module: JaxModule, remat: str) -> int:
    """Matrix products in the compiled gradient; a loop's body counts once."""
    params, buffers, ids = module.params(), module.buffers(), jnp.zeros((2, 16), jnp.int32)

    def total(params):
        outputs, _ = module.apply(params, buffers, input_ids=ids, remat=remat)
        return outputs.logits.sum()

    return len(re.findall(r" dot\(", jax.jit(jax.grad(total)).lower(params).compile().as_text()))


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**SIZES)),
        (Gemma2ForCausalLM, Gemma2Config(layer_types=["full_attention"] * 4, **SIZES)),
    ],
)
def test_recomputed_layers_are_those_that_the_program_computes_again(model, config):
    """`dots` keeps every linear layer's result, `full` none; both compute attention again. A
    Llama's last linear layer is not needed again, Gemma 2 has a norm behind it."""
    module = to_jax(model(config).train(), {"input_ids": torch.zeros(2, 16, dtype=torch.int64)})
    shape = model_shape(config.to_dict())
    (kind,) = shape.layers
    again = len(kind.matrices) - (not shape.norms_last)
    assert products(module, "full") - products(module, "dots") == again


def parts(shape: ModelShape, candidate: Candidate, form: Form | None = None) -> dict[str, float]:
    training = training_of(TrainConfig(model_name_or_path="-", dtype="bfloat16"), shape)
    return dict(estimate(training, candidate, form=form).parts)


LARGE = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
LONG = Candidate(slice_name="v6e-8", mesh={"fsdp": 8}, length=8192)


def test_policies_cost_what_they_compute_again():
    shape = model_shape(LARGE)
    by_policy = {
        remat: parts(shape, LONG.but(remat=remat))
        for remat in ("none", "dots", "attention", "full")
    }
    none, dots, attention, full = by_policy.values()
    assert none["matmuls"] == dots["matmuls"] < attention["matmuls"] == full["matmuls"]
    assert none["attention"] == attention["attention"] < dots["attention"] == full["attention"]
    attended = 4096 * (4096 + 2 * 1024 + 4096)  # q, k, v, o
    forward = attended + 3 * 4096 * 14336
    assert full["matmuls"] / none["matmuls"] == pytest.approx(
        1 + (forward - 4096 * 14336) / (3 * forward)
    )


def test_host_copies_are_hidden_until_they_are_the_longest():
    offload = LONG.but(remat="offload")
    shape = model_shape(LARGE)
    moved = 8192 * 32 * (4096 + 4096) * 2  # inputs and attention results, bfloat16
    assert parts(shape, offload)["host copies"] == pytest.approx(moved / 28e9)
    training = training_of(TrainConfig(model_name_or_path="-", dtype="bfloat16"), shape)
    assert estimate(training, offload).memory["activations kept"] == 0
    kept = estimate(training, LONG.but(remat="attention")).seconds
    assert estimate(training, offload).seconds == kept
    short = dataclasses.replace(shape.layers[0], matrices=shape.layers[0].matrices[:1])
    small = dataclasses.replace(shape, layers=(short,))
    found = parts(small, offload.but(length=512, batch_size=64))
    training = training_of(TrainConfig(model_name_or_path="-", dtype="bfloat16"), small)
    assert (
        estimate(training, offload.but(length=512, batch_size=64)).seconds >= found["host copies"]
    )


def test_attention_is_counted_in_whole_blocks():
    window = {**LARGE, "sliding_window": 1024}
    wide, narrow = (
        parts(model_shape(window), LONG, Form(block=block))["attention"] for block in (1024, 128)
    )
    # a query block of 1,024 reaches over two key blocks, one of 128 over nine
    assert wide / narrow == pytest.approx(2 * 1024 / (9 * 128))
    once = parts(model_shape(LARGE), LONG, Form(backward_products=5))["attention"]
    assert once < parts(model_shape(LARGE), LONG, form_of(LONG))["attention"]


def test_narrow_heads_leave_the_matrix_unit_idle():
    assert RATES["v6e"].attention_at(64) == pytest.approx((0.2, 0.18))
    assert RATES["v5p"].attention_at(256) == RATES["v5p"].attention_at(128)
    assert RATES["v6e"].attention_at(256) == RATES["v6e"].attention_at(512) == (0.6, 0.6)

"""Loss and every gradient of the model families against eager PyTorch, in float32."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from families import FAMILIES, build

import headrace as hr

# Families whose layers must run as a loop, with the number of layers outside of it.
_ROLLED = {name: 0 for name in FAMILIES if name not in ("resnet", "gemma4-e", "t5", "modernbert")}
# Their sizes are free as those of their kind are: captured for the example alone, which is faster.
_LIKE_ANOTHER = (
    *("qwen2", "gemma", "gemma4-kv", "gemma4-e", "gpt_neox", "olmo2", "smollm3"),
    *("roberta", "distilbert", "electra", "resnet"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_all_gradients_agree(name: str) -> None:
    model, inputs = build(name)
    report = hr.check(model, inputs, operators=False, dynamic=name not in _LIKE_ANOTHER)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    if "labels" in inputs:
        assert any("loss" in path for path in report.outputs), report.outputs
    assert len(report.gradients) >= 0.9 * len(trained), "gradients reach the parameters"
    assert report.worst_output <= 1e-5, str(report)
    assert report.worst_gradient <= 1e-4, str(report)
    if name in _ROLLED:
        assert any("loop" in note for note in report.loops), report.loops
        assert not any("not rolled" in note for note in report.loops), report.loops


def test_rolled_equals_unrolled() -> None:
    model, inputs = build("gemma2")  # sliding and full layers in turn: a period of two
    arrays = {k: v.numpy() for k, v in inputs.items()}
    losses = []
    for roll in (True, False):
        jm = hr.to_jax(model, inputs, roll=roll, dynamic=False)
        assert bool(jm.program.loops) is roll
        params, buffers = jm.params(), jm.buffers()

        def loss(p, jm=jm, buffers=buffers):
            return jm.apply(p, buffers, **arrays)[0].loss

        value, gradient = jax.jit(jax.value_and_grad(loss))(params)
        losses.append((value, jm.layout.unstack(gradient)))
    (a, left), (b, right) = losses
    assert abs(a - b) < 1e-6
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=1e-6)


def test_bfloat16_agrees_within_its_precision() -> None:
    model, inputs = build("llama")
    report = hr.check(model.to(torch.bfloat16), inputs, operators=False)
    assert report.ok, str(report)

"""Backwards written by hand (`torch.autograd.Function`) against eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import zoo
from torch import nn
from torch.autograd import Function

import headrace as hr
from headrace.errors import CaptureError


class Tripled(Function):
    """Two outputs, one without a gradient; a broadcast gradient; what is no tensor; ctx values."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, times: int) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.times = times
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x * weight + 1, positive

    @staticmethod
    def backward(ctx: Any, g: Any, _: Any) -> Any:
        x, weight = ctx.saved_tensors
        return g * 3 * weight, (g * x * ctx.times).sum(0), None


class Rounded(Function):
    """Straight through; the newer way of writing a Function."""

    @staticmethod
    def forward(x: Any, steps: int = 4) -> Any:
        return torch.round(x * steps) / steps

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, g, 0.1 * g), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, positive = Tripled.apply(self.linear(x), self.weight, 2)
        return x + torch.where(positive, y, Rounded.apply(y)).tanh()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _inputs() -> tuple[torch.Tensor]:
    return (torch.randn(5, 4, generator=torch.Generator().manual_seed(1)),)


def test_gradients_are_those_of_the_backward() -> None:
    torch.manual_seed(0)
    report = hr.check(Layers(), _inputs(), operators=True)
    assert report.ok and not report.disagreements, str(report)
    assert any("Tripled" in note and "keeps its own backward" in note for note in report.notes)
    assert any("loop of 3" in note for note in report.loops)


def test_a_backward_in_a_loop_with_recomputation_from_the_cache(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, (x,) = Layers(), _inputs()
    hr.to_jax(model, (x,), cache_dir=tmp_path)
    jm = hr.to_jax(model, (x,), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()), "the capture was kept"

    def total(params: Any) -> Any:
        return jm.apply(params, {}, x.numpy(), remat="full")[0].sum()

    found = jm.layout.unstack(jax.grad(total)(jm.params()))
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-5, atol=1e-6)


class Recomputed(Function):
    """Runs its forward again in the backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Any, module: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), g)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Recomputed.apply(x * 2, self.linear)


def test_a_backward_that_runs_autograd_is_refused_when_a_gradient_is_needed() -> None:
    model, (x,) = Reversible(), _inputs()
    jm = hr.to_jax(model, (x,))
    params = jm.params()
    want = model(x).detach().numpy()
    np.testing.assert_allclose(jm.apply(params, {}, x.numpy())[0], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(CaptureError, match="its backward runs autograd itself"):
        jax.grad(lambda p: jm.apply(p, {}, x.numpy())[0].sum())(params)


def test_yoso_attention_has_the_gradient_it_was_written_with() -> None:
    model, inputs = zoo.build("masked-lm", "yoso")
    report = hr.check(model, inputs, operators=False, dynamic=False)
    assert report.ok, str(report)

"""Small tensors that travel as one array: what is packed, and that nobody can tell."""

from __future__ import annotations

import copy
import math
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import headrace as hr
from headrace.bridge.step import packs
from headrace.bridge.step.packs import DeviceState, Pack


def _model() -> nn.Module:
    torch.manual_seed(0)
    small = [nn.Linear(4, 4) for _ in range(6)]
    return nn.Sequential(*small, nn.Linear(4, 2000), nn.Linear(2000, 1))


def _adamw_step(model: nn.Module, optimizer: Any) -> Any:
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return train_step


@pytest.mark.parametrize("mode", ["one_program", "two_programs"])
def test_small_tensors_travel_together_and_large_ones_alone(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "_MEMBERS", 4)
    model = _model()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager)]
    step = hr.compile_step(
        _adamw_step(model, optimizers[0]), model=model, optimizer=optimizers[0], mode=mode
    )
    reference = _adamw_step(eager, optimizers[1])
    x = torch.randn(3, 4)
    shapes = (3, 2, 3) if mode == "one_program" else (3, 3)
    for rows in shapes:  # a second shape is a second program on the same state
        loss, expected = step(x[:rows]), reference(x[:rows])
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)

    program = next(iter(step._programs.values()))[0].program
    sizes = {
        key: 4 * math.prod(shape)
        for pack in program.written
        for key, shape in zip(pack.keys, pack.shapes, strict=True)
    }
    alone = {p.keys[0] for p in program.written if len(p.keys) == 1}
    large = {key for key, size in sizes.items() if size > packs.LIMIT}
    assert len(sizes) == 4 * 16  # parameters, gradients, two moments
    assert large == {k for k in sizes if "6.weight" in k} == alone
    assert len(program.written) == 4 * (1 + math.ceil(15 / 4))

    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)
    moments = [o.state_dict()["state"] for o in optimizers]
    for i in moments[1]:
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(
                moments[0][i][name], moments[1][i][name], rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_of_some_of_the_packed_gradients(to_none: bool) -> None:
    torch.manual_seed(0)
    first = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)])
    second = copy.deepcopy(first)

    def parts(layers: nn.ModuleList) -> tuple[Any, list[torch.optim.Optimizer]]:
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in layers]

        def train_step(x: torch.Tensor) -> torch.Tensor:
            loss = layers[1](layers[0](x).tanh()).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss

        return train_step, optimizers

    function, optimizers = parts(first)
    step = hr.compile_step(function, model=list(first), optimizer=optimizers)
    reference, eager_optimizers = parts(second)
    for turn in range(6):
        x = torch.randn(4, 3)
        step(x), reference(x)
        if turn % 2:
            optimizers[0].zero_grad(set_to_none=to_none)
            eager_optimizers[0].zero_grad(set_to_none=to_none)
    for got, want in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(got.grad, want.grad)


def test_device_state_cuts_packs_anew() -> None:
    state = DeviceState()
    state.put(Pack((("a",), ("b",), ("c",)), ((2,), (1, 2), ())), jnp.arange(5.0))

    def load(key: Any) -> torch.Tensor:
        assert key == ("d",)
        return torch.full((2, 1), 9.0)

    other = Pack((("b",), ("d",)), ((1, 2), (2, 1)))
    assert state.get(other, load).tolist() == [2, 3, 9, 9]
    assert {key: value.tolist() for key, value in state.items()} == {
        ("a",): [0, 1],
        ("c",): 4,
        ("b",): [[2, 3]],
        ("d",): [[9], [9]],
    }
    state.drop([("d",), ("c",), ("unknown",)])
    state.fill_zeros([("a",)])
    assert {key: value.tolist() for key, value in state.items()} == {
        ("a",): [0, 0],
        ("b",): [[2, 3]],
    }

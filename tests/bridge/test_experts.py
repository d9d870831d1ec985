"""Which expert layers are proved to keep tokens apart, and what ends the proof."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jax.sharding import AbstractMesh
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward

from headrace.bridge.experts import expert_notes
from headrace.bridge.module import to_jax
from headrace.bridge.passes.experts import find_experts
from headrace.bridge.program import Program
from headrace.kernels.partition import Partition


class Layer(nn.Module):
    """A router and four experts in transformers' grouped form; `change` breaks it in one place."""

    has_gate, has_bias, has_post_expert_norm, is_transposed = True, False, False, False
    _is_expert_parallel = False

    def __init__(self, change: str = "", choices: int = 2) -> None:
        super().__init__()
        self.change, self.choices, self.num_experts = change, choices, 4
        self.router = nn.Linear(8, 4, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, -1)
        if self.change == "cumsum":
            up = up.cumsum(0)
        if self.change == "mean":
            up = up - up.mean()
        if self.change == "dropout":
            up = nn.functional.dropout(up, 0.5)
        if self.change == "flip":
            up = up.flip(0)
        if self.change == "leaves":
            self.rows = up
        return nn.functional.silu(gate) * up

    def forward(self, hidden: torch.Tensor) -> Any:
        tokens = hidden.reshape(-1, 8)
        weights, index = torch.topk(self.router(tokens).softmax(-1), self.choices)
        made = grouped_mm_experts_forward(self, tokens, index, weights).reshape(hidden.shape)
        return (made, self.rows) if self.change == "leaves" else hidden + made


def _program(layer: nn.Module) -> Program:
    return to_jax(layer.train(), (torch.randn(2, 6, 8),)).program


def _notes(program: Program, **sizes: int) -> tuple[str, ...]:
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return expert_notes(program, Partition(mesh=mesh))


@pytest.mark.parametrize("choices", [1, 2])
def test_the_grouped_form_is_proved_from_the_router_on(choices: int) -> None:
    program = _program(Layer(choices=choices))
    (layer,), reasons = find_experts(program.graph)
    assert not reasons and not _notes(program, fsdp=2)
    assert "`expert` axis" in _notes(program, fsdp=2, expert=2)[0]
    assert len(layer.inputs) == 1  # the hidden states: topk and softmax are inside
    inside = {str(node.target) for node in layer.nodes}
    assert {"aten.topk.default", "aten.sort.default", "aten.softmax.int"} <= inside


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("cumsum", "aten.cumsum.default"),
        ("mean", "aten.mean.default"),
        ("dropout", "aten.native_dropout.default"),
        ("flip", "aten.flip.default"),
        ("leaves", "not one result"),
    ],
)
def test_what_mixes_rows_ends_the_proof(change: str, reason: str) -> None:
    program = _program(Layer(change))
    assert not find_experts(program.graph)[0]
    (note,) = _notes(program, fsdp=2)
    assert "sorted by expert over the whole batch" in note and reason in note
    assert not _notes(program, tensor=2)

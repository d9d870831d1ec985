"""Branches on values: the example's is taken and checked; what training changes is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import zoo
from torch import nn

import headrace as hr
from headrace.errors import CaptureError


class Padded(nn.Module):
    """Leaves its mask away when nothing is masked, as FSMT does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        padding = mask.eq(0)
        padding[:, 0] = False  # written after it was made: the condition sees that
        if not padding.any():
            padding = None
        y = self.linear(x)
        return y if padding is None else y.masked_fill(padding[..., None], 0.0)


def _batch(length: int, *, masked: bool) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[:, 0] = 0
    mask[0, -1] = int(not masked)
    return {"x": torch.randn(2, length, 3), "mask": mask}


@pytest.mark.parametrize(("masked", "dynamic"), [(False, False), (True, True)])
def test_the_branch_of_the_example_is_taken_and_checked(masked: bool, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Padded()
    report = hr.check(model, _batch(4, masked=masked), operators=False, dynamic=dynamic)
    assert report.ok, str(report)
    assert any("asks `if not padding.any():`" in note for note in report.notes)
    jm = hr.to_jax(model, _batch(4, masked=masked), dynamic=dynamic)
    same = {
        k: v.repeat(3, 1, 1)[:5] if v.ndim > 2 else v.repeat(3, 1)[:5]
        for k, v in _batch(4, masked=masked).items()
    }  # without dynamic shapes this is a new capture
    found = jm(**{k: v.numpy() for k, v in same.items()})
    np.testing.assert_allclose(found, model(**same).detach(), rtol=1e-5, atol=1e-6)
    run = jax.jit(lambda b: jm.apply(jm.params(), {}, **b)[0])
    other: dict[str, Any] = {k: v.numpy() for k, v in _batch(4, masked=not masked).items()}
    with pytest.raises(Exception, match=r"test_branches.py:\d+ asks"):
        jax.block_until_ready(run(other))
        jax.effects_barrier()


def test_a_capture_that_depends_on_values_is_not_kept(tmp_path: Path) -> None:
    hr.to_jax(Padded(), _batch(4, masked=True), cache_dir=tmp_path)
    jm = hr.to_jax(Padded(), _batch(4, masked=False), cache_dir=tmp_path)
    assert any("False" in note for r in jm.program.history for note in r.notes if "asks" in note)


class Calibrates(nn.Module):
    """A branch on a running value (I-BERT's ranges)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.largest.max() < 1e-5 else x / self.largest


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(3).sum() < 1 else -x


@pytest.mark.parametrize(
    ("kind", "reason"), [(Calibrates, "a parameter or buffer"), (Draws, "random numbers")]
)
def test_conditions_that_training_changes_are_refused(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_branches.py:\d+ asks .* condition on {reason}"):
        hr.to_jax(kind(), (torch.randn(4, 3),))


def test_fsmt_asks_whether_there_is_padding() -> None:
    model, inputs = zoo.build("seq2seq-lm", "fsmt")
    report = hr.check(model, inputs, operators=False, dynamic=False)
    assert report.ok, str(report)


def test_a_number_in_an_assertion_is_the_examples() -> None:
    class Lengths(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            lengths = mask.sum(-1)
            assert lengths.max().item() <= x.shape[-1]  # as XLM and FlauBERT have it
            return x * lengths[:, None]

    x, mask = torch.randn(2, 4), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    jm = hr.to_jax(Lengths(), (x, mask))
    assert any("not checked" in n for r in jm.program.history for n in r.notes)
    for other in (mask, 1 - mask):  # nothing of the example is left in the program
        found = jm(x.numpy(), other.numpy())
        np.testing.assert_allclose(found, Lengths()(x, other).numpy(), rtol=1e-6)

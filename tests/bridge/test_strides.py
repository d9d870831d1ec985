"""`as_strided` reads memory as PyTorch laid it out, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.errors import CaptureError


class Windows(nn.Module):
    """Overlapping windows of a transposed tensor, as Longformer cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).transpose(0, 1)
        return y.as_strided((3, y.shape[1], 2, 4), (2 * y.stride(0), *y.stride()[1:2], *_two(y)))


def _two(y: torch.Tensor) -> tuple[int, int]:
    return y.stride(0), y.stride(2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_windows_of_a_transposed_tensor(dynamic: bool) -> None:
    torch.manual_seed(0)
    report = hr.check(Windows(), (torch.randn(2, 8, 4),), operators=False, dynamic=dynamic)
    assert report.ok, str(report)


class Around(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :2].as_strided((2, 4), (4, 1))


def test_memory_around_a_part_is_refused() -> None:
    with pytest.raises(CaptureError, match="reads the memory around a tensor"):
        hr.to_jax(Around(), (torch.randn(3, 4),), dynamic=False)

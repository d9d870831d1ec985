"""Where a function has a corner, PyTorch picks one derivative; the rules must pick the same.

All functions are one module, each with a parameter of its own that sits on corners, so that they
cost one capture and one compilation.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr

POINTS = (0.0, 1.0, -1.0, 0.0, 2.0, 6.0, 3.0, -3.0, 20.0)
ZERO = torch.zeros(len(POINTS))

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "l1_loss": lambda w: F.l1_loss(w, ZERO),
    "smooth_l1_loss": lambda w: F.smooth_l1_loss(w, ZERO),
    "smooth_l1_loss, beta 0": lambda w: F.smooth_l1_loss(w, ZERO, beta=0.0),
    "huber_loss": lambda w: F.huber_loss(w, ZERO),
    "1-norm": lambda w: w.norm(1),
    "2-norm of 0": lambda w: (w - w.detach()).norm(),
    "3-norm": lambda w: w.norm(3),
    "infinity-norm": lambda w: w.norm(float("inf")),
    "dist of equals": lambda w: torch.dist(w, w.detach()),
    "cdist, p 1": lambda w: torch.cdist(w[:, None], w[:, None], p=1.0),
    "relu": torch.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "softshrink": lambda w: F.softshrink(w, 1.0),
    "hardshrink": lambda w: F.hardshrink(w, 1.0),
    "threshold": lambda w: F.threshold(w, 0, 0),
    "clamp": lambda w: w.clamp(0, 6),
    "clamp by tensors": lambda w: w.clamp(ZERO, ZERO + 6),
    "maximum": lambda w: torch.maximum(w, ZERO),
    "minimum": lambda w: torch.minimum(w, ZERO),
    "amax of equals": lambda w: (w * 0).amax(),
    "max of equals": lambda w: (w * 0).max(),
    "max over a dim of equals": lambda w: (w * 0).max(0)[0],
    "cummax": lambda w: w.cummax(0)[0],
    "max_pool1d of equals": lambda w: F.max_pool1d((w * 0)[None, None], 3, 1),
    "std of equals": lambda w: (w - w.detach()).std(),
    "prod": lambda w: w.prod(),
    "cumprod": lambda w: w.cumprod(0),
    "sinc": torch.sinc,
    "power 0": lambda w: w.pow(0.0),
    "normalize of 0": lambda w: F.normalize((w - w.detach())[None]),
    "cosine_similarity of 0": lambda w: F.cosine_similarity((w - w.detach())[None], ZERO[None]),
    "margin_ranking_loss": lambda w: F.margin_ranking_loss(w, ZERO, ZERO + 1),
}


class Corners(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.ParameterList(nn.Parameter(torch.tensor(POINTS)) for _ in CASES)

    def forward(self, scale: Tensor) -> Tensor:
        pairs = zip(CASES.values(), self.points, strict=True)
        return sum((function(w) * scale).sum() for function, w in pairs)


def test_derivatives_at_corners_are_those_of_pytorch() -> None:
    model, scale = Corners(), torch.tensor(1.5)
    model(scale).backward()
    ours = hr.to_jax(model, (scale,), dynamic=False)
    value = lambda p: ours.apply(p, ours.buffers(), np.float32(1.5))[0]  # noqa: E731
    gradients = jax.jit(jax.grad(value))(ours.params())
    differ = {
        name: (w.grad.tolist(), np.asarray(gradients[f"points.{k}"]).tolist())
        for k, (name, w) in enumerate(zip(CASES, model.points, strict=True))
        if not np.allclose(w.grad, gradients[f"points.{k}"], 1e-5, 1e-6)
    }
    assert not differ

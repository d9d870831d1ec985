"""Bessel and Airy functions in double precision, against SciPy; PyTorch's own are less exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special
import torch

from headrace.bridge.ops.registry import lookup

POSITIVE = np.concatenate([np.geomspace(1e-8, 5, 40), np.linspace(1.9, 60, 80), [2.0, 5.0]])
ANY = np.concatenate([-POSITIVE, [0.0], POSITIVE])
AIRY = np.concatenate([ANY[np.abs(ANY) < 30], [-2.09, 2.09, 8.4, 110.0]])
CORNERS = np.array([0.0, -1.0, np.inf, -np.inf, np.nan])

CASES: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "bessel_j0": (scipy.special.j0, ANY),
    "bessel_j1": (scipy.special.j1, ANY),
    "bessel_y0": (scipy.special.y0, POSITIVE),
    "bessel_y1": (scipy.special.y1, POSITIVE),
    "modified_bessel_k0": (scipy.special.k0, POSITIVE),
    "modified_bessel_k1": (scipy.special.k1, POSITIVE),
    "scaled_modified_bessel_k0": (scipy.special.k0e, POSITIVE),
    "scaled_modified_bessel_k1": (scipy.special.k1e, POSITIVE),
    "airy_ai": (lambda x: scipy.special.airy(x)[0], AIRY),
}


@pytest.mark.parametrize("name", CASES)
def test_bessel_functions(name: str) -> None:
    reference, points = CASES[name]
    overload = getattr(torch.ops.aten, f"special_{name}").default
    rule = lookup(overload)
    assert rule is not None
    with jax.enable_x64(True):
        function = jax.jit(rule.function)
        got = np.asarray(function(points))
        corners = np.asarray(function(CORNERS))
    np.testing.assert_allclose(got, reference(points), rtol=1e-11, atol=1e-13)
    torch_values = overload(torch.from_numpy(points)).numpy()
    np.testing.assert_allclose(got, torch_values, rtol=1e-5, atol=5e-6)
    np.testing.assert_allclose(corners, overload(torch.from_numpy(CORNERS)).numpy(), rtol=1e-6)

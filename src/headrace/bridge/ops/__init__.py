"""The operator rules, one file per ATen family; importing this package fills the registry.

Read `registry.py` first: it is the contract of a rule. `promotion.py` and `dims.py` are what
rules share, `decompositions.py` finds PyTorch's own decomposition of an operator that has no
rule.
"""

from __future__ import annotations

from importlib import import_module

FAMILIES = (
    "activations",
    "arithmetic",
    "attention",
    "bags",
    "bessel",
    "casts",
    "comparison",
    "convolution",
    "creation",
    "experts",
    "distances",
    "fft",
    "grids",
    "indexing",
    "linalg",
    "losses",
    "matmul",
    "norms",
    "ordering",
    "padded",
    "padding",
    "polynomials",
    "pooling",
    "random",
    "reductions",
    "scans",
    "scatters",
    "shape",
    "special",
    "unary",
    "upsampling",
    "backward",  # last: it is made of forward rules
)

for family in FAMILIES:
    import_module(f"{__name__}.{family}")

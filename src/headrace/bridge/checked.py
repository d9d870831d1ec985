"""Conditions that a program was captured under, asked again whenever it runs.

Where one does not hold, all floating-point results are NaN, so that nothing wrong can be used, and
the run fails with the condition's message as soon as the host reads a result.

Does not know: which conditions there are (`bounds.py`, `branches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import headrace.bridge.bounds  # noqa: F401  registers the operator  # pyright: ignore[reportUnusedImport]
from headrace.bridge.program import Program
from headrace.errors import CaptureError

Array = jax.Array
REQUIRE = torch.ops.headrace.require.default


def asks(program: Program) -> bool:
    """Whether the capture depends on the values of its example, and not on their shapes alone."""
    return any(node.target is REQUIRE for node in program.nodes())


def checked(results: list[Any], required: Sequence[tuple[Array, str]]) -> list[Any]:
    """The results, NaN where a condition does not hold; then the run raises CaptureError."""
    if not required:
        return results
    for holds, why in required:
        jax.debug.callback(partial(_complain, why), jnp.all(holds))
    good = jnp.all(jnp.stack([jnp.all(holds) for holds, _ in required]))
    return [jnp.where(good, r, jnp.nan) if _is_float(r) else r for r in results]


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _complain(why: str, holds: np.ndarray) -> None:
    if not holds:
        raise CaptureError(f"{why}. This batch is another case.")

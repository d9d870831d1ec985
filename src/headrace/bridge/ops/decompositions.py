"""PyTorch's own decomposition of an operator that has no rule here.

Sources, in order: the operator's composite kernel (exact by construction), the core
decomposition table, the wider table of Python decompositions and references; a `prims`
operator, which those end in, becomes the ATen call it stands for. The result may contain
operators without a rule again.

Does not know: rules, JAX.
"""

# Operator schemas are a private attribute in torch, and have no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._ops import OpOverload


def decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """A Python function equal to `op` in terms of smaller operators, or None."""
    if op._can_decompose():
        return op.decompose
    if op.namespace == "prims":
        return getattr(op, "impl_aten", None)
    return core_aten_decompositions().get(op) or decomposition_table.get(op)


def exporter_table(ops: Iterable[OpOverload]) -> dict[OpOverload, Callable[..., Any]]:
    """Decompositions that `torch.export` may apply to these operators while it traces.

    Only the exporter's own table, composite operators and the core ones: the wider references end
    in `prims` that alias their inputs, which the exporter refuses.
    """
    known: Any = torch.export.default_decompositions()
    return {op: known[op] for op in ops if op in known}


def result_shape_depends_on_values(op: OpOverload) -> bool:
    """True for operators such as nonzero, which XLA cannot compile: shapes must be known first."""
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return bool(tags.intersection(op.tags))

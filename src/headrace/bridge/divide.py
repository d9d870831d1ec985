"""Lowering for a mesh: which values hold tokens, how embeddings are looked up.

Weights are gathered where they are used (`gathered`), inside a loop's body one layer at a time.
Knows: the graph's symbols for batch and sequence. Does not know: models' plans, devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch
import torch.fx as fx

from headrace.bridge.program import Program
from headrace.kernels.partition import FSDP, Partition, WeightSpec

Array = jax.Array


@dataclass(frozen=True, kw_only=True)
class Division:
    """A partition, the specs of a program's own placeholders, and its batch and sequence dims."""

    partition: Partition
    specs: Mapping[str, WeightSpec]
    batch: frozenset[Any]
    sequence: frozenset[Any]


def divide(program: Program, partition: Partition) -> Division:
    """What the lowering needs to know about `program` on this partition."""
    specs = {
        i.node: partition.weights[i.key]
        for i in program.inputs
        if i.kind == "parameter" and i.key in partition.weights
    }
    batch: set[Any] = set()
    sequence: set[Any] = set()
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        record = node.meta.get("val")
        if spec.kind == "user" and isinstance(record, torch.Tensor) and record.ndim:
            batch.add(_size(record.shape[0]))
            if record.ndim > 1 and not record.dtype.is_floating_point:
                sequence.add(_size(record.shape[1]))
    return Division(
        partition=partition,
        specs=specs,
        batch=frozenset(batch),
        sequence=frozenset(sequence - batch),
    )


def gathered(division: Division | None, node: fx.Node, value: Any) -> Any:
    """A placeholder's weight as operators want it; any other value as it is."""
    if division is None or node.name not in division.specs:
        return value
    return division.partition.gather(value, division.specs[node.name])


def constrained(division: Division | None, record: Any, value: Any) -> Any:
    """A value with a batch dim, divided by rows and, where it has a sequence dim, by tokens."""
    if division is None or not isinstance(record, torch.Tensor) or record.ndim < 2:
        return value
    if _size(record.shape[0]) not in division.batch:
        return value
    partition = division.partition
    entries: list[Any] = [partition.rows] + [None] * (record.ndim - 1)
    if record.ndim > 2 and _size(record.shape[1]) in division.sequence:
        entries[1] = partition.tokens
    return partition.constrain(value, *entries)


def embedding(division: Division, node: fx.Node, args: Any, function: Any) -> Array:
    """Rows of a divided table: every device looks its features up for all rows of its fsdp group.

    That moves activations of one layer instead of the table.
    """
    partition = division.partition
    stored = division.specs[node.args[0].name].stored  # pyright: ignore
    table, ids, *rest = args
    table = partition.gather(table, WeightSpec(stored=stored, compute=stored))
    last = stored[1] if len(stored) > 1 else None
    axes = (last,) if isinstance(last, str) else tuple(last or ())
    if FSDP not in axes:
        return function(table, ids, *rest)
    tokens = [partition.tokens] if ids.ndim > 1 else []
    rows = partition.entry("data", "expert")
    found = function(table, partition.constrain(ids, rows, *tokens), *rest)
    found = partition.constrain(found, rows, *tokens, last)
    return partition.constrain(found, partition.rows, *tokens, None)


def _size(size: Any) -> Any:
    """A number, or the symbol's expression."""
    return size if isinstance(size, int) else size.node.expr

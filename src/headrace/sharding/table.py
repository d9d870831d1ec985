"""The plan of a model on a mesh as a table: name, shape, spec, bytes a device, and why.

Knows: ParamPlan. Does not know: how a plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from headrace.sharding.mesh import MeshConfig
from headrace.sharding.rules import ParamPlan


def spec_text(spec: PartitionSpec, rank: int) -> str:
    """`(-, tensor, fsdp)`: the axes of every dim, `-` for none."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return "(" + ", ".join(_entry(entry) for entry in entries) + ")"


def _entry(entry: Any) -> str:
    if entry is None:
        return "-"
    return entry if isinstance(entry, str) else "+".join(entry)


def shard_rows(plans: Mapping[str, ParamPlan]) -> list[tuple[str, str, str, str, str]]:
    """(stored name, dtype and shape, spec, bytes a device, reason) for every parameter."""
    return [
        (
            plan.key,
            f"{plan.dtype} {list(plan.shape)}",
            spec_text(plan.spec, len(plan.shape)),
            f"{plan.bytes_per_device:,}",
            plan.reason,
        )
        for plan in plans.values()
    ]


def shard_table(plans: Mapping[str, ParamPlan]) -> str:
    """`shard_rows` in columns under a header, one line a parameter."""
    rows = [("parameter", "shape", "spec", "bytes a device", "reason"), *shard_rows(plans)]
    wide = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = (
        f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c:<{wide[2]}}  {d:>{wide[3]}}  {e}"
        for a, b, c, d, e in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def shard_totals(plans: Mapping[str, ParamPlan], mesh: MeshConfig) -> str:
    """Bytes of all parameters, on one device, and how much of that is not divided."""
    total = sum(plan.bytes for plan in plans.values())
    local = sum(plan.bytes_per_device for plan in plans.values())
    whole = sum(p.bytes for p in plans.values() if p.bytes == p.bytes_per_device)
    share = local * mesh.size / total if total else 1.0
    return (
        f"{total:,} bytes of parameters; {local:,} on each of {mesh.size} devices ({mesh}), "
        f"{share:.3f} copies in all; {whole:,} bytes are whole on every device"
    )

"""How one program is divided over a mesh: axis names, and constraints on values while tracing.

XLA partitions a jitted program by itself once it knows where values lie; what stands here tells it
only what it would get wrong: a weight that is stored in parts is gathered right before its use and
its gradient scattered right after, activations stay divided by batch and sequence, and kernels that
XLA cannot cut run inside `shard_map`.

Knows: mesh axes, specs by stored key. Does not know: models' plans (`headrace.sharding` has them),
files. A mesh of one device needs none of this: leave the partition out.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from headrace.kernels.quantized import DEQUANTIZE_NAME, QuantizedWeight

DATA, FSDP, TENSOR, CONTEXT, EXPERT = AXES = ("data", "fsdp", "tensor", "context", "expert")
BATCH_AXES = (DATA, FSDP, EXPERT)  # rows of the batch are divided over these
GATHER_NAME = "gather_weight"

# Cheap operators a policy need not save around: saving them would keep gathered weights.
_LAYOUT = frozenset(
    {"sharding_constraint", "transpose", "reshape", "squeeze", "convert_element_type"}
    | {"broadcast_in_dim", "dynamic_slice", "copy"}
)


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """stored: how the array lies between steps. compute: how an operator wants it."""

    stored: PartitionSpec
    compute: PartitionSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """A mesh and the specs of the weights by stored key (a stacked key's without its layer axis).

    Axes that the mesh lacks count as 1.
    """

    mesh: Mesh | AbstractMesh
    weights: Mapping[str, WeightSpec] = field(default_factory=dict)

    def size(self, axis: str | Sequence[str]) -> int:
        """Devices along one axis, or along several together."""
        names = (axis,) if isinstance(axis, str) else axis
        total = 1
        for name in names:
            total *= self.mesh.shape.get(name, 1)
        return total

    def axes(self, *names: str) -> tuple[str, ...]:
        """Those of `names` that divide something."""
        return tuple(name for name in names if self.size(name) > 1)

    def entry(self, *names: str) -> Any:
        """`names` as one entry of a PartitionSpec: None, an axis, or a tuple."""
        axes = self.axes(*names)
        return None if not axes else axes[0] if len(axes) == 1 else axes

    @property
    def rows(self) -> Any:
        """The spec entry of a batch dim."""
        return self.entry(*BATCH_AXES)

    @property
    def tokens(self) -> Any:
        """The spec entry of a sequence dim."""
        return self.entry(CONTEXT)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def constrain(self, value: Array, *entries: Any) -> Array:
        """`value` laid out by `entries`; an entry that does not divide its dim is left open."""
        spec = self.fitting(PartitionSpec(*entries), value.shape)
        return jax.lax.with_sharding_constraint(value, self.sharding(spec))

    def fitting(self, spec: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
        """`spec` for an array of other sizes: an entry that does not divide its dim is left out."""
        entries = [
            entry if entry is not None and size % self.size(entry) == 0 else None
            for entry, size in zip(spec, shape, strict=False)
        ]
        return PartitionSpec(*entries)

    def gather(self, value: Any, spec: WeightSpec) -> Any:
        """A weight as its operator wants it; its gradient goes back to how it is stored.

        Of a quantised weight the codes and the scales are gathered, not the values.
        """
        if isinstance(value, QuantizedWeight):
            codes, scales = self.gather(value.codes, spec), self.gather(value.scales, spec)
            return replace(value, codes=codes, scales=scales, used=self.sharding(spec.compute))
        stored, compute = (self.fitting(s, value.shape) for s in (spec.stored, spec.compute))
        return _gather(self, WeightSpec(stored=stored, compute=compute))(value)


@functools.lru_cache(maxsize=1024)
def _gather(partition: Partition, spec: WeightSpec) -> Any:
    stored, compute = partition.sharding(spec.stored), partition.sharding(spec.compute)

    def gather_weight(value: Array) -> Array:
        return jax.lax.with_sharding_constraint(value, compute)

    function = jax.custom_vjp(gather_weight)
    function.defvjp(
        lambda value: (gather_weight(value), None),
        lambda _, grad: (jax.lax.with_sharding_constraint(grad, stored),),
    )
    return function


_on_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar("headrace_on_mesh", default=False)


@contextlib.contextmanager
def tracing_on_mesh(partition: Partition | None) -> Generator[None]:
    """Operators traced inside keep batch and sequence apart, since both may be divided."""
    token = _on_mesh.set(partition is not None)
    try:
        yield
    finally:
        _on_mesh.reset(token)


def traced_on_mesh() -> bool:
    """Whether the program being traced is divided over a mesh."""
    return _on_mesh.get()


def save_but_weights(prim: Any, *_: Any, **params: Any) -> bool:
    """The remat policy `none` on a mesh, or of quantised weights: keep all but whole weights.

    Kept, gathered or dequantised weights would be the whole model on every device.
    """
    if prim.name in _LAYOUT:
        return False
    # custom_vjp_call has no name of its own; the function it was made from has.
    called = getattr(params.get("call_jaxpr"), "jaxpr", None)
    name = called.debug_info.func_name if called is not None else None
    return not (prim.name == "custom_vjp_call" and name in (GATHER_NAME, DEQUANTIZE_NAME))


__all__ = [
    "AXES",
    "BATCH_AXES",
    "CONTEXT",
    "DATA",
    "EXPERT",
    "FSDP",
    "TENSOR",
    "Partition",
    "WeightSpec",
    "save_but_weights",
    "traced_on_mesh",
    "tracing_on_mesh",
]

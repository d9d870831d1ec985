"""One way to run a training: slice, mesh, micro-batch, row length, remat, compiler flags.

Knows: how the pieces multiply. Does not know: whether it fits, how long it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from headrace.errors import ConfigError
from headrace.plan.hardware import Slice, parse_slice

AXES = ("data", "fsdp", "tensor", "context", "expert")
_BATCH_AXES = ("data", "fsdp", "expert")
Work = Literal["train", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """mesh: devices along each axis, as `mesh` of a configuration. batch_size: rows of a
    micro-batch for each device that rows are divided over. length: tokens in a row. flags: name
    of a set in flags.py. work: an optimizer step, or one batch of an evaluation."""

    slice_name: str
    mesh: Mapping[str, int] = field(default_factory=dict[str, int])
    batch_size: int = 1
    accumulation: int = 1
    length: int = 1024
    packing: bool = True
    remat: str = "full"
    flags: str = "default"
    work: Work = "train"

    @property
    def hardware(self) -> Slice:
        return parse_slice(self.slice_name)

    def axis(self, name: str) -> int:
        return int(self.mesh.get(name, 1))

    @property
    def trains(self) -> bool:
        """Whether it is an optimizer step; else a batch of an evaluation."""
        return self.work == "train"

    @property
    def num_devices(self) -> int:
        return math.prod(self.axis(name) for name in AXES)

    @property
    def batch_devices(self) -> int:
        """Devices that rows are divided over."""
        return math.prod(self.axis(name) for name in _BATCH_AXES)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on all devices."""
        return self.batch_size * self.batch_devices

    @property
    def device_tokens(self) -> int:
        """Positions that one device computes in a micro-batch."""
        return self.batch_size * self.length // self.axis("context")

    @property
    def step_positions(self) -> int:
        """Positions of a step on all devices, padding included."""
        return self.rows * self.length * self.accumulation

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"mesh": {k: v for k, v in self.mesh.items() if v > 1}}

    def mesh_text(self) -> str:
        parts = [f"{name} {self.axis(name)}" for name in AXES if self.axis(name) > 1]
        return " x ".join(parts) or "one device"


@dataclass(frozen=True, kw_only=True)
class ServerCandidate:
    """One way to serve: `tensor` devices of a slice share one copy of the model.

    streams: answers that a copy writes at once. longest: most tokens of a prompt and its answer.
    prompt, answer: their mean tokens. quantization, kv_cache_dtype: as of the engine.
    """

    slice_name: str
    tensor: int
    streams: int
    longest: int
    prompt: int
    answer: int
    quantization: str | None = None
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    work: Literal["serve"] = "serve"

    @property
    def hardware(self) -> Slice:
        return parse_slice(self.slice_name)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check_mesh(mesh: Mapping[str, Any], hardware: Slice) -> dict[str, int]:
    """The mesh of a configuration for a slice. ConfigError when it does not multiply to it."""
    unknown = [name for name in mesh if name not in AXES]
    wrong = [f"{k}: {v!r}" for k, v in mesh.items() if not _whole(v)]
    if unknown or wrong:
        raise ConfigError(
            f"mesh {dict(mesh)}: {', '.join([*map(repr, unknown), *wrong])} is wrong; it needs "
            f"whole numbers for {', '.join(AXES)}."
        )
    total = math.prod(mesh.values())
    if total == hardware.num_devices:
        return {name: int(size) for name, size in mesh.items()}
    rest = total // int(mesh.get("fsdp", 1))
    advice = "mesh: auto uses them all for fsdp"
    if hardware.num_devices % rest == 0:
        advice = f"fsdp: {hardware.num_devices // rest} would fit; {advice}"
    raise ConfigError(
        f"mesh {dict(mesh)} needs {total} devices, {hardware.name} has {hardware.num_devices} "
        f"({hardware.num_chips} chips): {advice}."
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def meshes(hardware: Slice, *, heads: int, kv_heads: int) -> Iterator[dict[str, int]]:
    """Meshes worth trying on a slice: fsdp alone, data x fsdp, and fsdp x tensor."""
    num = hardware.num_devices
    yield {"fsdp": num} if num > 1 else {}
    if num >= 2:
        yield {"data": num}
    tensor = 2
    while tensor <= min(num, 8):
        if num % tensor == 0 and heads % tensor == 0:
            rest = num // tensor
            yield {"fsdp": rest, "tensor": tensor} if rest > 1 else {"tensor": tensor}
        tensor *= 2
    data = 2
    while data <= num // 4:
        yield {"data": data, "fsdp": num // data}
        data *= 4

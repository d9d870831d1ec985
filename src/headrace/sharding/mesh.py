"""The mesh of a run: five axes with fixed names, from a mapping or chosen.

data     rows of the batch; every device has all weights
fsdp     rows of the batch; each device stores a part of every weight and gathers it for use
tensor   heads and features of one layer
context  tokens of one sequence
expert   rows of the batch; each device stores some experts of every mixture-of-experts layer

Knows: sizes, devices. Does not know: models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from headrace.errors import ConfigError
from headrace.kernels.partition import AXES, BATCH_AXES


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis; their product is the number of devices.

    >>> MeshConfig(fsdp=4).size
    4
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        wrong = [f"{name}: {value!r}" for name, value in self.sizes.items() if not _whole(value)]
        if wrong:
            raise ConfigError(f"mesh has {', '.join(wrong)}; every axis needs a whole number >= 1")

    @property
    def sizes(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(self.sizes.values())

    @property
    def batch_size(self) -> int:
        """Over how many devices the rows of a batch are divided."""
        return math.prod(self.sizes[axis] for axis in BATCH_AXES)

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in self.sizes.items() if size > 1]
        return ", ".join(parts) or "one device"

    @classmethod
    def sized(cls, value: Mapping[str, Any] | str) -> MeshConfig:
        """From a mapping or "fsdp=4,tensor=2", for however many devices that is."""
        given = _words(value) if isinstance(value, str) else dict(value)
        unknown = [name for name in given if name not in AXES]
        if unknown:
            raise ConfigError(f"mesh has no axis {', '.join(unknown)}; it has {', '.join(AXES)}")
        return cls(**given)

    @classmethod
    def parse(cls, value: Mapping[str, Any] | str | None, num_devices: int) -> MeshConfig:
        """From a mapping, "auto" (all devices on fsdp), None (one device), or "fsdp=4,tensor=2".

        Raises ConfigError when axes are unknown or do not multiply to `num_devices`.
        """
        if value is None:
            return cls()
        if value == "auto":
            return cls(fsdp=num_devices)
        config = cls.sized(value)
        given = {name: size for name, size in config.sizes.items() if size > 1}
        if config.size != num_devices:
            raise ConfigError(
                f"mesh {given} needs {config.size} devices, there are {num_devices}. "
                f"{_fitting(config, num_devices)}"
            )
        return config


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _words(text: str) -> dict[str, int]:
    """`fsdp=4,tensor=2` (or with colons or blanks) as a mapping."""
    given: dict[str, int] = {}
    for part in text.strip("{} ").replace(";", ",").split(","):
        name, _, size = part.replace(":", "=").partition("=")
        if not size.strip().isdigit():
            raise ConfigError(
                f"mesh {text!r} cannot be read; write axis=size pairs such as fsdp=4,tensor=2, "
                "or auto"
            )
        given[name.strip()] = int(size)
    return given


def _fitting(config: MeshConfig, num_devices: int) -> str:
    others = config.size // config.fsdp
    if num_devices % others == 0:
        return f"With fsdp: {num_devices // others} it fits; mesh: auto uses them all for fsdp."
    return "Their product must be the number of devices; mesh: auto uses them all for fsdp."


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The JAX mesh, axes in the order of AXES. `devices` may be those of a topology description.

    Real devices are ordered so that neighbouring axes are neighbours in the network. Raises
    ConfigError when the number of devices differs.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) != config.size:
        raise ConfigError(
            f"mesh ({config}) needs {config.size} devices, there are {len(devices)}. "
            f"{_fitting(config, len(devices))}"
        )
    shape = tuple(config.sizes[axis] for axis in AXES)
    if devices[0].platform == "tpu":
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices, dtype=object).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_spec(mesh: Mesh, *, rank: int = 3) -> PartitionSpec:
    """The spec of a batch array [A, B, T, ...]: micro-batches whole, rows and tokens divided."""
    rows = tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)
    entries: list[Any] = [None, rows or None]
    if rank > 2:
        entries.append("context" if mesh.shape.get("context", 1) > 1 else None)
    return PartitionSpec(*entries[:rank])

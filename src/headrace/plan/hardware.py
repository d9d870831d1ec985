"""Chips, slices and GPU machines: what each can do and how much memory it lets a program use.

Every figure is per *device*, the thing a JAX mesh counts: a chip on v4, v5e, v5p and v6e, half a
chip (one TensorCore) on v7x, one GPU. Peak rates and bandwidths are the makers' data sheets; the
memory of a TPU is what its compiler allows a program, which is less than the data sheet says.
Slice names are Google Cloud's: the number counts cores on v4, v5p and v7x and chips on v5e, v6e.

Knows: hardware and names. Does not know: prices (prices.py), the compiler (topology.py), models.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headrace.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device.

    flops: bf16 operations a second. hbm_bandwidth, link_bandwidth (one link, one way) and
    host_bandwidth (one way): bytes a second. hbm_bytes: what a program may use. links: links of a
    chip. clock_hz: what turns the compiler's cycles into seconds (0 for GPUs).
    """

    name: str
    kind: Literal["tpu", "gpu"]
    flops: float
    hbm_bandwidth: float
    hbm_bytes: int
    link_bandwidth: float
    links: int
    host_bandwidth: float
    clock_hz: float = 0.0
    devices_per_chip: int = 1
    tensorcores: int = 1  # of a device
    cores_per_chip: int = 1  # as slice names count them
    topology_prefix: str = ""
    chip_config_name: str = ""
    wraps_at: Literal["never", "16", "multiples of 4"] = "never"


def _tpu(name: str, tflops: float, hbm: float, gib: float, link: float, **rest: object) -> Chip:
    return Chip(
        name=name,
        kind="tpu",
        flops=tflops * 1e12,
        hbm_bandwidth=hbm * 1e9,
        hbm_bytes=int(gib * GIB),
        link_bandwidth=link * 1e9,
        host_bandwidth=28e9,  # assumed: PCIe as published measured runs with offloading imply it
        **rest,  # pyright: ignore[reportArgumentType]
    )


def _gpu(name: str, tflops: float, hbm: float, gib: float, link: float) -> Chip:
    return Chip(
        name=name,
        kind="gpu",
        flops=tflops * 1e12,
        hbm_bandwidth=hbm * 1e9,
        hbm_bytes=int(gib * GIB),
        link_bandwidth=link * 1e9,
        links=1,
        host_bandwidth=50e9,
    )


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            _tpu(
                "v4", 275, 1230, 31.75, 45, links=6, clock_hz=1.05e9, cores_per_chip=2,
                tensorcores=2,
                topology_prefix="v4", chip_config_name="megacore", wraps_at="multiples of 4",
            ),
            _tpu(
                "v5e", 197, 819, 15.75, 45, links=4, clock_hz=1.5e9,
                topology_prefix="v5e", wraps_at="16",
            ),
            _tpu(
                "v5p", 459, 2765, 95.74, 90, links=6, clock_hz=1.75e9, cores_per_chip=2,
                tensorcores=2,
                topology_prefix="v5p", wraps_at="multiples of 4",
            ),
            _tpu(
                "v6e", 918, 1638, 31.25, 90, links=4, clock_hz=1.75e9,
                topology_prefix="v6e", wraps_at="16",
            ),
            _tpu(
                "v7x", 1153.5, 3690, 94.75, 45, links=6, clock_hz=2.2e9, devices_per_chip=2,
                cores_per_chip=2, topology_prefix="tpu7x", wraps_at="multiples of 4",
            ),
            # NVLink one way; memory less about 1 GiB that the driver and runtime keep.
            _gpu("a100", 312, 2039, 78.5, 300),
            _gpu("h100", 989.5, 3350, 78.5, 450),
            _gpu("h200", 989.5, 4800, 139.5, 450),
        )
    }
)  # fmt: skip

_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = (
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8),
    (8, 8, 16), (8, 16, 16),
)  # fmt: skip
_SHAPES: Mapping[str, Sequence[tuple[int, ...]]] = {
    "v4": _CUBES[:8],
    "v5e": _FLAT,
    "v5p": _CUBES,
    "v6e": _FLAT,
    "v7x": ((1, 1, 1), *_CUBES[:8]),
}
_GPU_COUNTS = (1, 2, 4, 8)
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "tpu7x": "v7x", "v7": "v7x", "trillium": "v6e"}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What is rented at once: `num_chips` chips (GPUs) that one program runs on.

    shape: chips along each torus axis; (n,) for GPUs, which are all linked to each other.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """What a mesh must multiply to."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def is_tpu(self) -> bool:
        return self.chip.kind == "tpu"

    @property
    def topology_name(self) -> str:
        """libtpu's name, such as `v5p:2x2x1`."""
        return f"{self.chip.topology_prefix}:{'x'.join(map(str, self.shape))}"

    @property
    def usable_links(self) -> int:
        """Links a chip of this slice can receive on at once: two for each axis that closes to a
        ring, one for each open axis, none for an axis of one chip."""
        if not self.is_tpu:
            return 1
        wraps = self.chip.wraps_at
        all_fours = all(size % 4 == 0 for size in self.shape)
        total = 0
        for size in self.shape:
            ring = size == 16 if wraps == "16" else all_fours
            total += 0 if size == 1 else 2 if ring else 1
        return max(1, total)


def _slice_name(chip: Chip, shape: tuple[int, ...]) -> str:
    return f"{chip.name}-{math.prod(shape) * chip.cores_per_chip}"


def all_slices() -> dict[str, Slice]:
    """Every slice and GPU machine that can be planned for, by name, small ones first."""
    found: dict[str, Slice] = {}
    for name, shapes in _SHAPES.items():
        for shape in shapes:
            each = Slice(name=_slice_name(CHIPS[name], shape), chip=CHIPS[name], shape=shape)
            found[each.name] = each
    for name, chip in CHIPS.items():
        if chip.kind == "gpu":
            for count in _GPU_COUNTS:
                found[f"{name}-{count}"] = Slice(name=f"{name}-{count}", chip=chip, shape=(count,))
    return found


def parse_slice(text: str) -> Slice:
    """The slice of a name: `v5p-8`, `v5litepod-8`, `v6e:2x4`, `h100-2`, `2xh100`.

    Raises ConfigError with the nearest names and the sizes that exist.
    """
    slices = all_slices()
    name = _canonical(text)
    if name in slices:
        return slices[name]
    for each in slices.values():
        plain = "x".join(map(str, each.shape))
        if each.is_tpu and name in (f"{each.chip.name}:{plain}", f"{each.chip.name}:{plain}x1"):
            return each
    raise ConfigError(_unknown_slice(text, name, slices))


# how JAX names devices -> chips; the longest name that a device's begins with
_DEVICE_KINDS: Mapping[str, str] = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a JAX `device_kind`, None for one that is not in the table (a CPU)."""
    matches = [kind for kind in _DEVICE_KINDS if device_kind.startswith(kind)]
    return CHIPS[_DEVICE_KINDS[max(matches, key=len)]] if matches else None


def local_slice(device_kind: str, num_devices: int) -> Slice | None:
    """The slice or machine that so many devices of a kind are, None when none is known."""
    chip = chip_of(device_kind)
    return next(
        (s for s in all_slices().values() if s.chip is chip and s.num_devices == num_devices), None
    )


def _canonical(text: str) -> str:
    name = text.strip().lower().replace("_", "-").removeprefix("tpu-")
    count, cross, gpu = name.partition("x")
    if cross and count.isdigit() and gpu in CHIPS:
        return f"{gpu}-{count}"
    for separator in ("-", ":"):
        kind, found, size = name.partition(separator)
        if found:
            return f"{_ALIASES.get(kind, kind)}{separator}{size}"
    if name in CHIPS and CHIPS[name].kind == "gpu":
        return f"{name}-1"
    return name


def _unknown_slice(text: str, name: str, slices: Mapping[str, Slice]) -> str:
    if name.split("-")[0] in ("v2", "v3"):
        return (
            f"slice {text!r}: TPU {name.split('-')[0]} cannot be planned, its compiler and chips "
            f"are no longer offered. The nearest in size is v5e-{name.partition('-')[2] or 8}."
        )
    near = difflib.get_close_matches(name, slices, n=3, cutoff=0.5)
    kinds: dict[str, list[str]] = {}
    for each in slices.values():
        kinds.setdefault(each.chip.name, []).append(each.name.partition("-")[2])
    lines = [f"slice {text!r} is not known" + (f"; nearest: {', '.join(near)}" if near else "")]
    lines += [f"  {kind:<5} {kind}-{{{', '.join(sizes)}}}" for kind, sizes in kinds.items()]
    lines.append("The number counts cores on v4, v5p and v7x, chips on v5e and v6e, and GPUs.")
    return "\n".join(lines)

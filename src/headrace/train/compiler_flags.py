"""Compiler flag sets for training on TPU, by name, and which one a slice gets.

The same step can take half the time under other flags: what matters is whether weights are gathered
beside the matmuls or chained into them, and how much on-chip memory a fusion may use. The names and
values are XLA's own; MaxText's published recipes use the same ones for the same chips.

A plan compiles them, names the one it chose, and `compiler_flags` of a configuration applies it.

Knows: flags. Does not know: programs, times.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Options = Mapping[str, str | bool | int]

_ON_CHIP: dict[str, str | bool | int] = {"xla_tpu_scoped_vmem_limit_kib": 98304}
_OVERLAP: dict[str, str | bool | int] = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
    # Gathers over many chips stay gathers: as sums of padded parts they move twice the bytes.
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
    # Whole gathers that overlap, in place of products cut into windows around a ring.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000,
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}
_SPARSECORE: dict[str, str | bool | int] = {
    "xla_sc_disable_megacore_partitioning": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_tpu_enable_all_gather_offload_tracing": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_sc_enable_instruction_fusion": False,
}

FLAG_SETS: Mapping[str, Options] = MappingProxyType(
    {
        "default": {},
        "overlap": _OVERLAP,
        "overlap-vmem": {**_OVERLAP, **_ON_CHIP},
        "sparsecore": {**_ON_CHIP, **_SPARSECORE},
    }
)


def flag_sets(chip: str, num_devices: int) -> tuple[str, ...]:
    """Sets worth compiling on a chip, the plainest first. One device has no collectives."""
    vmem = chip in ("v6e", "v7x")  # the others' on-chip memory is smaller than the limit asked for
    if num_devices == 1:
        return ("default",)
    return ("default", "overlap", "overlap-vmem") if vmem else ("default", "overlap")


def compiler_options(name: str, platform: str) -> Options:
    """The options of a set; none on platforms whose compiler does not know them."""
    return FLAG_SETS[name] if platform == "tpu" else {}

"""What Google Cloud and SkyPilot call a slice, and how it is cut into hosts.

Sources: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e} (accelerator types, runtime versions),
cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (labels, machine types),
docs.skypilot.co/en/latest/reference/tpu.html. TPU7x is offered through GKE alone
(cloud.google.com/tpu/docs/queued-resources).

Knows: names. Does not know: manifests, prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.plan.hardware import Slice


@dataclass(frozen=True, kw_only=True)
class Names:
    """gke: the label `cloud.google.com/gke-tpu-accelerator`. accelerator: prefix of gcloud's
    accelerator type, "" where there is none. runtime: the TPU VM image."""

    gke: str
    accelerator: str
    runtime: str


TPU_NAMES: Mapping[str, Names] = {
    "v4": Names(gke="tpu-v4-podslice", accelerator="v4", runtime="tpu-ubuntu2204-base"),
    "v5e": Names(
        gke="tpu-v5-lite-podslice", accelerator="v5litepod", runtime="v2-alpha-tpuv5-lite"
    ),
    "v5p": Names(gke="tpu-v5p-slice", accelerator="v5p", runtime="v2-alpha-tpuv5"),
    "v6e": Names(gke="tpu-v6e-slice", accelerator="v6e", runtime="v2-alpha-tpuv6e"),
    "v7x": Names(gke="tpu7x", accelerator="", runtime=""),
}
GPU_NAMES: Mapping[str, str] = {"a100": "A100-80GB", "h100": "H100", "h200": "H200"}
_FLAT = ("v5e", "v6e")  # one host has up to 8 chips; larger slices have hosts of 4


def chips_per_host(wanted: Slice) -> int:
    """Chips (GPUs) of one host of the slice."""
    if not wanted.is_tpu:
        return wanted.num_chips
    largest = 8 if wanted.chip.name in _FLAT and wanted.num_chips <= 8 else 4
    return min(wanted.num_chips, largest)


def num_hosts(wanted: Slice) -> int:
    """Processes that a run on the slice has."""
    return wanted.num_chips // chips_per_host(wanted)


def accelerator_type(wanted: Slice) -> str:
    """gcloud's `--accelerator-type`, such as v5litepod-16."""
    return f"{TPU_NAMES[wanted.chip.name].accelerator}-{wanted.name.partition('-')[2]}"


def topology(wanted: Slice) -> str:
    """GKE's label for the shape, such as 2x2x1."""
    return "x".join(map(str, wanted.shape))

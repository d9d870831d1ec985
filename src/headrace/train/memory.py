"""Bytes of a device by cause, from the arrays of a run and the compiled step; what to change.

Arguments are exact: they are the arrays. Temporaries are the compiler's own number for the whole
program; of them the gradients' size is known, the rest (kept activations, logits of a chunk,
gathered weights, workspace) is given as one number, because the compiler reuses its memory.

Knows: arrays, MemoryUse. Does not know: devices' limits, how a step is compiled.
"""

from __future__ import annotations

import math
import re
import resource
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from headrace.errors import TrainingError
from headrace.train.shapes import MemoryUse
from headrace.train.state import Params, TrainState

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class MemoryCauses:
    """Bytes on one device. gradients are part of temporary."""

    frozen: int
    trainable: int
    optimizer: int
    other: int
    gradients: int
    temporary: int
    peak: int

    def lines(self) -> list[str]:
        """`memory   frozen weights 1.2 GiB, ...`, for the start screen and `headrace memory`."""
        rest = max(self.temporary - self.gradients, 0)
        parts = {
            "frozen weights": self.frozen,
            "trained weights (float32)": self.trainable,
            "optimizer": self.optimizer,
            "batch and buffers": self.other,
            "gradients (float32)": self.gradients,
            "activations, logits and workspace": rest,
        }
        shown = ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value)
        return [f"a device needs {size(self.peak)}: {shown}"]

    def advice(
        self, *, rows: int, length: int, remat: str, lora: bool, devices: int, quantized: bool
    ) -> list[str]:
        """Three changes that lower the largest causes, with about how much each brings."""
        rest = max(self.temporary - self.gradients, 0)
        found: list[tuple[int, str]] = []
        if rows > 1:
            half = max(rows // 2, 1)
            found.append(
                (
                    rest * (rows - half) // rows,
                    f"per_device_train_batch_size: {half} (now {rows}), with "
                    "gradient_accumulation_steps doubled",
                )
            )
        if remat not in ("full", "offload"):
            found.append((rest // 2, f"activation_checkpointing: full (now {remat})"))
        found.append((rest // 2, f"max_length: {max(length // 2, 1)} (now {length})"))
        if not lora:
            full = self.trainable + self.optimizer + self.gradients
            found.append((full * 9 // 10, "use_peft: true, which trains an adapter only"))
        if lora and not quantized:
            found.append((self.frozen * 7 // 10, "quantization: nf4, for the frozen weights"))
        if self.optimizer > self.trainable:
            found.append((self.optimizer * 9 // 10, "optim: adafactor, whose moments are small"))
        divided = self.frozen + self.trainable + self.optimizer + self.gradients
        found.append(
            (divided // 2, f"twice the devices with mesh: {{fsdp: {2 * max(devices, 1)}}}")
        )
        found.sort(key=lambda item: -item[0])
        return [
            f"{text}{f': about {size(saved)} less' if saved else ''}" for saved, text in found[:3]
        ]


def refused_bytes(message: str) -> int | None:
    """What XLA's message says was asked for, in bytes: 0 when it does not say how much, None when
    memory was not the reason."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    found = re.search(r"(?:temporaries|memory required)[^(]*\((\d+(?:\.\d+)?)([KMGT])\)", message)
    found = found or re.search(r"Used (\d+(?:\.\d+)?)([KMGT]) of", message)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0


@contextmanager
def out_of_memory_explained(explain: Callable[[int], list[str]]) -> Generator[None]:
    """A device that runs out of memory inside raises TrainingError with what `explain` says.

    explain: lines for the bytes that were asked for (0 when not known).
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        wanted = refused_bytes(str(error))
        if wanted is None:
            raise
        first = str(error).strip().splitlines()[0][:300]
        lines = "\n  ".join(explain(wanted))
        raise TrainingError(f"a device ran out of memory ({first}).\n  {lines}") from error


def peak_memory() -> dict[str, float]:
    """The most bytes in use so far: of the first device, or of this process where devices do not
    say (a CPU), under a name that says which.
    """
    stats: Any = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return {"device_peak_bytes": float(stats["peak_bytes_in_use"])}
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return {"process_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}


def memory_causes(state: TrainState, frozen: Params, batch: Any, memory: MemoryUse) -> MemoryCauses:
    """The causes for these arrays (or shapes with shardings) and this compiled step."""
    trainable = local_bytes(state.trainable)
    return MemoryCauses(
        frozen=local_bytes(frozen),
        trainable=trainable,
        optimizer=local_bytes(state.opt_state),
        other=local_bytes(state.buffers) + local_bytes(batch),
        gradients=min(trainable, memory.temporary),
        temporary=memory.temporary,
        peak=memory.peak,
    )


def local_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays on one device."""
    return sum(_local(leaf) for leaf in jax.tree.leaves(tree))


def _local(leaf: Any) -> int:
    shape = tuple(leaf.shape)
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None:
        shape = sharding.shard_shape(shape)
    return math.prod(shape) * leaf.dtype.itemsize


def size(count: int) -> str:
    """Bytes for people."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} bytes"

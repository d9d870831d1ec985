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

_ROOM = 0.95  # of a device's memory; what is left absorbs the estimate's error
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
        self,
        *,
        rows: int,
        length: int,
        remat: str,
        lora: bool,
        devices: int,
        quantized: bool,
        limit: int | None = None,
    ) -> list[str]:
        """Three changes that lower the largest causes, with about how much each brings.

        limit: bytes that a device has. With it rows or tokens are halved until a change fits, and
        one that leaves too much says how many rows go with it.
        """
        rest = max(self.temporary - self.gradients, 0)
        full = self.trainable + self.optimizer + self.gradients
        changes = [("", 0, 1.0)]  # what is set, bytes less for sure, share of the rest that stays
        if remat not in ("full", "offload"):
            changes.append((f"activation_checkpointing: full (now {remat})", 0, 0.5))
        usable = None if limit is None else _ROOM * limit
        shorter = self._halved(length, usable, least=max(1, min(length // 2, 64)))
        alone = self._halved(rows, usable)
        changes.append((f"max_length: {shorter} (now {length})", 0, shorter / length))
        if not lora:
            changes.append(("use_peft: true, which trains an adapter only", full * 9 // 10, 1.0))
        if lora and not quantized:
            less = self.frozen * 7 // 10
            changes.append(("quantization: nf4, for the frozen weights", less, 1.0))
        if self.optimizer > self.trainable:
            less = self.optimizer * 9 // 10
            changes.append(("optim: adafactor, whose moments are small", less, 1.0))
        less = (self.frozen + full) // 2
        changes.append((f"twice the devices with mesh: {{fsdp: {2 * max(devices, 1)}}}", less, 1.0))
        found: list[tuple[bool, int, str]] = []
        for text, sure, share in changes:
            room = None if limit is None else _ROOM * limit + sure + rest * (1 - share)
            fewer = self._halved(rows, room, share=share, at_least_once=not text)
            # one that leaves as few rows as fewer rows alone comes last
            spares = not text or limit is None or rows == 1 or fewer > alone
            if fewer < rows:
                text += (
                    f"{', and ' if text else ''}per_device_train_batch_size: {fewer} (now {rows}), "
                    f"with gradient_accumulation_steps x {rows // fewer}"
                )
            if text:
                found.append((spares, sure + int(rest * (1 - share * fewer / rows)), text))
        found.sort(key=lambda item: (not item[0], -item[1]))
        return [
            f"{text}{f': about {size(saved)} less' if saved else ''}"
            for _, saved, text in found[:3]
        ]

    def _halved(
        self,
        count: int,
        limit: float | None,
        *,
        least: int = 1,
        share: float = 1.0,
        at_least_once: bool = True,
    ) -> int:
        """`count` rows or tokens halved until the step needs at most `limit`, as far as they go.

        share: of the temporaries that grow with them."""
        rest = share * max(self.temporary - self.gradients, 0)
        fewer = max(count // 2, least) if at_least_once else count
        while limit is not None and fewer > least:
            if self.peak - rest * (1 - fewer / count) <= limit:
                break
            fewer = max(fewer // 2, least)
        return fewer


def refused_bytes(message: str) -> int | None:
    """What XLA's message says was asked for, in bytes: 0 when it does not say how much, None when
    memory was not the reason."""
    if not any(each in message for each in _REFUSALS):
        return None
    for pattern in _WANTED:
        found = re.search(pattern, message)
        if found:
            return _bytes(*found.groups())
    return 0


def available_bytes(message: str) -> int | None:
    """What XLA's message says a device has; None when it does not say."""
    found = re.search(rf"(?:available HBM \(|Used \S+ of |available bytes: ){_SIZE}", message)
    return _bytes(*found.groups()) if found else None


_SIZE = r"(\d+(?:\.\d+)?) ?([KMGT]?)i?B?"
_REFUSALS = ("RESOURCE_EXHAUSTED", "Ran out of memory", "Out of memory allocating")
# TPU's compiler in its three forms, then an allocation while running
_WANTED = (
    rf"(?:temporaries|memory required)[^(]*\({_SIZE}\)",
    rf"Used {_SIZE} of",
    rf"TensorCore Hbm usage: {_SIZE}",
    rf"(?:allocating|allocate) {_SIZE}",
)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * (_UNITS[unit] if unit else 1))


@contextmanager
def out_of_memory_explained(
    explain: Callable[[int, int | None], list[str]],
) -> Generator[None]:
    """A device that runs out of memory inside raises TrainingError with what `explain` says.

    explain: lines for the bytes that were asked for (0 when not known) and those that there are.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        wanted = refused_bytes(str(error))
        if wanted is None:
            raise
        first = str(error).strip().splitlines()[0][:300]
        lines = "\n  ".join(explain(wanted, available_bytes(str(error))))
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

"""How much memory a device has, as its backend says.

Knows: JAX devices. Does not know: what the memory is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """limit: bytes that programs may use. used: bytes in use now."""

    limit: int
    used: int


def device_memory(device: Any = None) -> DeviceMemory | None:
    """The memory of a device (this process's first by default); None where the backend does not
    say, as on CPU.
    """
    first = jax.local_devices()[0] if device is None else device
    stats: dict[str, int] = first.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return DeviceMemory(limit=int(stats["bytes_limit"]), used=int(stats.get("bytes_in_use", 0)))

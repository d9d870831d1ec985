"""Names of adapters, their slots, and how many requests use each.

Each load gets a version of its own, so that nothing computed for an earlier adapter of the same
name is reused. A slot is given to another adapter only when its last request is done.

Knows: names, slots. Does not know: weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from headrace.errors import AdapterError, AdapterSlotsError


@dataclass(eq=False, kw_only=True)
class Loaded:
    """One loaded adapter; slot 0 and version 0 are the base's."""

    name: str | None
    slot: int
    version: int
    uses: int = 0
    removed: bool = False


class Adapters:
    """Loaded adapters by name; safe to use from several threads."""

    def __init__(self, *, max_loras: int) -> None:
        self.max_loras = max_loras
        self._base = Loaded(name=None, slot=0, version=0)
        self._by_name: dict[str, Loaded] = {}
        self._free = list(range(max_loras, 0, -1))
        self._versions = count(1)
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Adapters that requests may name."""
        return tuple(self._by_name)

    @property
    def in_use(self) -> tuple[str, ...]:
        """Adapters that requests use now."""
        return tuple(name for name, loaded in list(self._by_name.items()) if loaded.uses)

    def add(self, name: str, put: Callable[[int], None], *, replace: bool = False) -> None:
        """Take a slot, let `put` fill it, then make the name known.

        Raises AdapterError for a name in use (unless `replace`), AdapterSlotsError when no slot is
        free.
        """
        old = self._by_name.get(name)
        if old is not None and not replace:
            raise AdapterError(f"an adapter named {name!r} is loaded already")
        if not self._free:
            raise AdapterSlotsError(
                f"all {self.max_loras} adapter slots are in use"
                + (" (the old version still answers)" if old is not None and replace else "")
                + "; unload one or start with more (max_loras)"
            )
        slot = self._free[-1]
        put(slot)  # may raise: nothing has changed then
        with self._lock:
            self._free.remove(slot)
            self._by_name[name] = Loaded(name=name, slot=slot, version=next(self._versions))
            if old is not None:
                self._retire(old)

    def remove(self, name: str) -> None:
        """Refuse new requests for the name; its slot is free when the last one is done."""
        with self._lock:
            if name not in self._by_name:
                raise AdapterError(f"no adapter named {name!r} is loaded")
            self._retire(self._by_name.pop(name))

    def hold(self, name: str | None, uses: int) -> Loaded:
        """Count uses of an adapter (None: the base). Raises AdapterError for an unknown name."""
        with self._lock:
            if name is not None and name not in self._by_name:
                raise AdapterError(f"no adapter named {name!r} is loaded")
            held = self._base if name is None else self._by_name[name]
            held.uses += uses
            return held

    def drop(self, held: Loaded, uses: int = 1) -> None:
        """Uses of an adapter are over."""
        with self._lock:
            held.uses -= uses
            if held.removed and held.uses == 0:
                self._free.append(held.slot)

    def _retire(self, loaded: Loaded) -> None:
        loaded.removed = True
        if loaded.uses == 0:
            self._free.append(loaded.slot)

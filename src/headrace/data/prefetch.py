"""The next items are made in a thread while the current one is used.

Order is kept, errors of the thread are raised where the item would have come, and leaving the
`with` block (Ctrl-C included) stops the thread before it returns.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
_POLL_SECONDS = 0.05


class _End:
    """Marks the end of the items, with the error that caused it."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[T]):
    """Iterate over `items` through a queue of at most `size` ready ones.

    with Prefetch(loader.steps(state), size=2) as steps:
        for step in steps: ...
    """

    def __init__(self, items: Iterable[T], *, size: int = 2) -> None:
        self._items = items
        self._ready: queue.Queue[T | _End] = queue.Queue(maxsize=size)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="headrace-prefetch", daemon=True)
        self._ended = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        item = self._ready.get()
        if not isinstance(item, _End):
            return item
        self._ended = True
        if item.error is not None:
            raise item.error
        raise StopIteration

    def _fill(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                if not self._put(item):
                    return
        except BaseException as raised:  # handed to the consumer, not swallowed
            error = raised
        self._put(_End(error))

    def _put(self, item: T | _End) -> bool:
        """False when the consumer left."""
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

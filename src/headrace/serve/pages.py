"""Which page of the cache belongs to whom, and which pages hold a known beginning.

A full page is known by the page before it and its own tokens, so equal beginnings are found by
content, exactly and without hashes that could collide. The first page hangs on a root, one for each
version of each adapter: another adapter's keys and values are never reused. Pages that nobody uses
stay known until they are needed; the one unused longest goes first.

Knows: page numbers, tokens. Does not know: devices, requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count

Key = tuple[Hashable, tuple[int, ...]]


class PagePool:
    """Pages 1..num_pages-1; page 0 takes what padding writes and is never given out."""

    def __init__(self, num_pages: int, page_size: int, *, caching: bool = True) -> None:
        self.num_pages, self.page_size, self.caching = num_pages, page_size, caching
        self._free = list(range(num_pages - 1, 0, -1))
        self._users = [0] * num_pages
        self._known: dict[Key, int] = {}
        self._key: dict[int, Key] = {}
        self._node: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._nodes = count()
        self.queries = self.hits = 0

    @property
    def num_available(self) -> int:
        """Pages that `take` can give: free ones and known ones that nobody uses."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that some sequence holds."""
        return self.num_pages - 1 - self.num_available

    def take(self) -> int | None:
        """A page for one user, None when all are in use. May forget the oldest known page."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._users[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Give up one use of each; the last page of a sequence becomes the oldest."""
        for page in reversed(pages):
            self._users[page] -= 1
            assert self._users[page] >= 0, f"page {page} was released more often than taken"
            if self._users[page] == 0:
                if page in self._key:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def find(self, root: Hashable, tokens: Sequence[int]) -> tuple[list[int], Hashable]:
        """Take the known pages with the beginning of `tokens`, leaving at least one token over.

        Returns them and the node that the next page hangs on.
        """
        parent: Hashable = ("root", root)
        if not self.caching:
            return [], parent
        found: list[int] = []
        size = self.page_size
        for i in range((len(tokens) - 1) // size):
            page = self._known.get((parent, tuple(tokens[i * size : (i + 1) * size])))
            if page is None:
                break
            found.append(page)
            parent = self._node[page]
        for page in found:
            self._users[page] += 1
            self._idle.pop(page, None)
        return found, parent

    def count(self, queries: int, hits: int) -> None:
        """Tokens of an admitted prompt that were looked up, and those that were found."""
        self.queries += queries
        self.hits += hits

    def remember(self, parent: Hashable, tokens: Sequence[int], page: int) -> Hashable:
        """`page` is full of `tokens` and follows `parent`: let others find it. Returns its node."""
        if not self.caching:
            return parent
        key: Key = (parent, tuple(tokens))
        twin = self._known.get(key)
        if twin is not None:
            return self._node[twin]
        if page not in self._key:
            self._known[key] = page
            self._key[page] = key
            self._node[page] = next(self._nodes)
        return self._node[page]

    def _forget(self, page: int) -> None:
        del self._known[self._key.pop(page)]
        del self._node[page]

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless every page is free, idle, or held as often as counted."""
        uses = [0] * self.num_pages
        for pages in held:
            for page in pages:
                uses[page] += 1
        assert uses == self._users, "the uses counted are not those of the sequences"
        unused = sorted([*self._free, *self._idle])
        assert unused == [p for p in range(1, self.num_pages) if not uses[p]], "a page leaked"
        assert len(self._known) == len(self._key) == len(self._node)

"""Which tokens the next step computes.

Running sequences come first: one token each, then what is left of their prompts, then waiting ones
as far as rows, pages and the step's budget go. When pages run out the youngest running sequence
gives its pages back and waits at the front; it is computed again later, most of it from pages that
are still known. Nothing here touches a device.

Knows: sequences, pages. Does not know: programs, text, threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from headrace.serve.pages import PagePool
from headrace.serve.request import Sequence


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`count` tokens of one sequence from `start` on; the last ones may be guesses (`drafts`)."""

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def completes(self) -> bool:
        """Whether the sequence gets a new token after this chunk."""
        return self.start + self.count == len(self.sequence.tokens) + len(self.drafts)


@dataclass(kw_only=True)
class Plan:
    """One step: sequences that decode one token, and chunks of prompts."""

    decode: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


class Scheduler:
    """Waiting and running sequences, and their pages.

    on_pages is called when a sequence has new pages, on_leave before it gives up its row; draft
    gives guesses of a decoding sequence's next tokens (at most block - 1).
    """

    def __init__(self, pool: PagePool, *, max_num_seqs: int, block: int, max_blocks: int) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._block, self._max_blocks = block, max_blocks
        self.on_pages: Callable[[Sequence], None] = lambda sequence: None
        self.on_leave: Callable[[Sequence], None] = lambda sequence: None
        self.draft: Callable[[Sequence], tuple[int, ...]] = lambda sequence: ()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """The next step; takes pages, may preempt."""
        plan = Plan()
        budget = self._max_blocks
        for sequence in [s for s in self.running if s.ready_to_decode]:
            if sequence.slot < 0:
                continue  # preempted for an older one
            drafts = self.draft(sequence) if budget else ()
            if not self._room(sequence, 1 + len(drafts)):
                continue
            if drafts:
                start, size = sequence.computed, 1 + len(drafts)
                plan.chunks.append(Chunk(sequence=sequence, start=start, count=size, drafts=drafts))
                budget -= 1
            else:
                plan.decode.append(sequence)
        for sequence in [s for s in self.running if not s.ready_to_decode]:
            if sequence.slot >= 0 and budget:
                budget -= self._chunk(sequence, budget, plan)
        # A sequence that was planned first may have been preempted for a later one.
        plan.decode = [s for s in plan.decode if s.slot >= 0]
        plan.chunks = [c for c in plan.chunks if c.sequence.slot >= 0]
        shared = any(not c.drafts for c in plan.chunks)
        while budget and self._admit(budget if shared else None):
            budget -= self._chunk(self.running[-1], budget, plan)
            shared = True
        return plan

    def _chunk(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Plan the next tokens of a prompt; returns the blocks used."""
        count = min(len(sequence.tokens) - sequence.computed, budget * self._block)
        if not self._room(sequence, count):
            return 0
        plan.chunks.append(Chunk(sequence=sequence, start=sequence.computed, count=count))
        return -(-count // self._block)

    def _admit(self, room: int | None) -> bool:
        """Start the first waiting sequence if it has a row and its prompt has pages.

        room: blocks that another prompt leaves in this step. A prompt that does not fit there but
        in a step of its own waits for that: cut in two it would answer no earlier, and its first
        half would only delay the other.
        """
        if not self.waiting or not self._free_slots:
            return False
        sequence = self.waiting[0]
        if self._leader_prefills(sequence.leader):
            return False
        size = self.pool.page_size
        known: list[int] = []
        node: Hashable = ("root", sequence.root)
        if sequence.params.prompt_logprobs is None:
            known, node = self.pool.find(sequence.root, sequence.tokens)
        needed = -(-len(sequence.tokens) // size) - len(known)
        spare = 1 if self.running else 0  # one more, so that the next decode does not preempt
        blocks = -(-(len(sequence.tokens) - len(known) * size) // self._block)
        cut = room is not None and room < blocks <= self._max_blocks
        if cut or needed + spare > self.pool.num_available:
            self.pool.release(known)
            return False
        self.waiting.popleft()
        sequence.pages, sequence.node = known, node
        sequence.computed = len(known) * size
        if sequence.params.prompt_logprobs is None:
            self.pool.count(len(sequence.tokens), sequence.computed)
        if not sequence.num_generated:
            sequence.num_cached = sequence.computed
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        self.on_pages(sequence)
        return True

    def _leader_prefills(self, leader: Sequence | None) -> bool:
        """Whether the pages of the same prompt are still being computed (n > 1)."""
        if leader is None or leader.finished is not None or leader.num_generated:
            return False
        return leader.slot >= 0 or leader in self.waiting

    def _room(self, sequence: Sequence, count: int) -> bool:
        """Take pages for `count` more tokens, preempting younger sequences if need be."""
        needed = -(-(sequence.computed + count) // self.pool.page_size)
        while len(sequence.pages) < needed:
            page = self.pool.take()
            if page is None:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    return False
                continue
            sequence.pages.append(page)
            self.on_pages(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.computed = 0
        sequence.prompt_scores.clear()
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def advance(self, sequence: Sequence, count: int) -> None:
        """`count` more tokens are in the cache; full pages become known."""
        size = self.pool.page_size
        before = sequence.computed // size
        sequence.computed += count
        for i in range(before, sequence.computed // size):
            tokens = sequence.tokens[i * size : (i + 1) * size]
            sequence.node = self.pool.remember(sequence.node, tokens, sequence.pages[i])

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting; its pages are free at once."""
        if sequence.slot >= 0:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.on_leave(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        self.pool.release(sequence.pages)
        sequence.pages = []

    def check(self) -> None:
        """Raise AssertionError when a page or row leaked."""
        self.pool.check([s.pages for s in self.running])
        slots = sorted([*self._free_slots, *(s.slot for s in self.running)])
        assert slots == list(range(len(slots))), "a row leaked"
        assert all(not s.pages and s.slot < 0 for s in self.waiting)

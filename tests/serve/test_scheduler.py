"""Pages and rows never leak, whatever happens; equal beginnings are found, foreign ones not."""

from __future__ import annotations

import random

import pytest

from headrace.serve.pages import PagePool
from headrace.serve.params import SamplingParams
from headrace.serve.request import Sequence
from headrace.serve.scheduler import Scheduler

SIZE = 4


def _sequence(tokens: list[int], *, root: int = 0, most: int = 12) -> Sequence:
    return Sequence(
        id=str(id(tokens)),
        tokens=list(tokens),
        num_prompt=len(tokens),
        params=SamplingParams(),
        seed=0,
        sink=lambda delta: None,
        max_tokens=most,
        root=root,
    )


def _step(scheduler: Scheduler, rng: random.Random) -> list[Sequence]:
    """Run the plan without a device; returns the sequences that got a token."""
    plan = scheduler.plan()
    wrote = list(plan.decode)
    for chunk in plan.chunks:
        assert chunk.sequence.slot >= 0
        scheduler.advance(chunk.sequence, chunk.count)
        if chunk.completes:
            wrote.append(chunk.sequence)
    for sequence in wrote:
        if sequence.computed < len(sequence.tokens):
            scheduler.advance(sequence, 1)
        sequence.tokens.append(rng.randrange(50))
    return wrote


@pytest.mark.parametrize("seed", range(5))
def test_a_random_day_leaks_nothing_and_everybody_finishes(seed: int) -> None:
    """Arrivals, cancellations and a cache far too small for all: 400 sequences."""
    rng = random.Random(seed)
    pool = PagePool(24, SIZE)
    scheduler = Scheduler(pool, max_num_seqs=5, block=4, max_blocks=4)
    beginnings = [[rng.randrange(50) for _ in range(16)] for _ in range(3)]
    waiting = 400
    open_sequences: set[Sequence] = set()
    finished = cancelled = 0
    for _ in range(20_000):
        while waiting and rng.random() < 0.3:
            tokens = rng.choice(beginnings)[: rng.randrange(17)]
            tokens = tokens + [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
            sequence = _sequence(tokens, root=rng.randrange(2), most=rng.randrange(1, 30))
            scheduler.add(sequence)
            open_sequences.add(sequence)
            waiting -= 1
        for sequence in _step(scheduler, rng):
            if sequence.num_generated >= sequence.max_tokens:
                scheduler.finish(sequence)
                sequence.finished = "length"
                open_sequences.remove(sequence)
                finished += 1
        if open_sequences and rng.random() < 0.05:
            victim = rng.choice(sorted(open_sequences, key=lambda s: s.id))
            scheduler.finish(victim)
            victim.finished = "abort"
            open_sequences.remove(victim)
            cancelled += 1
        scheduler.check()
        if not waiting and not open_sequences:
            break
    assert finished + cancelled == 400
    assert pool.num_used == 0
    assert scheduler.num_preemptions > 0
    assert pool.hits > 0


def test_a_prompt_that_fits_a_step_of_its_own_is_not_cut_to_fill_anothers() -> None:
    pool = PagePool(40, SIZE)
    scheduler = Scheduler(pool, max_num_seqs=6, block=SIZE, max_blocks=4)
    for size in (12, 8, 4, 30):
        scheduler.add(_sequence(list(range(100 * size, 101 * size))))
    planned: list[list[int]] = []
    for _ in range(4):
        plan = scheduler.plan()
        planned.append([c.count for c in plan.chunks])
        for chunk in plan.chunks:
            scheduler.advance(chunk.sequence, chunk.count)
            if chunk.completes:
                chunk.sequence.tokens.append(1)
    # 12 leaves one block, 8 needs two: it waits. 30 fits no step, so it fills what is left.
    assert planned == [[12], [8, 4, 4], [16], [10]]
    assert pool.queries == 12 + 8 + 4 + 30


def test_equal_beginnings_share_pages_of_the_same_root_only() -> None:
    pool = PagePool(20, SIZE)
    scheduler = Scheduler(pool, max_num_seqs=2, block=16, max_blocks=2)
    prompt = list(range(10))
    first = _sequence(prompt, root="v1")
    scheduler.add(first)
    _step(scheduler, random.Random(0))
    held = list(first.pages)
    scheduler.finish(first)
    same, other = _sequence(prompt, root="v1"), _sequence(prompt, root="v2")
    scheduler.add(same)
    scheduler.add(other)
    scheduler.plan()
    assert same.pages[:2] == held[:2]
    assert same.num_cached == 8  # two full pages; the last token is always computed
    assert other.num_cached == 0
    assert not set(other.pages) & set(same.pages)


def test_a_prompt_of_full_pages_still_computes_its_last_token() -> None:
    pool = PagePool(20, SIZE)
    scheduler = Scheduler(pool, max_num_seqs=2, block=16, max_blocks=2)
    for expected in (0, 4):
        sequence = _sequence(list(range(8)))
        scheduler.add(sequence)
        _step(scheduler, random.Random(0))
        assert sequence.num_cached == expected
        scheduler.finish(sequence)


def test_the_youngest_gives_way_and_comes_back() -> None:
    pool = PagePool(5, SIZE, caching=False)  # four pages
    scheduler = Scheduler(pool, max_num_seqs=2, block=4, max_blocks=4)
    old, young = _sequence([1] * 7), _sequence([2] * 3)
    scheduler.add(old)
    scheduler.add(young)
    rng = random.Random(0)
    for _ in range(9):
        _step(scheduler, rng)
        scheduler.check()
    assert scheduler.num_preemptions == 1
    assert young in scheduler.waiting
    assert young.tokens[:3] == [2] * 3
    assert young.num_generated > 0
    scheduler.finish(old)
    before = young.num_generated
    _step(scheduler, rng)
    assert young.num_generated == before + 1

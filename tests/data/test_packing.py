"""Packing keeps every example whole, once, and fills rows well; buckets are the best ones."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from headrace.data.buckets import bucket_of, choose_buckets, padding_share
from headrace.data.packing import one_each, pack


def best_fit_reference(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Best-fit decreasing by plain search, to compare with."""
    rows: list[list[int]] = []
    for example in np.argsort(-lengths, kind="stable").tolist():
        rooms = [size - int(lengths[row].sum()) for row in rows]
        fitting = [(room, i) for i, room in enumerate(rooms) if room >= lengths[example]]
        if fitting:
            rows[min(fitting)[1]].append(example)
        else:
            rows.append([example])
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_packing_is_best_fit_decreasing(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 65, size=200)
    packed = pack(lengths, row_length=64)
    reference = best_fit_reference(lengths, 64)
    used = sorted(int(lengths[packed.row(i)].sum()) for i in range(len(packed)))
    assert used == sorted(int(lengths[row].sum()) for row in reference)


def test_every_example_is_packed_once_and_fits() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, size=5000)
    packed = pack(lengths, row_length=2048)
    assert sorted(packed.members.tolist()) == list(range(5000))
    assert max(lengths[packed.row(i)].sum() for i in range(len(packed))) <= 2048
    assert packed.num_tokens == lengths.sum()
    assert packed.efficiency == lengths.sum() / (len(packed) * 2048)
    assert packed.efficiency > 0.97


def test_exact_fits_and_edges() -> None:
    assert [len(pack(np.array(n, int), row_length=4)) for n in ([], [4], [4, 4], [2, 2, 1, 3])] == [
        0,
        1,
        2,
        2,
    ]
    assert one_each(np.array([3, 1]), row_length=4).row(1).tolist() == [1]


def test_packing_is_deterministic() -> None:
    lengths = np.random.default_rng(1).integers(1, 64, size=500)
    first, second = pack(lengths, row_length=128), pack(lengths.copy(), row_length=128)
    assert first.members.tolist() == second.members.tolist()


def test_packing_grows_linearly() -> None:
    """Twenty times the examples must not cost 400 times the time."""

    def seconds(count: int) -> float:
        lengths = np.random.default_rng(0).integers(1, 1000, size=count)
        start = time.process_time()  # other work on the machine does not count
        pack(lengths, row_length=2048)
        return time.process_time() - start

    small = min(seconds(10_000) for _ in range(3))
    assert min(seconds(200_000) for _ in range(2)) < 100 * small


@pytest.mark.parametrize("seed", range(8))
def test_buckets_have_the_least_padding(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(0.03, size=60), 120)
    sizes = sorted({-(-int(n) // 8) * 8 for n in lengths})
    for count in (1, 2, 3, 4):
        found = choose_buckets(lengths, max_buckets=count, multiple=8)
        assert len(found) <= count
        assert found[-1] == sizes[-1]
        assert list(found) == sorted(set(found))
        every = [
            sorted((*chosen, sizes[-1]))
            for k in range(count)
            for chosen in itertools.combinations(sizes[:-1], k)
        ]
        best = min(padding_share(lengths, buckets) for buckets in every)
        assert padding_share(lengths, found) == pytest.approx(best, abs=1e-12)


def test_buckets_do_not_pass_max_length_and_need_not_use_all() -> None:
    assert choose_buckets(np.array([5, 100]), max_buckets=4, multiple=16, max_length=100) == (
        16,
        100,
    )
    assert choose_buckets(np.array([7, 8]), max_buckets=4, multiple=8) == (8,)


def test_bucket_of() -> None:
    assert bucket_of(np.array([1, 8, 9, 16]), (8, 16)).tolist() == [0, 0, 1, 1]
    with pytest.raises(AssertionError, match="over the last bucket"):
        bucket_of(np.array([17]), (8, 16))

"""A few row lengths, chosen from the data so that padding costs least.

Each row is padded to the smallest bucket that holds it; every bucket is one compiled program.
Exact, by dynamic programming over the distinct rounded lengths. Knows lengths only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def round_up(length: int, multiple: int) -> int:
    """The next multiple of `multiple` that is not below length."""
    return -(-length // multiple) * multiple


def choose_buckets(
    lengths: np.ndarray, *, max_buckets: int, multiple: int, max_length: int | None = None
) -> tuple[int, ...]:
    """At most max_buckets rising lengths with the fewest padded tokens for these lengths.

    Buckets are multiples of `multiple`, but never over max_length. The last one holds the longest
    example. Costs O(max_buckets * u^2) for u distinct rounded lengths (u = 64 for 8192 by 128).
    """
    rounded = -(-np.asarray(lengths, np.int64) // multiple) * multiple
    if max_length is not None:
        rounded = np.minimum(rounded, max_length)
    sizes, counts = np.unique(rounded, return_counts=True)
    ends = _cheapest_ends(sizes, counts, min(max_buckets, len(sizes)))
    return tuple(int(sizes[end]) for end in ends)


def _cheapest_ends(sizes: np.ndarray, counts: np.ndarray, num_buckets: int) -> list[int]:
    """Indices of the sizes that end a bucket.

    cost[k][j] = min over i of cost[k-1][i] + sizes[j] * rows in (i, j]; fewer buckets win ties.
    """
    num = len(sizes)
    before = np.concatenate([[0], np.cumsum(counts)]).astype(float)  # exact up to 2**53 tokens
    earlier = np.arange(num)[:, None] < np.arange(num)[None, :]
    # rows in (i, j] share a bucket of sizes[j]; i is the end of the bucket before
    shared = np.where(earlier, sizes * (before[None, 1:] - before[1:, None]), np.inf)
    cost = sizes * before[1:]
    starts: list[np.ndarray] = []
    totals = [cost[-1]]
    for _ in range(num_buckets - 1):
        table = cost[:, None] + shared
        starts.append(table.argmin(axis=0))
        cost = table.min(axis=0)
        totals.append(cost[-1])
    best = int(np.argmin(totals))
    ends = [num - 1]
    for chosen in reversed(starts[:best]):
        ends.append(int(chosen[ends[-1]]))
    return ends[::-1]


def bucket_of(lengths: np.ndarray, buckets: Sequence[int]) -> np.ndarray:
    """Index of the smallest bucket that holds each length."""
    index = np.searchsorted(np.asarray(buckets), lengths, side="left")
    assert not len(index) or index.max() < len(buckets), "a length is over the last bucket"
    return index


def padding_share(lengths: np.ndarray, buckets: Sequence[int]) -> float:
    """Share of tokens that are padding when each length is padded to its bucket."""
    padded = np.asarray(buckets)[bucket_of(lengths, buckets)].sum()
    return 1 - float(np.sum(lengths)) / float(padded)

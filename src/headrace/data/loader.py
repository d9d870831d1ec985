"""Steps of micro-batches in a fixed, resumable order.

An epoch's order follows from (seed, epoch) alone: rows are permuted, grouped by bucket into steps
of A x B rows, and the steps permuted. Rows that do not fill a step of their bucket move to the
next longer one, so at most one step of an epoch has filler rows. The state is two integers;
resuming jumps there without reading a token.

Shapes: A = micro-batches in a step, B = rows in a micro-batch over all processes, S = row length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from headrace.data.batches import FILLER, Batch, Rows
from headrace.data.examples import IGNORED


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """Where the next step is: epoch and step within it, both from 0. Goes into checkpoints."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step's data. batch: arrays [A, B, S] or [A, B]; counts are of this process."""

    batch: Batch
    state: LoaderState  # after this step: what a checkpoint taken now must hold
    length: int
    num_tokens: int
    num_supervised: int


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Deterministic steps from Rows.

    batch_size: B over all processes. process: (index, count); each process gets its share of every
    micro-batch, in order. shuffle=False keeps row order within each bucket, for evaluation.
    """

    rows: Rows
    batch_size: int
    accumulation: int = 1
    seed: int = 0
    shuffle: bool = True
    process: tuple[int, int] = field(default=(0, 1))

    def __post_init__(self) -> None:
        index, count = self.process
        if not 0 <= index < count or self.batch_size % count:
            raise ValueError(
                f"batch_size {self.batch_size} over process {index} of {count}: needs a multiple "
                f"of {count} and an index below it"
            )

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(A, B of this process, S) of every bucket that has steps: what will be compiled."""
        local = self.batch_size // self.process[1]
        used = [n for n, steps in zip(self.rows.bucket_lengths, self._steps, strict=True) if steps]
        return tuple((self.accumulation, local, length) for length in used)

    @property
    def steps_per_epoch(self) -> int:
        """The same in every epoch."""
        return sum(self._steps)

    def epochs_done(self, state: LoaderState) -> float:
        """Epochs up to `state`, the share of the present one included."""
        return state.epoch + state.step / self.steps_per_epoch

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        """Steps of each bucket: what is over moves up, and the last bucket rounds up."""
        counts = np.bincount(self.rows.row_buckets, minlength=len(self.rows.bucket_lengths))
        size = self.accumulation * self.batch_size
        steps, over = [], 0
        for count in counts.tolist():
            whole, over = divmod(count + over, size)
            steps.append(whole)
        steps[-1] += bool(over)
        return tuple(steps)

    def plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(row length, row indices [A * B]) for every step of an epoch; -1 is a filler row."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.rows)) if self.shuffle else np.arange(len(self.rows))
        buckets = self.rows.row_buckets[order]
        size = self.accumulation * self.batch_size
        plan: list[tuple[int, np.ndarray]] = []
        over = np.zeros(0, np.int64)
        for bucket, length in enumerate(self.rows.bucket_lengths):
            members = np.concatenate([over, order[buckets == bucket]])
            whole = len(members) // size * size
            plan.extend((length, part) for part in members[:whole].reshape(-1, size))
            over = members[whole:]
        if len(over):
            filler = np.full(size - len(over), FILLER, np.int64)
            plan.append((self.rows.bucket_lengths[-1], np.concatenate([over, filler])))
        if self.shuffle:
            plan = [plan[i] for i in rng.permutation(len(plan))]
        return plan

    def epoch(self, state: LoaderState) -> Iterator[Step]:
        """The steps from `state` to the end of its epoch."""
        plan = self.plan(state.epoch)
        for number in range(state.step, len(plan)):
            last = number + 1 == len(plan)
            after = (
                LoaderState(epoch=state.epoch + 1)
                if last
                else LoaderState(epoch=state.epoch, step=number + 1)
            )
            yield self.make_step(*plan[number], after, state.epoch if self.shuffle else 0)

    def steps(self, state: LoaderState | None = None) -> Iterator[Step]:
        """Steps without end, from `state` on; the caller decides when it is enough."""
        return endless(self.epoch, state or LoaderState())

    def make_step(self, length: int, indices: np.ndarray, after: LoaderState, epoch: int) -> Step:
        """The arrays of these rows [A * B over all processes]; epoch: of what is drawn anew."""
        index, count = self.process
        local = self.batch_size // count
        grid = indices.reshape(self.accumulation, self.batch_size)
        mine = grid[:, index * local : (index + 1) * local]
        flat = self.rows.batch(mine.ravel(), length, draw=(self.seed, epoch))
        batch = {k: v.reshape(self.accumulation, local, *v.shape[1:]) for k, v in flat.items()}
        tokens, supervised = _count(flat)
        return Step(
            batch=batch, state=after, length=length, num_tokens=tokens, num_supervised=supervised
        )


def endless(epoch: Callable[[LoaderState], Iterator[Step]], state: LoaderState) -> Iterator[Step]:
    """Steps from `state` on, one epoch after the other. epoch: the steps to the end of one."""
    while True:
        for step in epoch(state):
            yield step
            state = step.state


def _count(batch: Batch) -> tuple[int, int]:
    segments = [value for name, value in batch.items() if name.endswith("segment_ids")]
    tokens = sum(int(np.count_nonzero(value)) for value in segments)
    if not segments:
        real = batch["weights"] > 0 if "weights" in batch else slice(None)
        tokens = int(batch["attention_mask"][real].sum())
    if "weights" in batch:
        return tokens, int((batch["weights"] > 0).sum())
    return tokens, int(np.count_nonzero(batch["labels"] != IGNORED))

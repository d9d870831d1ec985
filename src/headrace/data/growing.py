"""A data set that is prepared in a thread while its first rows are trained on.

Pieces of a stream are tokenised, packed each for itself, and written to disk; training takes them
in order in the first epoch, and all their rows at random in later ones. The thread stays at most
AHEAD pieces before what is trained, so a run with few steps prepares few rows. What comes in which
step follows from the seed and the rows alone, never from timing: a resumed run prepares the pieces
again and goes on with exactly the batches that would have come.

Knows: threads, pieces, order. Does not know: how a piece is tokenised (stream.py), the loop.
Shapes: A = micro-batches in a step, B = rows in a micro-batch over all processes, S = row length.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from headrace.config import TrainConfig
from headrace.data.batches import FILLER, Batch, Rows, fingerprint
from headrace.data.dataset import LONGEST_CHOSEN, Dataset, pad_token_id, shape_rows
from headrace.data.loader import Loader, LoaderState, Step, endless
from headrace.data.report import DataReport
from headrace.data.stream import (
    PIECE,
    Arrays,
    Prepared,
    Totals,
    prepared_pieces,
    temporary_folder,
)
from headrace.errors import CheckpointError

AHEAD = 2  # pieces prepared beyond the one that is trained on


class GrowingRows:
    """Packed rows, piece by piece. The first piece is there when the constructor returns.

    Raises what preparing the first piece raises; errors of later pieces are raised by `piece`.
    """

    def __init__(
        self, parts: Iterator[Prepared], config: TrainConfig, pad_token_id: int, totals: Totals
    ) -> None:
        self._parts, self._config, self._pad, self._totals = parts, config, pad_token_id, totals
        self._arrays = Arrays(temporary_folder())
        self._pieces: list[Rows] = []
        self._starts = [0]  # global number of each piece's first row
        self._fingerprints: list[str] = []
        self._expected: Sequence[str] = ()
        self._changed = threading.Condition()
        self._wanted, self._ended, self._said = 0, False, False
        self._error: BaseException | None = None
        self.check: Callable[[Rows], None] = lambda rows: None  # of a piece, before it is used
        self._add(next(parts))
        self.first = self._pieces[0]
        threading.Thread(target=self._fill, name="headrace-prepare", daemon=True).start()

    def piece(self, number: int) -> Rows | None:
        """A piece's rows, waiting for them; None past the last."""
        with self._changed:
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or len(self._pieces) > number)
            if number >= len(self._pieces):
                if self._error is not None:
                    raise self._error
                return None
        self._compare(number)
        self.check(self._pieces[number])
        return self._pieces[number]

    def all_rows(self) -> int:
        """How many rows there are, after the last piece was prepared."""
        for number in itertools.count():
            if self.piece(number) is None:
                return self._starts[-1]
        raise AssertionError

    def start(self, number: int) -> int:
        """The global number of a piece's first row."""
        return self._starts[number]

    @property
    def known_rows(self) -> int | None:
        """All rows when every piece is prepared, else None."""
        with self._changed:
            return self._starts[-1] if self._ended and self._error is None else None

    @property
    def fingerprints(self) -> list[str]:
        """One for each piece so far: what a resumed run must find again."""
        with self._changed:
            return list(self._fingerprints)

    def expect(self, fingerprints: Sequence[str]) -> None:
        """Pieces must be these: those of the run that goes on."""
        self._expected = fingerprints

    def report(self) -> DataReport | None:
        """The final report, once, when all is prepared."""
        if self._said or self.known_rows is None:
            return None
        self._said = True
        return self.report_so_far()

    def report_so_far(self) -> DataReport:
        """What was prepared up to now, and whether that is all."""
        done = self.known_rows is not None
        with self._changed:
            count = len(self._pieces)
            some = f"the first {count} piece{'s' if count > 1 else ''}, more come while training"
            what = "all rows" if done else some
            return self._totals.report(self._packed(what))

    def lengths(self) -> np.ndarray:
        """Tokens of every example so far."""
        return self._arrays.lengths()

    def batch(
        self, rows: Sequence[int] | np.ndarray, length: int, *, draw: Sequence[int] = (0, 0)
    ) -> Batch:
        """Rows by global number (-1 = filler), as `Rows.batch`."""
        numbers = np.asarray(rows)
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        owners[numbers == FILLER] = 0
        parts: list[Batch] = []
        for owner, group in itertools.groupby(range(len(numbers)), key=lambda i: int(owners[i])):
            mine = numbers[list(group)]
            local = np.where(mine == FILLER, FILLER, mine - self._starts[owner])
            parts.append(self._pieces[owner].batch(local, length, draw=draw))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _fill(self) -> None:
        try:
            for part in self._parts:
                self._add(part)
                with self._changed:
                    self._changed.wait_for(lambda: len(self._pieces) <= self._wanted + AHEAD)
        except BaseException as error:  # raised where the piece would have come
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _add(self, part: Prepared) -> None:
        examples = self._arrays.add(part.examples)
        rows, _ = shape_rows(
            examples, self._config, self._pad, part.max_length, packing=True, kind="causal"
        )
        mark = fingerprint(rows)
        with self._changed:
            self._totals.add(part)
            self._pieces.append(rows)
            self._fingerprints.append(mark)
            self._starts.append(self._starts[-1] + len(rows))
            self._changed.notify_all()

    def _compare(self, number: int) -> None:
        if number < len(self._expected) and self._expected[number] != self._fingerprints[number]:
            raise CheckpointError(
                f"piece {number + 1} of {self._config.dataset_name} has other rows than when the "
                "checkpoint was saved. Resume with the same data, or start anew with another "
                "output_dir."
            )

    def _packed(self, what: str) -> str:
        size, rows = self._pieces[0].packing.row_length, self._starts[-1]
        used = sum(piece.packing.num_tokens for piece in self._pieces) / max(1, rows * size)
        return f"{what}: packed into {rows:,} rows of {size:,} tokens, {used:.1%} of them used"


@dataclass(frozen=True, kw_only=True)
class PieceLoader:
    """Steps from GrowingRows; arguments and order as in Loader, but the first epoch goes piece by
    piece. Rows that do not fill a step of their piece go into the first step of the next.
    """

    rows: GrowingRows
    batch_size: int
    accumulation: int = 1
    seed: int = 0
    process: tuple[int, int] = field(default=(0, 1))

    @cached_property
    def _loader(self) -> Loader:
        rows: Any = self.rows  # makes batches as Rows do
        return Loader(
            rows=rows, batch_size=self.batch_size, accumulation=self.accumulation, seed=self.seed,
            process=self.process,
        )  # fmt: skip

    @property
    def _size(self) -> int:
        return self.accumulation * self.batch_size

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """One shape: rows are packed."""
        local = self.batch_size // self.process[1]
        return ((self.accumulation, local, self.rows.first.bucket_lengths[-1]),)

    @property
    def steps_per_epoch(self) -> int | None:
        """None as long as rows are still prepared."""
        known = self.rows.known_rows
        return None if known is None else -(-known // self._size)

    def epochs_done(self, state: LoaderState) -> float:
        """As in Loader; in the first epoch, whose length may not be known yet, 0."""
        if state.epoch == 0:
            return 0.0
        return state.epoch + state.step / -(-self.rows.all_rows() // self._size)

    def steps(self, state: LoaderState | None = None) -> Iterator[Step]:
        """Steps without end, from `state` on."""
        return endless(self.epoch, state or LoaderState())

    def epoch(self, state: LoaderState) -> Iterator[Step]:
        """The steps from `state` to the end of its epoch."""
        plan = self._first_epoch() if state.epoch == 0 else self._later_epoch(state.epoch)
        length = self.shapes[0][2]
        following = itertools.chain(itertools.islice(plan, state.step, None), [None])
        for number, (now, then) in enumerate(itertools.pairwise(following), start=state.step):
            assert now is not None
            more = LoaderState(epoch=state.epoch, step=number + 1)
            after = LoaderState(epoch=state.epoch + 1) if then is None else more
            yield self._loader.make_step(length, now, after, state.epoch)

    def _first_epoch(self) -> Iterator[np.ndarray]:
        """Row numbers of each step: pieces in order, the rows of a piece at random."""
        over = np.zeros(0, np.int64)
        for number in itertools.count():
            piece = self.rows.piece(number)
            if piece is None:
                break
            order = np.random.default_rng([self.seed, 0, number]).permutation(len(piece))
            members = np.concatenate([over, self.rows.start(number) + order])
            whole = len(members) // self._size * self._size
            yield from members[:whole].reshape(-1, self._size)
            over = members[whole:]
        if len(over):
            yield self._filled(over)

    def _later_epoch(self, epoch: int) -> Iterator[np.ndarray]:
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows.all_rows())
        whole = len(order) // self._size * self._size
        yield from order[:whole].reshape(-1, self._size)
        if whole < len(order):
            yield self._filled(order[whole:])

    def _filled(self, over: np.ndarray) -> np.ndarray:
        filler = np.full(self._size - len(over), FILLER, np.int64)
        return np.concatenate([over, filler])


def growing_dataset(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int = LONGEST_CHOSEN,
    piece: int = PIECE,
) -> Dataset:
    """A Dataset whose first piece is ready and whose others follow. Raises as prepared_pieces."""
    rows = GrowingRows(
        prepared_pieces(config, tokenizer, limit=limit, piece=piece),
        config,
        pad_token_id(tokenizer),
        Totals(config, piece),
    )
    return Dataset(rows=rows.first, report=rows.report_so_far(), growing=rows)

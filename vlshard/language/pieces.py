"""Runs of consecutive rows, and the arithmetic that cuts them; integers on the host only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int
from numpy import ndarray

from vlshard.language.arrays import IntArray


@dataclass(frozen=True, eq=False)
class Pieces:
    """What one rank holds of a dim: runs of global rows, one after another in local order."""

    starts: Int[ndarray, " p"]
    lengths: Int[ndarray, " p"]

    @classmethod
    def whole(cls, size: int) -> "Pieces":
        """All rows of a dim, as one run."""
        return cls(np.array([0], np.int64), np.array([size], np.int64))

    @classmethod
    def single(cls, rows: Int[ndarray, " n"]) -> "Pieces":
        """Any rows, each a run of its own."""
        return cls(rows, np.ones_like(rows))

    @classmethod
    def of(cls, rows: Int[ndarray, " n"]) -> "Pieces":
        """Any rows in their order, in as few runs as that takes."""
        begins = np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) != 1)
        return cls(rows[begins], np.diff(begins, append=rows.size))

    @property
    def rows(self) -> int:
        """Number of rows in all runs."""
        return int(self.lengths.sum())

    def indices(self) -> IntArray:
        """Global row of each local row."""
        if self.starts.size == 1:
            start = int(self.starts[0])
            return np.arange(start, start + int(self.lengths[0]))
        ends = np.cumsum(self.lengths)
        shift = np.repeat(self.starts - ends + self.lengths, self.lengths)
        return shift + np.arange(self.rows)

    def runs_of(self, rows: IntArray) -> IntArray:
        """Which run each of some rows that are held is in; runs are in global order."""
        return np.searchsorted(self.starts, rows, "right") - 1

    def positions(self, rows: IntArray) -> IntArray:
        """Where rows that are held lie in local order."""
        run = self.runs_of(rows)
        return (np.cumsum(self.lengths) - self.lengths - self.starts)[run] + rows

    def take(self, start: int, stop: int) -> "Pieces":
        """Local rows ``start`` to ``stop - 1``."""
        ends = np.cumsum(self.lengths)
        begins = ends - self.lengths
        low = np.maximum(begins, start)
        kept = np.maximum(np.minimum(ends, stop) - low, 0)
        return Pieces(self.starts + low - begins, kept).only(kept > 0)

    def only(self, keep: Bool[ndarray, " p"]) -> "Pieces":
        """The runs that a mask keeps."""
        return Pieces(self.starts[keep], self.lengths[keep])

    def cut_each(self, unit: int, ranks: int, rank: int, *, zigzag: bool = False) -> "Pieces":
        """One rank's part of every run, cut into contiguous parts of whole units.

        A run that does not deal out evenly gives one unit more to some parts, which go round
        from where the run before stopped, so that total loads differ by at most one unit.

        Args:
          unit: rows that no cut parts.
          ranks: number of ranks.
          rank: which of them.
          zigzag: cut each run into ``2 * ranks`` parts and take two, so that rank r has the r-th
            from the start and the r-th from the end.
        """
        parts = 2 * ranks if zigzag else ranks
        size, extra = np.divmod(self.lengths // unit, parts)
        first = (np.cumsum(extra) - extra) % parts
        head = self._part(unit, parts, rank, size, extra, first)
        if not zigzag:
            return head.only(head.lengths > 0)
        tail = self._part(unit, parts, parts - 1 - rank, size, extra, first)
        starts = np.stack([head.starts, tail.starts], axis=1).ravel()
        lengths = np.stack([head.lengths, tail.lengths], axis=1).ravel()
        return Pieces(starts, lengths).only(lengths > 0)

    def parts_of(self, rows: IntArray, unit: int, ranks: int, *, zigzag: bool = False) -> IntArray:
        """Which rank gets each of some rows that are held, where ``cut_each`` cuts."""
        parts, run = 2 * ranks if zigzag else ranks, self.runs_of(rows)
        size, extra = np.divmod(self.lengths // unit, parts)
        first = ((np.cumsum(extra) - extra) % parts)[run]
        at, size, extra = (rows - self.starts[run]) // unit, size[run], extra[run]
        # Parts 0 .. wrapped - 1 have one unit more, and so have first .. last - 1.
        wrapped, last = np.maximum(first + extra - parts, 0), np.minimum(first + extra, parts)
        ends = np.cumsum(
            [wrapped * (size + 1), (first - wrapped) * size, (last - first) * (size + 1)], axis=0
        )
        less = np.maximum(size, 1)
        part = np.where(at < ends[0], at // (size + 1), wrapped + (at - ends[0]) // less)
        part = np.where(at < ends[1], part, first + (at - ends[1]) // (size + 1))
        part = np.where(at < ends[2], part, last + (at - ends[2]) // less)
        return np.minimum(part, parts - 1 - part) if zigzag else part

    def _part(
        self,
        unit: int,
        parts: int,
        part: int | IntArray,
        size: IntArray,
        extra: IntArray,
        first: IntArray,
    ) -> "Pieces":
        """One part of every run; parts first ... first + extra - 1 (modulo parts) have one more."""
        below = np.clip(part - first, 0, np.minimum(extra, parts - first))
        below = below + np.clip(first + extra - parts, 0, part)
        more = (part - first) % parts < extra
        return Pieces(self.starts + (size * part + below) * unit, (size + more) * unit)


def join(pieces: Sequence[Pieces]) -> Pieces:
    """Runs of several pieces, one after another."""
    starts = np.concatenate([piece.starts for piece in pieces])
    return Pieces(starts, np.concatenate([piece.lengths for piece in pieces]))


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Bounds of one rank's block as ``torch.chunk`` cuts it; the last blocks may be empty."""
    block = -(-size // ranks)
    return min(rank * block, size), min((rank + 1) * block, size)


def share(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Bounds of one rank's block where sizes differ by at most one, larger ones first."""
    block, extra = divmod(size, ranks)
    start = rank * block + min(rank, extra)
    return start, start + block + (rank < extra)


def shares_of(at: IntArray, size: IntArray | int, ranks: int) -> IntArray:
    """Whose block, as ``share`` cuts, each of some rows is in."""
    block, extra = np.divmod(size, ranks)
    large = extra * (block + 1)
    return np.where(at < large, at // (block + 1), extra + (at - large) // np.maximum(block, 1))

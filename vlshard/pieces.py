"""Runs of consecutive rows, and the arithmetic that cuts them; integers on the host only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int
from numpy import ndarray

from vlshard.header import IntArray


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

    @property
    def rows(self) -> int:
        """Number of rows in all runs."""
        return int(self.lengths.sum())

    def indices(self) -> IntArray:
        """Global row of each local row."""
        ends = np.cumsum(self.lengths)
        shift = np.repeat(self.starts - ends + self.lengths, self.lengths)
        return shift + np.arange(self.rows)

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

    def cut_each(self, unit: int, ranks: int, rank: int) -> "Pieces":
        """One rank's part of every run, cut into contiguous parts of whole units.

        A run that does not deal out evenly gives one unit more to some ranks, which go round
        from where the run before stopped, so that total loads differ by at most one unit.
        """
        size, extra = np.divmod(self.lengths // unit, ranks)
        first = (np.cumsum(extra) - extra) % ranks
        # Ranks first ... first + extra - 1 (modulo ranks) have one more; count those below rank.
        below = np.clip(rank - first, 0, np.minimum(extra, ranks - first))
        below = below + np.clip(first + extra - ranks, 0, rank)
        more = (rank - first) % ranks < extra
        kept = (size + more) * unit
        return Pieces(self.starts + (size * rank + below) * unit, kept).only(kept > 0)


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

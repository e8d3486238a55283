"""Dims made of several: which rows a place holds, as runs that are never written out row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from vlshard.language.cut import Cut, Places, axes_of
from vlshard.language.pieces import Pieces, chunk


@dataclass(frozen=True)
class Factor:
    """One of the dims of a fused dim, of which each cut deals equal blocks."""

    size: int
    cuts: tuple[Cut, ...] = ()
    factors: tuple["Factor", ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Parts of the mesh that cut it."""
        return tuple(a for factor in self.factors for a in factor.axes) + axes_of(self.cuts)

    def window(self, places: Places) -> tuple[int, int]:
        """What its cuts leave a place of what its factors do: the first index, and how many."""
        rows = prod(f.count(places) for f in self.factors) if self.factors else self.size
        return _window(rows, self.cuts, places)

    def count(self, places: Places) -> int:
        """Number of indices held at a place."""
        return self.window(places)[1]

    def pieces(self, places: Places, start: int, stop: int) -> Pieces:
        """Of the indices held at a place, those from ``start`` to ``stop - 1``."""
        first, _ = self.window(places)
        if self.factors:
            return _product(self.factors, places, first + start, first + stop)
        return Pieces(np.array([first + start]), np.array([stop - start]))


@dataclass(frozen=True)
class Fused:
    """Several dims in one: each factor may be cut for itself, ``cuts`` cut what is left."""

    factors: tuple[Factor, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def size(self) -> int:
        """Rows of the whole dim."""
        return prod(factor.size for factor in self.factors)

    @property
    def axes(self) -> tuple[str, ...]:
        """Parts of the mesh that cut it."""
        return tuple(a for factor in self.factors for a in factor.axes) + axes_of(self.cuts)

    def window(self, places: Places) -> tuple[int, int]:
        """What the cuts of the whole leave a place: the first row that is left, and how many."""
        return _window(prod(f.count(places) for f in self.factors), self.cuts, places)

    def count(self, places: Places) -> int:
        """Number of rows held at a place."""
        return self.window(places)[1]

    def pieces(self, places: Places) -> Pieces:
        """Rows held at a place."""
        first, rows = self.window(places)
        return _product(self.factors, places, first, first + rows)

    def runs(self, places: Places) -> int:
        """How many runs the rows held at a place are, before ``cuts`` cut them."""
        return _runs(self.factors, places)


def _window(rows: int, cuts: Sequence[Cut], places: Places) -> tuple[int, int]:
    """The first of so many rows, and how many, that contiguous cuts leave a place."""
    first = 0
    for cut in cuts:
        start, stop = chunk(rows, cut.ranks, cut.place(places))
        first, rows = first + start, stop - start
    return first, rows


def _product(factors: Sequence[Factor], places: Places, start: int, stop: int) -> Pieces:
    """Rows ``start`` to ``stop - 1`` of a product of what a place holds, the last the fastest."""
    *outer, last = factors
    count = last.count(places)
    if start >= stop:
        return Pieces.whole(0)
    if not outer:
        return last.pieces(places, start, stop)
    first = start // count
    slow = _product(outer, places, first, -(-stop // count))
    if count == last.size:
        pieces = Pieces(slow.starts * count, slow.lengths * count)
    else:
        fast = last.pieces(places, 0, count)
        starts = (slow.indices()[:, None] * last.size + fast.starts).ravel()
        pieces = Pieces(starts, np.tile(fast.lengths, slow.rows))
    return pieces.take(start - first * count, stop - first * count)


def _runs(factors: Sequence[Factor], places: Places) -> int:
    """How many runs a product is of what a place holds."""
    for i, factor in reversed(list(enumerate(factors))):
        if (count := factor.count(places)) < factor.size:
            inner = min(count, _runs(factor.factors, places)) if factor.factors else 1
            return inner * prod(outer.count(places) for outer in factors[:i])
    return 1

"""Bound dims: how each kind of tensor dim is cut, and which rows a place on the mesh holds."""

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vlshard.language.arrays import IntArray
from vlshard.language.cut import Cut, Places, axes_of
from vlshard.language.fused import Fused
from vlshard.language.packing import Packing
from vlshard.language.pieces import Pieces, chunk, join, share, shares_of

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Plain:
    """A dim of its own; ``rows`` says who holds each row, where a cut is by home."""

    size: int
    cuts: tuple[Cut, ...] = ()
    rows: Packing | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Parts of the mesh that cut it."""
        return axes_of(self.cuts)

    def pieces(self, places: Places) -> Pieces:
        """Rows held at a place: as ``torch.chunk`` cuts, head and tail, or by home."""
        pieces = Pieces.whole(self.size)
        for cut in self.cuts:
            rank = cut.place(places)
            match cut.order:
                case "zigzag":
                    chunks, rows = 2 * cut.ranks, pieces.rows
                    head = pieces.take(*share(rows, chunks, rank))
                    pieces = join([head, pieces.take(*share(rows, chunks, chunks - 1 - rank))])
                case "home":
                    rows = pieces.indices()
                    pieces = Pieces.of(rows[homes_of(self.rows, cut)[rows] == rank])
                case _:
                    pieces = pieces.take(*chunk(pieces.rows, cut.ranks, rank))
        return pieces

    def count(self, places: Places) -> int:
        """Number of rows held at a place."""
        rows = self.size
        for cut in self.cuts:
            rank = cut.place(places)
            if cut.order == "home":
                return self.pieces(places).rows
            if cut.order == "zigzag":
                rows = _length(share(rows, 2 * cut.ranks, rank)) + _length(
                    share(rows, 2 * cut.ranks, 2 * cut.ranks - 1 - rank)
                )
            else:
                rows = _length(chunk(rows, cut.ranks, rank))
        return rows


@dataclass(frozen=True)
class Packed:
    """Segments one after another: whole ones are dealt, then each is cut, then their pack."""

    packing: Packing
    segments: tuple[Cut, ...] = ()
    each: tuple[Cut, ...] = ()
    cuts: tuple[Cut, ...] = ()

    @property
    def size(self) -> int:
        """Rows of the whole dim."""
        return self.packing.rows

    @property
    def axes(self) -> tuple[str, ...]:
        """Parts of the mesh that cut it."""
        return axes_of((*self.segments, *self.each, *self.cuts))

    def row_costs(self) -> FloatArray:
        """What each row of each segment costs by the packing's coefficients."""
        a, b = self.packing.cost
        return a * self.packing.lengths_array.astype(np.float64) + b

    def pieces(self, places: Places) -> Pieces:
        """Rows held at a place, in whole units."""
        unit, pieces = self.packing.unit, self._cut_each(places)
        for cut in self.cuts:
            start, stop = share(pieces.rows // unit, cut.ranks, cut.place(places))
            pieces = pieces.take(start * unit, stop * unit)
        return pieces

    def count(self, places: Places) -> int:
        """Number of rows held at a place."""
        unit, rows = self.packing.unit, self._cut_each(places).rows
        for cut in self.cuts:
            rows = unit * _length(share(rows // unit, cut.ranks, cut.place(places)))
        return rows

    def _runs(self, held: IntArray) -> Pieces:
        """Segments as runs of rows."""
        lengths = self.packing.lengths_array[held]
        return Pieces(self.packing.ends[held] - lengths, lengths)

    def _cut_each(self, places: Places) -> Pieces:
        """What a place holds before the pack as a whole is cut."""
        pieces = self._runs(self.held(places))
        for cut in self.each:
            zigzag = cut.order == "zigzag"
            rank = cut.place(places)
            pieces = pieces.cut_each(self.packing.unit, cut.ranks, rank, zigzag=zigzag)
        return pieces

    def held(self, places: Places) -> IntArray:
        """The segments dealt to a place, before any is cut."""
        held = np.arange(len(self.packing.lengths))
        for cut in self.segments:
            rank = cut.place(places)
            if cut.order:
                held = held[self.dealt(cut, held) == rank]
            else:
                held = held[slice(*share(len(held), cut.ranks, rank))]
        return held

    def dealt(self, cut: Cut, held: IntArray) -> IntArray:
        """To which rank of a cut each of some segments, all that one place holds, goes."""
        match cut.order:
            case "home":
                return homes_of(self.packing, cut)[held]
            case "balance":
                return _balanced(self.packing.costs_of(held).tobytes(), cut.ranks)
            case _:
                return shares_of(np.arange(held.size), held.size, cut.ranks)


BoundDim = Plain | Fused | Packed


def _length(bounds: tuple[int, int]) -> int:
    """Number of rows between bounds."""
    return bounds[1] - bounds[0]


def homes_of(packing: Packing | None, cut: Cut) -> IntArray:
    """Which rank of a cut each segment is at home with.

    A cut over the leading part of the home axes unites the ranks that agree there.
    """
    if packing is None or packing.home is None:
        raise AssertionError("a cut by home is bound only to a Packing that says where")
    return packing.home_array // max((packing.homes or cut.ranks) // cut.ranks, 1)


@lru_cache(maxsize=256)
def _balanced(costs_of: bytes, ranks: int) -> IntArray:
    """To which rank segments of such costs are dealt: costly first, to whom has least so far.

    The largest load is within 4/3 of the best possible one.
    Source: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969.
    """
    costs: list[float] = np.frombuffer(costs_of).tolist()
    dealt = np.zeros(len(costs), np.int64)
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    order: list[int] = np.argsort(-np.array(costs), kind="stable").tolist()
    for i in order:
        load, count, rank = heap[0]
        dealt[i] = rank
        heapq.heapreplace(heap, (load + costs[i], count + 1, rank))
    dealt.setflags(write=False)
    return dealt

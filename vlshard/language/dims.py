"""Bound dims: how each kind of tensor dim is cut, and which rows a place on the mesh holds."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from vlshard.language.arrays import IntArray
from vlshard.language.packing import Packing
from vlshard.language.pieces import Pieces, chunk, join, share

Places = Mapping[str, int]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """One split bound to a mesh.

    Attributes:
      axes: the parts of the mesh that are joined, major to minor.
      sizes: ranks along each of them.
      order: None for contiguous blocks.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    order: str | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks that it deals to."""
        return prod(self.sizes)

    def place(self, places: Places) -> int:
        """Which of its ranks is at a place of the mesh."""
        place = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            place = place * size + places[axis]
        return place


@dataclass(frozen=True)
class Plain:
    """A dim of its own; ``rows`` says who holds each row, where a cut is by home."""

    size: int
    cuts: tuple[Cut, ...] = ()
    rows: Packing | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Parts of the mesh that cut it."""
        return _axes(self.cuts)

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
                    pieces = Pieces.of(rows[_homes(self.rows, cut)[rows] == rank])
                case _:
                    pieces = pieces.take(*chunk(pieces.rows, cut.ranks, rank))
        return pieces


@dataclass(frozen=True)
class Factor:
    """One of the dims of a fused dim, of which each cut deals equal blocks."""

    size: int
    cuts: tuple[Cut, ...] = ()
    factors: tuple["Factor", ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Parts of the mesh that cut it."""
        return tuple(a for factor in self.factors for a in factor.axes) + _axes(self.cuts)

    def indices(self, places: Places) -> IntArray:
        """Indices held at a place."""
        held = _combine(self.factors, places) if self.factors else np.arange(self.size)
        for cut in self.cuts:
            held = held[slice(*chunk(held.size, cut.ranks, cut.place(places)))]
        return held


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
        return tuple(a for factor in self.factors for a in factor.axes) + _axes(self.cuts)

    def pieces(self, places: Places) -> Pieces:
        """Rows held at a place."""
        pieces = Pieces.of(_combine(self.factors, places))
        for cut in self.cuts:
            pieces = pieces.take(*chunk(pieces.rows, cut.ranks, cut.place(places)))
        return pieces


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
        return _axes((*self.segments, *self.each, *self.cuts))

    def row_costs(self) -> FloatArray:
        """What each row of each segment costs by the packing's coefficients."""
        a, b = self.packing.cost
        return a * self.packing.lengths_array.astype(np.float64) + b

    def pieces(self, places: Places) -> Pieces:
        """Rows held at a place, in whole units."""
        unit = self.packing.unit
        held = self.held(places)
        lengths = self.packing.lengths_array
        starts = np.cumsum(lengths) - lengths
        pieces = Pieces(starts[held], lengths[held])
        for cut in self.each:
            zigzag = cut.order == "zigzag"
            pieces = pieces.cut_each(unit, cut.ranks, cut.place(places), zigzag=zigzag)
        for cut in self.cuts:
            start, stop = share(pieces.rows // unit, cut.ranks, cut.place(places))
            pieces = pieces.take(start * unit, stop * unit)
        return pieces

    def held(self, places: Places) -> IntArray:
        """The segments dealt to a place, before any is cut."""
        held = np.arange(len(self.packing.lengths))
        for cut in self.segments:
            rank = cut.place(places)
            match cut.order:
                case "home":
                    held = held[_homes(self.packing, cut)[held] == rank]
                case "balance":
                    held = held[_dealt(self.packing, held.tobytes(), cut.ranks) == rank]
                case _:
                    held = held[slice(*share(len(held), cut.ranks, rank))]
        return held


BoundDim = Plain | Fused | Packed


def _axes(cuts: tuple[Cut, ...]) -> tuple[str, ...]:
    """The parts of the mesh that cuts deal over."""
    return tuple(axis for cut in cuts for axis in cut.axes)


def _combine(factors: tuple[Factor, ...], places: Places) -> IntArray:
    """Indices of a product of dims, the last the fastest."""
    held = np.zeros(1, np.int64)
    for factor in factors:
        held = (held[:, None] * factor.size + factor.indices(places)).ravel()
    return held


def _homes(packing: Packing | None, cut: Cut) -> IntArray:
    """Which rank of a cut each segment is at home with.

    A cut over the leading part of the home axes unites the ranks that agree there.
    """
    if packing is None or packing.home is None:
        raise AssertionError("a cut by home is bound only to a Packing that says where")
    return packing.home_array // max((packing.homes or cut.ranks) // cut.ranks, 1)


@lru_cache(maxsize=256)
def _dealt(packing: Packing, held: bytes, ranks: int) -> IntArray:
    """To which rank each of the held segments is dealt: costly first, to whom has least so far.

    The largest load is within 4/3 of the best possible one.
    Source: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969.
    """
    segments: list[int] = np.frombuffer(held, np.int64).tolist()
    costs = [packing.cost_of(packing.lengths[segment]) for segment in segments]
    dealt = np.zeros(len(segments), np.int64)
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    for i in sorted(range(len(segments)), key=lambda i: -costs[i]):
        load, count, rank = heap[0]
        dealt[i] = rank
        heapq.heapreplace(heap, (load + costs[i], count + 1, rank))
    dealt.setflags(write=False)
    return dealt

"""Bound dims: how each kind of tensor dim is cut, and which rows a place on the mesh holds."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vlshard.header import IntArray
from vlshard.packing import Packing
from vlshard.pieces import Pieces, chunk, join, share

Places = Mapping[str, int]


@dataclass(frozen=True)
class Cut:
    """One split bound to a mesh: its axis, the ranks along it, and its order."""

    axis: str
    ranks: int
    order: str | None = None


@dataclass(frozen=True)
class Plain:
    """A dim of its own; ``home`` says who holds each row, where a cut is by home."""

    size: int
    cuts: tuple[Cut, ...] = ()
    home: tuple[int, ...] | None = None

    def pieces(self, places: Places) -> Pieces:
        """Rows held at a place: as ``torch.chunk`` cuts, head and tail, or by home."""
        pieces = Pieces.whole(self.size)
        for cut in self.cuts:
            rank = places[cut.axis]
            match cut.order:
                case "zigzag":
                    chunks, rows = 2 * cut.ranks, pieces.rows
                    head = pieces.take(*share(rows, chunks, rank))
                    pieces = join([head, pieces.take(*share(rows, chunks, chunks - 1 - rank))])
                case "home":
                    rows = pieces.indices()
                    pieces = Pieces.single(rows[array(self.home or ())[rows] == rank])
                case _:
                    pieces = pieces.take(*chunk(pieces.rows, cut.ranks, rank))
        return pieces


@dataclass(frozen=True)
class Fused:
    """Several dims in one: ``first`` cuts deal blocks of ``inner`` rows, ``cuts`` cut the rows."""

    outer: int
    inner: int
    first: tuple[Cut, ...] = ()
    cuts: tuple[Cut, ...] = ()

    @property
    def size(self) -> int:
        """Rows of the whole dim."""
        return self.outer * self.inner

    def pieces(self, places: Places) -> Pieces:
        """Rows held at a place."""
        start, stop = 0, self.outer
        for cut in self.first:
            low, high = chunk(stop - start, cut.ranks, places[cut.axis])
            start, stop = start + low, start + high
        pieces = Pieces.whole(self.size).take(start * self.inner, stop * self.inner)
        for cut in self.cuts:
            pieces = pieces.take(*chunk(pieces.rows, cut.ranks, places[cut.axis]))
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

    def pieces(self, places: Places) -> Pieces:
        """Rows held at a place, in whole units."""
        unit = self.packing.unit
        held = self.held(places)
        lengths = array(self.packing.lengths)
        starts = np.cumsum(lengths) - lengths
        pieces = Pieces(starts[held], lengths[held])
        for cut in self.each:
            pieces = pieces.cut_each(unit, cut.ranks, places[cut.axis])
        for cut in self.cuts:
            start, stop = share(pieces.rows // unit, cut.ranks, places[cut.axis])
            pieces = pieces.take(start * unit, stop * unit)
        return pieces

    def held(self, places: Places) -> IntArray:
        """The segments dealt to a place, before any is cut."""
        held = np.arange(len(self.packing.lengths))
        for cut in self.segments:
            if cut.order == "home":
                held = held[array(self.packing.home or ())[held] == places[cut.axis]]
            else:
                held = held[slice(*share(len(held), cut.ranks, places[cut.axis]))]
        return held


BoundDim = Plain | Fused | Packed


def array(values: tuple[int, ...]) -> IntArray:
    """Integers as an array; of the right dtype when there are none."""
    return np.array(values, np.int64)

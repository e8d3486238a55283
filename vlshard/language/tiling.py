"""The runs of a dim at all places at once: what each place holds, of rows that each one has.

No row is written out: cuts split runs and hand them on, so that a tiling is as long as the places
and the runs that they hold.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from vlshard.language.arrays import IntArray
from vlshard.language.cut import Cut
from vlshard.language.dims import Packed, Plain, homes_of
from vlshard.language.pieces import shares_of


@dataclass(frozen=True, eq=False)
class Tiling:
    """Runs of rows, each at one place: place by place, in local order.

    Attributes:
      starts: first row of each run.
      lengths: rows of each run, at least one.
      place: which place each run is at; never less than the one before.
      places: number of places.
    """

    starts: IntArray
    lengths: IntArray
    place: IntArray
    places: int = 1

    @classmethod
    def whole(cls, size: int) -> "Tiling":
        """All rows at one place."""
        runs = 1 if size else 0
        return cls(np.zeros(runs, np.int64), np.full(runs, size), np.zeros(runs, np.int64))

    @property
    def rows(self) -> IntArray:
        """Rows at each place."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        bounds = ends[np.searchsorted(self.place, np.arange(self.places + 1))]
        return np.diff(bounds)

    @cached_property
    def by_row(self) -> tuple[IntArray, IntArray]:
        """The first row of each run and its place, in the order of rows."""
        order = np.argsort(self.starts)
        return self.starts[order], self.place[order]

    def places_of(self, rows: IntArray) -> IntArray:
        """The place of each of some rows."""
        starts, place = self.by_row
        return place[np.searchsorted(starts, rows, "right") - 1]

    def dealt(self, ranks: int, rank: IntArray) -> "Tiling":
        """Each run goes as a whole to one rank of those that share its place."""
        place = self.place * ranks + rank
        order = _sorting(place, self.places * ranks)
        return Tiling(self.starts[order], self.lengths[order], place[order], self.places * ranks)

    def parted(
        self, parts: int, bounds: Callable[[IntArray], IntArray]
    ) -> tuple["Tiling", IntArray]:
        """Runs split where the rows of a place are cut.

        Args:
          parts: into how many parts, some of which may be empty.
          bounds: from the rows of each place, where its parts begin: one row of numbers a place.
        Returns: the runs, and of which part each is.
        """
        rows = self.rows
        begins = np.cumsum(self.lengths) - self.lengths
        cuts = ((np.cumsum(rows) - rows)[:, None] + bounds(rows)).ravel()
        at = merged(begins, cuts[cuts < rows.sum()])
        run = np.searchsorted(begins, at, "right") - 1
        starts = self.starts[run] + at - begins[run]
        lengths = np.diff(at, append=rows.sum())
        part = (np.searchsorted(cuts, at, "right") - 1) % parts
        return Tiling(starts, lengths, self.place[run], self.places), part

    def single(self) -> "Tiling":
        """Each row a run of its own."""
        run = np.repeat(np.arange(self.lengths.size), self.lengths)
        starts = self.starts[run] + _counted(self.lengths)
        return Tiling(starts, np.ones_like(starts), self.place[run], self.places)

    @property
    def position(self) -> IntArray:
        """How many runs of its place come before each run."""
        return np.arange(self.place.size) - np.searchsorted(self.place, self.place)

    def each(self, unit: int, cut: Cut) -> "Tiling":
        """Every run cut into contiguous parts of whole units, as ``Pieces.cut_each`` does."""
        parts = 2 * cut.ranks if cut.order == "zigzag" else cut.ranks
        size, extra = np.divmod(self.lengths // unit, parts)
        before = np.cumsum(extra) - extra
        first = (before - before[np.searchsorted(self.place, self.place)]) % parts
        count = np.where(size > 0, parts, extra)
        run, part = np.repeat(np.arange(count.size), count), _counted(count)
        wrapped = np.maximum(first + extra - parts, 0)[run]
        jump = np.where((size[run] > 0) | (part < wrapped), 0, first[run] - wrapped)
        part = part + jump
        below = np.clip(part - first[run], 0, np.minimum(extra, parts - first)[run])
        below += np.minimum(wrapped, part)
        more = (part - first[run]) % parts < extra[run]
        cutting = Tiling(
            self.starts[run] + (size[run] * part + below) * unit,
            (size[run] + more) * unit,
            self.place[run],
            self.places,
        )
        return cutting.dealt(cut.ranks, _folded(part, cut))


def plain_tiling(dim: Plain) -> Tiling:
    """The runs of a plain dim; places count along its cuts as they apply."""
    tiling = Tiling.whole(dim.size)
    for cut in dim.cuts:
        if cut.order == "home":
            tiling = tiling.single()
            tiling = tiling.dealt(cut.ranks, homes_of(dim.rows, cut)[tiling.starts])
        else:
            tiling = plainly_cut(tiling, cut)
    return tiling


def plainly_cut(tiling: Tiling, cut: Cut) -> Tiling:
    """Runs of a plain dim after a cut: contiguous blocks, or heads and tails."""
    parts = 2 * cut.ranks if cut.order == "zigzag" else cut.ranks
    bounds = _shares if cut.order == "zigzag" else _chunks
    runs, part = tiling.parted(parts, lambda rows: bounds(rows, parts))
    return runs.dealt(cut.ranks, _folded(part, cut))


def packed_tiling(dim: Packed) -> Tiling:
    """The runs of a pack; places count along its cuts as they apply."""
    unit, tiling = dim.packing.unit, dealt_segments(dim)
    for cut in dim.each:
        tiling = tiling.each(unit, cut)
    for cut in dim.cuts:
        ranks = cut.ranks
        runs, part = tiling.parted(
            ranks, lambda rows, ranks=ranks: _shares(rows // unit, ranks) * unit
        )
        tiling = replace(runs, place=runs.place * ranks + part, places=runs.places * ranks)
    return tiling


def dealt_segments(dim: Packed) -> Tiling:
    """Whole segments at the places that they are dealt to."""
    lengths = dim.packing.lengths_array
    order, place, places = np.arange(lengths.size), np.zeros_like(lengths), 1
    for cut in dim.segments:
        bounds = np.searchsorted(place, np.arange(places + 1))
        if cut.order is None:
            position = np.arange(place.size) - bounds[place]
            ranks = shares_of(position, np.diff(bounds)[place], cut.ranks)
        elif cut.order == "home":
            ranks = dim.dealt(cut, order)
        else:
            groups = [order[a:b] for a, b in pairwise(bounds.tolist()) if b > a]
            ranks = np.concatenate([order[:0], *(dim.dealt(cut, held) for held in groups)])
        place = place * cut.ranks + ranks
        sort = _sorting(place, places * cut.ranks)
        order, place, places = order[sort], place[sort], places * cut.ranks
    keep = lengths[order] > 0
    order, place = order[keep], place[keep]
    return Tiling(dim.packing.ends[order] - lengths[order], lengths[order], place, places)


def merged(some: IntArray, others: IntArray) -> IntArray:
    """The numbers of two sorted arrays, each once."""
    both = np.sort(np.concatenate([some, others]), kind="stable")
    return both[np.diff(both, prepend=both[:1] - 1) > 0]


def _sorting(place: IntArray, places: int) -> IntArray:
    """The order by place; of few places, small numbers are sorted faster."""
    small = place.astype(np.uint16) if places <= 2**16 else place
    return np.argsort(small, kind="stable")


def _folded(part: IntArray, cut: Cut) -> IntArray:
    """Which rank gets a part: of a zigzag, the one from the start and the one from the end."""
    return np.minimum(part, 2 * cut.ranks - 1 - part) if cut.order == "zigzag" else part


def _counted(counts: IntArray) -> IntArray:
    """0, 1, 2 ... for each of some counts, one after another."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _chunks(rows: IntArray, ranks: int) -> IntArray:
    """Where blocks begin as ``torch.chunk`` cuts, for several numbers of rows."""
    blocks = -(-rows // ranks)[:, None]
    return np.minimum(np.arange(ranks) * blocks, rows[:, None])


def _shares(rows: IntArray, ranks: int) -> IntArray:
    """Where blocks begin whose sizes differ by at most one, larger ones first."""
    block, extra = np.divmod(rows, ranks)
    every = np.arange(ranks)
    return every * block[:, None] + np.minimum(every, extra[:, None])

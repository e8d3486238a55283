"""What an exchange of rows costs, exactly by index: on a given Packing, else at symbolic sizes.

Symbolic sizes belong to a dim and a mesh, not to what is asked, so that all costs compare. With R
ranks on the mesh and Z axes of more than one rank, so that no dim has more zigzags one in another:

- a plain dim has R * 2**Z rows; where ``.home`` cuts, R times as many, which go to the R ranks in
  turn: n of its ranks have R / n neighbours each;
- so has each factor of a fused dim, but for those whose number the spec writes; the last of a
  bracket that is all written is multiplied by R;
- a pack without a Packing is no larger than two sides need, and compares with nothing else.

Fractions are the same at all sizes that divide, so rows are counted at the least of them.
"""

from collections.abc import Iterator, Mapping
from math import lcm, prod
from typing import NamedTuple

import numpy as np

from vlshard.language import (
    Dim,
    Group,
    Int,
    IntArray,
    Packed,
    Packing,
    Tiled,
    counts,
    grid,
    kept,
    tiled,
    tilings_kept,
)
from vlshard.programs.bound_cuts import bound_cuts, bound_pack, bound_sides
from vlshard.programs.even_rows import EvenRows
from vlshard.programs.states import Cuts, Part, used_axes

SAFE = 2**62
# Rows that are counted one by one, which of few is faster, and runs of packs that are kept.
FEW, MOST_KEPT = 8192, 2**21


class Rows(NamedTuple):
    """Rows that an exchange sends: by the rank that sends most, and by all together."""

    most: int
    total: int


class ExchangeCost:
    """Counts the rows that exchanges of one dim send.

    Attributes:
      rows: rows of the dim.
    """

    def __init__(
        self,
        dim: Dim,
        sizes: Mapping[str, int],
        packing: Packing | None = None,
        zigzags: int | None = None,
    ) -> None:
        """Choose the sizes.

        Args:
          dim: the dim; its splits do not matter.
          sizes: ranks along each part of the mesh.
          packing: the pack, if the dim is one.
          zigzags: how many zigzags there is room for, one in another; for each axis one if None.
        """
        self._dim, self._sizes, self._packing = dim, sizes, packing
        self._leaves = list(_leaves(dim, ()))
        ranks = prod(sizes.values())
        double = sum(n > 1 for n in sizes.values()) if zigzags is None else zigzags
        if packing:
            self.rows = packing.rows
        elif isinstance(dim, Group):
            self.rows = prod(fixed or ranks << double for _, fixed in self._leaves)
            self.rows *= ranks if all(fixed for _, fixed in self._leaves) else 1
        else:
            self.rows = ranks * ranks << double
        self._double = double
        self._few: dict[tuple[bool, bool], EvenRows | None] = {}
        self._sent: dict[tuple[Cuts, Cuts], Rows] = {}
        self._tilings: dict[Cuts, Tiled] = {}

    def sent(self, before: Cuts, after: Cuts) -> Rows:
        """Rows that an exchange sends.

        A rank that wants a row which it holds keeps it; else it gets it from the lowest rank that
        does, which is the first along axes that do not cut the dim before.

        Args:
          before: the cuts of the dim.
          after: its cuts after the exchange.
        Returns: what the rank sends that sends most, and all ranks of the axes that cut it before
          or after.
        """
        key = (before, after)
        if key not in self._sent:
            self._sent[key] = self._counted(before, after)
        return self._sent[key]

    def _counted(self, before: Cuts, after: Cuts) -> Rows:
        """What is sent: each row once to each rank that wants it and does not hold it."""
        have, want = used_axes(before), used_axes(after)
        ranks = {axis: n for axis, n in self._sizes.items() if axis in have or axis in want}
        if self._packing:
            return self._sent_of(
                ranks, before, after, *self._packed(self._packing, before, after, ranks)
            )
        even = self._even_rows(before, after)
        leaves, cycle = ({}, 1) if even else self._least(before, after)
        rows = even.rows if even else prod(leaves.values())
        if rows <= FEW:
            even = even or EvenRows(self._dim, leaves, cycle, ranks)
            most, total = even.sent(before, after)
            return Rows(most * (self.rows // rows), total * (self.rows // rows))
        held, stay = np.ones((), np.int64), np.ones((), np.int64)
        for one, other in bound_sides(self._dim, leaves, cycle, ranks, (before, after)):
            held, stay = held * counts(one, ranks), stay * kept(one, other, ranks)
        return self._sent_of(ranks, before, after, held, stay, rows)

    def _sent_of(
        self,
        ranks: Mapping[str, int],
        before: Cuts,
        after: Cuts,
        held: IntArray,
        stay: IntArray,
        rows: int,
    ) -> Rows:
        """What is sent where places hold so much before, and so much both before and after."""
        have, want = used_axes(before), used_axes(after)
        copies = prod(n for axis, n in ranks.items() if axis not in want)
        new = tuple(i for i, axis in enumerate(ranks) if axis not in have)
        stay = np.broadcast_to(stay, list(ranks.values()))
        if copies * rows > SAFE:
            held = np.asarray(held, object)
        sent = copies * held - stay.sum(axis=new, keepdims=True)
        scale = self.rows // max(rows, 1)
        return Rows(int(np.max(sent)) * scale, (copies * rows - int(stay.sum())) * scale)

    def _packed(
        self, packing: Packing, before: Cuts, after: Cuts, ranks: Mapping[str, int]
    ) -> tuple[IntArray, IntArray, int]:
        """Rows of the pack that places hold before, those that stay, and all."""
        # Of a small pack the runs are listed: they are fewer than its rows.
        if packing.rows > MOST_KEPT and (length := self._even(packing, before, after)):
            held, stay = np.ones((), np.int64), np.ones((), np.int64)
            for one, other in bound_pack(packing, length, ranks, (before, after)):
                held, stay = held * counts(one, ranks), stay * kept(one, other, ranks)
            return held, stay, self.rows
        one, other = self._tiled(packing, before), self._tiled(packing, after)
        return grid(one[0].rows, one[1], ranks), tilings_kept(one, other, ranks), self.rows

    def _even(self, packing: Packing, before: Cuts, after: Cuts) -> int:
        """Rows of every segment, where all are alike, and cut evenly and alone; else 0."""
        length, *rest = dict.fromkeys(packing.lengths)
        if rest or not all(cut.part for cut in (*before, *after)):
            return 0
        for side in (before, after):
            inner = [cut for cut in side if cut.part == (1,)]
            parts = prod(self._sizes[axis] for axis in used_axes(inner))
            if length % (parts << sum(cut.order == "zigzag" for cut in inner)):
                return 0
        return length

    def _tiled(self, packing: Packing, cuts: Cuts) -> Tiled:
        """The runs of the pack as it is cut, kept while there is room."""
        if cuts not in self._tilings:
            if sum(tiling.place.size for tiling, _ in self._tilings.values()) > MOST_KEPT:
                self._tilings.clear()
            parts = (bound_cuts(cuts, part, self._sizes) for part in ((0,), (1,), ()))
            self._tilings[cuts] = tiled(Packed(packing, *parts))
        return self._tilings[cuts]

    def quick(self, before: Cuts, after: Cuts) -> bool:
        """Whether an exchange is counted from few rows, which are kept."""
        return not self._packing and self._even_rows(before, after) is not None

    def _even_rows(self, before: Cuts, after: Cuts) -> EvenRows | None:
        """The rows one by one, where they are few: all cuts of some orders share them."""
        orders = {cut.order for cut in (*before, *after)}
        key = "zigzag" in orders, "home" in orders
        if key not in self._few:
            ranks = prod(self._sizes.values())
            leaves, cycle = self._leaves_at(ranks << self._double * key[0], ranks if key[1] else 1)
            few = prod(leaves.values()) <= FEW
            self._few[key] = EvenRows(self._dim, leaves, cycle, self._sizes) if few else None
        return self._few[key]

    def _leaves_at(self, each: int, cycle: int) -> tuple[dict[Part, int], int]:
        """Sizes at which cuts over some ranks divide, part by part, and the rows of one turn."""
        leaves = {part: fixed or each * cycle for part, fixed in self._leaves}
        if all(fixed for _, fixed in self._leaves):
            leaves[self._leaves[-1][0]] *= each
        return leaves, cycle

    def _least(self, before: Cuts, after: Cuts) -> tuple[dict[Part, int], int]:
        """The least sizes that divide, part by part, and the rows that go home in one turn."""
        sizes, cuts = self._sizes, [*before, *after]
        homes = [prod(sizes[axis] for axis in cut.axes) for cut in cuts if cut.order == "home"]
        double = max(sum(cut.order == "zigzag" for cut in side) for side in (before, after))
        cycle = lcm(*homes)
        leaves: dict[Part, int] = {}
        for part, fixed in self._leaves:
            within = used_axes([cut for cut in cuts if part[: len(cut.part)] == cut.part])
            free = prod(sizes[axis] for axis in dict.fromkeys(within)) << double
            leaves[part] = fixed or free * cycle
            if part == self._leaves[-1][0] and all(fixed for _, fixed in self._leaves):
                leaves[part] *= free
        return leaves, cycle


def _leaves(dim: Dim, part: Part) -> Iterator[tuple[Part, int]]:
    """The parts of a dim that have no parts, with their sizes where the spec says them, else 0."""
    if isinstance(dim, Group):
        for i, item in enumerate(dim.items):
            yield from _leaves(item, (*part, i))
    else:
        yield part, dim.value if isinstance(dim, Int) else 0


def symbolic_packing(sides: tuple[Cuts, Cuts], ranks: Mapping[str, int]) -> Packing:
    """A pack that all cuts of both sides deal evenly.

    Args:
      sides: the cuts before and after.
      ranks: ranks along each part of the mesh.
    """
    cuts = [cut for side in sides for cut in side]
    dealt = {axis for cut in cuts if cut.part == (0,) for axis in cut.axes}
    within = {axis for cut in cuts if cut.part != (0,) for axis in cut.axes}
    homes = [prod(ranks[a] for a in cut.axes) for cut in cuts if cut.order == "home"]
    segments = prod(ranks[axis] for axis in dealt)
    length = prod(ranks[a] for a in within) * 2 ** sum(cut.order == "zigzag" for cut in cuts)
    every = lcm(*homes)
    return Packing([length] * segments, home=[i % every for i in range(segments)], homes=every)

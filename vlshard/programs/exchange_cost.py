"""What an exchange of rows costs, exactly by index: on a given Packing, else at symbolic sizes.

Symbolic sizes are such that all cuts divide. A plain dim has as many rows as all axes in play
have ranks, and twice that for each zigzag of a side; its rows are at home with one rank after
another in turn. A part of a fused dim has twice as many rows as the axes that cut it on either
side have ranks, the last part that times the ranks of all axes. A pack without a Packing has a
segment for each rank of the axes that deal its segments on either side, each as long as the other
axes that cut it have ranks, and twice that for each zigzag.
"""

from collections.abc import Mapping
from itertools import product
from math import lcm, prod
from typing import NamedTuple

import numpy as np

from vlshard.language import Cut as BoundCut
from vlshard.language import Dim, Group, Int, IntArray, Packed, Packing
from vlshard.programs.states import Axes, Cut, Cuts, used_axes

Places = Mapping[str, IntArray]


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
        sides: tuple[Cuts, Cuts],
        sizes: Mapping[str, int],
        ranks: int,
        packing: Packing | None = None,
    ) -> None:
        """Choose the sizes.

        Args:
          dim: the dim.
          sides: its cuts before and after the program.
          sizes: ranks along each part of the mesh.
          ranks: ranks of all axes in play together.
          packing: the pack, if the dim is one.
        """
        self._dim, self._sizes, self._packing = dim, sizes, packing
        self._leaves = {} if packing else _leaf_rows(dim, sides, sizes, ranks)
        self.rows = packing.rows if packing else prod(self._leaves.values())
        self._places: dict[Cuts, Places] = {}
        self._sent: dict[tuple[Cuts, Cuts], Rows] = {}

    def sent(self, before: Cuts, after: Cuts) -> Rows:
        """Rows that an exchange sends.

        A rank that wants a row which it holds keeps it; else it gets it from the lowest rank that
        does, which is the first along axes that do not cut the dim before.

        Args:
          before: the cuts of the dim.
          after: its cuts after the exchange.
        """
        key = (before, after)
        if key not in self._sent:
            have, want = self._place(before), self._place(after)
            copies = prod(self._sizes[axis] for axis in have if axis not in want)
            kept = np.ones(self.rows, dtype=bool)
            sender = np.zeros(self.rows, dtype=np.int64)
            for axis, place in have.items():
                sender = sender * self._sizes[axis] + place
                if axis in want:
                    kept &= place == want[axis]
            sent = np.bincount(sender, copies - kept.astype(np.int64))
            self._sent[key] = Rows(int(sent.max(initial=0)), int(sent.sum()))
        return self._sent[key]

    def _place(self, cuts: Cuts) -> Places:
        """For each axis that cuts the dim, the place along it of the rank that holds each row."""
        if cuts not in self._places:
            if self._packing:
                self._places[cuts] = self._packed_places(self._packing, cuts)
            else:
                found: dict[str, IntArray] = {}
                self._local(self._dim, (), cuts, found)
                self._places[cuts] = found
        return self._places[cuts]

    def _packed_places(self, packing: Packing, cuts: Cuts) -> Places:
        """As the pack deals its rows."""
        bound = Packed(packing, *(_bound(cuts, part, self._sizes) for part in ((0,), (1,), ())))
        axes = used_axes(cuts)
        found = {axis: np.zeros(packing.rows, dtype=np.int64) for axis in axes}
        for place in product(*(range(self._sizes[axis]) for axis in axes)):
            rows = bound.pieces(dict(zip(axes, place, strict=True))).indices()
            for axis, at in zip(axes, place, strict=True):
                found[axis][rows] = at
        return found

    def _local(
        self, dim: Dim, part: tuple[int, ...], cuts: Cuts, found: dict[str, IntArray]
    ) -> tuple[IntArray, int]:
        """Where each row lies in what the cuts of a dim leave a rank, and how much that is."""
        if isinstance(dim, Group) and part not in self._leaves:
            at, size = np.zeros(self.rows, dtype=np.int64), 1
            for i, item in enumerate(dim.items):
                inner, extent = self._local(item, (*part, i), cuts, found)
                at, size = at * extent + inner, size * extent
        else:
            leaves = list(self._leaves)
            after = prod(self._leaves[leaf] for leaf in leaves[leaves.index(part) + 1 :])
            size = self._leaves[part]
            at = np.arange(self.rows, dtype=np.int64) // after % size
        for cut in cuts:
            if cut.part == part:
                ranks = prod(self._sizes[axis] for axis in cut.axes)
                place, at = _cut(at, size, ranks, cut.order)
                size //= ranks
                for axis in reversed(cut.axes):
                    found[axis], place = place % self._sizes[axis], place // self._sizes[axis]
        return at, size


def _cut(at: IntArray, size: int, ranks: int, order: str | None) -> tuple[IntArray, IntArray]:
    """Which rank gets each row of an even block, and where it then lies."""
    if order == "home":
        return at % ranks, at // ranks
    if order == "zigzag":
        chunk = size // (2 * ranks)
        number, at = at // chunk, at % chunk
        tail = number >= ranks
        return np.where(tail, 2 * ranks - 1 - number, number), at + tail * chunk
    return at // (size // ranks), at % (size // ranks)


def _leaf_rows(
    dim: Dim, sides: tuple[Cuts, Cuts], sizes: Mapping[str, int], ranks: int
) -> dict[tuple[int, ...], int]:
    """Symbolic rows of a dim, or of each of its parts where parts are cut."""
    cuts = [cut for side in sides for cut in side]
    if not any(cut.part for cut in cuts):
        return {(): ranks * 2 ** sum(cut.order == "zigzag" for cut in cuts)}
    leaves = dict(_leaves(dim, ()))
    for part, fixed in leaves.items():
        within = [cut for cut in cuts if part[: len(cut.part)] == cut.part and cut.part]
        axes = dict.fromkeys(used_axes(within))
        leaves[part] = fixed or 2 * prod(sizes[axis] for axis in axes)
    leaves[[*leaves][-1]] *= ranks
    return leaves


def _leaves(dim: Dim, part: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    """The parts of a dim that have no parts, with their sizes where the spec says them, else 0."""
    if isinstance(dim, Group):
        return [leaf for i, item in enumerate(dim.items) for leaf in _leaves(item, (*part, i))]
    return [(part, dim.value if isinstance(dim, Int) else 0)]


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


def _bound(cuts: Cuts, part: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[BoundCut, ...]:
    """The cuts of a part of a pack as layouts have them."""
    return tuple(_bound_cut(cut, sizes) for cut in cuts if cut.part == part)


def _bound_cut(cut: Cut, sizes: Mapping[str, int]) -> BoundCut:
    """One cut as layouts have it."""
    axes: Axes = cut.axes
    return BoundCut(axes, tuple(sizes[axis] for axis in axes), cut.order)

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
from itertools import product
from math import lcm, prod
from typing import NamedTuple

import numpy as np

from vlshard.language import Cut as BoundCut
from vlshard.language import Dim, Group, Int, IntArray, Packed, Packing
from vlshard.programs.states import Axes, Cut, Cuts, used_axes

Places = Mapping[str, IntArray]
Part = tuple[int, ...]


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
        self._sent: dict[tuple[Cuts, Cuts], Rows] = {}

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
            if self._packing:
                have, want = (_packed_places(self._packing, cuts, self._sizes) for cuts in key)
            else:
                small = _Small(self._dim, self._leaves, key, self._sizes)
                have, want = small.places(before), small.places(after)
            most, total, rows = _counted(have, want, self._sizes)
            scale = self.rows // max(rows, 1)
            self._sent[key] = Rows(most * scale, total * scale)
        return self._sent[key]


def _counted(have: Places, want: Places, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """Rows sent by the rank that sends most, by all together, and rows of the dim."""
    rows = next((place.size for place in (*have.values(), *want.values())), 0)
    copies = prod(sizes[axis] for axis in have if axis not in want)
    kept = np.ones(rows, dtype=bool)
    sender = np.zeros(rows, dtype=np.int64)
    for axis, place in have.items():
        sender = sender * sizes[axis] + place
        if axis in want:
            kept &= place == want[axis]
    sent = np.bincount(sender, copies - kept.astype(np.int64))
    return int(sent.max(initial=0)), int(sent.sum()), rows


class _Small:
    """A dim at the least sizes at which the cuts before and after an exchange divide."""

    def __init__(
        self,
        dim: Dim,
        leaves: list[tuple[Part, int]],
        sides: tuple[Cuts, Cuts],
        sizes: Mapping[str, int],
    ) -> None:
        self._dim, self._sizes = dim, sizes
        cuts = [cut for side in sides for cut in side]
        homes = [prod(sizes[a] for a in cut.axes) for cut in cuts if cut.order == "home"]
        double = max(sum(cut.order == "zigzag" for cut in side) for side in sides)
        self._cycle = lcm(*homes)
        self._leaves: dict[Part, int] = {}
        for part, fixed in leaves:
            within = used_axes([cut for cut in cuts if part[: len(cut.part)] == cut.part])
            free = prod(sizes[axis] for axis in dict.fromkeys(within)) << double
            self._leaves[part] = fixed or free * self._cycle
            if all(fixed for _, fixed in leaves) and part == leaves[-1][0]:
                self._leaves[part] *= free
        self._rows = prod(self._leaves.values())

    def places(self, cuts: Cuts) -> Places:
        """For each axis that cuts the dim, the place along it of the rank that holds each row."""
        found: dict[str, IntArray] = {}
        self._local(self._dim, (), cuts, found)
        return found

    def _local(
        self, dim: Dim, part: Part, cuts: Cuts, found: dict[str, IntArray]
    ) -> tuple[IntArray, int]:
        """Where each row lies in what the cuts of a dim leave a rank, and how much that is."""
        if isinstance(dim, Group):
            at, size = np.zeros(self._rows, dtype=np.int64), 1
            for i, item in enumerate(dim.items):
                inner, extent = self._local(item, (*part, i), cuts, found)
                at, size = at * extent + inner, size * extent
        else:
            leaves = list(self._leaves)
            after = prod(self._leaves[leaf] for leaf in leaves[leaves.index(part) + 1 :])
            size = self._leaves[part]
            at = np.arange(self._rows, dtype=np.int64) // after % size
        for cut in cuts:
            if cut.part == part:
                ranks = prod(self._sizes[axis] for axis in cut.axes)
                place, at = _cut(at, size, ranks, cut.order, self._cycle)
                size //= ranks
                for axis in reversed(cut.axes):
                    found[axis], place = place % self._sizes[axis], place // self._sizes[axis]
        return at, size


def _cut(
    at: IntArray, size: int, ranks: int, order: str | None, cycle: int
) -> tuple[IntArray, IntArray]:
    """Which rank gets each row of an even block, and where it then lies."""
    if order == "home":
        each = cycle // ranks
        return at % cycle // each, at // cycle * each + at % each
    if order == "zigzag":
        chunk = size // (2 * ranks)
        number, at = at // chunk, at % chunk
        tail = number >= ranks
        return np.where(tail, 2 * ranks - 1 - number, number), at + tail * chunk
    return at // (size // ranks), at % (size // ranks)


def _packed_places(packing: Packing, cuts: Cuts, sizes: Mapping[str, int]) -> Places:
    """For each axis that cuts a pack, the place along it of the rank that holds each row."""
    bound = Packed(packing, *(_bound(cuts, part, sizes) for part in ((0,), (1,), ())))
    axes = used_axes(cuts)
    found = {axis: np.zeros(packing.rows, dtype=np.int64) for axis in axes}
    for place in product(*(range(sizes[axis]) for axis in axes)):
        rows = bound.pieces(dict(zip(axes, place, strict=True))).indices()
        for axis, at in zip(axes, place, strict=True):
            found[axis][rows] = at
    return found


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


def _bound(cuts: Cuts, part: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[BoundCut, ...]:
    """The cuts of a part of a pack as layouts have them."""
    return tuple(_bound_cut(cut, sizes) for cut in cuts if cut.part == part)


def _bound_cut(cut: Cut, sizes: Mapping[str, int]) -> BoundCut:
    """One cut as layouts have it."""
    axes: Axes = cut.axes
    return BoundCut(axes, tuple(sizes[axis] for axis in axes), cut.order)

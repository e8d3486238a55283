"""Which rank has each row of a dim, at small sizes at which all cuts divide."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vlshard.language import Dim, Group, IntArray
from vlshard.programs.states import Cuts, Part

# Rows of all cuts together that are kept.
MOST_KEPT = 2**21

BoolArray = npt.NDArray[np.bool_]
Places = Mapping[str, npt.NDArray[np.int16]]


class Held(NamedTuple):
    """Which places have each row.

    Attributes:
      places: for each axis that cuts the dim, the place along it, row by row.
      order: the rows, those of one place after another.
      ranks: places that have rows, each as many.
    """

    places: Places
    order: npt.NDArray[np.int32]
    ranks: int


class EvenRows:
    """A dim of even sizes, each of its rows; what is known of some cuts is kept."""

    def __init__(
        self, dim: Dim, leaves: Mapping[Part, int], cycle: int, sizes: Mapping[str, int]
    ) -> None:
        """Take sizes at which all cuts divide.

        Args:
          dim: the dim.
          leaves: rows of each part that has no parts.
          cycle: rows that go home to one rank after another, before it is the first one's turn.
          sizes: ranks along each part of the mesh.
        """
        self._dim, self._leaves, self._cycle, self._sizes = dim, leaves, cycle, sizes
        self.rows = prod(leaves.values())
        self._held: dict[Cuts, Held] = {}

    def sent(self, before: Cuts, after: Cuts) -> tuple[int, int]:
        """Rows that an exchange sends: by the rank that sends most, and by all together."""
        have, want = self._of(before), self._of(after)
        copies = prod(self._sizes[axis] for axis in have.places if axis not in want.places)
        same: BoolArray = np.ones(self.rows, dtype=bool)
        for axis, place in have.places.items():
            if axis in want.places:
                same &= place == want.places[axis]
        kept = same[have.order].reshape(have.ranks, -1).sum(axis=1)
        each = copies * (self.rows // have.ranks)
        return each - int(kept.min()), copies * self.rows - int(kept.sum())

    def _of(self, cuts: Cuts) -> Held:
        """Which places have each row as the dim is cut."""
        found = self._held.get(cuts)
        if found is None:
            if len(self._held) * self.rows > MOST_KEPT:
                self._held.clear()
            places: dict[str, IntArray] = {}
            self._local(self._dim, (), cuts, places)
            sender = np.zeros(self.rows, dtype=np.int64)
            for axis, place in places.items():
                sender = sender * self._sizes[axis] + place
            ranks = prod(self._sizes[axis] for axis in places)
            order = np.argsort(sender, kind="stable").astype(np.int32)
            small = {axis: place.astype(np.int16) for axis, place in places.items()}
            found = self._held[cuts] = Held(small, order, ranks)
        return found

    def _local(
        self, dim: Dim, part: Part, cuts: Cuts, found: dict[str, IntArray]
    ) -> tuple[IntArray, int]:
        """Where each row lies in what the cuts of a dim leave a rank, and how much that is."""
        if isinstance(dim, Group):
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

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

from collections.abc import Iterator, Mapping, Sequence
from math import lcm, prod
from typing import NamedTuple

import numpy as np

from vlshard.language import (
    BoundDim,
    Dim,
    Factor,
    Fused,
    Group,
    Int,
    Packed,
    Packing,
    Plain,
    counts,
    kept,
)
from vlshard.language import Cut as BoundCut
from vlshard.programs.states import Cut, Cuts, used_axes

Part = tuple[int, ...]
SAFE = 2**62


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
            self._sent[key] = self._counted(before, after)
        return self._sent[key]

    def _counted(self, before: Cuts, after: Cuts) -> Rows:
        """What is sent: each row once to each rank that wants it and does not hold it."""
        have, want = used_axes(before), used_axes(after)
        ranks = {axis: n for axis, n in self._sizes.items() if axis in have or axis in want}
        sides = self._bound(before, after)
        rows = prod(dim.size for dim, _ in sides)
        copies = prod(n for axis, n in ranks.items() if axis not in want)
        held, stay = np.ones((), np.int64), np.ones((), np.int64)
        for side in sides:
            held, stay = held * counts(side[0], ranks), stay * kept(*side, ranks)
        stay = np.broadcast_to(stay, [n for n in ranks.values() if n > 1])
        new = tuple(i for i, axis in enumerate(ranks) if axis not in have)
        if copies * rows > SAFE:
            held = np.asarray(held, object)
        sent = copies * held - stay.sum(axis=new, keepdims=True)
        most, total = int(np.max(sent)), copies * rows - int(stay.sum())
        scale = self.rows // max(rows, 1)
        return Rows(most * scale, total * scale)

    def _bound(self, before: Cuts, after: Cuts) -> list[tuple[BoundDim, BoundDim]]:
        """The dim before and after at the least sizes that divide, as factors that do not meet."""
        sides = (before, after)
        if packing := self._packing:
            parts = ((0,), (1,), ())
            have, want = (
                Packed(packing, *(self._cuts(side, part) for part in parts)) for side in sides
            )
            return [(have, want)]
        cuts = [*before, *after]
        double = max(sum(cut.order == "zigzag" for cut in side) for side in sides)
        if isinstance(self._dim, Group):
            leaves = {part: fixed or self._span(cuts, part) for part, fixed in self._leaves}
            if all(fixed for _, fixed in self._leaves):
                leaves[self._leaves[-1][0]] *= self._span(cuts, self._leaves[-1][0])
            have, want = (self._fused(self._dim, side, leaves) for side in sides)
            return [(have, want)]
        # Who is at home is counted in turns of ``cycle`` rows, every other cut in whole turns.
        cycle = lcm(*(self._span([cut], ()) for cut in cuts if cut.order == "home"))
        turns = [[cut for cut in side if cut.order != "home"] for side in sides]
        homes = [
            [cut._replace(order=None) for cut in side if cut.order == "home"] for side in sides
        ]
        found: list[tuple[BoundDim, BoundDim]] = []
        for size, (have, want) in ((self._span(cuts, ()) << double, turns), (cycle, homes)):
            if size > 1:
                found.append((Plain(size, self._cuts(have, ())), Plain(size, self._cuts(want, ()))))
        return found

    def _span(self, cuts: Sequence[Cut], part: Part) -> int:
        """Ranks of the axes over which a part is cut, with what it is a part of."""
        within = [cut for cut in cuts if part[: len(cut.part)] == cut.part]
        return prod(self._sizes[axis] for axis in dict.fromkeys(used_axes(within)))

    def _cuts(self, cuts: Sequence[Cut], part: Part) -> tuple[BoundCut, ...]:
        """The cuts of a part as layouts have them."""
        found = [cut for cut in cuts if cut.part == part]
        return tuple(
            BoundCut(cut.axes, tuple(self._sizes[a] for a in cut.axes), cut.order) for cut in found
        )

    def _fused(self, dim: Group, cuts: Cuts, leaves: Mapping[Part, int]) -> Fused:
        """A fused dim as layouts have it."""
        items = (self._factor(item, (i,), cuts, leaves) for i, item in enumerate(dim.items))
        return Fused(tuple(items), self._cuts(cuts, ()))

    def _factor(self, dim: Dim, part: Part, cuts: Cuts, leaves: Mapping[Part, int]) -> Factor:
        """A factor of it."""
        own = self._cuts(cuts, part)
        if not isinstance(dim, Group):
            return Factor(leaves[part], own)
        items = tuple(
            self._factor(item, (*part, i), cuts, leaves) for i, item in enumerate(dim.items)
        )
        return Factor(prod(item.size for item in items), own, items)


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

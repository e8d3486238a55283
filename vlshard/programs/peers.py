"""Moves between the ranks along some axes, planned by one of them from who holds its own rows.

No member of the group is laid out: where the rows that a rank wants come from, and who wants the
rows that it has, is asked of the two layouts (``Layout.holders``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from vlshard.language import IntArray, LayoutError, MeshShape
from vlshard.programs.moves import Moves

Digits = Mapping[str, IntArray]
Finder = Callable[[IntArray], Digits]


@dataclass(frozen=True)
class Peers:
    """The ranks that differ from one along some axes only, numbered as ``MeshShape.peers`` does.

    Attributes:
      mesh: the axes and their sizes.
      axes: parts of the mesh, major to minor.
      rank: the one.
    """

    mesh: MeshShape
    axes: tuple[str, ...]
    rank: int

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Where the one is along each part of the mesh."""
        return self.mesh.coords(self.rank)

    @property
    def size(self) -> int:
        """Number of members."""
        return prod(self.mesh.parts[axis] for axis in self.axes)

    @property
    def me(self) -> int:
        """The number of the one."""
        return int(self.number(self.place))

    def number(self, at: Mapping[str, int] | Digits) -> IntArray:
        """Numbers of members; axes that are not told count as 0."""
        number = np.zeros((), np.int64)
        for axis in self.axes:
            number = number * self.mesh.parts[axis] + at.get(axis, 0)
        return number

    def here(self, found: Digits, axes: tuple[str, ...]) -> IntArray:
        """Whether places are those of the one along these axes, as far as they are told."""
        same = np.ones((), dtype=bool)
        for axis in axes:
            if axis in found:
                same = same & (found[axis] == self.place[axis])
        return same

    @property
    def others(self) -> tuple[str, ...]:
        """Parts of the mesh along which all members are where the one is."""
        return tuple(part for part in self.mesh.parts if part not in self.axes)


def plan_moves(
    have: IntArray, want: IntArray, holders: tuple[Finder, Finder], peers: Peers, *, local: bool
) -> Moves:
    """Who sends which rows to whom, so that each rank of a group gets the rows it wants.

    A row that several ranks want goes to each of them; of several holders, a rank takes its own
    copy, else the one of the first.

    Args:
      have: the global rows that this rank holds, increasing.
      want: those that it shall hold, increasing.
      holders: where the ranks are that hold rows, before and after.
      peers: the group.
      local: whether nothing leaves any rank of the group, whatever the rows.
    Returns: the moves of this rank; those of all members fit together.
    Raises: LayoutError if nobody in the group holds a row that is wanted.
    """
    before, after = holders
    found = before(want)
    _refuse_lost(want, np.broadcast_to(peers.here(found, peers.others), want.shape))
    mine = np.broadcast_to(peers.here(found, peers.axes), want.shape)
    sources = np.where(mine, peers.me, peers.number(found))
    cutting = tuple(axis for axis in peers.axes if axis in found)
    leaving = _leaving(after(have), have.size, cutting, peers)
    return Moves(
        me=peers.me,
        send=grouped(*leaving),
        receive=grouped(np.arange(want.size), sources),
        rows=have.size,
        size=want.size,
        local=local,
    )


def _leaving(
    wanted: Digits, rows: int, cutting: tuple[str, ...], peers: Peers
) -> tuple[IntArray, IntArray]:
    """Positions of rows that this rank hands out, and to which member each time.

    Args:
      wanted: where those are that want each row of this rank.
      rows: how many it has.
      cutting: the axes of the group along which only one rank holds each row before.
      peers: the group.
    """
    inside = np.broadcast_to(peers.here(wanted, peers.others), (rows,))
    free = {axis: peers.mesh.parts[axis] for axis in peers.axes if axis not in wanted}
    grid = np.indices(tuple(free.values())).reshape(len(free), prod(free.values()))
    at = {axis: digit[:, None] for axis, digit in wanted.items()}
    at |= {axis: places[None] for axis, places in zip(free, grid, strict=True)}
    shape = (rows, grid.shape[1])
    member = np.broadcast_to(peers.number(at), shape)
    first = all(peers.place[axis] == 0 for axis in peers.axes if axis not in cutting)
    holding = np.broadcast_to(peers.here(at, cutting), shape)
    handed = inside[:, None] & ((member == peers.me) | (~holding if first else False))
    position, _ = np.nonzero(handed)
    return position, member[handed]


def grouped(positions: IntArray, members: IntArray) -> dict[int, IntArray]:
    """Positions by member, in the order given.

    Args:
      positions: what to group.
      members: to which member each belongs.
    """
    order = np.argsort(members, kind="stable")
    numbers, begins = np.unique(members[order], return_index=True)
    parts = np.split(positions[order], begins[1:])
    return dict(zip(numbers.tolist(), parts, strict=False))


def _refuse_lost(want: IntArray, held: IntArray) -> None:
    """Refuse rows that nobody in the group holds."""
    if not held.all():
        lost = want[~held].tolist()
        listed = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
        raise LayoutError(f"no rank of the group holds these wanted rows: {listed}")

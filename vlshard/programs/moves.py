"""Who sends which rows to whom, by global index: integers on the host, no tensors.

``Moves`` says, for each member of a group, which local rows it is sent and where the rows that
come from it go. Gather, scatter, slice, all-to-all and uneven exchange are all such moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from vlshard.language import IntArray, LayoutError


@dataclass(frozen=True, eq=False)
class Positions:
    """Where rows lie along a dim.

    Attributes:
      members: for each group member, the positions of its rows.
      size: rows along the dim.
      copies: room for those who carry positions out to keep them on a device.
    """

    members: tuple[IntArray, ...]
    size: int
    copies: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many rows each member has."""
        return tuple(rows.size for rows in self.members)

    @cached_property
    def starts(self) -> tuple[int | None, ...]:
        """Where each member's rows start; None if they are not consecutive."""
        return tuple(
            (int(rows[0]) if rows.size else 0) if (np.diff(rows) == 1).all() else None
            for rows in self.members
        )

    @cached_property
    def everywhere(self) -> bool:
        """Whether each of several members has all rows, in order."""
        every = np.arange(self.size)
        return len(self.members) > 1 and all(np.array_equal(rows, every) for rows in self.members)

    @cached_property
    def laid_out(self) -> bool:
        """Whether every row occurs once, each member's one after another."""
        return self.once and None not in self.starts

    @cached_property
    def once(self) -> bool:
        """Whether every row of the dim occurs exactly once."""
        count = np.bincount(np.concatenate(self.members), minlength=self.size)
        return bool((count == 1).all())

    @cached_property
    def ordered(self) -> bool:
        """Whether the members' positions, one after another, are 0, 1, 2, ..."""
        return np.array_equal(np.concatenate(self.members), np.arange(self.size))


@dataclass(frozen=True, eq=False)
class Moves:
    """Rows that one member of a group sends and receives.

    Attributes:
      me: this rank's place in the group.
      send: for each member, positions in the input of the rows that it gets from here.
      receive: for each member, positions in the result of the rows that come from it.
      rows: rows of the input.
      size: rows of the result.
      local: whether nothing leaves any rank of the group; the same on all of them.
    """

    me: int
    send: tuple[IntArray, ...]
    receive: tuple[IntArray, ...]
    rows: int
    size: int
    local: bool

    @cached_property
    def outgoing(self) -> Positions:
        """What leaves, as positions in the input."""
        return Positions(self.send, self.rows)

    @cached_property
    def incoming(self) -> Positions:
        """What arrives, as positions in the result."""
        return Positions(self.receive, self.size)

    @cached_property
    def identity(self) -> bool:
        """Whether the result is the input."""
        mine = ((self.send[self.me], self.rows), (self.receive[self.me], self.size))
        return self.local and all(np.array_equal(rows, np.arange(size)) for rows, size in mine)

    @property
    def reverse(self) -> "Moves":
        """The moves that bring every row back."""
        return Moves(self.me, self.receive, self.send, self.size, self.rows, self.local)

    @property
    def rows_sent(self) -> int:
        """Rows that go to other ranks."""
        return sum(rows.size for k, rows in enumerate(self.send) if k != self.me)

    @property
    def rows_received(self) -> int:
        """Rows that come from other ranks; as many gradients go back to them in backward."""
        return sum(rows.size for k, rows in enumerate(self.receive) if k != self.me)


def plan_moves(have: Sequence[IntArray], want: Sequence[IntArray], me: int) -> Moves:
    """Who sends which rows to whom, so that each rank gets the rows it wants.

    A row that several ranks want goes to each of them; of several holders, a rank takes its own
    copy, else the one of the lowest rank.

    Args:
      have: per group member, the global indices that it holds, in local order.
      want: per group member, the global indices that it shall hold, in local order.
      me: this rank's place in the group.
    Returns: the moves of this rank; those of all members fit together.
    Raises: LayoutError if nobody holds a row that is wanted.
    """
    top = 1 + max((int(rows.max()) for rows in (*have, *want) if rows.size), default=-1)
    holder = np.full(top, -1)
    for member in reversed(range(len(have))):
        holder[have[member]] = member
    place = np.zeros(top, dtype=np.int64)
    place[have[me]] = np.arange(have[me].size)
    sources: list[IntArray] = []
    for member, rows in enumerate(want):
        own = np.zeros(top, dtype=bool)
        own[have[member]] = True
        sources.append(np.where(own[rows], member, holder[rows]))
    lost = sorted({int(i) for rows, s in zip(want, sources, strict=True) for i in rows[s < 0]})
    if lost:
        listed = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
        raise LayoutError(f"no rank of the group holds these wanted rows: {listed}")
    members = range(len(have))
    return Moves(
        me=me,
        send=tuple(place[want[k][sources[k] == me]] for k in members),
        receive=tuple(np.flatnonzero(sources[me] == k) for k in members),
        rows=have[me].size,
        size=want[me].size,
        local=all(bool((source == k).all()) for k, source in enumerate(sources)),
    )


def locate(rows: IntArray, wanted: IntArray) -> IntArray:
    """Positions at which rows are found.

    Args:
      rows: distinct global indices, in any order.
      wanted: some of them.
    Returns: for each wanted index its position in ``rows``.
    """
    order = np.argsort(rows)
    return order[np.searchsorted(rows, wanted, sorter=order)]

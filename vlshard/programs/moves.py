"""Who sends which rows to whom, by global index: integers on the host, no tensors.

``Moves`` says which local rows each member of a group is sent and where the rows that come from it
go; it knows only the members with which rows are exchanged. Gather, scatter, slice, all-to-all and
uneven exchange are all such moves.

Every rank holds its rows in global order, so that the rows of a message need no order of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from vlshard.language import IntArray

Rows = Mapping[int, IntArray]


@dataclass(frozen=True, eq=False)
class Positions:
    """Where rows lie along a dim.

    Attributes:
      rows: by group member, the positions of its rows; only members that have some, increasing.
      size: rows along the dim.
      copies: by member, room for those who carry positions out to keep them on devices.
    """

    rows: Rows
    size: int
    copies: dict[int, dict[Any, Any]] = field(default_factory=dict[int, dict[Any, Any]], repr=False)

    @cached_property
    def joined(self) -> IntArray:
        """The positions of all members, one after another."""
        return np.concatenate([np.empty(0, np.int64), *self.rows.values()])

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """How many rows each member has."""
        return {member: rows.size for member, rows in self.rows.items()}

    @cached_property
    def starts(self) -> Mapping[int, int | None]:
        """Where each member's rows start; None if they are not consecutive."""
        return {
            member: int(rows[0]) if bool((np.diff(rows) == 1).all()) else None
            for member, rows in self.rows.items()
        }

    @cached_property
    def everywhere(self) -> bool:
        """Whether each of several members has all rows, in order."""
        every = np.arange(self.size)
        return len(self.rows) > 1 and all(np.array_equal(r, every) for r in self.rows.values())

    @cached_property
    def laid_out(self) -> bool:
        """Whether every row occurs once, each member's one after another."""
        return self.once and None not in self.starts.values()

    @cached_property
    def once(self) -> bool:
        """Whether every row of the dim occurs exactly once."""
        return bool((np.bincount(self.joined, minlength=self.size) == 1).all())

    @cached_property
    def ordered(self) -> bool:
        """Whether the members' positions, one after another, are 0, 1, 2, ..."""
        return np.array_equal(self.joined, np.arange(self.size))


class Even(Enum):
    """Moves of a whole group, in blocks of one size, for which devices have a collective."""

    GATHER = "gather"
    SCATTER = "scatter"

    @property
    def reverse(self) -> "Even":
        """What brings every row back."""
        return Even.SCATTER if self is Even.GATHER else Even.GATHER


@dataclass(frozen=True, eq=False)
class Moves:
    """Rows that one member of a group sends and receives.

    Attributes:
      me: this rank's place in the group.
      send: positions in the input of the rows that each member gets from here, this rank too.
      receive: positions in the result of the rows that come from each member.
      rows: rows of the input.
      size: rows of the result.
      local: whether nothing leaves any rank of the group, whatever the data: known from specs, so
        that the whole group takes part or nobody does.
      even: what the moves of all members make up together, if blocks of one size; else None.
    """

    me: int
    send: Rows
    receive: Rows
    rows: int
    size: int
    local: bool
    even: Even | None = None

    def __post_init__(self) -> None:
        """Members without rows are left out."""
        for name in ("send", "receive"):
            given: Rows = getattr(self, name)
            rows = {member: given[member] for member in sorted(given) if given[member].size}
            object.__setattr__(self, name, rows)

    @cached_property
    def outgoing(self) -> Positions:
        """What leaves, as positions in the input."""
        return Positions(self.send, self.rows)

    @cached_property
    def incoming(self) -> Positions:
        """What arrives, as positions in the result."""
        return Positions(self.receive, self.size)

    @cached_property
    def still(self) -> bool:
        """Whether this rank exchanges nothing, and its result is its input."""
        sides = (self.outgoing, self.incoming)
        return all(set(side.rows) <= {self.me} and side.ordered for side in sides)

    @cached_property
    def reverse(self) -> "Moves":
        """The moves that bring every row back."""
        even = self.even and self.even.reverse
        return Moves(self.me, self.receive, self.send, self.size, self.rows, self.local, even)

    @property
    def rows_sent(self) -> int:
        """Rows that go to other ranks."""
        return sum(rows.size for k, rows in self.send.items() if k != self.me)

    @property
    def rows_received(self) -> int:
        """Rows that come from other ranks; as many gradients go back to them in backward."""
        return sum(rows.size for k, rows in self.receive.items() if k != self.me)

"""Rows that visit the ranks which hold what they are computed with, such as experts.

Each row names some experts, and the share of each in its result. It goes once to every member of a
group that holds a part of one of them, however many it needs there; there it is computed, weighted
and summed, and one row comes back from each member, summed at home in group order.

Who visits whom is integers: ``Hosts.visits`` decides it, with one all-to-all of counts, which is
the one time that the host reads from the device. ``Visits`` then carries rows there and back, as
often as asked, differentiably: gradients of rows are summed at home, and the gradient of a share
comes back from where it was used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from vlshard.comm.ahead import Index
from vlshard.comm.collectives import all_reduce, travel
from vlshard.comm.parcels import Parcels, travel_together
from vlshard.language import IntArray

Copies = dict[torch.device, Tensor]


class Leaving(NamedTuple):
    """Pairs of a row and an expert in the order in which they leave: by member, then by row.

    A pair is there once for each member that holds a part of its expert; those whose expert nobody
    holds come last.

    Attributes:
      counts: rows and pairs that each member is sent.
      order: which pair it is, of ``t k parts``.
      row: the row of each.
      code: twice the number of its expert at that member, and 1 more where the row is not the same
        as the one before.
    """

    counts: Int[Tensor, "n 2"]
    order: Int[Tensor, " pairs"]
    row: Int[Tensor, " pairs"]
    code: Int[Tensor, " pairs"]


@dataclass(frozen=True, eq=False)
class Hosts:
    """Which experts the ranks hold that a row can visit.

    Attributes:
      held: by member of the group, the experts of which it holds a part, increasing. Each is held
        by equally many members, or by none.
      num_experts: how many there are.
      me: this rank's place in the group.
      group: ranks that have different rows; None where rows stay with their rank.
      same: ranks that have the same rows and other experts, or other parts of them: what they
        compute is summed. None where there are none.
    """

    held: Sequence[IntArray]
    num_experts: int
    me: int = 0
    group: ProcessGroup | None = None
    same: ProcessGroup | None = None
    _copies: tuple[Copies, Copies] = field(default_factory=lambda: (Copies(), Copies()), repr=False)

    @cached_property
    def members(self) -> IntArray:
        """The members that hold parts of each expert, [e, parts]; of none, one more than are."""
        nobody = len(self.held)
        owned = np.zeros((nobody, self.num_experts), bool)
        for member, own in enumerate(self.held):
            owned[member, own] = True
        parts = max(owned.sum(0).max(initial=0), 1)
        holders = np.argsort(~owned, axis=0, kind="stable")[:parts].T.copy()
        holders[owned.sum(0) == 0] = nobody
        return holders

    @cached_property
    def numbers(self) -> IntArray:
        """The number of each expert among those of a member, [n + 1, e]; nobody's come last."""
        found = np.zeros((len(self.held) + 1, self.num_experts), np.int64)
        for member, own in enumerate(self.held):
            found[member, own] = np.arange(len(own))
        return found

    def leaving(
        self, experts: Int[Tensor, "t k"], rows: Int[Tensor, " t"], num_rows: int
    ) -> Leaving:
        """Who is sent which rows, for which experts: nothing is sent or read by the host.

        Args:
          experts: that each row needs, all different.
          rows: which rows these are, increasing.
          num_rows: of how many.
        """
        tables = zip((self.members, self.numbers), self._copies, strict=True)
        members, numbers = (Index(*table).on(experts.device) for table in tables)
        member, order = members[experts].flatten().sort(stable=True)
        pair = order // members.shape[1]
        row = rows[pair // max(experts.shape[1], 1)]
        visit = member * (num_rows + 1) + row
        new = (visit.diff(prepend=visit.new_full((1,), -1)) != 0).long()
        code = 2 * numbers[member, experts.flatten()[pair]] + new
        counts = row.new_zeros(len(self.held) + 1, 2)
        counts.index_add_(0, member, torch.stack([new, torch.ones_like(new)], dim=1))
        return Leaving(counts[:-1], order, row, code)

    def visits(
        self, experts: Int[Tensor, "t k"], rows: Int[Tensor, " t"], num_rows: int
    ) -> "Visits":
        """Plan the visits of this rank's rows; all ranks of the group call it, rows or none.

        Args:
          experts: that each row needs, all different.
          rows: which rows these are, increasing; the others need none.
          num_rows: of how many.
        """
        leaving, group = self.leaving(experts, rows, num_rows), self.group
        if group is None:
            return self._staying(leaving, num_rows)
        ones = [1] * len(self.held)
        there = Parcels(leaving.order, ones, ones, len(ones), group).send(leaving.counts)
        told = cast("list[list[int]]", torch.cat([leaving.counts.T, there.T]).tolist())
        sent, pairs, come, pairs_here = told
        left = sum(pairs)
        code = leaving.code[:left]
        by_pair = Parcels(leaving.order[:left], pairs, pairs_here, len(leaving.order), group, True)
        slot = (code % 2).cumsum(0) - 1
        index = slot.new_empty(sum(sent)).scatter_(0, slot, leaving.row[:left])
        by_row = Parcels(index, sent, come, num_rows, group)
        found = by_pair.send(code.int()).long()
        row = (found % 2).cumsum(0) - 1
        parts = self.members.shape[1]
        return Visits(row, found // 2, sum(come), by_row, by_pair, parts, same=self.same)

    def _staying(self, leaving: Leaving, num_rows: int) -> "Visits":
        """Rows that stay, for those of their experts that are here."""
        pairs = len(leaving.order)
        if len(self.held[0]) < self.num_experts:
            pairs = int(leaving.counts[0, 1])
        row, number = leaving.row[:pairs], leaving.code[:pairs] // 2
        return Visits(row, number, num_rows, own=leaving.order[:pairs], same=self.same)


@dataclass(frozen=True, eq=False)
class Visits:
    """The rows that a rank computes experts on in one layer, and their way home.

    Attributes:
      row: of each pair of a row and an expert that is computed here, which of the rows it is;
        increasing.
      expert: which of the experts that this rank holds it is.
      num_rows: how many rows there are here.
      rows: how rows travel; None where they stay.
      pairs: how shares do.
      parts: how many members hold parts of an expert.
      own: which of this rank's pairs are computed here, where rows stay; None is all.
      same: ranks over which results are summed.
    """

    row: Int[Tensor, " pairs"]
    expert: Int[Tensor, " pairs"]
    num_rows: int
    rows: Parcels | None = None
    pairs: Parcels | None = None
    parts: int = 1
    own: Int[Tensor, " pairs"] | None = None
    same: ProcessGroup | None = None

    @classmethod
    def here(cls, experts: Int[Tensor, "t k"], rows: Int[Tensor, " t"], num_rows: int) -> "Visits":
        """Every expert is here, whole, and nothing moves.

        Args:
          experts: that each row needs.
          rows: which rows these are, increasing; the others need none.
          num_rows: of how many.
        """
        return cls(rows.repeat_interleave(experts.shape[1]), experts.flatten(), num_rows)

    def dispatch(
        self, x: Float[Tensor, "rows m"], shares: Float[Tensor, "t k"]
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, " pairs"]]:
        """Bring rows, and a share for each pair, to where they are computed.

        Args:
          x: this rank's rows.
          shares: of each expert of those that need some.
        Returns: the rows that this rank computes on, and the share of each of its pairs.
        """
        each = shares[..., None].expand(*shares.shape, self.parts).flatten()
        if self.rows and self.pairs:
            rows, each = travel_together((self.rows.away(), self.pairs.away()), x, each)
            return rows, each
        return x, each if self.own is None else each.index_select(0, self.own)

    def combine(self, y: Float[Tensor, "n m"]) -> Float[Tensor, "rows m"]:
        """Bring results home and sum them.

        Args:
          y: what this rank has computed of each row that ``dispatch`` gave.
        Returns: one row per row of this rank, zeros for those that need no expert; same dtype, the
          sum of the members' rows rounded once, and the same bits on all ranks that have the same.
        """
        home = travel(y, self.rows.home()) if self.rows else y
        return home if self.same is None else all_reduce(home, self.same)

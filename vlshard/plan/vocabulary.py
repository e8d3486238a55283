"""A vocabulary that is cut over ranks: which rows of its tables travel to whom in a micro-batch.

Numbers on the host. Ranks that share a vocabulary tell each other, a step ahead, which rows of each
other's part their tokens need and what their labelled tokens predict; nothing of it is read back
from a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from vlshard.comm import Mesh, exchange_arrays, row_move
from vlshard.language import IntArray, Layout
from vlshard.plan.lookup import Lookup
from vlshard.programs import Even, Moves

NOTHING = -1


class TokenIds(NamedTuple):
    """What some tokens ask the vocabulary for; numbers on the host.

    Attributes:
      ids: id of each token in local order, one row after another; ``NOTHING`` of those that need
        no row of the embedding, being padding or placeholders.
      targets: the id that each labelled token predicts, in local order.
    """

    ids: IntArray
    targets: IntArray

    @property
    def needed(self) -> IntArray:
        """The different ids, increasing."""
        return np.unique(self.ids[self.ids != NOTHING])


@dataclass(frozen=True, eq=False)
class ToldIds:
    """What the ranks that share a vocabulary have told this one of a micro-batch.

    Attributes:
      own: what this rank's tokens ask for.
      asked: ids of this rank's part that each member's tokens need, increasing.
      targets: what the labelled tokens of each member predict, in its local order.
    """

    own: TokenIds
    asked: Sequence[IntArray]
    targets: Sequence[IntArray]


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary that a plan cuts.

    Attributes:
      rows: layout of the ids, contiguous over the axes that cut them.
      axes: these axes, major to minor: the ranks that differ along them only share the vocabulary,
        and are its members in this order.
      apart: those of the axes over which tokens are cut: along the others members hold the same.
      mesh: the ranks.
    """

    rows: Layout
    axes: tuple[str, ...]
    apart: tuple[str, ...]
    mesh: Mesh

    @cached_property
    def _members(self) -> tuple[int, ...]:
        return self.mesh.peers(self.axes, self.mesh.here)

    @cached_property
    def _ends(self) -> IntArray:
        """Where the parts of the members end; each begins where the one before ends."""
        return np.cumsum([self.rows.local_shape(rank)[0] for rank in self._members])

    @property
    def _me(self) -> int:
        return self._members.index(self.mesh.here)

    @cached_property
    def _part(self) -> tuple[int, int]:
        """First id of this rank's part, and the first behind it."""
        begin, end = np.concatenate([[0], self._ends])[self._me : self._me + 2].tolist()
        return begin, end

    def exchange(self, own: TokenIds) -> ToldIds:
        """Tell the other members what this rank's tokens ask for; every rank calls this alike.

        Args:
          own: of a micro-batch.
        """
        asking = [np.r_[ids.size, ids, own.targets] for ids in self._by_owner(own)]
        heard = exchange_arrays(asking, self.mesh.host_group(self.axes))
        asked = [message[1 : 1 + message[0]] for message in heard]
        targets = [message[1 + message[0] :] for message in heard]
        return ToldIds(own, asked, targets)

    def imagine(self, members: Sequence[TokenIds]) -> ToldIds:
        """What this rank would be told; no ranks need to run.

        Args:
          members: what the tokens of each member ask for, in the order of the members.
        """
        asked = [self._by_owner(member)[self._me] for member in members]
        return ToldIds(members[self._me], asked, [member.targets for member in members])

    def plan(self, told: ToldIds) -> Lookup:
        """What moves in a micro-batch.

        Args:
          told: by the members.
        """
        needed, ids = told.own.needed, told.own.ids
        places = np.where(ids == NOTHING, needed.size, np.searchsorted(needed, ids))
        return Lookup(
            needed=needed,
            places=places,
            rows=row_move(self._fetch(told, needed), self.axes, self.mesh),
            labelled=row_move(self._labelled(told), self.apart, self.mesh),
            targets=np.concatenate([told.targets[k] for k in self._differing]),
            part=self._part,
            group=None if self.mesh.imagined else self.mesh.group(self.axes),
        )

    def _by_owner(self, tokens: TokenIds) -> list[IntArray]:
        """The ids that tokens need, by the member whose part they are in."""
        needed = tokens.needed
        return np.split(needed, np.searchsorted(needed, self._ends)[:-1])

    def _fetch(self, told: ToldIds, needed: IntArray) -> Moves:
        """Rows of the table from the members that have them to those that need them."""
        begin, end = self._part
        owners = np.searchsorted(self._ends, needed, "right")
        return Moves(
            me=self._me,
            send={k: ids - begin for k, ids in enumerate(told.asked)},
            receive={k: np.flatnonzero(owners == k) for k in np.unique(owners).tolist()},
            rows=end - begin,
            size=needed.size,
            local=False,
        )

    @cached_property
    def _differing(self) -> list[int]:
        """The members that hold other tokens than each other, this rank among them."""
        return [self._members.index(rank) for rank in self.mesh.peers(self.apart, self.mesh.here)]

    def _labelled(self, told: ToldIds) -> Moves:
        """Labelled rows to all members; those of one after those of another."""
        counts = [told.targets[k].size for k in self._differing]
        ends = list(accumulate(counts))
        me, own = self._differing.index(self._me), told.own.targets.size
        return Moves(
            me=me,
            send=dict.fromkeys(range(len(counts)), np.arange(own)),
            receive={k: np.arange(end - counts[k], end) for k, end in enumerate(ends)},
            rows=own,
            size=sum(counts),
            local=not self.apart,
            even=Even.GATHER if len(set(counts)) == 1 and own else None,
        )

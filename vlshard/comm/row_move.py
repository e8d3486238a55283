"""Moves of rows between the ranks along some axes, at once or in flight; rows may be cut by heads.

Where heads are dealt, each row counts as several, one per block of heads, so that an all-to-all
from tokens to heads is a move of rows like any other.
"""

from dataclasses import dataclass

import einops
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from vlshard.comm.ahead import Index
from vlshard.comm.collectives import exchange_rows, indices_of
from vlshard.comm.flight import start_rows
from vlshard.comm.mesh import Mesh
from vlshard.comm.pending import Pending
from vlshard.programs import Moves


@dataclass(frozen=True, eq=False)
class RowMove:
    """A differentiable move of rows; call it, or start it and wait.

    Attributes:
      moves: this rank's part, in blocks of rows; None if every rank keeps its rows as they are.
      group: the ranks that take part; None where nothing travels.
      before: blocks into which the heads of each row are cut before they travel.
      after: blocks from which they are put together.
    """

    moves: Moves | None
    group: ProcessGroup | None
    before: int
    after: int

    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "..."]:
        """Move rows and wait for them."""
        if self.moves is None:
            return x
        return self._join(exchange_rows(self._cut(x), 0, self.moves, self.group))

    def start(self, x: Float[Tensor, "n ..."]) -> Pending:
        """Send rows on their way."""
        if self.moves is None:
            return Pending.here(x)
        return start_rows(self._cut(x), (0, 0), self.moves, self.group).then(self._join)

    @property
    def indices(self) -> list[Index]:
        """What the move, and the way back, index tensors by."""
        return [] if self.moves is None else indices_of(self.moves)

    def _cut(self, x: Tensor) -> Tensor:
        """One row per block of heads."""
        if self.before == 1:
            return x
        return einops.rearrange(x, "n (block h) d -> (n block) h d", block=self.before)

    def _join(self, x: Tensor) -> Tensor:
        """The blocks of each row, side by side again."""
        if self.after == 1:
            return x
        return einops.rearrange(x, "(n block) h d -> n (block h) d", block=self.after)


def row_move(
    moves: Moves, axes: tuple[str, ...], mesh: Mesh, before: int = 1, after: int = 1
) -> RowMove:
    """A move between the ranks along some axes.

    Args:
      moves: this rank's part, in blocks of rows.
      axes: the axes, in the order of the ranks.
      mesh: the ranks; its group is asked for by all of them or by none, whatever the rows.
      before: blocks into which each row is cut.
      after: blocks from which each row is put together.
    """
    if moves.local and moves.still and before == after == 1:
        return RowMove(None, None, 1, 1)
    group = None if moves.local or mesh.imagined else mesh.group(axes)
    return RowMove(moves, group, before, after)

"""Blocks of one shape, one a rank, brought to all ranks of a group."""

from functools import cache

import numpy as np
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from vlshard.comm.collectives import exchange_rows
from vlshard.programs import Even, Moves


def gather_blocks(
    x: Shaped[Tensor, "..."], group: ProcessGroup | None
) -> Shaped[Tensor, "ranks ..."]:
    """The blocks of all ranks of a group, in its order.

    Args:
      x: this rank's block; those of the others have its shape.
      group: the ranks; None is this rank alone.
    """
    if group is None:
        return x[None]
    moves = _to_all(group.size(), group.rank())
    return exchange_rows(x.reshape(1, -1), 0, moves, group).reshape(group.size(), *x.shape)


@cache
def _to_all(ranks: int, me: int) -> Moves:
    """The one row of each rank goes to all."""
    send = dict.fromkeys(range(ranks), np.arange(1))
    receive = {k: np.arange(k, k + 1) for k in range(ranks)}
    return Moves(me, send, receive, 1, ranks, local=False, even=Even.GATHER)

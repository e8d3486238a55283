"""Moves planned from what all members of a group hold, laid out: slow, and written apart."""

import numpy as np

from vlshard.programs.moves import Moves


def dense_moves(have, want, me, local=None):
    """Who sends which rows to whom: a rank takes its own copy, else the lowest holder's.

    Args:
      have: per group member, the global indices that it holds, in local order.
      want: per group member, those that it shall hold.
      me: this rank's place in the group.
      local: whether nothing leaves any rank; None looks.
    """
    places = [{int(row): at for at, row in enumerate(rows)} for rows in have]

    def source(member, row):
        order = [member, *range(len(have))]
        return next(k for k in order if row in places[k])

    sources = [[source(k, int(row)) for row in rows] for k, rows in enumerate(want)]
    pairs = [
        list(zip(map(int, rows), s, strict=True)) for rows, s in zip(want, sources, strict=True)
    ]
    send = {k: [places[me][row] for row, s in pairs[k] if s == me] for k in range(len(have))}
    receive = {k: [at for at, s in enumerate(sources[me]) if s == k] for k in range(len(have))}
    here = all(s == k for k, found in enumerate(sources) for s in found)
    return Moves(
        me=me,
        send={k: np.array(rows, np.int64) for k, rows in send.items()},
        receive={k: np.array(rows, np.int64) for k, rows in receive.items()},
        rows=have[me].size,
        size=want[me].size,
        local=here if local is None else local,
    )

"""What a step means for one rank: which rows of which dim go where. Pure integers."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import assert_never

import numpy as np

from vlshard.language import BoundDim, IntArray, Layout, Packed, Plain, counts, kept
from vlshard.programs.moves import Even, Moves
from vlshard.programs.peers import Peers, grouped, plan_moves
from vlshard.programs.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    ZeroPad,
)


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's part in a step.

    Attributes:
      axes: the axes of the group, in mesh order.
      dims: tensor dims that ``moves.send`` and ``moves.receive`` index.
      moves: rows that go and come; None where a whole tensor is all-reduced.
    """

    axes: tuple[str, ...]
    dims: tuple[int, int] = (0, 0)
    moves: Moves | None = None


def route(step: Step, src: Layout, dst: Layout, rank: int) -> Route:
    """One rank's part in a step.

    Args:
      step: a step from ``src`` to ``dst``.
      src: layout before.
      dst: layout after.
      rank: a global rank.
    Returns: the rows that it sends and receives, by index.
    """
    match step:
        case AllReduce(axis):
            return Route(src.mesh.read(axis))
        case AllToAll(axis, taken, put):
            return _all_to_all(axis, (_find(src, put), _find(src, taken)), src, dst, rank)
        case AllGather(axis, dim) | Slice(axis, dim):
            local = isinstance(step, Slice)
            return _along(_find(src, dim), src.mesh.read(axis), src, dst, rank, local=local)
        case ReduceScatter(axis, dim) | ZeroPad(axis, dim):
            local = isinstance(step, ZeroPad)
            back = _along(_find(src, dim), src.mesh.read(axis), dst, src, rank, local=local)
            return Route(back.axes, back.dims, back.moves.reverse if back.moves else None)
        case Exchange(axes, dim):
            at = _find(src, dim)
            over = src.mesh.expand(axes)
            return _along(at, over, src, dst, rank, local=_rows_stay(src, dst, at))
        case _:
            assert_never(step)


def _along(
    dim: int, axes: tuple[str, ...], src: Layout, dst: Layout, rank: int, *, local: bool = False
) -> Route:
    """Rows of one dim go to the ranks that want them."""
    peers = Peers(src.mesh, axes, rank)
    have, want = (_rows(side, rank, dim) for side in (src, dst))
    finders = (partial(src.holders, dim=dim), partial(dst.holders, dim=dim))
    moves = plan_moves(have, want, finders, peers, local=local)
    return Route(axes, (dim, dim), moves if local else replace(moves, even=_even(moves, peers)))


def _rows_stay(src: Layout, dst: Layout, dim: int) -> bool:
    """Whether every rank holds the same rows before and after, if that follows from sizes alone.

    So it is where cuts are only spelled otherwise, at sizes that divide. The segments of a pack
    and the homes of rows are data: such rows count as moving.
    """
    before, after = src.bound[dim], dst.bound[dim]
    if isinstance(before, Packed) or (isinstance(before, Plain) and before.rows is not None):
        return False
    ranks = src.mesh.parts
    held = counts(before, ranks)
    return bool((held == counts(after, ranks)).all() and (held == kept(before, after, ranks)).all())


def _even(moves: Moves, peers: Peers) -> Even | None:
    """Whether all members send all of their rows, equally many, to all; all see it alike."""
    sizes = {rows.size for rows in moves.receive.values()}
    to_all = len(moves.send) == len(moves.receive) == peers.size > 1 and len(sizes) == 1
    gathers = to_all and moves.incoming.once and moves.outgoing.everywhere
    return Even.GATHER if gathers else None


def _all_to_all(axis: str, dims: tuple[int, int], src: Layout, dst: Layout, rank: int) -> Route:
    """Each rank is sent its block of the first dim and gets all blocks of the second."""
    axes = src.mesh.read(axis)
    peers, (cut, joined) = Peers(src.mesh, axes, rank), dims
    whole, full = _rows(src, rank, cut), _rows(dst, rank, joined)
    to, source = (
        np.broadcast_to(peers.number(side.holders(rows, dim)), rows.shape)
        for side, rows, dim in ((dst, whole, cut), (src, full, joined))
    )
    send, receive = (grouped(np.arange(member.size), member) for member in (to, source))
    return Route(axes, dims, Moves(peers.me, send, receive, whole.size, full.size, local=False))


def _rows(layout: Layout, rank: int, dim: int) -> IntArray:
    """Global indices of one dim that a rank holds, in local order; not to be written to."""
    bound, places = layout.bound[dim], layout.mesh.coords(rank)
    return _held(bound, tuple((axis, places[axis]) for axis in bound.axes))


@lru_cache(maxsize=256)
def _held(dim: BoundDim, place: tuple[tuple[str, int], ...]) -> IntArray:
    """Kept because the routes of q, k, v and out ask for the same rows."""
    rows = dim.pieces(dict(place)).indices()
    rows.setflags(write=False)
    return rows


def _find(layout: Layout, name: str) -> int:
    """The tensor dim with a label."""
    labels = [layout.spec.label(i) for i in range(len(layout.spec.dims))]
    return labels.index(name)

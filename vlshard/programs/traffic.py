"""What each step of a program sends, for all ranks at once: counted, without anybody's rows.

Each row that moves is sent once to each rank that wants it and does not hold it, by the lowest
rank of the group that holds it; so counts of what places hold, before, after and both, do.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, assert_never

import numpy as np

from vlshard.language import IntArray, Layout, MeshShape, counts, kept
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

SAFE = 2**62


class Sent(NamedTuple):
    """Elements that ranks send in a step, forward and backward, as grids over the mesh."""

    forward: IntArray
    backward: IntArray


@lru_cache(maxsize=16)
def sent(steps: tuple[Step, ...], layouts: tuple[Layout, ...]) -> tuple[Sent, ...]:
    """What ranks send to others in each step, exactly.

    Args:
      steps: the steps.
      layouts: the layouts before the first, and after each.
    Returns: elements; an all-reduce of n ranks counts as 2(n-1)/n of the tensor, rounded up.
    """
    triples = zip(steps, layouts, layouts[1:], strict=False)
    return tuple(_sent(step, src, dst) for step, src, dst in triples)


def at_rank(grid: IntArray, mesh: MeshShape, rank: int) -> int:
    """The number of one rank in a grid."""
    places = mesh.coords(rank)
    wide = [place for part, place in places.items() if mesh.parts[part] > 1]
    found = np.asarray(grid)
    return int(found[tuple(p if n > 1 else 0 for p, n in zip(wide, found.shape, strict=False))])


def _sent(step: Step, src: Layout, dst: Layout) -> Sent:
    """What ranks send in one step."""
    before, after = _shapes(src), _shapes(dst)
    match step:
        case AllReduce(axis):
            ranks = src.mesh.span(src.mesh.read(axis))
            count = -(-2 * (ranks - 1) * _product(before) // ranks)
            return Sent(count, count)
        case AllToAll(_, taken, put):
            leave, arrive = _find(src, put), _find(src, taken)
            forward = _wide(before[leave] - after[leave], src)
            backward = _wide(after[arrive] - before[arrive], src)
        case AllGather(axis, dim) | Slice(axis, dim):
            leave = arrive = _find(src, dim)
            forward, backward = _along(leave, src.mesh.read(axis), src, dst)
        case ReduceScatter(axis, dim) | ZeroPad(axis, dim):
            leave = arrive = _find(src, dim)
            backward, forward = _along(leave, src.mesh.read(axis), dst, src)
        case Exchange(axes, dim):
            leave = arrive = _find(src, dim)
            forward, backward = _along(leave, src.mesh.expand(axes), src, dst)
        case _:
            assert_never(step)
    return Sent(
        _product([*before[:leave], forward, *before[leave + 1 :]]),
        _product([*after[:arrive], backward, *after[arrive + 1 :]]),
    )


def _along(dim: int, axes: Sequence[str], src: Layout, dst: Layout) -> tuple[IntArray, IntArray]:
    """Rows of one dim that ranks send to those of their group that want them, and that they get."""
    ranks = src.mesh.parts
    have, want = src.bound[dim], dst.bound[dim]
    held, wanted, stay = (
        _wide(grid, src)
        for grid in (counts(have, ranks), counts(want, ranks), kept(have, want, ranks))
    )
    wide = [part for part, n in ranks.items() if n > 1]
    alike = tuple(i for i, part in enumerate(wide) if part in axes and part not in have.axes)
    shape = [ranks[part] if i in alike else stay.shape[i] for i, part in enumerate(wide)]
    copies = prod(ranks[part] for part in axes if part not in want.axes)
    sends = copies * held - np.broadcast_to(stay, shape).sum(axis=alike, keepdims=True)
    # Of ranks that hold the same rows, the first sends them.
    first = np.zeros([n if i in alike else 1 for i, n in enumerate(shape)], held.dtype)
    first[(0,) * first.ndim] = 1
    return _wide(sends * first, src), _wide(wanted - stay, src)


def _shapes(layout: Layout) -> list[IntArray]:
    """The local shape at each place, dim by dim."""
    return [_wide(counts(dim, layout.mesh.parts), layout) for dim in layout.bound]


def _wide(grid: IntArray, layout: Layout) -> IntArray:
    """A grid with room for products of all that a step sends."""
    room = prod(max(n, 1) for n in layout.shape) * 2 * layout.mesh.size <= SAFE
    return np.asarray(grid).astype(np.int64 if room else object)


def _product(grids: Sequence[IntArray]) -> IntArray:
    """The product of several grids, in the integers that they are."""
    found = np.ones((), grids[0].dtype if grids else np.int64)
    for grid in grids:
        found = np.asarray(found * grid, found.dtype)
    return found


def _find(layout: Layout, name: str) -> int:
    """The tensor dim with a label."""
    labels = [layout.spec.label(i) for i in range(len(layout.spec.dims))]
    return labels.index(name)

"""What all places of a mesh hold at once: how much, and how much of it both before and after.

Answers are grids: arrays with a numpy axis for each part of the mesh that has more than one rank,
in the order of the mesh, of length 1 where the dim is not cut over it, so that they broadcast.
Fused dims are counted as boxes, the others as runs; neither is as long as the dim.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from vlshard.language.arrays import IntArray
from vlshard.language.cut import Cut, axes_of
from vlshard.language.dims import BoundDim, FloatArray, Packed, Plain
from vlshard.language.fused import Factor, Fused
from vlshard.language.tiling import Tiling, merged, packed_tiling, plain_tiling

Ranks = Mapping[str, int]
Grids = Mapping[str, IntArray]
Array = TypeVar("Array", IntArray, FloatArray)
SAFE = 2**62


class Span(NamedTuple):
    """Consecutive indices at each place: the first, and the one after the last."""

    start: IntArray
    stop: IntArray


Box = tuple[Span, ...]
Tiled = tuple[Tiling, tuple[Cut, ...]]


def counts(dim: BoundDim, ranks: Ranks) -> IntArray:
    """Rows of a dim that each place holds, as a grid.

    Args:
      dim: the dim.
      ranks: ranks along each part of the mesh, in its order.
    """
    match dim:
        case Fused():
            places = _places(ranks, _type(dim.size))
            return _window(_product_of(dim.factors, places), dim.cuts, places)[1]
        case Plain() if not any(cut.order == "home" for cut in dim.cuts):
            return _plain_counts(dim, _places(ranks, np.int64))
        case Plain():
            return grid(plain_tiling(dim).rows, dim.cuts, ranks)
        case Packed():
            return _packed_window(dim, ranks)[1] * dim.packing.unit


def costs(dim: Packed, ranks: Ranks) -> FloatArray:
    """What the rows cost that each place holds, as a grid.

    Args:
      dim: the dim.
      ranks: ranks along each part of the mesh, in its order.
    """
    tiling = packed_tiling(dim)
    segment = np.searchsorted(dim.packing.ends, tiling.starts, "right")
    cost = dim.row_costs()[segment] * tiling.lengths
    found = np.bincount(tiling.place, cost, tiling.places).astype(np.float64)
    return grid(found, (*dim.segments, *dim.each, *dim.cuts), ranks)


def by_rank(of: IntArray | FloatArray, ranks: Ranks) -> FloatArray:
    """A grid as one number for each rank of the mesh.

    Args:
      of: what a function of this file returns.
      ranks: ranks along each part of the mesh, in its order.
    """
    shape = [n for n in ranks.values() if n > 1]
    return np.broadcast_to(of.astype(np.float64), shape).flatten()


def kept(before: BoundDim, after: BoundDim, ranks: Ranks) -> IntArray:
    """Rows that each place holds both before and after, as a grid.

    Args:
      before: the dim as it is cut before.
      after: the same dim as it is cut after.
      ranks: ranks along each part of the mesh, in its order.
    """
    blocks = [one for one in map(_in_blocks, (before, after)) if one]
    if len(blocks) == 2:
        places = _places(ranks, _type(before.size))
        return _overlap(_boxes(blocks[0], places), _boxes(blocks[1], places), _ones(places))
    if isinstance(before, Packed) and isinstance(after, Packed) and _alike(before, after):
        windows = [_packed_window(dim, ranks) for dim in (before, after)]
        first = np.maximum(*(start for start, _ in windows))
        last = np.minimum(*(start + units for start, units in windows))
        return np.maximum(last - first, 0) * before.packing.unit
    sides = [tiled(dim) for dim in (before, after) if not isinstance(dim, Fused)]
    return tilings_kept(sides[0], sides[1], ranks)


def _in_blocks(dim: BoundDim) -> Fused | None:
    """A fused dim, or a plain one without orders as that of a single factor; else None."""
    match dim:
        case Fused():
            return dim
        case Plain() if not any(cut.order for cut in dim.cuts):
            return Fused((Factor(dim.size),), dim.cuts)
        case _:
            return None


def _alike(before: Packed, after: Packed) -> bool:
    """Whether packs differ at most in how they are cut as a whole."""
    return (before.packing, before.segments, before.each) == (
        after.packing,
        after.segments,
        after.each,
    )


def tiled(dim: Plain | Packed) -> Tiled:
    """The runs of a dim that is not fused, with the cuts by which its places count."""
    if isinstance(dim, Plain):
        return plain_tiling(dim), dim.cuts
    return packed_tiling(dim), (*dim.segments, *dim.each, *dim.cuts)


def tilings_kept(before: Tiled, after: Tiled, ranks: Ranks) -> IntArray:
    """What ``kept`` says, of runs that are known.

    Args:
      before: the runs before.
      after: the runs after, of the same rows.
      ranks: ranks along each part of the mesh, in its order.
    """
    sides = (before, after)
    begins = merged(*(tiling.by_row[0] for tiling, _ in sides))
    lengths = np.diff(begins, append=int(before[0].lengths.sum()))
    have, want = (_digits(tiling.places_of(begins), cuts) for tiling, cuts in sides)
    index, same = np.zeros_like(begins), np.ones(begins.size, dtype=bool)
    used: list[tuple[str, int]] = []
    for axis, (size, place) in {**want, **have}.items():
        if axis in have and axis in want:
            same &= place == want[axis][1]
        index = index * size + place
        used.append((axis, size))
    found = _tally(index[same], lengths[same], prod(size for _, size in used))
    axes = tuple(axis for axis, _ in used)
    return grid(found, [Cut(axes, tuple(size for _, size in used))], ranks)


def _digits(place: IntArray, cuts: Sequence[Cut]) -> dict[str, tuple[int, IntArray]]:
    """For each axis its ranks, and where along it each of some places is."""
    found: dict[str, tuple[int, IntArray]] = {}
    for cut in reversed(cuts):
        for axis, size in zip(reversed(cut.axes), reversed(cut.sizes), strict=True):
            place, digit = np.divmod(place, size)
            found[axis] = (size, digit)
    return found


def _tally(index: IntArray, amounts: IntArray, size: int) -> IntArray:
    """Sums of amounts by index, exact beyond what doubles hold: in two halves."""
    low, high = amounts & (2**31 - 1), amounts >> 31
    found = np.bincount(index, low, size).astype(np.int64)
    return found + (np.bincount(index, high, size).astype(np.int64) << 31) if high.any() else found


def grid(flat: Array, cuts: Sequence[Cut], ranks: Ranks) -> Array:
    """Numbers of places as a grid.

    Args:
      flat: one for each place.
      cuts: the cuts along which places count, major to minor.
      ranks: ranks along each part of the mesh, in its order.
    """
    sizes = dict(zip(axes_of(cuts), (n for cut in cuts for n in cut.sizes), strict=True))
    used = [axis for axis, n in sizes.items() if n > 1]
    order = [axis for axis in ranks if axis in used]
    block = flat.reshape([sizes[axis] for axis in used])
    block = block.transpose([used.index(axis) for axis in order])
    return block.reshape([n if a in used else 1 for a, n in ranks.items() if n > 1])


# -------------------------------------------------- closed forms


def _places(ranks: Ranks, kind: type) -> Grids:
    """The place along each part of the mesh, as a grid."""
    wide = [axis for axis, n in ranks.items() if n > 1]
    found: dict[str, IntArray] = {}
    for axis, n in ranks.items():
        shape = [n if axis == other else 1 for other in wide]
        found[axis] = np.arange(n).astype(kind).reshape(shape)
    return found


def _type(size: int) -> type:
    """What rows are counted in: integers of any length where 64 bits do not do."""
    return np.int64 if size <= SAFE else object


def _ones(places: Grids) -> IntArray:
    """A grid of 1 alone, in the integers that grids count in; never a bare number."""
    for place in places.values():
        return np.ones([1] * place.ndim, place.dtype)
    return np.ones((), np.int64)


def _place(cut: Cut, places: Grids) -> IntArray:
    """Which rank of a cut each place is."""
    place = np.zeros((), np.int64)
    for axis, size in zip(cut.axes, cut.sizes, strict=True):
        place = place * size + places[axis]
    return place


def _plain_counts(dim: Plain, places: Grids) -> IntArray:
    """Rows of a plain dim without homes at each place."""
    rows = np.array(dim.size)
    for cut in dim.cuts:
        place, parts = _place(cut, places), 2 * cut.ranks
        if cut.order == "zigzag":
            rows = _shared(rows, parts, place) + _shared(rows, parts, parts - 1 - place)
        else:
            rows = _window(rows, [cut], places)[1]
    return rows


def _packed_window(dim: Packed, ranks: Ranks) -> tuple[IntArray, IntArray]:
    """The first unit, and how many, that the cuts of the pack leave each place of what it has.

    Of the last cut that goes through each segment sums do.
    """
    unit, places = dim.packing.unit, _places(ranks, np.int64)
    *each, last = dim.each or (None,)
    tiling = packed_tiling(Packed(dim.packing, dim.segments, tuple(filter(None, each))))
    cuts = (*dim.segments, *filter(None, each))
    if last is None:
        units = grid(tiling.rows // unit, cuts, ranks)
    else:
        parts = 2 * last.ranks if last.order == "zigzag" else last.ranks
        size, extra = np.divmod(tiling.lengths // unit, parts)
        whole, more = (
            grid(Tiling(tiling.starts, n, tiling.place, tiling.places).rows, cuts, ranks)
            for n in (size, extra)
        )
        place = _place(last, places)
        units = whole + _shared(more, parts, place)
        if last.order == "zigzag":
            units = units + whole + _shared(more, parts, parts - 1 - place)
    first = units * 0
    for cut in dim.cuts:
        place = _place(cut, places)
        first = first + place * (units // cut.ranks) + np.minimum(place, units % cut.ranks)
        units = _shared(units, cut.ranks, place)
    return first, units


def _shared(rows: IntArray, ranks: int, place: IntArray) -> IntArray:
    """Rows of blocks whose sizes differ by at most one, larger ones first."""
    return rows // ranks + (place < rows % ranks)


def _window(rows: IntArray, cuts: Sequence[Cut], places: Grids) -> tuple[IntArray, IntArray]:
    """The first of so many rows, and how many, that contiguous cuts leave each place."""
    first = rows * 0
    for cut in cuts:
        block, place = -(-rows // cut.ranks), _place(cut, places)
        start = np.minimum(block * place, rows)
        first, rows = first + start, np.minimum(block, rows - start)
    return first, rows


def _counted(factor: Factor, places: Grids) -> tuple[IntArray, IntArray]:
    """What its cuts leave each place of a factor: the first index, and how many."""
    rows = _product_of(factor.factors, places) if factor.factors else _ones(places) * factor.size
    return _window(rows, factor.cuts, places)


def _product_of(factors: Sequence[Factor], places: Grids) -> IntArray:
    """How many indices of a product each place holds."""
    rows = _ones(places)
    for factor in factors:
        rows = rows * _counted(factor, places)[1]
    return rows


# -------------------------------------------------- boxes


def _boxes(dim: Fused, places: Grids) -> list[Box]:
    """What each place holds of a fused dim: boxes, a span of each factor that has no factors."""
    first, rows = _window(_product_of(dim.factors, places), dim.cuts, places)
    whole = not dim.cuts
    return _product(dim.factors, places, None if whole else Span(first, first + rows))


def _product(factors: Sequence[Factor], places: Grids, taken: Span | None) -> list[Box]:
    """The rows of a product in a span, the last factor the fastest; None takes all."""
    factor, *rest = factors
    if not rest or taken is None:
        own = _factor(factor, places, taken)
        return _crossed(own, _product(rest, places, None)) if rest else own
    below = _product_of(rest, places)
    wide = np.maximum(below, 1)
    first, skip = taken.start // wide, taken.start % wide
    last, over = taken.stop // wide, taken.stop % wide
    zero, cut = below * 0, skip > 0
    # Whole turns of the rest, then what the span has of the first turn and of the last.
    found = _crossed(_factor(factor, places, Span(first + cut, last)), _product(rest, places, None))
    head = Span(skip, np.where(cut, np.minimum(below, skip + taken.stop - taken.start), skip))
    tail = Span(zero, np.where((last > first) | ~cut, over, zero))
    for turn, span in ((first, head), (last, tail)):
        if (span.start < span.stop).any():
            own = _factor(factor, places, Span(turn, turn + 1))
            found += _crossed(own, _product(rest, places, span))
    return found


def _factor(factor: Factor, places: Grids, taken: Span | None) -> list[Box]:
    """Of the indices of a factor that each place holds, those in a span."""
    first, rows = _counted(factor, places)
    span = Span(first, first + rows) if taken is None else Span(*(first + n for n in taken))
    if factor.factors:
        whole = taken is None and not factor.cuts
        return _product(factor.factors, places, None if whole else span)
    return [(span,)]


def _crossed(some: Sequence[Box], others: Sequence[Box]) -> list[Box]:
    """The boxes of a product of two sets."""
    return [(*one, *other) for one in some for other in others]


def _overlap(some: Sequence[Box], others: Sequence[Box], one: IntArray) -> IntArray:
    """Rows that are in boxes of both sets, at each place; boxes of one set do not meet."""
    found = one * 0
    for box in some:
        for other in others:
            rows = one
            for a, b in zip(box, other, strict=True):
                both = np.minimum(a.stop, b.stop) - np.maximum(a.start, b.start)
                rows = rows * np.maximum(both, 0)
            found = found + rows
    return found

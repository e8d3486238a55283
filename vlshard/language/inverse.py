"""Who holds these rows: the inverse of a layout, for many rows at once, by arithmetic.

``Layout.indices`` says which rows a rank holds; this says where along each axis of the mesh the
rank is that holds each of some rows. No rank is laid out for it, but where one cut follows another
inside the places that the rows are at.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np

from vlshard.language.arrays import IntArray
from vlshard.language.cut import Cut, Places
from vlshard.language.dims import BoundDim, Packed, Plain, homes_of
from vlshard.language.fused import Factor, Fused
from vlshard.language.pieces import shares_of

Digits = Mapping[str, IntArray]


def holders(dim: BoundDim, rows: IntArray) -> dict[str, IntArray]:
    """Where the rank is that holds each row.

    Args:
      dim: a bound dim.
      rows: some of its rows, in any order.
    Returns: for each axis that cuts the dim the place along it, one number a row.
    """
    match dim:
        case Plain():
            return _plain(dim, rows)
        case Fused():
            found: dict[str, IntArray] = {}
            _blocks(dim.cuts, *_factors(dim.factors, rows, found), found)
            return found
        case Packed():
            return _packed(dim, rows)
        case _:
            assert_never(dim)


def _plain(dim: Plain, rows: IntArray) -> dict[str, IntArray]:
    """``holders`` of a dim of its own."""
    found: dict[str, IntArray] = {}
    at, extent = rows, np.full_like(rows, dim.size)
    for i, cut in enumerate(dim.cuts):
        match cut.order:
            case "home":
                before = replace(dim, cuts=dim.cuts[:i])
                place, at, extent = _homes(before, cut, at, found)
                _spread(cut, place, found)
            case "zigzag":
                at, extent = _zigzag(cut, at, extent, found)
            case _:
                at, extent = _blocks([cut], at, extent, found)
    return found


def _homes(
    before: Plain, cut: Cut, at: IntArray, found: Digits
) -> tuple[IntArray, IntArray, IntArray]:
    """Of rows that stay at home: at which rank, which of the rows there, and how many those are."""
    place, inner, extent = np.zeros_like(at), np.zeros_like(at), np.zeros_like(at)
    for places, chosen in _by_place(found, at.size):
        homes = homes_of(before.rows, cut)[before.pieces(places).indices()]
        order = np.argsort(homes, kind="stable")
        counts = np.bincount(homes, minlength=cut.ranks)
        turn = np.empty_like(homes)
        turn[order] = np.arange(homes.size) - (np.cumsum(counts) - counts)[homes[order]]
        place[chosen] = homes[at[chosen]]
        inner[chosen], extent[chosen] = turn[at[chosen]], counts[place[chosen]]
    return place, inner, extent


def _zigzag(
    cut: Cut, at: IntArray, extent: IntArray, found: dict[str, IntArray]
) -> tuple[IntArray, IntArray]:
    """Which row of its place each row is after a cut into heads and tails, and of how many."""
    parts = 2 * cut.ranks
    part = shares_of(at, extent, parts)
    place = np.minimum(part, parts - 1 - part)
    _spread(cut, place, found)
    block, extra = np.divmod(extent, parts)
    head, tail = (block + (half < extra) for half in (place, parts - 1 - place))
    inner = at - part * block - np.minimum(part, extra) + np.where(part == place, 0, head)
    return inner, head + tail


def _blocks(
    cuts: Sequence[Cut], at: IntArray, extent: IntArray, found: dict[str, IntArray]
) -> tuple[IntArray, IntArray]:
    """Which row of its place each row is after contiguous cuts, and of how many."""
    for cut in cuts:
        block = -(-extent // cut.ranks)
        place, at = np.divmod(at, block)
        _spread(cut, place, found)
        extent = np.minimum((place + 1) * block, extent) - place * block
    return at, extent


def _factors(
    factors: Sequence[Factor], rows: IntArray, found: dict[str, IntArray]
) -> tuple[IntArray, IntArray]:
    """Which row of those that the factors leave its place each row is, and of how many."""
    digits: list[IntArray] = []
    for factor in reversed(factors):
        rows, digit = np.divmod(rows, factor.size)
        digits.append(digit)
    at, extent = np.zeros_like(rows), np.ones_like(rows)
    for factor, digit in zip(factors, reversed(digits), strict=True):
        inner, count = digit, np.full_like(digit, factor.size)
        if factor.factors:
            inner, count = _factors(factor.factors, digit, found)
        inner, count = _blocks(factor.cuts, inner, count, found)
        at, extent = at * count + inner, extent * count
    return at, extent


def _packed(dim: Packed, rows: IntArray) -> dict[str, IntArray]:
    """``holders`` of a pack."""
    unit, found = dim.packing.unit, dict[str, IntArray]()
    segment = np.searchsorted(dim.packing.ends, rows, "right")
    for i, cut in enumerate(dim.segments):
        place, before = np.zeros_like(rows), replace(dim, segments=dim.segments[:i])
        for places, chosen in _by_place(found, rows.size):
            held = before.held(places)
            place[chosen] = dim.dealt(cut, held)[np.searchsorted(held, segment[chosen])]
        _spread(cut, place, found)
    for i, cut in enumerate(dim.each):
        place, before = np.zeros_like(rows), replace(dim, each=dim.each[:i], cuts=())
        zigzag = cut.order == "zigzag"
        for places, chosen in _by_place(found, rows.size):
            pieces = before.pieces(places)
            place[chosen] = pieces.parts_of(rows[chosen], unit, cut.ranks, zigzag=zigzag)
        _spread(cut, place, found)
    if dim.cuts:
        at, extent, before = np.zeros_like(rows), np.zeros_like(rows), replace(dim, cuts=())
        for places, chosen in _by_place(found, rows.size):
            pieces = before.pieces(places)
            at[chosen], extent[chosen] = pieces.positions(rows[chosen]) // unit, pieces.rows // unit
        for cut in dim.cuts:
            place = shares_of(at, extent, cut.ranks)
            _spread(cut, place, found)
            block, extra = np.divmod(extent, cut.ranks)
            at, extent = at - place * block - np.minimum(place, extra), block + (place < extra)
    return found


def _spread(cut: Cut, place: IntArray, found: dict[str, IntArray]) -> None:
    """Note where ranks of a cut are along each of its axes."""
    for axis, size in zip(reversed(cut.axes), reversed(cut.sizes), strict=True):
        place, found[axis] = np.divmod(place, size)


def _by_place(found: Digits, rows: int) -> Iterator[tuple[Places, IntArray]]:
    """The places that rows are at so far, and which of the rows are there."""
    if not found or not rows:
        if rows:
            yield {}, np.arange(rows)
        return
    digits = np.stack(list(found.values()), axis=1)
    order = np.lexsort(digits.T[::-1])
    sorted_digits = digits[order]
    begins = np.flatnonzero((np.diff(sorted_digits, axis=0) != 0).any(axis=1)) + 1
    for chosen in np.split(order, begins):
        yield dict(zip(found, digits[chosen[0]].tolist(), strict=True)), chosen

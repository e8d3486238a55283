"""Cuts of a state as layouts have them: bound to ranks, and dims to sizes at which they divide."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from vlshard.language import BoundDim, Dim, Factor, Fused, Group, Packed, Packing, Plain
from vlshard.language import Cut as BoundCut
from vlshard.programs.states import Cut, Cuts, Part

Sizes = Mapping[str, int]
Leaves = Mapping[Part, int]


def bound_cuts(cuts: Sequence[Cut], part: Part, sizes: Sizes) -> tuple[BoundCut, ...]:
    """The cuts of one part of a dim.

    Args:
      cuts: the cuts of a dim.
      part: the part.
      sizes: ranks along each part of the mesh.
    """
    return tuple(
        BoundCut(cut.axes, tuple(sizes[axis] for axis in cut.axes), cut.order)
        for cut in cuts
        if cut.part == part
    )


def bound_sides(
    dim: Dim, leaves: Leaves, cycle: int, sizes: Sizes, sides: tuple[Cuts, Cuts]
) -> Iterator[tuple[BoundDim, BoundDim]]:
    """A plain or a fused dim before and after: one dim, or several whose product it is.

    Args:
      dim: the dim.
      leaves: rows of each part that has no parts.
      cycle: rows that go home to one rank after another, before it is the first one's turn again.
      sizes: ranks along each part of the mesh.
      sides: the cuts before and after.
    """
    if isinstance(dim, Group):
        have, want = (_fused(dim, side, leaves, sizes) for side in sides)
        yield have, want
        return
    # ``.home`` cuts within turns of ``cycle`` rows, all else cuts between them.
    turns = [[cut for cut in side if cut.order != "home"] for side in sides]
    homes = [[cut._replace(order=None) for cut in side if cut.order == "home"] for side in sides]
    for size, cuts in ((prod(leaves.values()) // cycle, turns), (cycle, homes)):
        have, want = (Plain(size, bound_cuts(side, (), sizes)) for side in cuts)
        yield have, want


def bound_pack(
    packing: Packing, length: int, sizes: Sizes, sides: tuple[Cuts, Cuts]
) -> Iterator[tuple[BoundDim, BoundDim]]:
    """A pack before and after whose segments are all alike, as a product: of segments and rows.

    Args:
      packing: the pack.
      length: rows of each segment, which the cuts divide.
      sizes: ranks along each part of the mesh.
      sides: the cuts before and after, none of them of the pack as a whole.
    """
    segments = Packing([1] * len(packing.lengths), home=packing.home, homes=packing.homes)
    have, want = (Packed(segments, bound_cuts(side, (0,), sizes)) for side in sides)
    yield have, want
    one = Packing([length])
    have, want = (Packed(one, each=bound_cuts(side, (1,), sizes)) for side in sides)
    yield have, want


def _fused(dim: Group, cuts: Cuts, leaves: Leaves, sizes: Sizes) -> Fused:
    """A fused dim."""
    items = (_factor(item, (i,), cuts, leaves, sizes) for i, item in enumerate(dim.items))
    return Fused(tuple(items), bound_cuts(cuts, (), sizes))


def _factor(dim: Dim, part: Part, cuts: Cuts, leaves: Leaves, sizes: Sizes) -> Factor:
    """A factor of one."""
    own = bound_cuts(cuts, part, sizes)
    if not isinstance(dim, Group):
        return Factor(leaves[part], own)
    items = (_factor(item, (*part, i), cuts, leaves, sizes) for i, item in enumerate(dim.items))
    factors = tuple(items)
    return Factor(prod(factor.size for factor in factors), own, factors)

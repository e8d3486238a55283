"""What cuts each dim may have on the way between two sides, and what its exchanges cost."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from vlshard.language import Dim, MeshShape, Packing
from vlshard.programs.dim_space import DimRules, DimSpace, Kind, limits_of
from vlshard.programs.exchange_cost import ExchangeCost, symbolic_packing
from vlshard.programs.states import Axes, Cuts, used_axes


class KnownDim(NamedTuple):
    """What is known of a dim beside its cuts.

    Attributes:
      dim: its brackets, without names and splits.
      kind: how it is made.
      label: stands for its name, in the order of names.
      packing: the pack, if it is given.
    """

    dim: Dim
    kind: Kind
    label: str
    packing: Packing | None = None


@lru_cache(maxsize=128)
def dim_space_of(rules: DimRules) -> DimSpace:
    """The cuts of dims that are alike: programs share what was found out about them."""
    return DimSpace(rules)


@lru_cache(maxsize=64)
def exchange_cost_of(
    dim: Dim, ranks: tuple[tuple[str, int], ...], packing: Packing | None
) -> ExchangeCost:
    """Costs of dims that are alike."""
    return ExchangeCost(dim, dict(ranks), packing)


def rules_of(
    dim: KnownDim,
    sides: tuple[Cuts, Cuts],
    axes: Axes,
    ranks: tuple[tuple[str, int], ...],
    joins: tuple[Axes, ...] | None,
) -> DimRules:
    """What cuts a dim may have between two sides."""
    orders = {cut.order for side in sides for cut in side if cut.order}
    homes = {
        prod(dict(ranks)[axis] for axis in cut.axes)
        for side in sides
        for cut in side
        if cut.order == "home"
    }
    limits = limits_of(sides, dict(ranks)) if dim.kind is Kind.FUSED else {}
    written = sides if dim.kind is Kind.PACKED or joins is not None else ()
    return DimRules(
        dim.kind,
        dim.dim,
        tuple(sorted(orders)) if dim.kind is not Kind.PACKED else (),
        tuple(sorted(homes)),
        tuple(limits.items()),
        written,
        joins,
        axes,
        ranks,
    )


def pack_of(dim: KnownDim, sides: tuple[Cuts, Cuts], mesh: MeshShape) -> Packing | None:
    """The Packing of a packed dim; a symbolic one if none with rows is given."""
    if dim.kind is not Kind.PACKED:
        return None
    given = dim.packing if dim.packing and dim.packing.rows else None
    return given or symbolic_packing(sides, mesh.parts)


def joins_of(
    axes: Axes, sides: Sequence[tuple[Cuts, Cuts]], before: Axes, after: Axes
) -> tuple[Axes, ...]:
    """The axes that one cut may be over by narrow rules: those that a side has in sequence."""
    summed = tuple(axis for axis in before if axis not in after)
    runs = [summed]
    for side in sides:
        for cuts in side:
            runs += [cut.axes for cut in cuts if len(cut.axes) > 1]
            for part in dict.fromkeys(cut.part for cut in cuts):
                runs.append(used_axes([c for c in cuts if c.part == part and not c.order]))
    found: dict[Axes, None] = {}
    for run in runs:
        for i in range(len(run)):
            for k in range(i + 2, len(run) + 1):
                if {*run[i:k]} <= {*axes}:
                    found[run[i:k]] = None
    return tuple(found)

"""From one layout to another: the cheapest program of steps that moves a tensor there."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from vlshard.language import (
    NO_NEW_SUM,
    Binder,
    Dim,
    Dots,
    Group,
    Int,
    LayoutError,
    MeshShape,
    Name,
    Packing,
    Spec,
    arrow,
    label,
    packing_of,
)
from vlshard.programs.changes import StepKind
from vlshard.programs.dim_space import Kind
from vlshard.programs.program import Program, Traffic
from vlshard.programs.rules import KnownDim
from vlshard.programs.states import read_state, write_spec
from vlshard.programs.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
)
from vlshard.programs.way import Leg, way

__all__ = ["Program", "Traffic", "transition"]

Item = Name | Group | Int
Items = tuple[tuple[str, int | Packing], ...]


def transition(
    src: str | Spec,
    dst: str | Spec,
    mesh: MeshShape,
    /,
    *,
    where: str | None = None,
    **sizes: int | Packing,
) -> Program:
    """The cheapest program between two layouts of one tensor.

    Steps cost the bytes that the busiest rank sends, at symbolic even sizes: ``program_space`` says
    which steps there are and what they cost, ``search`` which of several programs is preferred.
    The sizes of plain and fused dims do not matter, so one program serves all of them.

    Args:
      src: layout before.
      dst: layout after, of the same dims.
      mesh: sizes of the axes; those of size 1 cost nothing.
      where: the place that the layouts belong to, for messages.
      sizes: sizes, where known. A bracket whose first name has an integer size is fused; one of
        two names is packed if the first has a Packing, by which exchanges are then counted, or no
        size.
    Returns: the program; equal arguments may give the same object.
    Raises: SpecError if the dims differ or a sum is pending on the right alone; LayoutError if a
      side does not fit the mesh or its Packing.
    """
    texts = tuple(side if isinstance(side, str) else side.text for side in (src, dst))
    return _planned(src, dst, texts, mesh.shape, where, tuple(sizes.items()))


@lru_cache(maxsize=1024)
def _planned(
    src: str | Spec,
    dst: str | Spec,
    _texts: tuple[str, ...],
    mesh: MeshShape,
    where: str | None,
    items: Items,
) -> Program:
    """The program of some arguments; texts are told apart since messages show them."""
    if isinstance(src, Spec) and isinstance(dst, Spec) and "->" in src.text == dst.text:
        sides = src, dst
    else:
        sides = arrow(f"{str(src).strip()} -> {str(dst).strip()}")
    sizes = dict(items)
    for side in sides:
        binder = Binder(side, mesh, where)
        binder.check_axes()
        for dim in side.dims:
            if packing_of(dim, sizes):
                binder.dim(dim, sizes)
    _check_sums(*sides, mesh, where)
    labels = [label(dim) for dim in sides[0].dims]
    order = {text: i for i, text in enumerate(sorted({*labels}))}
    digits = len(str(len(order)))
    dims = tuple(
        _known(dim, sizes, f"{order[text]:0{digits}}")
        for dim, text in zip(sides[0].dims, labels, strict=True)
    )
    found = way(dims, *(read_state(side, mesh) for side in sides), mesh)
    steps = tuple(_step(leg, labels, mesh) for leg in found.legs)
    between = tuple(write_spec(leg.after, sides[0], mesh) for leg in found.legs[:-1])
    spellings = tuple(i for i, leg in enumerate(found.legs) if leg.spelling)
    return Program(*sides, mesh, steps, between, found.cost, found.proven, spellings)


def _known(dim: Dim, sizes: Mapping[str, int | Packing], rank: str) -> KnownDim:
    """How a dim is made; a bracket of two names without a size counts as the pack it may be."""
    match dim:
        case Name():
            return KnownDim(_bare(dim), Kind.PLAIN, rank)
        case Group((Name() as first, Name())) if not isinstance(sizes.get(first.name), int):
            return KnownDim(_bare(dim), Kind.PACKED, rank, packing_of(dim, sizes))
        case Group():
            return KnownDim(_bare(dim), Kind.FUSED, rank)
        case Int() | Dots():
            return KnownDim(dim, Kind.FIXED, rank)


def _bare(dim: Item) -> Item:
    """A dim without names and splits: dims that are made alike are equal then."""
    match dim:
        case Name():
            return replace(dim, name="", splits=())
        case Group(items):
            return replace(dim, items=tuple(map(_bare, items)), splits=())
        case Int():
            return dim


def _step(leg: Leg, labels: Sequence[str], mesh: MeshShape) -> Step:
    """The step of a leg."""
    over = mesh.text(leg.axes)
    match leg.kind, [labels[i] for i in leg.dims]:
        case StepKind.ALL_GATHER, [dim]:
            return AllGather(over, dim)
        case StepKind.REDUCE_SCATTER, [dim]:
            return ReduceScatter(over, dim)
        case StepKind.ALL_TO_ALL, [src, dst]:
            return AllToAll(over, src, dst)
        case StepKind.SLICE, [dim]:
            return Slice(over, dim)
        case StepKind.ALL_REDUCE, []:
            return AllReduce(over)
        case StepKind.EXCHANGE, [dim]:
            return Exchange(tuple(over.strip("()").split()), dim)
        case _:
            raise AssertionError(f"a {leg.kind.name} of {len(leg.dims)} dims")


def _check_sums(src: Spec, dst: Spec, mesh: MeshShape, where: str | None) -> None:
    """What is pending on the right is pending on the left, part by part."""
    before = {part for axis in src.pending for part in mesh.axis_parts(axis)}
    missing = [axis for axis in dst.pending if not {*mesh.axis_parts(axis)} <= before]
    if missing:
        names = " ".join(map(str, missing))
        headline = f"a sum over {names} is pending on the right but not on the left"
        spans = [axis.span for axis in missing]
        raise LayoutError(headline, text=dst.text, spans=spans, where=where, notes=[NO_NEW_SUM])

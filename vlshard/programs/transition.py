"""From one layout to another: the cheapest program of steps that moves a tensor there."""

from collections.abc import Mapping
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
    packing_of,
)
from vlshard.programs.dim_space import Kind
from vlshard.programs.program import Program, Traffic
from vlshard.programs.program_space import KnownDim, ProgramSpace
from vlshard.programs.search import cheapest
from vlshard.programs.states import State, read_state, write_spec
from vlshard.programs.steps import Step

__all__ = ["Program", "Traffic", "transition"]

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
    dims = tuple(_known(dim, sizes) for dim in sides[0].dims)
    before, after = (read_state(side, mesh) for side in sides)
    steps, states = _found(dims, before, after, mesh)
    between = tuple(write_spec(state, sides[0], mesh) for state in states)
    return Program(*sides, mesh, steps, between)


@lru_cache(maxsize=1024)
def _found(
    dims: tuple[KnownDim, ...], src: State, dst: State, mesh: MeshShape
) -> tuple[tuple[Step, ...], tuple[State, ...]]:
    """The steps and the states between them; searched once, whatever the sizes."""
    return cheapest(ProgramSpace(dims, src, dst, mesh))


def _known(dim: Dim, sizes: Mapping[str, int | Packing]) -> KnownDim:
    """How a dim is made; a bracket of two names without a size counts as the pack it may be."""
    match dim:
        case Name():
            return KnownDim(dim, Kind.PLAIN)
        case Group((Name() as first, Name())) if not isinstance(sizes.get(first.name), int):
            return KnownDim(dim, Kind.PACKED, packing_of(dim, sizes))
        case Group():
            return KnownDim(dim, Kind.FUSED)
        case Int() | Dots():
            return KnownDim(dim, Kind.FIXED)


def _check_sums(src: Spec, dst: Spec, mesh: MeshShape, where: str | None) -> None:
    """What is pending on the right is pending on the left, part by part."""
    before = {part for axis in src.pending for part in mesh.axis_parts(axis)}
    missing = [axis for axis in dst.pending if not {*mesh.axis_parts(axis)} <= before]
    if missing:
        names = " ".join(map(str, missing))
        headline = f"a sum over {names} is pending on the right but not on the left"
        spans = [axis.span for axis in missing]
        raise LayoutError(headline, text=dst.text, spans=spans, where=where, notes=[NO_NEW_SUM])

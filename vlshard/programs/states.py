"""States of a tensor on its way: which cuts each dim has, and which sums are pending.

A state is a layout without sizes, in a form that can be compared and searched: per dim its cuts
in the order in which they apply, over parts of the mesh, and the parts over which a sum is
pending. Parts of one rank are left out. Joined and nested cuts differ as they are written, and
where sizes do not divide: ``s@(dp cp)`` is not ``s@dp@cp``. ``apart`` makes one of both.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vlshard.language import Dim, Group, MeshShape, Name, Spec, label, spec

Axes = tuple[str, ...]
Part = tuple[int, ...]


class Cut(NamedTuple):
    """One cut of a dim.

    Attributes:
      part: where inside the dim's brackets it stands; ``()`` is the dim itself.
      axes: the parts of the mesh that are joined, major to minor.
      order: None for contiguous blocks.
    """

    part: tuple[int, ...]
    axes: Axes
    order: str | None = None


Cuts = tuple[Cut, ...]


class State(NamedTuple):
    """The cuts of each dim, in the order in which they apply, and the pending parts."""

    dims: tuple[Cuts, ...]
    pending: Axes = ()


def read_state(of: Spec, mesh: MeshShape) -> State:
    """The state that a spec writes."""
    dims = tuple(tuple(_cuts(dim, mesh, ())) for dim in of.dims)
    pending = {part for axis in of.pending for part in mesh.axis_parts(axis)}
    return State(dims, tuple(p for p, n in mesh.parts.items() if p in pending and n > 1))


def _cuts(dim: Dim, mesh: MeshShape, part: tuple[int, ...]) -> Iterator[Cut]:
    """The cuts of a dim over more than one rank: inside-out, then left to right."""
    if isinstance(dim, Group):
        for i, item in enumerate(dim.items):
            yield from _cuts(item, mesh, (*part, i))
    if isinstance(dim, Name | Group):
        for split in dim.splits:
            axes = [p for axis in split.axes for p in mesh.axis_parts(axis)]
            if axes := tuple(p for p in axes if mesh.parts[p] > 1):
                yield Cut(part, axes, split.order)


def write_spec(state: State, like: Spec, mesh: MeshShape) -> Spec:
    """The spec of a state, with the dims of another spec."""
    dims = [_text(dim, cuts, mesh, ()) for dim, cuts in zip(like.dims, state.dims, strict=True)]
    pending = ["+", mesh.text(state.pending).strip("()")] if state.pending else []
    return spec(" ".join([*dims, *pending]))


def _text(dim: Dim, cuts: Cuts, mesh: MeshShape, part: tuple[int, ...]) -> str:
    """A dim with its cuts in the language."""
    if isinstance(dim, Group):
        inner = [_text(item, cuts, mesh, (*part, i)) for i, item in enumerate(dim.items)]
        bare = f"({' '.join(inner)})"
    else:
        bare = label(dim)
    return bare + "".join(
        f"@{mesh.text(cut.axes)}" + (f".{cut.order}" if cut.order else "")
        for cut in cuts
        if cut.part == part
    )


def apart(cuts: Cuts) -> Cuts:
    """Cuts with one for each axis where they make contiguous blocks."""
    return tuple(
        single
        for cut in cuts
        for single in ([cut] if cut.order else [Cut(cut.part, (axis,)) for axis in cut.axes])
    )


def used_axes(cuts: Sequence[Cut]) -> Axes:
    """The parts of the mesh that cuts are over, in the order of application."""
    return tuple(axis for cut in cuts for axis in cut.axes)


def begin_alike(cuts: Cuts, others: Cuts) -> int:
    """With how many cuts both begin."""
    same = 0
    while same < min(len(cuts), len(others)) and cuts[same] == others[same]:
        same += 1
    return same


def changed_axes(before: Cuts, after: Cuts, axes: Iterable[str]) -> Axes:
    """Those of some axes that an exchange changes: not the ones of cuts that both begin with."""
    same = begin_alike(before, after)
    used = {*used_axes(before[same:]), *used_axes(after[same:])}
    return tuple(axis for axis in axes if axis in used)

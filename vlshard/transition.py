"""From one layout to another: the program of steps that moves a tensor there."""

from dataclasses import dataclass
from typing import NamedTuple

from vlshard.errors import LayoutError, Span
from vlshard.layout import Binder, layout
from vlshard.mesh_shape import MeshShape
from vlshard.packing import Packing
from vlshard.routes import route, traffic
from vlshard.spec import Dim, Group, Name, Spec, arrow, label
from vlshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    dual,
)


class Traffic(NamedTuple):
    """Bytes that one rank sends to others."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Program:
    """Steps from one layout to another; printable, no tensors.

    Attributes:
      src: layout before.
      dst: layout after.
      mesh: the mesh that both are on.
      steps: what to do, in order; nothing where the layouts are the same.
    """

    src: Spec
    dst: Spec
    mesh: MeshShape
    steps: tuple[Step, ...]

    def bytes_sent(self, *, rank: int = 0, itemsize: int = 4, **sizes: int | Packing) -> Traffic:
        """Bytes that a rank sends, exactly.

        Args:
          rank: a global rank of the mesh.
          itemsize: bytes of one element.
          sizes: global size or packing of each dim, by name.
        Returns: bytes forward and backward; an all-reduce of n ranks counts as 2(n-1)/n of the
          tensor, rounded up.
        Raises: LayoutError if a size is missing or does not fit.
        """
        src, dst = (layout(side, self.mesh, where=None, **sizes) for side in (self.src, self.dst))
        counts = [traffic(route(step, src, dst, rank), src, dst, rank) for step in self.steps]
        return Traffic(*(itemsize * sum(count[way] for count in counts) for way in (0, 1)))

    def describe(self, *, itemsize: int = 4, **sizes: int | Packing) -> str:
        """The program as text, with the bytes that each rank sends.

        Args:
          itemsize: bytes of one element.
          sizes: global size or packing of each dim, by name.
        Returns: the lines of ``str``, and one with the largest number of bytes of any rank.
        Raises: LayoutError if a size is missing or does not fit.
        """
        ranks = range(self.mesh.size)
        counts = [self.bytes_sent(rank=rank, itemsize=itemsize, **sizes) for rank in ranks]
        forward, backward = (max(count[way] for count in counts) for way in (0, 1))
        return f"{self}\n  a rank sends at most {forward:,} bytes, in backward {backward:,}"

    def __str__(self) -> str:
        lines = [f"{self.src} -> {self.dst}  on {self.mesh}"]
        lines += [f"  {step}; backward {dual(step)}" for step in self.steps]
        return "\n".join(lines if self.steps else [*lines, "  nothing to do"])


def transition(
    src: str | Spec,
    dst: str | Spec,
    mesh: MeshShape,
    /,
    *,
    where: str | None = None,
    **sizes: int | Packing,
) -> Program:
    """The cheapest program between two layouts of one tensor; of one step at most, for now.

    Steps cost the bytes that the busiest rank sends. Which of the steps other than an exchange
    can serve follows from what changes, so at most one can; an exchange never sends less than a
    gather or a slice that serves, and on a tie it comes last.

    Args:
      src: layout before.
      dst: layout after, of the same dims.
      mesh: sizes of the axes; those of size 1 cost nothing.
      where: the place that the layouts belong to, for messages.
      sizes: sizes, where known; a bracket whose first name has an integer size is fused, not
        packed.
    Returns: the program.
    Raises: SpecError if the dims differ or a sum is pending on the right alone; LayoutError if a
      side does not fit the mesh or one step does not do.
    """
    if isinstance(src, Spec) and isinstance(dst, Spec) and "->" in src.text == dst.text:
        sides = src, dst
    else:
        sides = arrow(f"{str(src).strip()} -> {str(dst).strip()}")
    for side in sides:
        Binder(side, mesh.shape, where).check_axes()
    changes = Changes.between(*sides, mesh)
    steps = _steps(changes, mesh, {name for name, size in sizes.items() if isinstance(size, int)})
    if steps is None:
        raise LayoutError(
            "this needs several steps, which is not available yet",
            text=sides[0].text,
            spans=changes.spans,
            where=where,
            notes=["one step gathers, slices, sums, moves one split or exchanges rows of one dim"],
        )
    return Program(*sides, mesh, steps)


class Cut(NamedTuple):
    """A split of a dim: of which part of it, over which axis, in which order."""

    part: tuple[int, ...]
    axis: str
    order: str | None


class Change(NamedTuple):
    """A dim and its splits before and after, as they apply."""

    dim: Dim
    before: tuple[Cut, ...]
    after: tuple[Cut, ...]

    @property
    def name(self) -> str:
        """The dim as steps name it."""
        return label(self.dim)

    @property
    def gathered(self) -> str | None:
        """The axis of the last split before, if it is the one that is taken away."""
        return self.before[-1].axis if self.before[:-1] == self.after else None

    @property
    def sliced(self) -> str | None:
        """The axis of the last split after, if it is the one that is added."""
        return self.after[-1].axis if self.after[:-1] == self.before else None


@dataclass(frozen=True)
class Changes:
    """What differs between two layouts; axes of size 1 do not count.

    Attributes:
      dims: the dims whose splits differ.
      summed: axes over which a sum is pending before alone.
      spans: the characters of all that.
    """

    dims: tuple[Change, ...]
    summed: tuple[str, ...]
    spans: tuple[Span, ...]

    @classmethod
    def between(cls, src: Spec, dst: Spec, mesh: MeshShape) -> "Changes":
        """Compare two specs of the same dims."""
        changes: list[Change] = []
        spans: list[Span] = []
        for before, after in zip(src.dims, dst.dims, strict=True):
            change = Change(before, _cuts(before, mesh), _cuts(after, mesh))
            if change.before != change.after:
                changes.append(change)
                spans += [before.span, after.span]
        gone = [axis for axis in src.pending if axis not in dst.pending]
        gone = [axis for axis in gone if mesh.span((str(axis),)) > 1]
        spans += [axis.span for axis in gone]
        return cls(tuple(changes), tuple(map(str, gone)), tuple(spans))


def _cuts(dim: Dim, mesh: MeshShape, part: tuple[int, ...] = ()) -> tuple[Cut, ...]:
    """The splits of a dim over more than one rank, in the order in which they apply."""
    if not isinstance(dim, Name | Group):
        return ()
    items = dim.items if isinstance(dim, Group) else ()
    inner = [cut for i, item in enumerate(items) for cut in _cuts(item, mesh, (*part, i))]
    own: list[Cut] = []
    for split in dim.splits:
        parts = [p for axis in split.axes for p in mesh.axis_parts(axis) if mesh.parts[p] > 1]
        if parts:
            own.append(Cut(part, mesh.text(parts), split.order))
    return (*inner, *own)


def _steps(changes: Changes, mesh: MeshShape, fused: set[str]) -> tuple[Step, ...] | None:
    """No step, or one; None if one does not do."""
    match changes.dims, changes.summed:
        case (), ():
            return ()
        case (), (axis,):
            return (AllReduce(axis),)
        case (change,), (axis,) if change.sliced == axis:
            return (ReduceScatter(axis, change.name),)
        case (change,), ():
            return _along(change, mesh, fused)
        case (first, second), ():
            return _between(first, second) or _between(second, first)
        case _:
            return None


def _along(change: Change, mesh: MeshShape, fused: set[str]) -> tuple[Step, ...] | None:
    """The step that changes the splits of one dim."""
    if axis := change.gathered:
        return (AllGather(axis, change.name),)
    if axis := change.sliced:
        return (Slice(axis, change.name),)
    before, after = ([cut.axis for cut in cuts] for cuts in (change.before, change.after))
    reordered = [a for a in before if a in after] != [a for a in after if a in before]
    ordered = any(cut.order for cut in (*change.before, *change.after))
    if not (reordered or ordered or _packed(change.dim, fused)):
        return None
    used = {part for axis in (*before, *after) for part in mesh.read(axis)}
    return (Exchange(tuple(part for part in mesh.parts if part in used), change.name),)


def _between(src: Change, dst: Change) -> tuple[Step, ...] | None:
    """The step that takes the last split off one dim and puts it last on another."""
    axis = src.gathered
    return (AllToAll(axis, src.name, dst.name),) if axis and axis == dst.sliced else None


def _packed(dim: Dim, fused: set[str]) -> bool:
    """Whether a dim is a pack, or a bracket that may be one."""
    return (
        isinstance(dim, Group)
        and isinstance(dim.items[0], Name)
        and (dim.items[0].name not in fused)
    )

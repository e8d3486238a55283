"""Carries programs out on local tensors; ``reshard`` does so in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from jaxtyping import Shaped
from torch import Tensor, is_grad_enabled
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vlshard.comm.ahead import Index
from vlshard.comm.collectives import all_reduce, indices_of, move_rows
from vlshard.comm.compare_calls import watch_of
from vlshard.comm.graph_break import untraced
from vlshard.comm.mesh import Mesh
from vlshard.language import Binder, Layout, MeshShape, Name, Packing, PlanError, Spec, refuse_shape
from vlshard.language import arrow as read_arrow
from vlshard.programs import Program, Route, Slice, ZeroPad, route, transition

Sizes = Mapping[str, int | Packing]
Stage = tuple[Route, ProcessGroup | None]


@dataclass(frozen=True, eq=False)
class Lowered:
    """A program bound to sizes, this rank and its groups; call it on local tensors.

    Attributes:
      program: the steps.
      src: layout before.
      dst: layout after.
      rank: global rank of this process.
      stages: per step, this rank's part and the group that it needs.
    """

    program: Program
    src: Layout
    dst: Layout
    rank: int
    stages: tuple[Stage, ...]

    @untraced
    def __call__(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Move a tensor from the layout before to the one after, differentiably.

        Args:
          x: this rank's part in the layout before.
        Returns: its part in the layout after, same dtype.
        Raises: LayoutError if the shape is not the one of the layout before.
        """
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        """The call itself, for those whom Dynamo does not look into either."""
        self.check(x.shape)
        return run_stages(x, self.stages)

    @property
    def indices(self) -> list[Index]:
        """What the steps, and the way back, index tensors by."""
        moves = [part.moves for part, _ in self.stages if part.moves is not None]
        return [index for one in moves for index in indices_of(one)]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """What the layout before gives this rank."""
        return self.src.local_shape(self.rank)

    def check(self, shape: tuple[int, ...]) -> None:
        """The local shape is the one that the layout gives this rank."""
        if shape != self.shape:
            refuse_shape(self.src, self.rank, tuple(shape))


def run_stages(x: Tensor, stages: Sequence[Stage]) -> Tensor:
    """Carry steps out one after another."""
    for part, group in stages:
        if part.moves is not None:
            x = move_rows(x, part.dims, part.moves, group)
        elif group is not None:
            x = all_reduce(x, group)
    return x


def lower(program: Program, mesh: Mesh, sizes: Sizes) -> Lowered:
    """Bind a program to sizes and to this rank, once for many tensors.

    Groups that the mesh has not made yet are made now, so every rank has to do this alike.

    Args:
      program: what to do.
      mesh: the mesh that the program was made for, with its groups.
      sizes: global size or packing of each dim, by name.
    Returns: a function of local tensors.
    Raises: LayoutError if a size is missing or does not fit; PlanError if ranks have to
      communicate and there is no process group.
    """
    layouts = program.layouts(mesh, **sizes)
    stages: list[Stage] = []
    for step, src, dst in zip(program.steps, layouts, layouts[1:], strict=False):
        part = route(step, src, dst, mesh.here)
        quiet = isinstance(step, Slice | ZeroPad) or mesh.imagined
        stages.append((part, None if quiet else mesh.group(part.axes)))
    return Lowered(program, layouts[0], layouts[-1], mesh.here, tuple(stages))


@untraced
def reshard(
    x: Shaped[Tensor, "..."], arrow: str, mesh: Mesh, /, **sizes: int | Packing
) -> Shaped[Tensor, "..."]:
    """Move a tensor from one layout to another; every rank calls this alike.

    The gradient of a value that is replicated over an axis is a term of a sum over it, the
    gradient of such a term is replicated, and that of a split value is split.

    Args:
      x: this rank's part in the layout on the left.
      arrow: both layouts, such as ``b s@cp h d -> b s h@cp d``.
      mesh: the axes, and the ranks along them.
      sizes: global size or packing of dims, by name; a plain dim that is not named is taken as
        even over its axes.
    Returns: this rank's part in the layout on the right, same dtype; the tensor itself where the
      layouts are the same.
    Raises: SpecError if the arrow cannot be read; LayoutError if it does not fit the mesh, the
      sizes or the tensor; PlanError if ranks have to communicate and there is no process group;
      TypeError if x is no tensor.
    """
    watch = watch_of(mesh)
    if watch is None:
        return bound_program(x, arrow, mesh, sizes).run(x)
    watch.compare("reshard", lambda: told_call(x, arrow, mesh, sizes))
    return watch.follow(bound_program(x, arrow, mesh, sizes).run(x), "reshard")


def bound_program(x: object, arrow: str, mesh: object, sizes: Mapping[str, object]) -> Lowered:
    """The program of an arrow for a tensor and all like it; see ``reshard``."""
    running, shape = running_mesh(mesh), _local(x).shape
    return _lowered(arrow, shape, SameMesh(running), _items(arrow, len(shape), running, sizes))


def running_mesh(mesh: object) -> Mesh:
    """A mesh whose ranks can send, this one among them.

    Raises: PlanError if it is something else, or this rank is not on it.
    """
    if isinstance(mesh, DeviceMesh):
        fix = "fix: Mesh.from_device_mesh(mesh), made once, has the same ranks and axes"
        raise PlanError("a DeviceMesh takes no specs", notes=[fix])
    if not isinstance(mesh, Mesh):
        note = f"{mesh!r} is sizes only; make a Mesh on the running ranks"
        notes = [note] if isinstance(mesh, MeshShape) else []
        raise PlanError(f"a {type(mesh).__name__} has no ranks to send between", notes=notes)
    _ = mesh.here
    return mesh


def _local(x: object) -> Tensor:
    """A local tensor.

    Raises: TypeError if it is something else.
    """
    if isinstance(x, DTensor):
        raise TypeError(
            "local tensors are resharded, not DTensors: from_dtensor(x) gives this rank's part, "
            "to_dtensor wraps what comes out"
        )
    if not isinstance(x, Tensor):
        raise TypeError(
            f"a torch.Tensor is resharded, not a {type(x).__module__}.{type(x).__qualname__}"
        )
    return x


def _items(
    arrow: str, ndim: int, mesh: Mesh, sizes: Mapping[str, object]
) -> tuple[tuple[str, int | Packing], ...]:
    """The sizes that are given, checked."""
    items = [(name, size) for name, size in sizes.items() if isinstance(size, int | Packing)]
    if len(items) < len(sizes):
        binder = Binder(expanded(arrow, ndim)[0], mesh, None)
        items = [(name, binder.size(name, size)) for name, size in sizes.items()]
    return tuple(items)


def told_call(x: object, arrow: str, mesh: Mesh, sizes: Mapping[str, object]) -> dict[str, object]:
    """What all ranks must say alike of a call; nothing is sent, and no group made.

    Raises: what the call itself raises for what this rank gives.
    """
    local = _local(x)
    src, dst = expanded(arrow, local.ndim)
    given = _items(arrow, local.ndim, mesh, sizes)
    known = {**even_sizes(src, mesh, tuple(local.shape)), **dict(given)}
    before = transition(src, dst, mesh, where=None, **known).layouts(mesh, **known)[0]
    if tuple(local.shape) != before.local_shape(mesh.here):
        refuse_shape(before, mesh.here, tuple(local.shape))
    return {
        "arrow": f"{src} -> {dst}",
        "sizes": {name: str(size) for name, size in known.items()},
        "dtype": str(local.dtype),
        "gradient": local.requires_grad and is_grad_enabled(),
        "mesh": str(mesh),
    }


@lru_cache(maxsize=1024)
def expanded(text: str, ndim: int) -> tuple[Spec, Spec]:
    """The specs of an arrow for a tensor of so many dims.

    Raises: SpecError if the arrow cannot be read or has another number of dims.
    """
    src, dst = read_arrow(text)
    return src.expand(ndim), dst.expand(ndim)


@dataclass(frozen=True, eq=False)
class SameMesh:
    """A mesh as a key: its groups are its own, so an equal mesh is not the same."""

    mesh: Mesh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameMesh) and self.mesh is other.mesh

    def __hash__(self) -> int:
        return id(self.mesh)


# Each holds an index for every row that moves, so few are kept where sizes change with the step.
@lru_cache(maxsize=128)
def _lowered(
    text: str, shape: tuple[int, ...], same: SameMesh, items: tuple[tuple[str, int | Packing], ...]
) -> Lowered:
    """The program of an arrow, bound; made once for each mesh, local shape and sizes."""
    src, dst = expanded(text, len(shape))
    sizes = {**even_sizes(src, same.mesh, shape), **dict(items)}
    program = transition(src, dst, same.mesh, where=None, **sizes)
    return lower(program, same.mesh, sizes)


def even_sizes(src: Spec, mesh: Mesh, shape: tuple[int, ...]) -> dict[str, int]:
    """Global sizes of plain dims, if all ranks have as much as this one.

    Dims that stay with the ranks that read them have no such size.
    """
    found: dict[str, int] = {}
    for dim, rows in zip(src.dims, shape, strict=True):
        if isinstance(dim, Name) and not any(split.order == "home" for split in dim.splits):
            axes = [str(axis) for split in dim.splits for axis in split.axes]
            found[dim.name] = rows * mesh.span([a for a in axes if a in mesh.parts_of])
    return found

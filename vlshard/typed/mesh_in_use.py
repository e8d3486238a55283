"""The mesh that ``Sharded`` annotations are checked against, while a block runs."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from vlshard.comm import Mesh
from vlshard.language import MeshShape, Packing, PlanError


@dataclass(frozen=True)
class MeshInUse:
    """A mesh, this rank on it, and the packings that hold in every call."""

    mesh: MeshShape
    rank: int
    packings: Mapping[str, Packing]


_in_use: ContextVar[MeshInUse | None] = ContextVar("mesh_in_use", default=None)


def mesh_in_use() -> MeshInUse | None:
    """What ``use_mesh`` said; None outside of it."""
    return _in_use.get()


@contextmanager
def use_mesh(mesh: MeshShape, rank: int | None = None, /, **packings: Packing) -> Generator[None]:
    """Check ``Sharded`` annotations against a mesh while a block runs.

    It changes nothing else, and nothing at all where annotations are not checked. Without it, one
    process holds everything: splits say nothing, and each dim has its global size. What is set
    holds in the current thread (more exactly, in its ``contextvars`` context).

    Args:
      mesh: the axes.
      rank: the rank whose part is checked; None is this process, of a ``Mesh``.
      packings: segments of packed dims by the name of the first dim in their bracket, or rows
        of plain dims that stay at home.
    Raises: PlanError if the mesh has no such rank.
    """
    if rank is None and not isinstance(mesh, Mesh):
        raise PlanError("a MeshShape has no ranks running: say whose part is checked")
    place = mesh.here if rank is None and isinstance(mesh, Mesh) else rank or 0
    mesh.coords(place)
    token = _in_use.set(MeshInUse(mesh, place, packings))
    try:
        yield
    finally:
        _in_use.reset(token)

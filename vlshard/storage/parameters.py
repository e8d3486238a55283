"""How each parameter is stored: its part for compute, over which axes that is sharded, and where.

A unit declares one storage; axes that cut a parameter for compute drop out of it, since each
coordinate along them has a part of its own. So the parameters of one unit may live on several
meshes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vlshard.language import Layout, MeshShape
from vlshard.storage.declared import Storage
from vlshard.storage.parts import Parts


@dataclass(frozen=True)
class StoredParameter:
    """One parameter at rest.

    Attributes:
      shape: of the part that a rank computes with.
      shard: parts of the mesh over which that is sharded, in mesh order.
      replicate: parts over which it is copied; together with ``shard`` and ``beside`` all.
      beside: parts that cut the parameter for compute.
      dim: the dim that is sharded.
    """

    shape: tuple[int, ...]
    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    beside: tuple[str, ...] = ()
    dim: int = 0


def store(
    shape: tuple[int, ...], storage: Storage, mesh: MeshShape, part: Layout | None = None
) -> StoredParameter:
    """How a parameter is stored.

    Sharding cuts dim 0 if it divides by the ranks, else the first later dim that does, else dim 0
    in blocks that FSDP2 pads.

    Args:
      shape: what this rank computes with: the whole, or its part.
      storage: declared for its unit, with every axis of the mesh named.
      mesh: the ranks.
      part: layout of the parameter if it is cut for compute.
    """
    beside = tuple(p for p in mesh.parts if part is not None and p in part.axes)
    shard, copies = (
        tuple(axis for axis in axes if axis not in beside)
        for axes in (storage.shard, storage.replicate)
    )
    ranks = mesh.span(shard)
    dim = next((i for i, size in enumerate(shape) if size % ranks == 0), 0)
    return StoredParameter(shape, shard, copies, beside, dim)


def counts_here(stored: StoredParameter, mesh: MeshShape, rank: int) -> bool:
    """Whether a rank is the one, of all that hold the same elements, that counts them."""
    places = mesh.coords(rank)
    return all(places[axis] == 0 for axis in stored.replicate)


def stored_parameters(
    shapes: Mapping[str, tuple[int, ...]],
    storages: Mapping[str, Storage],
    mesh: MeshShape,
    parts: Parts,
) -> dict[str, StoredParameter]:
    """How each parameter is stored.

    Args:
      shapes: of whole parameters, by name.
      storages: of each unit, children before parents, the root being ``""``.
      mesh: the ranks.
      parts: the parameters that are cut for compute.
    """
    stored: dict[str, StoredParameter] = {}
    for name, shape in shapes.items():
        storage = storages[unit_of(name, storages)]
        local = parts.shape(name, shape)
        stored[name] = store(local, storage, mesh, parts.layouts.get(name))
    return stored


def unit_of(name: str, units: Iterable[str]) -> str:
    """The innermost unit that holds a parameter; the root is ``""``."""
    return max((u for u in units if u == "" or name.startswith(u + ".")), key=len)

"""A mesh with its process groups: the sizes of a MeshShape, bound to the running ranks."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vlshard.language import AxisSize, MeshShape, PlanError

__all__ = ["Mesh", "MeshShape"]

Axes = tuple[str, ...]
T = TypeVar("T")


class Mesh(MeshShape):
    """A MeshShape that can make process groups; equal to any mesh of the same axes and sizes.

    Without ``torch.distributed`` it is usable for everything that needs no communication.
    """

    _shape: MeshShape
    _groups: dict[Axes, dist.ProcessGroup]
    _device_meshes: dict[tuple[Axes, Axes, Axes, str], DeviceMesh]
    _seen_from: int | None

    def __init__(self, /, **sizes: AxisSize) -> None:
        super().__init__(**sizes)
        object.__setattr__(self, "_shape", MeshShape(**sizes))
        object.__setattr__(self, "_groups", {})
        object.__setattr__(self, "_device_meshes", {})
        object.__setattr__(self, "_seen_from", None)

    @property
    def shape(self) -> MeshShape:
        """The sizes alone, without process groups."""
        return self._shape

    @property
    def rank(self) -> int:
        """Global rank of this process; 0 without ``torch.distributed``."""
        if self._seen_from is not None:
            return self._seen_from
        return dist.get_rank() if dist.is_initialized() else 0

    def seen_from(self, rank: int) -> "Mesh":
        """This mesh as one of its ranks has it, which need not run: to plan for it, without groups.

        Args:
          rank: a global rank.
        Returns: an equal mesh; what is planned with it can be looked at, and not carried out.
        Raises: PlanError if the mesh has no such rank.
        """
        self.coords(rank)
        seen = copy(self)
        object.__setattr__(seen, "_seen_from", rank)
        return seen

    @property
    def imagined(self) -> bool:
        """Whether this is a mesh as ``seen_from`` gives it."""
        return self._seen_from is not None

    def make_groups(self, axes_sets: Iterable[Sequence[str]]) -> None:
        """Make the groups of several sets of axes; every rank must call this with the same sets.

        Args:
          axes_sets: axes of each group, major to minor; axes of size 1 do not matter.
        Raises: PlanError if an axis is unknown, or if this mesh is not the size of the world.
        """
        wanted = {self._key(axes) for axes in axes_sets}
        for axes in sorted(wanted - self._groups.keys()):
            self._groups[axes] = self._make(axes)

    def group(self, axes: Sequence[str]) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one along the axes only.

        Its ranks are in the order of ``peers(axes, rank)``. A group that ``make_groups`` has not
        made is made now, so every rank has to ask for it at the same point.

        Args:
          axes: major to minor.
        Raises: PlanError if an axis is unknown, or if this mesh is not the size of the world.
        """
        key = self._key(axes)
        if key not in self._groups:
            self._groups[key] = self._make(key)
        return self._groups[key]

    def device_mesh(
        self,
        shard: Sequence[str],
        replicate: Sequence[str] = (),
        device_type: str = "cpu",
        *,
        beside: Sequence[str] = (),
    ) -> DeviceMesh:
        """The DeviceMesh over which FSDP stores parameters; every rank must ask for it.

        Args:
          shard: axes over which each parameter is cut, in the order of the mesh: torch gathers a
            group's shards by rank, so another order would mislabel them.
          replicate: axes over which it is whole, in any order.
          device_type: where the ranks compute.
          beside: axes along which ranks hold other parameters, or other parts of one: each
            coordinate along them has a mesh of its own, and this rank's is given.
        Returns: one dim ``shard``, or two dims ``replicate``, ``shard``; all axes of a dim count
          as one, and ``shard`` may have size 1.
        Raises: PlanError if an axis of more than one rank is missing, unknown or named twice, or
          if the shard axes are in another order than the mesh's.
        """
        key = (tuple(shard), tuple(replicate), tuple(beside), device_type)
        if key not in self._device_meshes:
            made = self._make_device_mesh(shard, replicate, beside, device_type)
            self._device_meshes[key] = made
        return self._device_meshes[key]

    def parts_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """The DeviceMesh of DTensors: one dim for each part, named like it, in order.

        Args:
          device_type: where the ranks compute.
        Returns: one mesh, made by the first call: every rank has to make it alike.
        Raises: PlanError if this mesh has no axes or is not the size of the world.
        """
        key = (tuple(self.parts), ("parts",), (), device_type)
        if key not in self._device_meshes:
            self._check_world()
            if not self.parts:
                raise PlanError("a mesh without axes has no DeviceMesh")
            ranks = torch.arange(self.size).reshape(tuple(self.parts.values()))
            names = tuple(self.parts)
            self._device_meshes[key] = _device_mesh(device_type, ranks[None], names, self.rank)
        return self._device_meshes[key]

    def _key(self, axes: Sequence[str]) -> Axes:
        """The axes that tell groups apart."""
        return tuple(part for part in self.expand(axes) if self.parts[part] > 1)

    def _make(self, axes: Axes) -> dist.ProcessGroup:
        """Make this rank's group over the axes."""
        self._check_world()
        return _process_group(self.peers(axes, self.rank))

    def _make_device_mesh(
        self,
        shard: Sequence[str],
        replicate: Sequence[str],
        beside: Sequence[str],
        device_type: str,
    ) -> DeviceMesh:
        """A mesh of the rank tensor whose dims are whole sets of axes."""
        self._check_world()
        named = self.expand((*beside, *replicate, *shard))
        cut = self.expand(shard)
        order = list(self.parts)
        ordered = sorted(cut, key=order.index)
        if list(cut) != ordered:
            headline = f"parameters cannot be cut over ({' '.join(shard)}), only in mesh order"
            fix = f"fix: {self.text(ordered)}"
            raise PlanError(headline, notes=[self.note, fix])
        if missing := [part for part in order if self.parts[part] > 1 and part not in named]:
            headline = f"parameters are neither cut nor whole over {' '.join(missing)}"
            raise PlanError(headline, notes=[self.note])
        whole = sorted(self.expand(replicate), key=order.index)
        ranks = torch.arange(self.size).reshape(tuple(self.parts.values()) or (1,))
        apart = sorted(self.expand(beside), key=order.index)
        first = [order.index(axis) for axis in (*apart, *whole, *ordered)]
        rest = [i for i in range(ranks.dim()) if i not in first]
        ranks = ranks.permute(*first, *rest)
        flat = ranks.reshape(self.span(beside), -1, self.span(shard))
        if not replicate:
            return _device_mesh(device_type, flat[:, 0], ("shard",), self.rank)
        return _device_mesh(device_type, flat, ("replicate", "shard"), self.rank)

    def _check_world(self) -> None:
        """The ranks of this mesh are running."""
        if not dist.is_initialized():
            headline = "no process group: start the ranks with torchrun and initialise torch first"
            raise PlanError(headline, notes=[self.note])
        if dist.get_world_size() != self.size:
            headline = f"the mesh has {self.size} ranks, the world {dist.get_world_size()}"
            raise PlanError(headline, notes=[self.note])


# A group costs threads and connections, and equal ones serve all meshes of a process. They live as
# long as the default group that they were made in.
_groups_made: dict[object, dict[object, Any]] = {}


def _made(key: object, make: Callable[[], T]) -> T:
    """What was made for a key in the default group that is up now, or is made now."""
    world = dist.group.WORLD
    if world not in _groups_made:
        _groups_made.clear()
    known = _groups_made.setdefault(world, {})
    if key not in known:
        known[key] = make()
    return known[key]


def _process_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of some ranks, in this order; all of them call this alike, and nobody else.

    So that a rank makes as many groups as it is in, however many there are.
    """

    def make() -> dist.ProcessGroup:
        made = dist.new_group(
            list(ranks), timeout=_time_limit(), sort_ranks=False, use_local_synchronization=True
        )
        return cast("dist.ProcessGroup", made)

    return _made(ranks, make)


def _time_limit() -> timedelta | None:
    """The default group's, which groups made in it do not take over by themselves.

    torch has no public way to ask.
    """
    world = cast(Any, dist.group.WORLD)
    backends = [world._get_backend(device) for device in world._device_types]
    options = [getattr(backend, "options", None) for backend in backends]
    return next((getattr(found, "_timeout", None) for found in options if found), None)


def _device_mesh(device_type: str, meshes: Tensor, names: tuple[str, ...], rank: int) -> DeviceMesh:
    """This rank's of several DeviceMeshes, and its groups; every rank calls this alike.

    Args:
      device_type: where the ranks compute.
      meshes: all ranks, one mesh after another along dim 0.
      names: of a mesh's dims.
      rank: of this process.
    """
    flat = cast("list[int]", meshes.flatten().tolist())
    key = (device_type, tuple(meshes.shape), tuple(flat), names)

    def make() -> DeviceMesh:
        (mine,) = (ranks for ranks in meshes if (ranks == rank).any())
        groups = [_process_group(_line(mine, dim, rank)) for dim in range(mine.dim())]
        return DeviceMesh.from_group(groups, device_type, mine, mesh_dim_names=names)

    return _made(key, make)


def _line(ranks: Tensor, dim: int, rank: int) -> tuple[int, ...]:
    """The ranks that differ from one in one dim only, itself included."""
    lines = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim])
    (mine,) = lines[(lines == rank).any(dim=1)]
    return tuple(cast("list[int]", mine.tolist()))

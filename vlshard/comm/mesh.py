"""A mesh with its process groups: the sizes of a MeshShape, bound to the running ranks."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vlshard.comm.groups import axes_of, device_mesh, host_group, own_group
from vlshard.language import AxisSize, MeshShape, PlanError

__all__ = ["Mesh", "MeshShape"]

Axes = tuple[str, ...]

_any_world: ContextVar[bool] = ContextVar("any_world", default=False)


class Mesh(MeshShape):
    """A MeshShape that can make process groups; equal to any mesh of the same axes and sizes.

    Its ranks are those of the world, or the part of it that ``ranks`` names, such as the ranks of
    one stage or of one role. Such a part numbers its ranks from 0, as ``layout`` does, and makes
    its groups without the others.

    Without ``torch.distributed`` it is usable for everything that needs no communication.
    """

    _shape: MeshShape
    _ranks: tuple[int, ...] | None
    _places: dict[int, int]
    _groups: dict[Axes, dist.ProcessGroup]
    _device_meshes: dict[tuple[Axes, Axes, Axes, str], DeviceMesh]
    _seen_from: int | None

    def __init__(self, /, *, ranks: Sequence[int] | None = None, **sizes: AxisSize) -> None:
        """Name the axes.

        Args:
          ranks: the global ranks on the mesh, the last axis the fastest; None is all of them.
          sizes: number of ranks along each axis, or along each of its parts, outermost first.
        Raises: PlanError if a size is no integer or below 1, if the ranks are not so many, all
          different and there, or if fewer than the running ones are meant and not named.
        """
        super().__init__(**sizes)
        object.__setattr__(self, "_shape", MeshShape(**sizes))
        object.__setattr__(self, "_ranks", None if ranks is None else tuple(ranks))
        object.__setattr__(self, "_places", {rank: place for place, rank in enumerate(ranks or ())})
        object.__setattr__(self, "_groups", {})
        object.__setattr__(self, "_device_meshes", {})
        object.__setattr__(self, "_seen_from", None)
        if ranks is not None:
            self._check_ranks(tuple(ranks))
        elif dist.is_initialized() and self.size < dist.get_world_size() and not _any_world.get():
            headline = f"the mesh has {self.size} ranks, the world {dist.get_world_size()}"
            raise PlanError(headline, notes=[self.note, self._fix_for_part()])

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, /) -> "Mesh":
        """The same ranks, axes named like the dims; its groups of one dim serve here too.

        Args:
          mesh: a DeviceMesh with ``mesh_dim_names``, over all ranks or some; a dim may be named
            like a part of an axis, such as ``cp.ring``.
        Raises: PlanError if its dims have no names, or parts of an axis stand apart.
        """
        names = mesh.mesh_dim_names
        if names is None:
            fix = "fix: init_device_mesh(..., mesh_dim_names=(...))"
            raise PlanError("a DeviceMesh without names has no axes to speak of", notes=[fix])
        ranks = cast("list[int]", mesh.mesh.flatten().tolist())
        world = dist.get_world_size() if dist.is_initialized() else 1
        made = cls(ranks=ranks, **axes_of(names, mesh.shape))
        if list(made.parts) != list(names):
            raise PlanError(f"the mesh has parts of an axis apart: {' '.join(names)}")
        if ranks == list(range(world)):
            object.__setattr__(made, "_ranks", None)
        if made.rank is not None:
            made._take_over(mesh)
        return made

    @property
    def shape(self) -> MeshShape:
        """The sizes alone, without process groups."""
        return self._shape

    @property
    def ranks(self) -> Sequence[int]:
        """Global rank of each rank of the mesh."""
        return range(self.size) if self._ranks is None else self._ranks

    @property
    def rank(self) -> int | None:
        """This process on the mesh, its global rank where the mesh is the world; None outside.

        0 without ``torch.distributed``.
        """
        if self._seen_from is not None:
            return self._seen_from
        me = dist.get_rank() if dist.is_initialized() else 0
        if self._ranks is None:
            return me
        return self._places.get(me)

    @property
    def here(self) -> int:
        """``rank``, of a process that is on the mesh.

        Raises: PlanError if it is not.
        """
        rank = self.rank
        if rank is None:
            named = ", ".join(map(str, self.ranks[:8])) + ", ..." * (self.size > 8)
            headline = f"rank {dist.get_rank()} is not on this mesh of ranks {named}"
            fix = "fix: only the ranks of a mesh use it; mesh.rank is None on the others"
            raise PlanError(headline, notes=[self.note, fix])
        return rank

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

    def host_group(self, axes: Sequence[str]) -> dist.ProcessGroup | None:
        """A group like ``group(axes)`` that sends from the host, for whoever plans steps ahead.

        Made by the first call, which every rank makes alike. Nothing else uses it, so one thread
        may, beside what computes.

        Args:
          axes: major to minor.
        Returns: None where this rank is alone.
        Raises: as ``group``.
        """
        key = self._key(axes)
        if not key:
            return None
        self._check_world()
        return host_group(tuple(self.ranks[place] for place in self.peers(key, self.here)))

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
            made = device_mesh(device_type, self._grid()[None], tuple(self.parts))
            self._device_meshes[key] = made
        return self._device_meshes[key]

    def _key(self, axes: Sequence[str]) -> Axes:
        """The axes that tell groups apart."""
        return tuple(part for part in self.expand(axes) if self.parts[part] > 1)

    def _make(self, axes: Axes) -> dist.ProcessGroup:
        """Make this rank's group over the axes; its ranks do, and nobody else."""
        self._check_world()
        return own_group(tuple(self.ranks[place] for place in self.peers(axes, self.here)))

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
        ranks = self._grid()
        apart = sorted(self.expand(beside), key=order.index)
        first = [order.index(axis) for axis in (*apart, *whole, *ordered)]
        rest = [i for i in range(ranks.dim()) if i not in first]
        ranks = ranks.permute(*first, *rest)
        flat = ranks.reshape(self.span(beside), -1, self.span(shard))
        if not replicate:
            return device_mesh(device_type, flat[:, 0], ("shard",))
        return device_mesh(device_type, flat, ("replicate", "shard"))

    @property
    def _whole(self) -> bool:
        """Whether all ranks of the world make its groups together."""
        return self._ranks is None

    def _grid(self) -> torch.Tensor:
        """Global ranks by place."""
        return torch.tensor(self.ranks).reshape(tuple(self.parts.values()) or (1,))

    def _take_over(self, mesh: DeviceMesh) -> None:
        """Use a DeviceMesh, and its groups whose ranks are in the order of the mesh."""
        self._device_meshes[tuple(self.parts), ("parts",), (), mesh.device_type] = mesh
        for part in self.parts if self.size > 1 else ():
            group = mesh.get_group(part)
            peers = [self.ranks[place] for place in self.peers((part,), self.here)]
            if self.parts[part] > 1 and dist.get_process_group_ranks(group) == peers:
                self._groups[(part,)] = group

    def _check_ranks(self, ranks: tuple[object, ...]) -> None:
        """The ranks of a part of the world are as many as the mesh has, and there."""
        odd = [rank for rank in ranks if type(rank) is not int or rank < 0]
        world = dist.get_world_size() if dist.is_initialized() else None
        missing = [rank for rank in ranks if world is not None and cast(int, rank) >= world]
        if odd:
            headline = f"ranks={list(ranks)[:8]}: {odd[0]!r} is no global rank"
        elif len(set(ranks)) < len(ranks):
            headline = f"ranks={list(ranks)[:8]}: a rank is named twice"
        elif len(ranks) != self.size:
            headline = f"the mesh has {self.size} ranks, and ranks= names {len(ranks)}"
        elif missing:
            headline = f"ranks= names rank {missing[0]}, and the world has {world} ranks"
        else:
            return
        raise PlanError(headline, notes=[self.note])

    def _fix_for_part(self) -> str:
        """How to say that a part of the world is meant, or no ranks at all."""
        given = repr(self._shape).partition("(")[2][:-1]
        part = f"Mesh({given}{', ' if given else ''}ranks=[...]) for {self.size} of the ranks"
        return f"fix: {part}, or MeshShape({given}) for sizes only"

    def _check_world(self) -> None:
        """The ranks of this mesh are running, and this is one of them."""
        if not dist.is_initialized():
            headline = "no process group: start the ranks with torchrun and initialise torch first"
            raise PlanError(headline, notes=[self.note])
        if self._whole and dist.get_world_size() != self.size:
            headline = f"the mesh has {self.size} ranks, the world {dist.get_world_size()}"
            raise PlanError(headline, notes=[self.note])
        if not self._whole:
            self._check_ranks(tuple(self.ranks))
        _ = self.here

    def __repr__(self) -> str:
        plain = super().__repr__()
        if self._ranks is None:
            return plain
        return f"{plain[:-1]}{', ' if self.parts else ''}ranks={list(self._ranks)})"


@contextmanager
def any_world() -> Generator[None]:
    """Let meshes of other worlds than the running one be made, to plan for them."""
    token = _any_world.set(True)
    try:
        yield
    finally:
        _any_world.reset(token)

"""Process groups and DeviceMeshes of torch, made once for all meshes of a process.

A group costs threads and connections, and equal ones serve everybody. They live as long as the
default group that they were made in.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_groups_made: dict[object, dict[object, Any]] = {}


def own_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group that only its own ranks make; they call this alike.

    Args:
      ranks: global ranks, in the order of the group; this one is among them.
    """
    return _made(("own", ranks), lambda: new_own_group(ranks))


def host_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group with CPU tensors, for one thread that plans ahead; its own ranks call this alike.

    Args:
      ranks: global ranks, in the order of the group; this one is among them.
    """
    return _made(("host", ranks), lambda: new_own_group(ranks, backend="gloo"))


def new_own_group(
    ranks: Sequence[int], *, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Another group that only its own ranks make; they call this alike, as often.

    ``new_group(use_local_synchronization=True)`` names a group by how many a process knows. Ranks
    of different parts of the world know differently many, and would wait for each other under
    different names; so here it is named by its ranks, and by how many these have made.

    Args:
      ranks: global ranks, in the order of the group; this one is among them.
      backend: None is the default group's.
      timeout: None is the default group's.
    """
    c10d, world = cast(Any, dist.distributed_c10d), dist.group.WORLD
    kind, store = c10d._world.pg_map[world]
    number = _count(tuple(ranks))
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend or kind),
        store,
        f"vlshard {'-'.join(map(str, ranks))} {number}",
        timeout=timeout or _time_limit() or c10d._get_default_timeout(backend or kind),
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def _count(ranks: tuple[int, ...]) -> int:
    """How many groups of these ranks there are, with the one that is made next."""
    made = _made(("count", ranks), lambda: [0])
    made[0] += 1
    return made[0]


def device_mesh(device_type: str, meshes: Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """This rank's of several DeviceMeshes, and its groups; every rank of them calls this alike.

    Args:
      device_type: where the ranks compute.
      meshes: global ranks by place, one mesh after another along dim 0.
      names: of a mesh's dims.
    """
    flat = cast("list[int]", meshes.flatten().tolist())
    key = (device_type, tuple(meshes.shape), tuple(flat), names)

    def make() -> DeviceMesh:
        me = dist.get_rank()
        lines = [_lines(meshes, dim) for dim in range(1, meshes.dim())]
        groups = [own_group(next(r for r in line if me in r)) for line in lines]
        (mine,) = (ranks for ranks in meshes if (ranks == me).any())
        return DeviceMesh.from_group(groups, device_type, mine, mesh_dim_names=names)

    return _made(key, make)


def _made(key: object, make: Callable[[], T]) -> T:
    """What was made for a key in the default group that is up now, or is made now."""
    world = dist.group.WORLD
    if world not in _groups_made:
        _groups_made.clear()
    known = _groups_made.setdefault(world, {})
    if key not in known:
        known[key] = make()
    return known[key]


def _time_limit() -> timedelta | None:
    """The default group's, which groups made in it do not take over by themselves.

    torch has no public way to ask.
    """
    world = cast(Any, dist.group.WORLD)
    backends = [world._get_backend(device) for device in world._device_types]
    options = [getattr(backend, "options", None) for backend in backends]
    return next((getattr(found, "_timeout", None) for found in options if found), None)


def _lines(ranks: Tensor, dim: int) -> tuple[tuple[int, ...], ...]:
    """The ranks that differ in one dim only, a tuple for each of their groups."""
    lines = cast("list[list[int]]", ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist())
    return tuple(sorted(tuple(line) for line in lines))


def axes_of(names: Sequence[str], shape: Sequence[int]) -> dict[str, int | dict[str, int]]:
    """Axes and their parts, of dims that are named like parts: ``cp.ring`` belongs to ``cp``.

    Args:
      names: of the dims of a DeviceMesh.
      shape: ranks along each of them.
    """
    sizes: dict[str, int | dict[str, int]] = {}
    for name, ranks in zip(names, shape, strict=True):
        axis, _, part = name.partition(".")
        known = sizes.setdefault(axis, {})
        if isinstance(known, dict) and part:
            known[part] = ranks
        else:
            sizes[axis] = ranks
    return sizes

"""What FSDP2 has no public name for, in one place: a mesh per parameter, and its collectives.

Checked with torch 2.13, where ``fully_shard(shard_placement_fn=)`` is documented and what it takes
is not exported.
"""

from collections.abc import Callable
from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)

__all__ = ["ShardPlacementResult", "mesh_info", "set_collectives"]


def mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    """A mesh of ``Mesh.device_mesh`` as FSDP2 takes it for one parameter."""
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def set_collectives(
    module: FSDPModule, gather: Callable[[], object], scatter: Callable[[], object]
) -> None:
    """Have each of a unit's groups of parameters gathered and reduced by collectives of its own.

    ``set_custom_all_gather`` takes units of one mesh only; a collective is handed the process group
    at each call, so it serves any.

    Args:
      module: a unit.
      gather: makes what gathers parameters.
      scatter: makes what sums gradients.
    """
    state = cast(Any, module)._get_fsdp_state()
    for group in state._fsdp_param_groups:
        group._all_gather_comm = gather()
        group._reduce_scatter_comm = scatter()

"""What FSDP2 has no public name for, in one place: a mesh per parameter, and its collectives.

Checked with torch 2.13, where ``fully_shard(shard_placement_fn=)`` is documented and what it takes
is not exported.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)

__all__ = ["ShardPlacementResult", "mesh_info", "plain_sums", "set_collectives"]


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
    for group in _groups(module):
        group._all_gather_comm = gather()
        group._reduce_scatter_comm = OwnSum() if _alone(group) else scatter()


def plain_sums(module: FSDPModule) -> None:
    """Have a unit's gradients summed, and divided by nothing.

    Args:
      module: a unit.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    for group in _groups(module):
        if _alone(group):
            group.gradient_divide_factor = None  # FSDP2 would divide by the 1, into new memory


class OwnSum:
    """The sum of the gradients of one rank: they stay where FSDP2 has gathered them."""

    def __init__(self) -> None:
        self._terms: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the terms, and then the same for the sum."""
        terms, self._terms = self._terms, None
        if terms is not None and (terms.shape, terms.dtype) == (torch.Size(size), dtype):
            return terms
        self._terms = torch.empty(*size, dtype=dtype, device=device)
        return self._terms

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Never called: FSDP2 copies what one rank has, here to where it is."""


def _groups(module: FSDPModule) -> list[Any]:
    """The groups of a unit's parameters, one a mesh."""
    return cast(Any, module)._get_fsdp_state()._fsdp_param_groups


def _alone(group: Any) -> bool:
    """Whether no other rank has gradients of a group's parameters."""
    info = group.mesh_info
    copies = info.replicate_mesh_size if isinstance(info, HSDPMeshInfo) else 1
    return info.shard_mesh_size == 1 and copies == 1

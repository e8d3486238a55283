"""Which block of a parameter is stored here, and writing into it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from vlshard.storage import Block, Parts

Target = nn.Module | Iterable[tuple[str, Tensor]]


def named_parameters(target: Target) -> dict[str, Tensor]:
    """Parameters by name, of a module or of (name, tensor) pairs; a tied one comes once."""
    return dict(target.named_parameters() if isinstance(target, nn.Module) else target)


def stored_block(tensor: Tensor) -> Block:
    """The block of a tensor that this rank stores, as slices of the whole.

    Args:
      tensor: a plain tensor, which is whole, or a DTensor that is sharded over any dims, or
        replicated.
    Raises: ValueError for other placements; a block cannot say what they store.
    """
    block = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placement in enumerate(tensor.placements):
            if type(placement) is Shard:
                start, stop = block[placement.dim]
                chunk = -(-(stop - start) // mesh.size(axis))
                at = min(start + mesh.get_local_rank(axis) * chunk, stop)
                block[placement.dim] = (at, min(at + chunk, stop))
            elif not isinstance(placement, Replicate):
                raise ValueError(f"a parameter cannot be written under {placement}")
    return tuple(slice(start, stop) for start, stop in block)


@torch.no_grad()
def write_block(
    name: str, tensor: Tensor, read: Callable[[Block], Tensor], parts: Parts | None = None
) -> None:
    """Write what this rank stores of a parameter, converted to its dtype and device.

    Args:
      name: of the parameter.
      tensor: a plain tensor or a DTensor: the whole, or the part that this rank computes with.
      read: gives any block of the whole parameter.
      parts: the parameters that are cut for compute.
    Raises: ValueError if there is nothing to write to.
    """
    if tensor.is_meta:
        raise ValueError("a parameter on the meta device has no storage to write to")
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    for here, there in (parts or Parts()).rectangles(name, stored_block(tensor)):
        local[here].copy_(read(there))

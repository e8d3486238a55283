"""What a rank stores of a tensor, as rectangles of the whole."""

from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from vlshard.language.pieces import chunk
from vlshard.storage.parts import Block, Parts


def stored_block(tensor: Tensor) -> Block:
    """The block of a tensor that this rank stores, as slices of the whole.

    Args:
      tensor: a plain tensor, which is whole, or a DTensor that is sharded over any dims, or
        replicated.
    Raises: ValueError for other placements; a block cannot say what they store.
    """
    block = {dim: (0, size) for dim, size in enumerate(tensor.shape)}
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placement in enumerate(tensor.placements):
            if type(placement) is Shard:
                start, stop = block[placement.dim]
                at = chunk(stop - start, mesh.size(axis), mesh.get_local_rank(axis))
                block[placement.dim] = (start + at[0], start + at[1])
            elif not isinstance(placement, Replicate):
                raise ValueError(f"a parameter cannot be written under {placement}")
    return tuple(slice(start, stop) for start, stop in block.values())


def stored_rectangles(name: str, tensor: Tensor, parts: Parts) -> Iterator[tuple[Block, Block]]:
    """Where what this rank stores of a parameter, or of what is cut as it is, lies in the whole.

    Args:
      name: of the parameter.
      tensor: a plain tensor or a DTensor: the whole, or the part that this rank computes with.
      parts: the parameters that are cut for compute.
    Returns: rectangles as slices of the local tensor and slices of the whole.
    Raises: ValueError as ``stored_block``.
    """
    return parts.rectangles(name, stored_block(tensor))

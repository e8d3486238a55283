"""Writing into the part of a parameter that is stored here."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from vlshard.storage import Block, Parts, local_part, stored_rectangles

Target = nn.Module | Iterable[tuple[str, Tensor]]


def named_parameters(target: Target) -> dict[str, Tensor]:
    """Parameters by name, of a module or of (name, tensor) pairs; a tied one comes once."""
    return dict(target.named_parameters() if isinstance(target, nn.Module) else target)


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
    local = local_part(tensor)
    for here, there in stored_rectangles(name, tensor, parts or Parts()):
        local[here].copy_(read(there))

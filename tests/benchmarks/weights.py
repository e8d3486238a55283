"""First values of parameters, and numbers that tell whether two contenders' gradients agree."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.benchmarks.workloads import weight
from tests.training import own_part
from vlshard.storage.parts import Parts


@torch.no_grad()
def set_weights(model: nn.Module, parts: Parts | None = None) -> None:
    """Give every parameter its first value, or this rank's part of it."""
    parts = parts or Parts()
    for name, parameter in model.named_parameters():
        full = own_part(name, weight(name, parts.whole_shape(name, parameter.shape)), parts)
        if isinstance(parameter, DTensor):
            placed = (parameter.device_mesh, parameter.placements)
            full = distribute_tensor(full, *placed, src_data_rank=None)
        parameter.copy_(full)


def whole(x: Tensor) -> Tensor:
    """All of a tensor, of which this rank may have a shard; a collective."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def fingerprint(gradients: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """Of each whole gradient its norm and its product with a direction drawn from its name.

    Args:
      gradients: by name; ``whole`` of each is taken on every rank.
    """
    found: dict[str, tuple[float, float]] = {}
    for name, gradient in gradients:
        flat = gradient.double().flatten()
        direction = weight(f"direction of {name}", flat.shape).double()
        found[name] = float(flat.norm()), float(flat @ direction / direction.norm())
    return found

"""The norm of all gradients, over parameters that live on different meshes."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

CHUNK = 256
TINY, HUGE = 1e-9, 1e18  # norms between them were summed without a square that is lost
SMALLEST = 1e-30  # a factor that float32 holds exactly enough


@torch.no_grad()
def grad_norm(
    parameters: Iterable[Tensor], counted: Iterable[bool] | None = None
) -> Float[Tensor, ""]:
    """The 2-norm of all gradients together, each element of each gradient counted once.

    A gradient is taken to be replicated over every rank that its mesh does not split: a DTensor
    counts where this rank has coordinate 0 along each replicated mesh dim, a plain tensor counts
    on rank 0 only, and of several meshes that hold copies the one with rank 0 counts (where rank 0
    has no gradient at all, the lowest rank that has one). So the sum needs one all-reduce over the
    world, whatever meshes the parameters have.

    Args:
      parameters: the same ones, in the same order, on every rank, or none on a rank that holds
        none; those without a gradient are skipped, which must hold on every rank alike. An
        iterator is used up once.
      counted: whether this rank counts each of them, where meshes do not tell: of a parameter that
        is cut for compute each rank's part has a mesh of its own. ``BoundPlan.counts`` says so.
    Returns: the norm in float32, the same on every rank; 0 if there is no gradient. It is inf where
      it is beyond float32, or a gradient is inf, and nan where one is nan.
    Raises: ValueError if a gradient is still a pending sum.
    """
    return _counted_norm(tuple(parameters), counted)[1].float()


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor], max_norm: float, counted: Iterable[bool] | None = None
) -> Float[Tensor, ""]:
    """Scale all gradients in place so that their norm is at most ``max_norm``.

    Args:
      parameters: as for ``grad_norm``.
      max_norm: the largest norm that is left; as in torch, the factor is
        ``max_norm / (norm + 1e-6)`` where that is below 1.
      counted: as for ``grad_norm``.
    Returns: the norm before clipping, as ``grad_norm`` gives it. Finite gradients keep their
      direction, however large they are; if one is inf or nan, all are left as they are.
    Raises: ValueError if a gradient is still a pending sum.
    """
    gradients, norm = _counted_norm(tuple(parameters), counted)
    scale = max_norm / (float(norm) + 1e-6)
    if scale < 1.0 and math.isfinite(float(norm)):
        for gradient in gradients:
            for factor in _factors(scale):
                local_part(gradient).mul_(factor)
    return norm.float()


def local_part(x: Tensor) -> Tensor:
    """What this rank stores of a tensor; an alias, so it may be changed in place."""
    return x.to_local() if isinstance(x, DTensor) else x


def _counted_norm(
    parameters: Sequence[Tensor], counted: Iterable[bool] | None
) -> tuple[list[Tensor], Tensor]:
    """The gradients that are there, and their norm.

    A norm of 0 may be one that nobody counted, of a model on ranks without rank 0: all ranks see
    it, and then the lowest rank with gradients stands in for rank 0.
    """
    device = _device(parameters)
    there, counting = _gradients(parameters, counted)
    norm = _norm(counting, device)
    if counted is None and dist.is_initialized() and float(norm) == 0:
        me, nobody = dist.get_rank(), dist.get_world_size()
        lowest = torch.tensor(me if there else nobody, device=device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        if 0 < (first := int(lowest)) < nobody:
            norm = _norm(_gradients(parameters, None, first)[1], device)
    return there, norm


def _gradients(
    parameters: Sequence[Tensor], counted: Iterable[bool] | None, first: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that are there, and what of them this rank counts; ``first`` has them all."""
    there = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if counted is None:
        return there, [local_part(x) for x in there if _counts_here(x, first)]
    pairs = zip(parameters, counted, strict=True)
    mine = [parameter.grad for parameter, counts in pairs if counts]
    return there, [local_part(gradient) for gradient in mine if gradient is not None]


def _device(parameters: Sequence[Tensor]) -> torch.device:
    """Where the norm is summed: the parameters' device."""
    return local_part(parameters[0]).device if parameters else torch.device("cpu")


def _factors(scale: float) -> tuple[float, ...]:
    """Factors that make up a scale; each is a normal number of float32, in which it is applied."""
    return (scale,) if scale > SMALLEST else (SMALLEST, scale / SMALLEST)


def _norm(counted: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum the squares that this rank counts, then those of all ranks; float64 where there is one.

    Squares in float32 overflow above 1e19 and vanish below 1e-19. All ranks see by the sum whether
    that may have happened, and then sum again the squares of what is divided by the largest.
    """
    exact = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    norm = _total(counted, _sum_of_squares, exact, device).sqrt()
    if TINY < float(norm) < HUGE:
        return norm
    largest = torch.zeros((), dtype=exact, device=device)
    for x in counted:
        if x.numel():
            largest = torch.maximum(largest, x.abs().max().to(exact))
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    if not 0.0 < float(largest) < math.inf:
        return norm if math.isnan(float(norm)) else largest
    scaled = partial(_scaled_squares, largest=largest)
    return largest * _total(counted, scaled, exact, device).sqrt()


def _total(
    counted: Sequence[Tensor],
    squares: Callable[[Tensor, torch.dtype], Tensor],
    exact: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Squares, summed over gradients and ranks."""
    total = torch.zeros((), dtype=exact, device=device)
    for x in counted:
        total += squares(x, exact)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def _counts_here(gradient: Tensor, first: int) -> bool:
    """Whether this rank is the one, of all that hold the same elements, that counts them."""
    if not isinstance(gradient, DTensor):
        return not dist.is_initialized() or dist.get_rank() == first
    mesh, placements = gradient.device_mesh, gradient.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a gradient with placements {placements} is not summed yet")
    coordinate = mesh.get_coordinate()
    if coordinate is None or not _holds(mesh, first):
        return False
    return all(
        place == 0
        for place, placement in zip(coordinate, placements, strict=True)
        if placement.is_replicate()
    )


@lru_cache
def _holds(mesh: DeviceMesh, rank: int) -> bool:
    """Whether a rank is on the mesh; asked for every parameter of every step."""
    return bool((mesh.mesh == rank).any())


def _sum_of_squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of squares; short float32 runs first, which loses nothing and is fast.

    One float32 run over 2e7 elements loses 1e-3 to 1e-2 on CPU, and a float64 copy takes 20 times
    as long; runs of 256 lose 1e-7.
    """
    flat = x.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if flat.dtype == torch.float64:
        return flat.square().sum().to(dtype)
    whole = flat.numel() // CHUNK * CHUNK
    runs = flat[:whole].view(-1, CHUNK)
    norms = cast(Tensor, torch.linalg.vector_norm(runs, dim=1, dtype=torch.float32))
    return norms.to(dtype).square().sum() + flat[whole:].to(dtype).square().sum()


def _scaled_squares(x: Tensor, dtype: torch.dtype, *, largest: Tensor) -> Tensor:
    """Sum of squares of what is divided by the largest element of all gradients."""
    exact = x.to(dtype.to_complex() if x.is_complex() else dtype)
    return (exact.abs() / largest).square().sum()

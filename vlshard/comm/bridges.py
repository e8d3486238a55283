"""Between specs and DTensor: placements where DTensor can say a layout, and tensors both ways.

DTensor cuts a dim into contiguous blocks over one mesh axis after the other, in the order of the
mesh. What the language says beyond that (joined axes, other orders, packed dims, cuts inside a
fused one) is refused here, with carets under it.
"""

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vlshard.comm.groups import axes_of
from vlshard.comm.mesh import Mesh
from vlshard.comm.reshard import even_sizes, running_mesh
from vlshard.language import (
    Layout,
    MeshShape,
    Packing,
    Span,
    Spec,
    gradient_placements,
    layout,
    placed_text,
    placements,
    refuse,
    refuse_shape,
    same_placements,
    spec,
)


def to_dtensor(
    x: Shaped[Tensor, "..."], text: str | Spec, mesh: Mesh, /, **sizes: int | Packing
) -> DTensor:
    """Wrap local tensors as one DTensor; every rank calls this alike.

    The gradient that comes back follows the language's rule: it is a term of a sum over the axes
    over which the tensor is replicated, and whole over those over which a sum is pending.

    Args:
      x: this rank's part.
      text: its layout.
      mesh: the axes, and the ranks along them.
      sizes: global size of dims, by name; a plain dim that is not named is taken as even over its
        axes.
    Returns: a DTensor over ``mesh.parts_mesh``, of the same dtype; it shares the memory of a
      contiguous ``x``.
    Raises: SpecError if the text is no spec of so many dims; LayoutError if it does not fit the
      mesh, the sizes or the tensor, or if DTensor cannot say it.
    """
    mesh = running_mesh(mesh)
    parsed = (spec(text) if isinstance(text, str) else text).expand(x.ndim)
    placed = placements(parsed, mesh, **sizes)
    bound = layout(parsed, mesh, where=None, **{**even_sizes(parsed, mesh, x.shape), **sizes})
    _check_shape(tuple(x.shape), bound, mesh.here)
    stride = torch.empty(bound.shape, device="meta").stride()
    return DTensor.from_local(
        x.contiguous(),
        mesh.parts_mesh(x.device.type),
        placed,
        run_check=False,
        shape=torch.Size(bound.shape),
        stride=stride,
        grad_placements=gradient_placements(placed),
    )


def from_dtensor(x: DTensor, text: str | Spec | None = None, /) -> Shaped[Tensor, "..."]:
    """This rank's part of a DTensor; gradients follow the language's rule, as in ``to_dtensor``.

    Args:
      x: a DTensor whose mesh has names, if a layout is given.
      text: the layout that it must have; None takes it as it is. Nothing is moved: ``reshard``
        does that, or ``DTensor.redistribute`` before.
    Returns: the local tensor, same dtype and memory.
    Raises: SpecError if the text is no spec of so many dims; LayoutError if the DTensor is placed
      otherwise, or if DTensor cannot say the layout.
    """
    if text is not None:
        parsed = (spec(text) if isinstance(text, str) else text).expand(x.ndim)
        mesh = mesh_of(x.device_mesh, parsed)
        if not same_placements(x.placements, want := placements(parsed, mesh), mesh):
            headline = f"the DTensor is placed as {placed_text(x.placements, mesh)}"
            note = f"the spec says {placed_text(want, mesh)}; redistribute moves it"
            refuse(parsed, headline, Span(0, len(parsed.text)), note)
    return x.to_local(grad_placements=gradient_placements(x.placements))


def mesh_of(device_mesh: DeviceMesh, parsed: Spec) -> MeshShape:
    """The axes of a DeviceMesh whose dims are named like axes or parts of them."""
    names = device_mesh.mesh_dim_names
    if names is None:
        headline = "the mesh of the DTensor has no names, so no spec can speak of it"
        refuse(parsed, headline, Span(0, len(parsed.text)), "fix: give mesh_dim_names")
    mesh = MeshShape(**axes_of(names, device_mesh.shape))
    if list(mesh.parts) != list(names):
        headline = f"the mesh of the DTensor has parts of an axis apart: {' '.join(names)}"
        refuse(parsed, headline, Span(0, len(parsed.text)), "fix: parts stand side by side")
    return mesh


def _check_shape(shape: tuple[int, ...], bound: Layout, rank: int) -> None:
    """The local shape is the one that the layout gives this rank."""
    if shape != bound.local_shape(rank):
        refuse_shape(bound, rank, shape)

"""Between specs and DTensor: placements where DTensor can say a layout, and tensors both ways.

DTensor cuts a dim into contiguous blocks over one mesh axis after the other, in the order of the
mesh. What the language says beyond that (joined axes, other orders, packed dims, cuts inside a
fused one) is refused here, with carets under it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vlshard.errors import LayoutError, PlanError, Span
from vlshard.layout import Layout, layout, refuse_shape
from vlshard.mesh import Mesh, MeshShape
from vlshard.packing import Packing
from vlshard.spec import Axis, Dim, Dots, Group, Name, Spec, Split, label, names_in, spec, splits_in

Cut = tuple[str, Axis]


def placements(
    text: str | Spec, mesh: MeshShape, /, **sizes: int | Packing
) -> tuple[Placement, ...]:
    """What DTensor calls a layout.

    Args:
      text: the layout.
      mesh: the axes; a split axis counts as its parts.
      sizes: global size or packing of dims, as far as known; they tell packed dims from fused
        ones.
    Returns: one placement for each part of the mesh, in order; ``Shard`` over an axis of size 1.
    Raises: SpecError if the text is no spec; LayoutError if the mesh has no such axis, or if
      DTensor cannot say this layout.
    """
    parsed = spec(text) if isinstance(text, str) else text
    found: dict[str, Placement] = dict.fromkeys(mesh.parts, Replicate())
    for axis in parsed.pending:
        found |= dict.fromkeys(parts_of(axis, mesh, parsed), Partial())
    counted = True
    for i, dim in enumerate(parsed.dims):
        cuts = list(_cuts(dim, mesh, parsed, sizes))
        if cuts and not counted:
            headline = "the dims behind '...' cannot be counted"
            _refuse(parsed, headline, dim.span, "fix: spec(...).expand(x.ndim) says how many it is")
        counted = counted and not isinstance(dim, Dots)
        _check_nesting(dim, cuts, mesh, parsed)
        found |= {part: Shard(i) for part, _ in cuts}
    return tuple(found.values())


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
    parsed = (spec(text) if isinstance(text, str) else text).expand(x.ndim)
    placed = placements(parsed, mesh, **sizes)
    bound = layout(parsed, mesh, where=None, **{**_even(parsed, mesh, x.shape), **sizes})
    _check_shape(tuple(x.shape), bound, mesh.rank)
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
            _refuse(parsed, headline, Span(0, len(parsed.text)), note)
    return x.to_local(grad_placements=gradient_placements(x.placements))


def gradient_placements(placed: Sequence[Placement]) -> tuple[Placement, ...]:
    """Where the gradient of a tensor lives: a sum for a whole value, whole for a sum."""
    dual: dict[Placement, Placement] = {Replicate(): Partial(), Partial(): Replicate()}
    return tuple(dual.get(placement, placement) for placement in placed)


def mesh_of(device_mesh: DeviceMesh, parsed: Spec) -> MeshShape:
    """The axes of a DeviceMesh whose dims are named like axes or parts of them."""
    names = device_mesh.mesh_dim_names
    if names is None:
        headline = "the mesh of the DTensor has no names, so no spec can speak of it"
        _refuse(parsed, headline, Span(0, len(parsed.text)), "fix: give mesh_dim_names")
    sizes: dict[str, int | dict[str, int]] = {}
    for name, ranks in zip(names, device_mesh.shape, strict=True):
        axis, _, part = name.partition(".")
        known = sizes.setdefault(axis, {})
        if isinstance(known, dict) and part:
            known[part] = ranks
        else:
            sizes[axis] = ranks
    mesh = MeshShape(**sizes)
    if list(mesh.parts) != list(names):
        headline = f"the mesh of the DTensor has parts of an axis apart: {' '.join(names)}"
        _refuse(parsed, headline, Span(0, len(parsed.text)), "fix: parts stand side by side")
    return mesh


def same_placements(one: Sequence[Placement], two: Sequence[Placement], mesh: MeshShape) -> bool:
    """Whether two lists of placements say the same; over an axis of size 1 all do."""
    pairs = zip(one, two, mesh.parts.values(), strict=True)
    return all(a == b or ranks == 1 for a, b, ranks in pairs)


def placed_text(placed: Sequence[Placement], mesh: MeshShape) -> str:
    """Placements in a message, axis by axis."""
    pairs = zip(mesh.parts, placed, strict=True)
    return " ".join(f"{part}:{placement}" for part, placement in pairs)


def _cuts(
    dim: Dim, mesh: MeshShape, parsed: Spec, sizes: Mapping[str, int | Packing]
) -> Iterator[Cut]:
    """The parts over which a dim is cut, in order of application, where DTensor can say it."""
    inner = list(_inner_splits(dim))
    packed = any(isinstance(sizes.get(name.name), Packing) for name in names_in(dim))
    for split in splits_in(dim):
        parts = [(part, axis) for axis in split.axes for part in parts_of(axis, mesh, parsed)]
        wide = [part for part, _ in parts if mesh.parts[part] > 1]
        note = f"fix: reshard to a layout that has '{label(dim)}' whole, or in contiguous blocks"
        if wide and split.order:
            headline = f"DTensor has no '.{split.order}', only contiguous blocks"
            _refuse(parsed, headline, split.order_span, note)
        if wide and packed:
            _refuse(parsed, f"DTensor has no packed dims such as '{label(dim)}'", split.span, note)
        if wide and split in inner:
            headline = f"DTensor can cut '{label(dim)}' by its first dim only, or as a whole"
            _refuse(parsed, headline, split.span, note)
        if len(wide) > 1:
            headline = f"DTensor cannot join axes into one cut, as '{mesh.text(wide)}'"
            nested = "".join(f"@{part}" for part in wide)
            note = f"fix: '{nested}', cut after cut, is the same where {mesh.span(wide)} divides"
            _refuse(parsed, headline, split.span, f"{note} the size")
        yield from parts


def _check_nesting(dim: Dim, cuts: Sequence[Cut], mesh: MeshShape, parsed: Spec) -> None:
    """Cuts of one dim come in the order of the mesh."""
    wide = [(part, axis) for part, axis in cuts if mesh.parts[part] > 1]
    parts = list(mesh.parts)
    ordered = sorted((part for part, _ in wide), key=parts.index)
    if [part for part, _ in wide] != ordered:
        headline = (
            f"DTensor cuts '{label(dim)}' in the order of the mesh, {' before '.join(ordered)}"
        )
        spans = [axis.span for _, axis in wide]
        raise LayoutError(headline, text=parsed.text, spans=spans, notes=[mesh.note])


def _inner_splits(dim: Dim) -> Iterator[Split]:
    """Splits of the dims of a bracket behind its first."""
    if isinstance(dim, Group):
        yield from _inner_splits(dim.items[0])
        for item in dim.items[1:]:
            yield from splits_in(item)


def parts_of(axis: Axis, mesh: MeshShape, parsed: Spec) -> tuple[str, ...]:
    """The parts that an axis of a spec stands for; if there are none, an error points at it."""
    try:
        return mesh.axis_parts(axis)
    except PlanError as error:
        notes = error.notes
        spans = [axis.span]
        raise LayoutError(error.headline, text=parsed.text, spans=spans, notes=notes) from None


def _refuse(parsed: Spec, headline: str, span: Span, note: str) -> NoReturn:
    """Raise an error with carets under the part that DTensor cannot say."""
    raise LayoutError(headline, text=parsed.text, spans=[span], notes=[note])


def _even(parsed: Spec, mesh: MeshShape, shape: Sequence[int]) -> dict[str, int]:
    """Global sizes of plain dims if all ranks have as much as this one."""
    return {
        dim.name: rows * mesh.span([str(axis) for split in dim.splits for axis in split.axes])
        for dim, rows in zip(parsed.dims, shape, strict=True)
        if isinstance(dim, Name)
    }


def _check_shape(shape: tuple[int, ...], bound: Layout, rank: int) -> None:
    """The local shape is the one that the layout gives this rank."""
    if shape != bound.local_shape(rank):
        refuse_shape(bound, rank, shape)

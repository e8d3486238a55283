"""What DTensor calls a layout: its placement types, and nothing that needs ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vlshard.language.errors import LayoutError, PlanError, Span
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.language.spec import spec
from vlshard.language.syntax import (
    Axis,
    Dim,
    Dots,
    Group,
    Spec,
    Split,
    label,
    names_in,
    splits_in,
)

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
            refuse(parsed, headline, dim.span, "fix: spec(...).expand(x.ndim) says how many it is")
        counted = counted and not isinstance(dim, Dots)
        _check_nesting(dim, cuts, mesh, parsed)
        found |= {part: Shard(i) for part, _ in cuts}
    return tuple(found.values())


def gradient_placements(placed: Sequence[Placement]) -> tuple[Placement, ...]:
    """Where the gradient of a tensor lives: a sum for a whole value, whole for a sum."""
    dual: dict[Placement, Placement] = {Replicate(): Partial(), Partial(): Replicate()}
    return tuple(dual.get(placement, placement) for placement in placed)


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
            refuse(parsed, headline, split.order_span, note)
        if wide and packed:
            refuse(parsed, f"DTensor has no packed dims such as '{label(dim)}'", split.span, note)
        if wide and split in inner:
            headline = f"DTensor can cut '{label(dim)}' by its first dim only, or as a whole"
            refuse(parsed, headline, split.span, note)
        if len(wide) > 1:
            headline = f"DTensor cannot join axes into one cut, as '{mesh.text(wide)}'"
            nested = "".join(f"@{part}" for part in wide)
            note = f"fix: '{nested}', cut after cut, is the same where {mesh.span(wide)} divides"
            refuse(parsed, headline, split.span, f"{note} the size")
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


def refuse(parsed: Spec, headline: str, span: Span, note: str) -> NoReturn:
    """Raise an error with carets under the part that DTensor cannot say."""
    raise LayoutError(headline, text=parsed.text, spans=[span], notes=[note])

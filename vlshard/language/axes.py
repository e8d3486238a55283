"""What the axes of a token layout do: bring rows home, deal segments whole, or cut into them.

Axes are named by their parts, which is what an axis that is not split is.
"""

from collections.abc import Iterable
from dataclasses import replace

from vlshard.language.mesh_shape import MeshShape
from vlshard.language.syntax import Axis, Dim, Dots, Group, Name, Spec, Split, splits_in


def home_axes(parsed: Spec, mesh: MeshShape) -> tuple[str, ...]:
    """Axes of the spec's ``.home`` split; empty if it has none."""
    dim = parsed.dims[0]
    first = dim.items[0] if isinstance(dim, Group) else dim
    splits = first.splits if isinstance(first, Name) else ()
    return _parts([split for split in splits if split.order == "home"], mesh)


def cutting_axes(parsed: Spec, mesh: MeshShape) -> tuple[str, ...]:
    """Axes that cut inside a segment or a row, so that attention needs what others hold."""
    dim = parsed.dims[0]
    if isinstance(dim, Group):
        inner = [s for item in dim.items[1:] if isinstance(item, Name) for s in item.splits]
        return _parts([*inner, *dim.splits], mesh)
    second = parsed.dims[1]
    return _parts(second.splits if isinstance(second, Name) else (), mesh)


def spec_axes(parsed: Spec, mesh: MeshShape) -> tuple[str, ...]:
    """All axes that a spec splits over, in order of application."""
    return _parts([split for dim in parsed.dims for split in splits_in(dim)], mesh)


def _parts(splits: Iterable[Split], mesh: MeshShape) -> tuple[str, ...]:
    return tuple(part for s in splits for axis in s.axes for part in mesh.axis_parts(axis))


def ulysses_specs(parsed: Spec, axis: str, mesh: MeshShape) -> tuple[str, str]:
    """Specs of a head tensor before and after the all-to-all over some axes.

    Args:
      parsed: layout of the tokens, model width last.
      axis: the axes to move from tokens to heads, as the language writes them.
      mesh: the ranks.
    Returns: the two specs, for example ``("b s@cp h d", "b s h@cp d")``.
    """
    tokens = parsed.dims[:-1]
    moved = mesh.read(axis)
    before = " ".join(map(str, tokens))
    after = " ".join(str(without_axes(dim, moved, mesh)) for dim in tokens)
    return f"{before} h d", f"{after} h@{axis} d"


def without_axes(dim: Dim, moved: tuple[str, ...], mesh: MeshShape) -> Dim:
    """The dim with its splits over some axes taken away.

    Args:
      dim: of a spec.
      moved: parts of the mesh.
      mesh: the ranks.
    Returns: the dim; a split that joins some of these axes with others keeps the others.
    """
    if not isinstance(dim, Name | Group):
        return dim
    if isinstance(dim, Group):
        kept = [without_axes(item, moved, mesh) for item in dim.items]
        items = tuple(item for item in kept if not isinstance(item, Dots))
        dim = replace(dim, items=items)
    left = (_split_without(split, moved, mesh) for split in dim.splits)
    return replace(dim, splits=tuple(split for split in left if split.axes))


def _split_without(split: Split, moved: tuple[str, ...], mesh: MeshShape) -> Split:
    """The split with some axes taken away, which may leave none."""
    parts = _parts([split], mesh)
    kept = [part for part in parts if part not in moved]
    if len(kept) == len(parts):
        return split
    named = (part.partition(".") for part in kept)
    return replace(split, axes=tuple(Axis(name, part or None) for name, _, part in named))

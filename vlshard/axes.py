"""What the axes of a token layout do: bring rows home, deal segments whole, or cut into them."""

from dataclasses import replace

from vlshard.spec import Axis, Dim, Dots, Group, Name, Spec


def home_axes(parsed: Spec) -> tuple[str, ...]:
    """Axes of the spec's ``.home`` split; empty if it has none."""
    dim = parsed.dims[0]
    first = dim.items[0] if isinstance(dim, Group) else dim
    splits = first.splits if isinstance(first, Name) else ()
    return next((_names(split.axes) for split in splits if split.order == "home"), ())


def cutting_axes(parsed: Spec) -> tuple[str, ...]:
    """Axes that cut inside a segment or a row, so that attention needs what others hold."""
    dim = parsed.dims[0]
    if isinstance(dim, Group):
        inner = [s for item in dim.items[1:] if isinstance(item, Name) for s in item.splits]
        splits = [*inner, *dim.splits]
    else:
        second = parsed.dims[1]
        splits = list(second.splits) if isinstance(second, Name) else []
    return tuple(name for split in splits for name in _names(split.axes))


def spec_axes(parsed: Spec) -> tuple[str, ...]:
    """All axes that a spec splits over, in order of application."""
    return tuple(dict.fromkeys(axis.name for axis in parsed.axes))


def _names(axes: tuple[Axis, ...]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes)


def ulysses_specs(parsed: Spec, axis: str) -> tuple[str, str]:
    """Specs of a head tensor before and after the all-to-all over an axis.

    Args:
      parsed: layout of the tokens, model width last.
      axis: the axis to move from tokens to heads.
    Returns: the two specs, for example ``("b s@cp h d", "b s h@cp d")``.
    """
    tokens = parsed.dims[:-1]
    before = " ".join(map(str, tokens))
    after = " ".join(str(_without(dim, axis)) for dim in tokens)
    return f"{before} h d", f"{after} h@{axis} d"


def _without(dim: Dim, axis: str) -> Dim:
    """The dim with its split over an axis taken away."""
    if not isinstance(dim, Name | Group):
        return dim
    if isinstance(dim, Group):
        kept = [_without(item, axis) for item in dim.items]
        items = tuple(item for item in kept if not isinstance(item, Dots))
        dim = replace(dim, items=items)
    return replace(dim, splits=tuple(s for s in dim.splits if axis not in _names(s.axes)))

"""Whether a plan's splits can be computed: dims, axes, heads, and the cuts of the tokens."""

from collections.abc import Iterator, Mapping

from vlshard.language import (
    LayoutError,
    MeshShape,
    PlanError,
    ShardError,
    Spec,
    Split,
    home_axes,
    label,
    layout,
    names_in,
    nearest,
    spec,
    splits_in,
)
from vlshard.plan.check_heads import check_heads, deal_fix
from vlshard.plan.inside import HasInsides, Inside
from vlshard.plan.model_config import SITES
from vlshard.plan.place import Place
from vlshard.plan.splits import Splits, trailing


def check_splits(
    splits: Mapping[str, str], mesh: MeshShape, config: object, source: str
) -> Iterator[ShardError]:
    """Each split is of inner dims that the model has, over axes that there are."""
    if not splits:
        return
    if not isinstance(config, HasInsides):
        headline = f"a {type(config).__name__} says nothing of the insides of its blocks"
        fix = "fix: leave splits out, or give the config insides()"
        yield PlanError(headline, where=f"{source} splits", notes=[fix])
        return
    insides = {name: inside for inside in config.insides().values() for name in inside.dims}
    for name, text in splits.items():
        place = Place(source, name).of(text)
        if name not in insides:
            headline = f"unknown inside {name!r}{nearest(name, insides)}"
            note = f"insides that can be split: {', '.join(insides)}"
            yield PlanError(headline, text=text, where=place, notes=[note])
            continue
        try:
            yield from _check_split(spec(text), name, insides[name], mesh, place)
        except ShardError as error:
            fault = (error.headline, error.text, error.spans, error.notes)
            yield type(error)(fault[0], text=fault[1], spans=fault[2], where=place, notes=fault[3])


def _check_split(
    parsed: Spec, split: str, inside: Inside, mesh: MeshShape, place: str
) -> Iterator[ShardError]:
    """One split: its dims, orders, axes and sizes."""
    dims = inside.dims[split]
    if " ".join(map(label, parsed.dims)) != dims or parsed.pending:
        known = spec(dims).names
        wrong = [n for dim in parsed.dims for n in names_in(dim) if n.name not in known]
        yield LayoutError(
            f"this inside has dims {dims!r}",
            text=parsed.text,
            spans=[n.name_span for n in wrong] or [dim.span for dim in parsed.dims],
            where=place,
        )
        return
    names = [name for dim in parsed.dims for name in names_in(dim)]
    if orders := [cut for name in names for cut in name.splits if cut.order]:
        yield LayoutError(
            "inner dims are cut in contiguous blocks only",
            text=parsed.text,
            spans=[cut.order_span for cut in orders],
            where=place,
        )
        return
    if stay := [name for name in names if name.name in inside.whole and name.splits]:
        others = [name.name for name in names if name.name not in inside.whole]
        yield LayoutError(
            f"{inside.whole[stay[0].name]} is never cut",
            text=parsed.text,
            spans=[name.span for name in stay],
            where=place,
            notes=[f"fix: cut {' or '.join(others)}"],
        )
        return
    sizes = {name.name: inside.sizes[name.name] for name in names}
    bound = layout(parsed, mesh, where=place, **sizes)
    for dim, name in enumerate(names):
        ranks = mesh.span([str(axis) for cut in name.splits for axis in cut.axes])
        size = sizes[name.name]
        if name.name in inside.dealt and size % ranks:
            yield PlanError(
                f"{size} {inside.dealt[name.name]} cannot be dealt to {ranks} ranks",
                text=parsed.text,
                spans=[name.span],
                where=place,
                notes=[deal_fix(inside, split, name, ranks)],
            )
            continue
        idle = int((bound.loads(dim) == 0).sum()) * ranks // mesh.size
        if idle:
            yield PlanError(
                f"{name.name} of {size} over {ranks} ranks leaves {idle} of them "
                "nothing to compute",
                text=parsed.text,
                spans=[name.span],
                where=place,
                notes=[f"fix: {_most(size, ranks)} ranks at most"],
            )


def _most(size: int, ranks: int) -> int:
    """The most ranks, of so many, of which each gets some of a dim that is cut once."""
    return next(n for n in range(ranks, 0, -1) if (n - 1) * -(-size // n) < size)


def check_doors(
    derived: Splits, given: Mapping[str, str], layouts: Mapping[str, str], source: str
) -> Iterator[ShardError]:
    """The cuts of the tokens can be undone on the way in, and heads meet their keys.

    Where rows travel by index no cut of the tokens is undone, so any is legal.
    """
    for kind, inside in derived.insides.items():
        axes = derived.axes(kind)
        if not axes or inside.by_index:
            continue
        text = layouts[SITES[inside.site]]
        place = Place(source, SITES[inside.site]).of(text)
        yield from _check_tokens(derived, kind, axes, text, place)
        if kind == derived.attention(inside.site) and len(inside.dims) > 1:
            yield from check_heads(derived, inside, given, source)


def _check_tokens(
    derived: Splits, kind: str, axes: tuple[str, ...], text: str, place: str
) -> Iterator[ShardError]:
    """Of the token layout, the split's axes cut nothing, or are whole cuts, the last of a dim."""
    mesh, parsed = derived.mesh, spec(text)
    over = mesh.text(axes)
    if home := [part for part in home_axes(parsed, mesh) if part in axes]:
        spans = [s.span for dim in parsed.dims for s in splits_in(dim) if s.order == "home"]
        yield PlanError(
            f"rows are read by the ranks of {mesh.text(home)!r}, over which {kind} is split",
            text=text,
            spans=spans,
            where=place,
            notes=["fix: ranks that split a block hold parts of the same rows"],
        )
        return
    for dim in parsed.dims:
        joined, early = trailing(dim, axes, mesh)
        if joined:
            apart = ["".join(_apart(split, axes, mesh)) for split in joined]
            yield PlanError(
                f"{kind} is split over {over!r}, which this cut joins with another axis",
                text=text,
                spans=[split.span for split in joined],
                where=place,
                notes=[f"fix: {', '.join(apart)}: the last cut is undone on the way in"],
            )
        if early:
            yield PlanError(
                f"{kind} is split over {over!r}, whose cut is not the last one of {label(dim)!r}",
                text=text,
                spans=[split.span for split in early],
                where=place,
                notes=["fix: put it behind the others, so that it can be undone on the way in"],
            )


def _apart(split: Split, axes: tuple[str, ...], mesh: MeshShape) -> list[str]:
    """A joined cut as two, of which the one that is undone on the way in comes last."""
    parts = [part for axis in split.axes for part in mesh.axis_parts(axis)]
    order = f".{split.order}" if split.order else ""
    runs = [p for p in parts if p not in axes], [p for p in parts if p in axes]
    return [f"@{mesh.text(run)}{order}" for run in runs]

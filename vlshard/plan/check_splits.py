"""Whether a plan's splits can be computed: dims, axes, heads, and the cuts of the tokens."""

from collections.abc import Iterator, Mapping

from vlshard.language import (
    LayoutError,
    MeshShape,
    Name,
    PlanError,
    ShardError,
    Span,
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
from vlshard.plan.inside import HasInsides, Inside
from vlshard.plan.model_config import SITES
from vlshard.plan.place import Place
from vlshard.plan.splits import Splits, trailing

# Insides that models have and that cannot be computed in parts yet.
UNBUILT = ("text.experts", "text.vocab")


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
        if name in UNBUILT:
            yield PlanError(f"{name} cannot be split yet", text=text, where=place)
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
    if orders := [split for name in names for split in name.splits if split.order]:
        yield LayoutError(
            "inner dims are cut in contiguous blocks only",
            text=parsed.text,
            spans=[split.order_span for split in orders],
            where=place,
        )
        return
    if names[-1].name == "d" and names[-1].splits:
        yield LayoutError(
            "the width of a head is never cut",
            text=parsed.text,
            spans=[names[-1].span],
            where=place,
            notes=["fix: cut the heads"],
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
                notes=[_degrees(name, size, ranks)],
            )
            continue
        idle = int((bound.loads(dim) == 0).sum()) * ranks // mesh.size
        if idle and not inside.by_index:
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


def _degrees(dim: Name, size: int, ranks: int) -> str:
    """Over how many ranks a dim can be cut, and how fewer key heads than ranks are."""
    works = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    axes = [str(axis) for split in dim.splits for axis in split.axes]
    if dim.name != "kv" or ranks % size or len(axes) > 1 or "." in axes[0]:
        return f"fix: degrees {works} work"
    if size == 1:
        return f"fix: {dim.name} d, whole: every rank computes the one key head"
    parts = f"{axes[0]}=({size}, {ranks // size})"
    return f"fix: degrees {works} work; on Mesh({parts}), {dim.name}@{axes[0]}.0"


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
            yield from _check_heads(derived, inside, given, source)


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


def _check_heads(
    derived: Splits, inside: Inside, given: Mapping[str, str], source: str
) -> Iterator[ShardError]:
    """Each rank has the key heads of its query heads."""
    q_name, kv_name = inside.dims
    q_dim, kv_dim = (spec(dims).names[0] for dims in inside.dims.values())
    q, kv = inside.sizes[q_dim], inside.sizes[kv_dim]
    over_q, over_kv = derived.degrees(inside.site)
    if q_name not in given and kv_name not in given:
        return
    missing = next((name for name in (q_name, kv_name) if name not in given), None)
    if missing and not (missing == kv_name and kv == 1):
        other = kv_name if missing == q_name else q_name
        yield PlanError(
            f"{other} is split and {missing} is not: a rank's query heads must meet their keys",
            where=f"{source} splits",
            notes=[f"fix: name both; {_offer(over_q, q, kv)}"],
        )
        return
    cuts = derived.cuts(derived.attention(inside.site) or "")
    first, second = (
        [p for s in cuts.get(name, ()) for a in s.axes for p in derived.mesh.axis_parts(a)]
        for name in (q_dim, kv_dim)
    )
    if first[: len(second)] == second and (over_q == over_kv or kv == over_kv):
        return
    text = given[kv_name] if kv_name in given else given[q_name]
    yield PlanError(
        f"{q} query heads over {over_q} ranks do not meet {kv} key heads over {over_kv}",
        text=text,
        spans=[Span(0, len(text))],
        where=Place(source, kv_name).of(text),
        notes=[f"fix: {_offer(over_q, q, kv)}"],
    )


def _offer(degree: int, q: int, kv: int) -> str:
    """How key heads can be cut where query heads are over so many ranks."""
    works = [str(n) for n in range(1, q + 1) if q % n == 0 and (kv % n == 0 or n % kv == 0)]
    if kv % degree == 0:
        return "kv over the same axes as h"
    if degree % kv == 0:
        rest = degree // kv
        split = f"tp=({kv}, {rest})" if kv > 1 else f"tp={degree}"
        cut = "kv@tp.0" if kv > 1 else "kv whole"
        return f"{cut} on a mesh with {split}: each rank then has the key head of its query heads"
    return f"degrees {', '.join(works)} work for {q} query heads and {kv} key heads"

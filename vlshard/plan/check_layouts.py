"""Whether a plan's layouts fit the boundaries that they are for, and each other."""

from collections.abc import Iterator, Mapping

from vlshard.language import (
    LayoutError,
    MeshShape,
    Name,
    Packing,
    PlanError,
    ShardError,
    Spec,
    home_axes,
    label,
    layout,
    names_in,
    nearest,
    spec,
    splits_in,
)
from vlshard.plan.model_config import PATCHES, SITES, TOKENS, ModelConfig
from vlshard.plan.place import Place
from vlshard.plan.tokens import PACK, is_packed


def check_layouts(
    layouts: Mapping[str, str], mesh: MeshShape, config: ModelConfig, source: str
) -> Iterator[ShardError]:
    """Boundaries exist, dims are theirs, axes exist, and what is asked for is there."""
    for name, text in layouts.items():
        where = Place(source, name).of(text)
        if name not in SITES.values():
            known = name in config.boundaries
            follows = "its layout follows from attention= and the other layouts"
            yield PlanError(
                f"the layout of boundary {name!r} is not a plan's to choose: {follows}"
                if known
                else f"unknown boundary {name!r}{nearest(name, config.boundaries)}",
                where=where,
                text=text,
                notes=[f"boundaries that take a layout: {', '.join(SITES.values())}"],
            )
            continue
        try:
            yield from _check_layout(spec(text), name, mesh, config, where)
        except ShardError as error:
            yield type(error)(
                error.headline,
                text=error.text,
                spans=error.spans,
                where=where,
                notes=error.notes,
            )
    for name in SITES.values():
        if name not in layouts:
            yield PlanError(f"no layout for boundary {name!r}", where=f"{source} layouts")


def _check_layout(
    parsed: Spec, name: str, mesh: MeshShape, config: ModelConfig, where: str
) -> Iterator[ShardError]:
    dims = " ".join(map(label, parsed.dims))
    forms = [config.boundaries[name], *([PACK] if name == TOKENS else [])]
    if dims not in forms:
        known = [name for form in forms for name in spec(form).names]
        wrong = [n for dim in parsed.dims for n in names_in(dim) if n.name not in known]
        yield LayoutError(
            f"boundary {name!r} has dims {' or '.join(map(repr, forms))}",
            text=parsed.text,
            spans=[n.name_span for n in wrong] or [dim.span for dim in parsed.dims],
            where=where,
            notes=[f"'{n.name}' is none of them{nearest(n.name, known)}" for n in wrong],
        )
        return
    if parsed.pending:
        yield LayoutError(
            f"no sum can be pending at boundary {name!r}",
            text=parsed.text,
            spans=[axis.span for axis in parsed.pending],
            where=where,
            notes=["attention and what follows need whole values"],
        )
        return
    if name == PATCHES:
        packing = Packing([config.unit], unit=config.unit, home=[0])
        layout(parsed, mesh, img=packing, c=1)
    elif is_packed(parsed):
        layout(parsed, mesh, smp=Packing([1], home=[0]), m=1)
    else:
        layout(parsed, mesh, b=Packing([1], home=[0]), s=1, m=1)
    width = parsed.dims[-1]
    if isinstance(width, Name) and width.splits:
        yield LayoutError(
            f"{name} may split rows and tokens, not {width.name!r}",
            text=parsed.text,
            spans=[width.span],
            where=where,
        )


def check_homes(layouts: Mapping[str, str], mesh: MeshShape, source: str) -> Iterator[ShardError]:
    """Patches are at home over the axes over which rows are read, or leading ones of them."""
    homes = {name: home_axes(spec(layouts[name]), mesh) for name in SITES.values()}
    patches, tokens = homes[PATCHES], homes[TOKENS]
    if patches and tokens and tokens[: len(patches)] != patches:
        text = layouts[PATCHES]
        read = f"{TOKENS} over {mesh.text(tokens)!r}"
        splits = [split for dim in spec(text).dims for split in splits_in(dim)]
        yield PlanError(
            f"{PATCHES} is at home over {mesh.text(patches)!r}, {read}",
            text=text,
            spans=[split.span for split in splits if split.order == "home"],
            where=Place(source, PATCHES).of(text),
            notes=[
                f"fix: {TOKENS} says which ranks read rows; {PATCHES} names the same axes, or "
                "the leading ones of them"
            ],
        )

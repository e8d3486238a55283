"""Everything that can be wrong with a plan, found before anything is allocated or sent."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from vlshard.errors import LayoutError, PlanError, ShardError, Span, nearest
from vlshard.layout import layout
from vlshard.mesh import MeshShape
from vlshard.packing import Packing
from vlshard.settings import Gather, Heads, Hybrid, Mode, Ring, Storage, Ulysses
from vlshard.spec import Axis, Dim, Dots, Group, Name, Spec, spec

# The boundaries whose layout a plan writes down; the layouts of all others follow from these and
# from the attention modes.
PATCHES = "vision.patches"
TOKENS = "text.tokens"
SITES = {"vision": PATCHES, "text": TOKENS}


@runtime_checkable
class ModelConfig(Protocol):
    """What a plan must know of a model to be checked against it."""

    @property
    def boundaries(self) -> Mapping[str, str]:
        """Dims of each named boundary, for example ``{"text.tokens": "b s m"}``."""
        ...

    @property
    def heads(self) -> Mapping[str, Heads]:
        """Heads of each attention site."""
        ...

    @property
    def unit(self) -> int:
        """Patches of a merge unit, which no cut divides."""
        ...

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter by name."""
        ...

    def units(self) -> tuple[str, ...]:
        """Module paths whose parameters are gathered together, children before parents."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a plan's line stands, for messages."""

    source: str
    name: str

    def of(self, text: str) -> str:
        """``plans/long.py:41 text.q``: file, line of the quoted text, and the name."""
        try:
            lines = Path(self.source).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return f"{self.source} {self.name}"
        quoted = (f'"{text}"', f"'{text}'")
        found = (i for i, line in enumerate(lines, 1) if any(part in line for part in quoted))
        line = next(found, None)
        return f"{self.source}:{line} {self.name}" if line else f"{self.source} {self.name}"


def pattern_matcher(pattern: str) -> Callable[[str], bool]:
    """A test of parameter names: ``*`` is anything within one part, ``**`` anything at all."""
    parts = re.split(r"(\*\*|\*)", pattern)
    regex = "".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts)
    compiled = re.compile(regex)
    return lambda name: compiled.fullmatch(name) is not None


def unit_of(name: str, units: tuple[str, ...]) -> str:
    """The innermost unit that holds a parameter."""
    return max((u for u in units if u == "" or name.startswith(u + ".")), key=len)


def check_world(mesh: MeshShape, world: int, source: str) -> Iterator[ShardError]:
    """The mesh has as many places as there are ranks."""
    if mesh.size != world:
        yield PlanError(
            f"mesh {mesh} has {mesh.size} ranks, the world has {world}",
            where=f"{source} mesh",
            notes=[f"fix: start {mesh.size} ranks, or a mesh whose sizes multiply to {world}"],
        )


def check_storage(
    params: Mapping[str, Storage], mesh: MeshShape, config: ModelConfig, source: str
) -> Iterator[ShardError]:
    """Axes exist and occur once, every pattern is of use, every unit has one storage."""
    for pattern, storage in params.items():
        place = Place(source, "params").of(pattern)
        named = (*storage.shard, *storage.replicate)
        unknown = [axis for axis in named if axis not in mesh.sizes]
        if unknown:
            yield PlanError(
                f"unknown mesh axis {unknown[0]!r} in {storage}",
                where=f"{place} {pattern!r}",
                notes=[f"mesh: {mesh}{nearest(unknown[0], mesh.sizes)}"],
            )
        elif len(set(named)) < len(named):
            yield PlanError(f"an axis occurs twice in {storage}", where=f"{place} {pattern!r}")
    names = config.parameter_shapes()
    chosen = storage_patterns(params, names)
    for pattern in params:
        if pattern not in chosen.values():
            shadowed = any(map(pattern_matcher(pattern), names))
            reason = "matches only what earlier patterns match" if shadowed else "matches nothing"
            yield PlanError(
                f"pattern {pattern!r} {reason}",
                where=Place(source, "params").of(pattern),
                notes=["fix: remove it, or move it before the more general patterns"],
            )
    left = [name for name in names if name not in chosen]
    if left:
        yield PlanError(
            f"{len(left)} parameters have no storage, the first is {left[0]!r}",
            where=f"{source} params",
            notes=['fix: end params with "**": replicate() or fsdp(...)'],
        )
    yield from _one_storage_a_unit(params, chosen, config, source)


def storage_patterns(params: Mapping[str, Storage], names: Mapping[str, object]) -> dict[str, str]:
    """The pattern that decides each parameter: the first that matches."""
    tests = [(pattern, pattern_matcher(pattern)) for pattern in params]
    first = {name: next((p for p, test in tests if test(name)), None) for name in names}
    return {name: pattern for name, pattern in first.items() if pattern is not None}


def _one_storage_a_unit(
    params: Mapping[str, Storage], chosen: dict[str, str], config: ModelConfig, source: str
) -> Iterator[ShardError]:
    firsts: dict[str, str] = {}
    for name, pattern in chosen.items():
        unit = unit_of(name, config.units())
        first = firsts.setdefault(unit, name)
        if params[chosen[first]] != params[pattern]:
            yield PlanError(
                f"unit {unit or '(root)'!r} has two storages: {first} is {params[chosen[first]]}, "
                f"{name} is {params[pattern]}",
                where=Place(source, "params").of(pattern),
                notes=["fix: write the pattern so that it takes whole units"],
            )
            return


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
    dims = tuple(parsed.label(i) for i in range(len(parsed.dims)))
    expected = spec(config.boundaries[name])
    wanted = tuple(expected.label(i) for i in range(len(expected.dims)))
    if dims != wanted or parsed.pending:
        yield LayoutError(
            f"boundary {name!r} has dims {' '.join(wanted)!r}",
            text=parsed.text,
            spans=[Span(0, len(parsed.text))],
            where=where,
        )
        return
    if name == PATCHES:
        packing = Packing([config.unit], unit=config.unit, home=[0])
        layout(parsed, mesh, img=packing, c=1)
    else:
        layout(parsed, mesh, b=Packing([1], home=[0]), s=1, m=1)
    for dim in parsed.dims[len(parsed.dims) - 1 :]:
        if isinstance(dim, Name) and dim.splits:
            yield LayoutError(
                f"{name} may split rows and tokens, not {dim.name!r}",
                text=parsed.text,
                spans=[dim.span],
                where=where,
            )


def check_checkpoint(
    checkpoint: Mapping[str, int], config: ModelConfig, source: str
) -> Iterator[ShardError]:
    """Recomputation names sites, and counts of 1 and more."""
    for site, every in checkpoint.items():
        if site not in config.heads or every < 1:
            yield PlanError(
                f"checkpoint takes a site and a count of at least 1, not {site!r}: {every}",
                where=f"{source} checkpoint",
                notes=[f"sites: {', '.join(config.heads)}"],
            )


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


def check_homes(layouts: Mapping[str, str], source: str) -> Iterator[ShardError]:
    """Patches and tokens agree on the axis over which rows are read."""
    homes = {name: home_axes(spec(layouts[name])) for name in SITES.values()}
    given = [axes for axes in homes.values() if axes]
    if len(given) == 2 and given[0] != given[1]:
        yield PlanError(
            f"{PATCHES} is at home over {' '.join(given[0])!r}, {TOKENS} over "
            f"{' '.join(given[1])!r}",
            where=f"{source} layouts",
            notes=["fix: rows are read by the ranks of one axis; name the same one in both"],
        )


def check_attention(
    attention: Mapping[str, Mode],
    layouts: Mapping[str, str],
    mesh: MeshShape,
    config: ModelConfig,
    source: str,
) -> Iterator[ShardError]:
    """Every cut inside a segment is met by a mode, and heads can be dealt."""
    for site in attention:
        if site not in config.heads:
            yield PlanError(
                f"unknown attention site {site!r}{nearest(site, config.heads)}",
                where=f"{source} attention",
            )
    for site, heads in config.heads.items():
        text = layouts[SITES[site]]
        place = Place(source, SITES[site]).of(text)
        cuts = [axis for axis in cutting_axes(spec(text)) if mesh.sizes[axis] > 1]
        mode = attention.get(site)
        if isinstance(mode, Ring | Hybrid):
            name = type(mode).__name__.lower()
            yield PlanError(
                f"{name}(...) attention is not available yet",
                where=f"{source} attention {site!r}",
                notes=["fix: ulysses or gather"],
            )
        elif mode is None:
            if cuts:
                yield _uncovered(text, place, site, cuts)
        elif mode.overlap:
            yield PlanError(
                "overlap=True is not available yet",
                where=f"{source} attention {site!r}",
                notes=["fix: leave overlap out"],
            )
        elif mode.axis not in mesh.sizes:
            yield PlanError(
                f"unknown mesh axis {mode.axis!r} in attention",
                where=f"{source} attention {site!r}",
                notes=[f"mesh: {mesh}{nearest(mode.axis, mesh.sizes)}"],
            )
        elif mode.axis not in spec_axes(spec(text)):
            yield PlanError(
                f"attention of {site} works over {mode.axis!r}, over which {SITES[site]} is whole",
                text=text,
                where=place,
                notes=[f"fix: split {SITES[site]} over {mode.axis}, or leave the mode out"],
            )
        elif [axis for axis in cuts if axis != mode.axis]:
            yield _uncovered(text, place, site, [axis for axis in cuts if axis != mode.axis])
        else:
            yield from _check_heads(site, mode, heads, text, mesh, place)


def _uncovered(text: str, place: str, site: str, cuts: list[str]) -> PlanError:
    axis = cuts[0]
    found = re.finditer(rf"@{axis}\b", text)
    return PlanError(
        f"segments are cut over {axis!r}, and no attention mode brings their keys together",
        text=text,
        spans=[Span(*match.span()) for match in found],
        where=place,
        notes=[f'fix: attention={{"{site}": gather("{axis}")}} or ulysses("{axis}")'],
    )


def _check_heads(
    site: str, mode: Ulysses | Gather, heads: Heads, text: str, mesh: MeshShape, place: str
) -> Iterator[ShardError]:
    q, kv, _ = heads
    degree = mesh.sizes[mode.axis]
    if isinstance(mode, Gather) or deals(q, kv, degree):
        return
    works = [str(n) for n in range(1, q + 1) if deals(q, kv, n)]
    arrow = " -> ".join(ulysses_specs(spec(text), mode.axis))
    start = arrow.rindex(f"h@{mode.axis}")
    count = f"{q} heads" if q == kv else f"{q} q heads over {kv} kv heads"
    yield PlanError(
        f"{count} cannot be dealt to {mode.axis}={degree}",
        text=arrow,
        spans=[Span(start, start + len(f"h@{mode.axis}"))],
        where=f"{place} ({site}.q)",
        notes=[f"fix: degrees {', '.join(works)} work; or gather({mode.axis!r})"],
    )


def deals(q: int, kv: int, degree: int) -> bool:
    """Whether heads go whole to ``degree`` ranks, kv heads being repeated where they are fewer."""
    return q % degree == 0 and (kv % degree == 0 or degree % kv == 0)


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

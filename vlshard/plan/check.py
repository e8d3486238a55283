"""Everything that can be wrong with a plan, found before anything is allocated or sent."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import cast

from vlshard.attention import Mode
from vlshard.comm import Mesh
from vlshard.language import (
    LayoutError,
    MeshShape,
    Name,
    Packing,
    PlanError,
    ShardError,
    Spec,
    coefficients,
    home_axes,
    label,
    layout,
    names_in,
    nearest,
    spec,
    splits_in,
)
from vlshard.plan.model_config import PATCHES, SITES, TOKENS, ModelConfig
from vlshard.plan.tokens import PACK, is_packed
from vlshard.storage import Storage

KINDS: Mapping[str, tuple[type | UnionType, str]] = {
    "params": (Storage, "replicate() or fsdp(...)"),
    "layouts": (str, "a spec in quotes"),
    "attention": (Mode, "ulysses(...), gather(...), ring(...) or hybrid(...)"),
    "checkpoint": (int, "a count"),
    "splits": (str, "a spec in quotes"),
}

# Fields of attention modes that name mesh axes.
OVER = ("axis", "ulysses", "gather", "ring")


@dataclass(frozen=True)
class Place:
    """Where a plan's line stands, for messages."""

    source: str
    name: str

    def of(self, text: str) -> str:
        """``plans/long.py:41 text.q``: file, line of the quoted text, and the name."""
        return self._line_with(f'"{text}"', f"'{text}'")

    def of_mode(self, site: str, mode: Mode) -> str:
        """``plans/long.py:44 attention``: where a site's mode is chosen."""
        made = f": {type(mode).__name__.lower()}("
        return self._line_with(f'"{site}"{made}', f"'{site}'{made}")

    def _line_with(self, *quoted: str) -> str:
        """The first line of the file that has one of these texts; without one, the file."""
        try:
            lines = Path(self.source).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return f"{self.source} {self.name}"
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


def check_kinds(fields: Mapping[str, object], source: str) -> Iterator[ShardError]:
    """Each field of a plan holds what the other checks take for granted."""
    mesh = fields["mesh"]
    if not isinstance(mesh, Mesh):
        yield PlanError(f"mesh is {mesh!r}, not a Mesh(...)", where=f"{source} mesh")
    for name, (kind, what) in KINDS.items():
        values = fields[name]
        if not isinstance(values, Mapping):
            found = f"{name} is a {type(values).__name__}, not a dict"
            yield PlanError(found, where=f"{source} {name}")
            continue
        for key, value in cast("Mapping[object, object]", values).items():
            if not isinstance(key, str):
                yield PlanError(f"{name} has {key!r} for a name", where=f"{source} {name}")
            if not isinstance(value, kind) or isinstance(value, bool):
                where = f"{source} {name} {key!r}"
                yield PlanError(f"{value!r} is not {what}", where=where)
            elif not all(isinstance(getattr(value, at, None), str | None) for at in OVER):
                yield PlanError(f"{value} names no mesh axis", where=f"{source} {name} {key!r}")


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
        unknown = [axis for axis in named if axis not in mesh.parts_of]
        if unknown:
            yield PlanError(
                f"{mesh.unknown(unknown[0])} in {storage}",
                where=f"{place} {pattern!r}",
                notes=[mesh.offer(unknown[0])],
            )
        elif len(set(parts := _expand(named, mesh))) < len(parts):
            yield PlanError(f"an axis occurs twice in {storage}", where=f"{place} {pattern!r}")
        elif (cut := _expand(storage.shard, mesh)) != sorted(cut, key=list(mesh.parts).index):
            ordered = sorted(
                storage.shard, key=lambda a: list(mesh.parts).index(mesh.parts_of[a][0])
            )
            yield PlanError(
                f"parameters are sharded in mesh order only, not over {' '.join(storage.shard)!r}",
                where=f"{place} {pattern!r}",
                notes=[f"fix: fsdp({' '.join(ordered)!r})"],
            )
    names = config.parameter_shapes()
    chosen = storage_patterns(params, names)
    for pattern in params:
        if pattern not in chosen.values():
            reason = "matches nothing"
            fix = f"the name most like it is {_most_like(pattern, names)!r}"
            if any(map(pattern_matcher(pattern), names)):
                reason = "matches only what earlier patterns match"
                fix = "fix: remove it, or move it before the more general patterns"
            place = Place(source, "params").of(pattern)
            yield PlanError(f"pattern {pattern!r} {reason}", where=place, notes=[fix])
    left = [name for name in names if name not in chosen]
    if left:
        yield PlanError(
            f"{len(left)} parameters have no storage, the first is {left[0]!r}",
            where=f"{source} params",
            notes=['fix: end params with "**": replicate() or fsdp(...)'],
        )
    yield from _one_storage_a_unit(params, chosen, config, source)


def _most_like(pattern: str, names: Collection[str]) -> str:
    """The first of the names that begin most as a pattern does."""
    stem = pattern
    while not any(name.startswith(stem) for name in names):
        stem = stem[:-1]
    return next(name for name in names if name.startswith(stem))


def _expand(axes: Iterable[str], mesh: MeshShape) -> list[str]:
    """The parts of axes that exist, those named twice too."""
    return [part for axis in axes for part in mesh.parts_of[axis]]


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


def check_cost(cost: tuple[float, float] | None, source: str) -> Iterator[ShardError]:
    """The coefficients of dealing are two numbers of at least 0."""
    if cost is not None:
        try:
            coefficients(cost)
        except LayoutError:
            headline = f"cost={cost!r} is not two finite numbers (a, b) of at least 0"
            yield PlanError(headline, where=f"{source} cost")


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

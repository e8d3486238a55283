"""Whether a plan's attention modes meet its cuts, and whether heads can be dealt."""

from collections.abc import Iterator, Mapping

from vlshard.attention import Heads, Hybrid, Mode, Ways
from vlshard.language import (
    MeshShape,
    PlanError,
    ShardError,
    Span,
    cutting_axes,
    nearest,
    spec,
    spec_axes,
    splits_in,
    ulysses_specs,
)
from vlshard.plan.model_config import SITES, ModelConfig
from vlshard.plan.place import Place


def check_modes(
    attention: Mapping[str, Mode], mesh: MeshShape, config: ModelConfig, source: str
) -> Iterator[ShardError]:
    """Sites and axes exist, and hybrids name what they are made of."""
    for site, mode in attention.items():
        where = f"{Place(source, 'attention').of_mode(site, mode)} {site!r}"
        if site not in config.heads:
            yield PlanError(
                f"unknown attention site {site!r}{nearest(site, config.heads)}",
                where=where,
                notes=[f"sites: {', '.join(config.heads)}"],
            )
        yield from _check_axes(mode, mesh, where)


def _check_axes(mode: Mode, mesh: MeshShape, where: str) -> Iterator[ShardError]:
    """The axes of a mode exist, each once, and those that it needs are given."""
    ways = mode.ways
    if isinstance(mode, Hybrid) and (not ways.ulysses or bool(ways.gather) == bool(ways.ring)):
        yield PlanError(
            f"{mode} takes ulysses= and one of gather= and ring=",
            where=where,
            notes=['fix: for example hybrid(ulysses="cp.1", ring="cp.0")'],
        )
    elif not ways.axes:
        yield PlanError(f"{mode} names no mesh axis", where=where, notes=[mesh.note])
    unknown = [axis for axis in ways.axes if axis not in mesh.parts_of]
    for axis in unknown:
        yield PlanError(f"{mesh.unknown(axis)} in attention", where=where, notes=[mesh.offer(axis)])
    parts = [part for axis in ways.axes for part in mesh.parts_of.get(axis, ())]
    if twice := [part for part in mesh.parts if parts.count(part) > 1]:
        yield PlanError(
            f"mesh axis {twice[0]!r} is named twice in {mode}",
            where=where,
            notes=[mesh.note, "each way takes axes of its own: cp=(2, 2) has cp.0 and cp.1"],
        )


def check_cover(
    attention: Mapping[str, Mode],
    layouts: Mapping[str, str],
    mesh: MeshShape,
    config: ModelConfig,
    source: str,
) -> Iterator[ShardError]:
    """Every cut inside a segment is met by a mode, and heads can be dealt."""
    for site, heads in config.heads.items():
        text = layouts[SITES[site]]
        place = Place(source, SITES[site]).of(text)
        ways = attention[site].ways if site in attention else Ways()
        named = [part for axis in ways.axes for part in mesh.parts_of.get(axis, (axis,))]
        if len(set(named) & set(mesh.parts)) < len(named):
            continue  # an axis that is unknown or named twice has been told
        split = spec_axes(spec(text), mesh)
        whole = [axis for axis in ways.axes if not set(mesh.parts_of[axis]) <= set(split)]
        for axis in whole:
            yield PlanError(
                f"attention of {site} works over {axis!r}, over which {SITES[site]} is whole",
                text=text,
                where=place,
                notes=[f"fix: split {SITES[site]} over {axis}, or leave the mode out"],
            )
        if ways.ulysses and not whole:
            yield from _check_heads(site, ways, heads, text, mesh, place)
        yield from _check_cuts(site, ways, text, mesh, place)


def idle_axes(
    attention: Mapping[str, Mode],
    layouts: Mapping[str, str],
    mesh: MeshShape,
    config: ModelConfig,
) -> Iterator[str]:
    """Remarks on axes of a mode over which no segment is cut, so that no key has to travel.

    All-to-all is left out: it deals heads, whether segments are cut or whole.
    """
    for site in (site for site in config.heads if site in attention):
        ways = attention[site].ways
        cutting = cutting_axes(spec(layouts[SITES[site]]), mesh)
        for axis in (*ways.gather, *ways.ring):
            if not set(mesh.parts_of[axis]) & set(cutting):
                yield (
                    f"{attention[site]} of {site} sends nothing over {axis}: "
                    f"{SITES[site]} has no segment that is cut over it"
                )


def _check_cuts(
    site: str, ways: Ways, text: str, mesh: MeshShape, place: str
) -> Iterator[ShardError]:
    """The mode works over every axis that cuts inside segments."""
    served = {part for axis in ways.axes for part in mesh.parts_of[axis]}
    parsed = spec(text)
    cutting = [part for part in cutting_axes(parsed, mesh) if mesh.parts[part] > 1]
    cuts = [part for part in cutting if part not in served]
    if not cuts:
        return
    axes = [axis for dim in parsed.dims for split in splits_in(dim) for axis in split.axes]
    spans = [axis.span for axis in axes if set(mesh.axis_parts(axis)) & set(cuts)]
    needed = [part for part in mesh.parts if part in cutting]
    named = mesh.text(needed).strip("()")
    yield PlanError(
        f"segments are cut over {mesh.text(cuts)!r}, and no attention mode brings their keys "
        "together",
        text=text,
        spans=[Span(start - (text[start - 1] == "@"), stop) for start, stop in spans],
        where=place,
        notes=[f'fix: attention={{"{site}": gather("{named}")}} or ulysses("{named}")'],
    )


def _check_heads(
    site: str, ways: Ways, heads: Heads, text: str, mesh: MeshShape, place: str
) -> Iterator[ShardError]:
    """Heads go whole to the ranks of the all-to-all."""
    q, kv, _ = heads
    degree = mesh.span(ways.ulysses)
    if deals(q, kv, degree):
        return
    works = [str(n) for n in range(1, q + 1) if deals(q, kv, n)]
    axes = mesh.text(mesh.expand(ways.ulysses))
    arrow = " -> ".join(ulysses_specs(spec(text), axes, mesh))
    start = arrow.rindex(f"h@{axes}")
    count = f"{q} heads" if q == kv else f"{q} q heads over {kv} kv heads"
    instead = mesh.text(mesh.expand(ways.axes)).strip("()")
    yield PlanError(
        f"{count} cannot be dealt to {axes}={degree}",
        text=arrow,
        spans=[Span(start, start + len(f"h@{axes}"))],
        where=f"{place} ({site}.q)",
        notes=[
            f"fix: degrees {', '.join(works)} work; or gather({instead!r}) or ring({instead!r})"
        ],
    )


def deals(q: int, kv: int, degree: int) -> bool:
    """Whether heads go whole to ``degree`` ranks, kv heads being repeated where they are fewer."""
    return q % degree == 0 and (kv % degree == 0 or degree % kv == 0)

"""Whether a plan's attention modes meet its cuts, and whether heads can be dealt."""

import re
from collections.abc import Iterator, Mapping

from vlshard.axes import cutting_axes, spec_axes, ulysses_specs
from vlshard.check import Place
from vlshard.contract import SITES, ModelConfig
from vlshard.errors import PlanError, ShardError, Span, nearest
from vlshard.mesh_shape import MeshShape
from vlshard.settings import Gather, Heads, Hybrid, Mode, Ring, Ulysses
from vlshard.spec import spec


def check_modes(
    attention: Mapping[str, Mode], mesh: MeshShape, config: ModelConfig, source: str
) -> Iterator[ShardError]:
    """Sites and axes exist, and what is asked for is there."""
    for site, mode in attention.items():
        where = f"{source} attention {site!r}"
        if site not in config.heads:
            yield PlanError(
                f"unknown attention site {site!r}{nearest(site, config.heads)}", where=where
            )
        if mode.overlap:
            fix = "fix: leave overlap out"
            yield PlanError("overlap=True is not available yet", where=where, notes=[fix])
        if isinstance(mode, Ring | Hybrid):
            yield PlanError(
                f"{type(mode).__name__.lower()}(...) attention is not available yet",
                where=where,
                notes=["fix: ulysses or gather"],
            )
        elif mode.axis not in mesh.parts_of:
            yield PlanError(
                f"{mesh.unknown(mode.axis)} in attention",
                where=where,
                notes=[mesh.offer(mode.axis)],
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
        cuts = [axis for axis in cutting_axes(spec(text), mesh) if mesh.parts[axis] > 1]
        mode = attention.get(site)
        if isinstance(mode, Ulysses | Gather) and mode.axis in mesh.parts_of:
            served = mesh.expand((mode.axis,))
            cuts = [axis for axis in cuts if axis not in served]
            if not set(served) <= set(spec_axes(spec(text), mesh)):
                yield PlanError(
                    f"attention of {site} works over {mode.axis!r}, over which {SITES[site]} is "
                    "whole",
                    text=text,
                    where=place,
                    notes=[f"fix: split {SITES[site]} over {mode.axis}, or leave the mode out"],
                )
            elif isinstance(mode, Ulysses):
                yield from _check_heads(site, mode, heads, text, mesh, place)
        if cuts and not isinstance(mode, Ring | Hybrid):
            yield _uncovered(text, place, site, cuts)


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
    site: str, mode: Ulysses, heads: Heads, text: str, mesh: MeshShape, place: str
) -> Iterator[ShardError]:
    q, kv, _ = heads
    degree = mesh.span((mode.axis,))
    if deals(q, kv, degree):
        return
    works = [str(n) for n in range(1, q + 1) if deals(q, kv, n)]
    arrow = " -> ".join(ulysses_specs(spec(text), mode.axis, mesh))
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

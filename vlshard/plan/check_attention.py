"""Whether a plan names attention sites, and whether its modes meet its cuts."""

from collections.abc import Iterator, Mapping

from vlshard.attention import Mode, SiteWords, check_mode, check_rows
from vlshard.language import (
    MeshShape,
    PlanError,
    ShardError,
    cutting_axes,
    nearest,
    spec,
    splits_in,
)
from vlshard.plan.model_config import SITES, ModelConfig
from vlshard.plan.place import Place
from vlshard.plan.splits import Splits


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
        yield from check_mode(mode, mesh, where)


def check_cover(
    attention: Mapping[str, Mode],
    layouts: Mapping[str, str],
    splits: Splits,
    config: ModelConfig,
    source: str,
) -> Iterator[ShardError]:
    """Every cut inside a segment is met by a mode, and heads can be dealt.

    Where a split brings tokens together on the way in, modes work on what is cut then, and on the
    heads that are left.
    """
    mesh = splits.mesh
    for site, heads in config.heads.items():
        rows, mode = spec(layouts[SITES[site]]), attention.get(site)
        place = Place(source, SITES[site]).of(rows.text)
        inside = splits.attention(site)
        if inside and splits.axes(inside):
            rows = splits.entered(rows, inside)
            if faults := list(_check_undone(site, mode, splits, inside, source)):
                yield from faults
                continue
        words = SiteWords(
            attention=f"attention of {site}",
            rows=SITES[site],
            give=f'attention={{"{site}": MODE}}',
            where=place,
            queries=f"{place} ({site}.q)",
        )
        left = splits.heads(site, heads)
        yield from check_rows(rows, cutting_axes(rows, mesh), mode, left, mesh, words)


def _check_undone(
    site: str, mode: Mode | None, splits: Splits, inside: str, source: str
) -> Iterator[ShardError]:
    """A mode works over no axis whose tokens are brought together on the way in."""
    mesh = splits.mesh
    given = {n: splits.specs[n] for n in splits.insides[inside].dims if n in splits.specs}
    for axis in mode.ways.axes if mode else ():
        over = set(mesh.parts_of.get(axis, ()))
        for name, cut in given.items():
            cuts = [one for dim in cut.dims for one in splits_in(dim)]
            spans = [
                one.span for one in cuts if {p for a in one.axes for p in mesh.axis_parts(a)} & over
            ]
            if spans:
                yield PlanError(
                    f"attention of {site} works over {axis!r}, over which its heads are split and "
                    "its tokens gathered",
                    text=cut.text,
                    spans=spans,
                    where=Place(source, name).of(cut.text),
                    notes=[f"fix: leave {axis} out of the mode"],
                )
                break


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

"""Whether an attention mode meets the cuts of a layout, and whether heads can be dealt."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vlshard.attention.modes import Heads, Hybrid, Mode, Ways
from vlshard.language import (
    MeshShape,
    PlanError,
    ShardError,
    Span,
    Spec,
    spec_axes,
    splits_in,
    ulysses_specs,
)


class SiteWords(NamedTuple):
    """How messages speak of an attention site.

    Attributes:
      attention: what attends, such as ``attention of vision``.
      rows: what is cut, such as ``vision.patches``.
      give: how a mode is given, with ``MODE`` in its place.
      where: the place of the layout of the rows.
      queries: the place of the layout of the queries.
    """

    attention: str
    rows: str
    give: str
    where: str | None
    queries: str | None


def check_mode(mode: Mode, mesh: MeshShape, where: str | None) -> Iterator[ShardError]:
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


def check_rows(
    rows: Spec,
    cutting: Sequence[str],
    mode: Mode | None,
    heads: Heads,
    mesh: MeshShape,
    words: SiteWords,
) -> Iterator[ShardError]:
    """Every cut inside a segment is met by the mode, and heads can be dealt.

    Args:
      rows: layout of the rows; its last dim is a width.
      cutting: parts of the mesh that cut inside segments.
      mode: how keys are brought to the queries; a fault of its axes is told by ``check_mode``
        alone.
      heads: heads of queries and of keys.
      mesh: the ranks.
      words: how messages speak of it.
    """
    ways = mode.ways if mode else Ways()
    named = [part for axis in ways.axes for part in mesh.parts_of.get(axis, (axis,))]
    if len(set(named) & set(mesh.parts)) < len(named):
        return
    split = spec_axes(rows, mesh)
    whole = [axis for axis in ways.axes if not set(mesh.parts_of[axis]) <= set(split)]
    for axis in whole:
        yield PlanError(
            f"{words.attention} works over {axis!r}, over which {words.rows} is whole",
            text=rows.text,
            where=words.where,
            notes=[f"fix: split {words.rows} over {axis}, or leave the mode out"],
        )
    if ways.ulysses and not whole:
        yield from _check_heads(rows, ways, heads, mesh, words)
    yield from _check_cuts(rows, cutting, ways, mesh, words)


def _check_cuts(
    rows: Spec, cutting: Sequence[str], ways: Ways, mesh: MeshShape, words: SiteWords
) -> Iterator[ShardError]:
    """The mode works over every axis that cuts inside segments."""
    served = {part for axis in ways.axes for part in mesh.parts_of[axis]}
    cutting = [part for part in cutting if mesh.parts[part] > 1]
    cuts = [part for part in cutting if part not in served]
    if not cuts:
        return
    axes = [axis for dim in rows.dims for split in splits_in(dim) for axis in split.axes]
    spans = [axis.span for axis in axes if set(mesh.axis_parts(axis)) & set(cuts)]
    needed = [part for part in mesh.parts if part in cutting]
    named = mesh.text(needed).strip("()")
    given = words.give.replace("MODE", f'gather("{named}")')
    yield PlanError(
        f"segments are cut over {mesh.text(cuts)!r}, and no attention mode brings their keys "
        "together",
        text=rows.text,
        spans=[Span(start - (rows.text[start - 1] == "@"), stop) for start, stop in spans],
        where=words.where,
        notes=[f'fix: {given} or ulysses("{named}")'],
    )


def _check_heads(
    rows: Spec, ways: Ways, heads: Heads, mesh: MeshShape, words: SiteWords
) -> Iterator[ShardError]:
    """Heads go whole to the ranks of the all-to-all."""
    q, kv, _ = heads
    degree = mesh.span(ways.ulysses)
    if deals(q, kv, degree):
        return
    works = [str(n) for n in range(1, q + 1) if deals(q, kv, n)]
    axes = mesh.text(mesh.expand(ways.ulysses))
    arrow = " -> ".join(ulysses_specs(rows, axes, mesh))
    start = arrow.rindex(f"h@{axes}")
    count = f"{q} heads" if q == kv else f"{q} q heads over {kv} kv heads"
    instead = mesh.text(mesh.expand(ways.axes)).strip("()")
    yield PlanError(
        f"{count} cannot be dealt to {axes}={degree}",
        text=arrow,
        spans=[Span(start, start + len(f"h@{axes}"))],
        where=words.queries,
        notes=[
            f"fix: degrees {', '.join(works)} work; or gather({instead!r}) or ring({instead!r})"
        ],
    )


def deals(q: int, kv: int, degree: int) -> bool:
    """Whether heads go whole to ``degree`` ranks, kv heads being repeated where they are fewer."""
    return q % degree == 0 and (kv % degree == 0 or degree % kv == 0)

"""Who holds what of a tensor, as the terminal and the SVG picture draw it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np

from vlshard.language import Fused, IntArray, Layout, MeshShape, Packed, Pieces, splits_in

MOST_HOLDERS = 16
MOST_RANKS = 4
MOST_COUNTED = 2**16
# Runs of one holder, above which a dim is not drawn.
MOST_RUNS = 2**20
LOADS: tuple[Literal["rows", "cost"], ...] = ("rows", "cost")


@dataclass(frozen=True)
class Holder:
    """Ranks that hold the same.

    Attributes:
      number: place of the holder among all.
      ranks: the first of its ranks.
      copies: how many ranks they are.
      places: where they are along each part of the mesh that a split uses.
      shape: sizes of what each of the ranks holds.
      pieces: what they hold of each dim, as runs of indices in local order; None if those are
        too many.
    """

    number: int
    ranks: tuple[int, ...]
    copies: int
    places: Mapping[str, int]
    shape: tuple[int, ...]
    pieces: tuple[Pieces | None, ...]

    @property
    def name(self) -> str:
        """The ranks: ``0`` or ``0 4 8 12 +4``."""
        words = [str(rank) for rank in self.ranks]
        return " ".join(words + [f"+{self.copies - len(words)}"] * (self.copies > len(words)))


@dataclass(frozen=True)
class Strip:
    """One dim that is split.

    Attributes:
      number: place of the dim in the tensor.
      name: the dim as the spec writes it.
      size: its indices.
      unit: rows that no cut parts.
      ends: where segments end, the last one too; empty if it is no pack.
    """

    number: int
    name: str
    size: int
    unit: int
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Picture:
    """A layout with its first holders.

    Attributes:
      layout: the layout.
      most: holders that are listed.
    """

    layout: Layout
    most: int = MOST_HOLDERS

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Parts of the mesh over which a dim is split, in the order of the mesh."""
        mesh = self.layout.mesh
        splits = [split for dim in self.layout.spec.dims for split in splits_in(dim)]
        used = {p for split in splits for axis in split.axes for p in mesh.axis_parts(axis)}
        return tuple(part for part in mesh.parts if part in used)

    @cached_property
    def others(self) -> tuple[str, ...]:
        """The other parts of the mesh; ranks that differ along these alone hold the same."""
        return tuple(part for part in self.layout.mesh.parts if part not in self.axes)

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """The dims that are split, in order."""
        return tuple(self._strips())

    def _strips(self) -> Iterator[Strip]:
        for number, (dim, bound) in enumerate(
            zip(self.layout.spec.dims, self.layout.bound, strict=True)
        ):
            if "@" not in str(dim):
                continue
            unit, ends = 1, ()
            if isinstance(bound, Packed):
                unit, ends = bound.packing.unit, _ends(bound.packing.lengths)
            yield Strip(number, str(dim), bound.size, unit, ends)

    @property
    def hidden(self) -> int:
        """How many holders are not listed."""
        return self.layout.mesh.span(self.axes) - len(self.holders)

    @cached_property
    def holders(self) -> tuple[Holder, ...]:
        """The first holders, by rank."""
        mesh = self.layout.mesh
        copies = mesh.span(self.others)
        found: list[Holder] = []
        for number, place in enumerate(first_places(mesh, self.axes, self.most)):
            same = first_places(mesh, self.others, MOST_RANKS)
            ranks = tuple(mesh.rank_at({**place, **other}) for other in same)
            shape, pieces = self.layout.local_shape(ranks[0]), self._pieces(ranks[0])
            found.append(Holder(number, ranks, copies, place, shape, pieces))
        return tuple(found)

    def _pieces(self, rank: int) -> tuple[Pieces | None, ...]:
        """What a rank holds of each dim, where that can be drawn."""
        places = self.layout.mesh.coords(rank)
        return tuple(
            None if isinstance(dim, Fused) and dim.runs(places) > MOST_RUNS else dim.pieces(places)
            for dim in self.layout.bound
        )


def first_places(mesh: MeshShape, parts: Sequence[str], most: int) -> Iterator[dict[str, int]]:
    """The first places along some parts of a mesh, the last part the fastest."""
    for number in range(min(mesh.span(parts), most)):
        place: dict[str, int] = {}
        for part in reversed(parts):
            number, place[part] = divmod(number, mesh.parts[part])
        yield {part: place[part] for part in parts}


def heading(layout: Layout) -> str:
    """The spec and the mesh, in words where there is nothing to write."""
    mesh = str(layout.mesh) or "a mesh without axes"
    return f"{str(layout.spec) or 'a number'}  on {mesh}"


def runs(pieces: Pieces) -> tuple[IntArray, IntArray]:
    """First index of each run and the one after its last, in local order; neighbours are one."""
    some = pieces.only(pieces.lengths > 0)
    stops = some.starts + some.lengths
    new = np.flatnonzero(np.concatenate([[True], some.starts[1:] != stops[:-1]])[: stops.size])
    return some.starts[new], stops[np.append(new[1:] - 1, stops.size - 1)[: new.size]]


def held_of(pieces: Pieces, bounds: Sequence[int]) -> list[int]:
    """How many of the indices between each two neighbouring bounds are held."""
    if not pieces.starts.size:
        return [0] * (len(bounds) - 1)
    order = np.argsort(pieces.starts)
    starts, lengths = pieces.starts[order], pieces.lengths[order]
    ends, at = np.cumsum(lengths), np.array(bounds, np.int64)
    run = np.searchsorted(starts, at, "right") - 1
    inside = np.clip(at - starts[run], 0, lengths[run]) + (ends - lengths)[run]
    return np.diff(np.where(run < 0, 0, inside)).tolist()


def notes(picture: Picture) -> list[str]:
    """What a picture of holders does not say."""
    found: list[str] = []
    layout = picture.layout
    for strip in picture.strips:
        if any(holder.pieces[strip.number] is None for holder in picture.holders):
            found.append(f"{strip.name}: what more than {MOST_RUNS:,} runs hold is not drawn")
        if strip.ends and layout.mesh.size <= MOST_COUNTED:
            rows, cost = (layout.imbalance(strip.number, by=by) for by in LOADS)
            busiest = f"the busiest rank has {rows:.2f} times the mean of rows, {cost:.2f} of cost"
            found.append(f"{strip.name}: {busiest}")
    if axes := " ".join(part for part in picture.others if layout.mesh.parts[part] > 1):
        found.append(f"ranks that differ along {axes} alone hold the same indices")
    if layout.spec.pending:
        axes = " ".join(map(str, layout.spec.pending))
        found.append(f"a sum over {axes} is pending: what they hold are terms of it")
    return found


def _ends(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where each segment ends."""
    return tuple(accumulate(lengths))

"""Who holds what of a tensor, as the terminal and the SVG picture draw it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from vlshard.language import Layout, MeshShape, Packed, Pieces, splits_in

MOST_HOLDERS = 16
MOST_RANKS = 4
MOST_COUNTED = 1024
LOADS: tuple[Literal["rows", "cost"], ...] = ("rows", "cost")


@dataclass(frozen=True)
class Holder:
    """Ranks that hold the same.

    Attributes:
      number: place of the holder among all.
      ranks: the first of its ranks.
      copies: how many ranks they are.
      places: where they are along each part of the mesh that a split uses.
      pieces: what they hold of each dim, as runs of indices in local order.
    """

    number: int
    ranks: tuple[int, ...]
    copies: int
    places: Mapping[str, int]
    pieces: tuple[Pieces, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of what each of the ranks holds."""
        return tuple(pieces.rows for pieces in self.pieces)

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
            found.append(Holder(number, ranks, copies, place, self.layout.pieces(ranks[0])))
        return tuple(found)


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


def runs(pieces: Pieces) -> list[tuple[int, int]]:
    """First and last index of each run, in local order; runs that follow one another are one."""
    found: list[tuple[int, int]] = []
    for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        if found and found[-1][1] + 1 == start:
            found[-1] = (found[-1][0], start + length - 1)
        elif length:
            found.append((start, start + length - 1))
    return found


def notes(picture: Picture) -> list[str]:
    """What a picture of holders does not say."""
    found: list[str] = []
    layout = picture.layout
    for strip in picture.strips:
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
    ends: list[int] = []
    for length in lengths:
        ends.append((ends[-1] if ends else 0) + length)
    return tuple(ends)

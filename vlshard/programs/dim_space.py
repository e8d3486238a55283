"""The cuts that one dim may have on the way between two layouts.

- A plain dim, and a fused one as a whole, may be cut contiguously over any axes, joined or nested,
  whatever the sides write; with an order only as a side writes it (axes and order together).
- A part of a fused dim is cut as one of the sides cuts it, or with some of those cuts left out,
  never half as the one and half as the other: so it can be dealt whole if the sides can.
- A packed dim has the cuts of a side, or those with the last ones taken away.
- Cuts that both sides have, and before which nothing changes, stay.

An exchange may make any of these of any other, over axes that nothing else uses, where the dim is
packed, a cut before or after it is ordered, or axes that both have come in another order. Where
they are only joined otherwise, or cut another part, one of the two must be the cuts of a side or
those with the last ones taken away. Where four axes and more could be cut anew, what an exchange
makes must be so in any case.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from itertools import combinations
from typing import NamedTuple

from vlshard.programs.states import Axes, Cut, Cuts, used_axes

MANY = 4


class Kind(Enum):
    """How a tensor dim is made, as far as cuts go."""

    FIXED = "fixed"
    PLAIN = "plain"
    FUSED = "fused"
    PACKED = "packed"


class Edge(NamedTuple):
    """One cut more or one less.

    Attributes:
      axes: the axes of the cut.
      mask: the same, as bits.
      cuts: number of the cuts that come of it.
    """

    axes: Axes
    mask: int
    cuts: int


class DimSpace:
    """All cuts that a dim may have, numbered as they are met.

    Attributes:
      label: the dim as steps name it.
      kind: how it is made.
      sides: its cuts before and after.
      frozen: those that stay.
    """

    def __init__(
        self,
        label: str,
        kind: Kind,
        sides: tuple[Cuts, Cuts],
        bits: Mapping[str, int],
        joins: Sequence[Axes],
    ) -> None:
        """Prepare.

        Args:
          label: the dim as steps name it.
          kind: how it is made.
          sides: its cuts before and after.
          bits: one bit for each axis that may be cut anew somewhere.
          joins: which of these axes a contiguous cut may be over.
        """
        self.label, self.kind, self.sides = label, kind, sides
        self.frozen = frozen_cuts(kind, *sides)
        self._bits = bits
        ordered = [c for side in sides for c in side if c.order and c not in self.frozen]
        outer = (*(Cut((), axes) for axes in joins), *dict.fromkeys(ordered))
        self._applicable = [(cut, self._mask(cut.axes)) for cut in outer]
        self._kept = tuple(cut for cut in sides[0] if cut in self.frozen)
        self._written = {side[:n]: None for side in sides for n in range(len(side) + 1)}
        self._plainly = kind is Kind.PLAIN and not ordered
        self._numbers: dict[Cuts, int] = {}
        self._cuts: list[Cuts] = []
        self._masks: list[int] = []
        self._shorter: dict[int, tuple[Edge, ...]] = {}
        self._longer: dict[int, tuple[Edge, ...]] = {}
        self._exchanges: dict[tuple[int, int], tuple[int, ...]] = {}
        self._arrangements: dict[int, tuple[Cuts, ...]] = {}

    def number(self, cuts: Cuts) -> int:
        """The number of some cuts."""
        if cuts not in self._numbers:
            self._numbers[cuts] = len(self._cuts)
            self._cuts.append(cuts)
            self._masks.append(self._mask(used_axes(cuts)))
        return self._numbers[cuts]

    def cuts(self, number: int) -> Cuts:
        """The cuts of a number."""
        return self._cuts[number]

    def mask(self, number: int) -> int:
        """The axes of some cuts, as bits, without those that stay."""
        return self._masks[number]

    def shorter(self, number: int) -> tuple[Edge, ...]:
        """What can be had by undoing one cut."""
        if number not in self._shorter:
            cuts = self._cuts[number]
            self._shorter[number] = tuple(
                Edge(cut.axes, self._mask(cut.axes), self.number((*cuts[:i], *cuts[i + 1 :])))
                for i, cut in enumerate(cuts)
                if cut not in self.frozen and _applies_last(cut, cuts[i + 1 :], self.kind)
            )
        return self._shorter[number]

    def longer(self, number: int) -> tuple[Edge, ...]:
        """What can be had by one cut more."""
        if number not in self._longer:
            used = self._masks[number]
            edges = [
                Edge(axes, mask, self.number(cuts))
                for axes, mask, cuts in self._extended(self._cuts[number])
                if not mask & used
            ]
            self._longer[number] = tuple(dict.fromkeys(edges))
        return self._longer[number]

    def exchanges(self, number: int, free: int) -> tuple[int, ...]:
        """What one exchange can make of some cuts, over their axes and free ones.

        Args:
          number: the cuts before.
          free: axes that nothing uses, as bits.
        """
        key = (number, free)
        if self.kind is Kind.FIXED or (self._plainly and self._masks[number].bit_count() < 2):
            return ()
        if key not in self._exchanges:
            before = self._cuts[number]
            found = self._within(self._masks[number] | free)
            made = [after for after in found if self._exchangeable(before, after)]
            self._exchanges[key] = tuple(map(self.number, dict.fromkeys(made)))
        return self._exchanges[key]

    def _exchangeable(self, before: Cuts, after: Cuts) -> bool:
        """Whether an exchange may lead from some cuts to others."""
        if before == after:
            return False
        if self.kind is Kind.PACKED or any(cut.order for cut in (*before, *after)):
            return True
        common = {*used_axes(before)} & {*used_axes(after)}
        stands, stood = _standing(before, common), _standing(after, common)
        if _order(stands) != _order(stood):
            return True
        return stands != stood and (before in self._written or after in self._written)

    def _extended(self, cuts: Cuts) -> Iterator[tuple[Axes, int, Cuts]]:
        """Cuts with one more that applies last, on the dim or on a part of it; its axes first."""
        if self.kind is Kind.PACKED:
            for side in self.sides:
                if side[: len(cuts)] == cuts and len(side) > len(cuts):
                    axes = side[len(cuts)].axes
                    yield axes, self._mask(axes), side[: len(cuts) + 1]
        elif self.kind is not Kind.FIXED:
            for cut, mask in self._applicable:
                if not cut.order or _one_home((*cuts, cut)):
                    yield cut.axes, mask, (*cuts, cut)
        if self.kind is Kind.FUSED:
            for cut, more in self._extended_parts(cuts):
                yield cut.axes, self._mask(cut.axes), more

    def _extended_parts(self, cuts: Cuts) -> Iterator[tuple[Cut, Cuts]]:
        """Cuts of a fused dim with one more of those that a side has on its parts."""
        inner, outer = _inner(cuts), _outer(cuts)
        for side in map(_inner, self.sides):
            if not {*inner} <= {*side}:
                continue
            for new in side:
                more = tuple(cut for cut in side if cut in inner or cut == new)
                later = more[more.index(new) + 1 :]
                if new not in inner and _applies_last(new, (*later, *outer), self.kind):
                    yield new, (*more, *outer)

    def _within(self, mask: int) -> Iterator[Cuts]:
        """All cuts that the dim may have over some axes, besides those that stay."""
        if self.kind is Kind.PACKED or mask.bit_count() >= MANY:
            for cuts in self._written:
                if self.frozen <= {*cuts} and not self._mask(used_axes(cuts)) & ~mask:
                    yield cuts
            return
        kept, still = _inner(self._kept), _outer(self._kept)
        for inner in dict.fromkeys(cuts for side in self.sides for cuts in _subsets(_inner(side))):
            own = self._mask(used_axes(inner))
            if {*kept} <= {*inner} and not own & ~mask:
                for outer in self._arranged(mask & ~own):
                    yield (*inner, *still, *outer)

    def _arranged(self, mask: int) -> tuple[Cuts, ...]:
        """All sequences of cuts of the whole dim over some axes."""
        if mask not in self._arrangements:
            found: list[Cuts] = [()]
            for cut, own in self._applicable:
                if not own & ~mask:
                    found += [(cut, *rest) for rest in self._arranged(mask & ~own)]
            self._arrangements[mask] = tuple(cuts for cuts in found if _one_home(cuts))
        return self._arrangements[mask]

    def _mask(self, axes: Sequence[str]) -> int:
        """Axes as bits."""
        return sum(self._bits.get(axis, 0) for axis in axes)


def frozen_cuts(kind: Kind, src: Cuts, dst: Cuts) -> frozenset[Cut]:
    """The cuts that both sides have and before which nothing changes; a program leaves them."""
    if kind is not Kind.FUSED:
        same = [a == b for a, b in zip(src, dst, strict=False)]
        return frozenset(src[: same.index(False) if False in same else len(same)])
    found: list[Cut] = []
    for part in dict.fromkeys(cut.part for cut in src):
        inside = [[c for c in side if _encloses(part, c.part)] for side in (src, dst)]
        own = [tuple(c for c in side if c.part == part) for side in (src, dst)]
        if inside[0] == inside[1]:
            found += frozen_cuts(Kind.PLAIN, own[0], own[1])
    return frozenset(found)


def _applies_last(cut: Cut, later: Sequence[Cut], kind: Kind) -> bool:
    """Whether none of the cuts after one applies to what it left."""
    if kind is not Kind.FUSED:
        return not later
    return not any(cut.part == c.part or _encloses(c.part, cut.part) for c in later)


def _encloses(outer: tuple[int, ...], inner: tuple[int, ...]) -> bool:
    """Whether a part stands inside another one."""
    return len(outer) < len(inner) and inner[: len(outer)] == outer


def _one_home(cuts: Cuts) -> bool:
    """Whether rows are brought home at most once."""
    return sum(cut.order == "home" for cut in cuts) <= 1


def _inner(cuts: Cuts) -> Cuts:
    """The cuts of parts of a dim."""
    return tuple(cut for cut in cuts if cut.part)


def _outer(cuts: Cuts) -> Cuts:
    """The cuts of a dim as a whole."""
    return tuple(cut for cut in cuts if not cut.part)


def _subsets(cuts: Cuts) -> list[Cuts]:
    """Some of the cuts, in order: all ways."""
    return [some for n in range(len(cuts) + 1) for some in combinations(cuts, n)]


def _standing(cuts: Cuts, axes: Collection[str]) -> list[tuple[tuple[int, ...], Axes]]:
    """Where some axes stand: on which part, joined with what, in which order."""
    kept = [(cut.part, tuple(axis for axis in cut.axes if axis in axes)) for cut in cuts]
    return [(part, left) for part, left in kept if left]


def _order(standing: Sequence[tuple[tuple[int, ...], Axes]]) -> Axes:
    """The order in which axes apply."""
    return tuple(axis for _, axes in standing for axis in axes)

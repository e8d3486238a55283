"""The cuts that one dim may have on the way between two layouts, and what a step makes of them.

Joined cuts in contiguous blocks count as one for each axis: at sizes that divide ``s@(dp cp)`` is
``s@dp@cp``, and ``spelling`` chooses afterwards. What is cut one after another so, on one part of a
dim, is a sequence of axes; a cut with an order ends it.

- A plain dim, and a fused one as a whole, may have sequences over any axes. Between them stand cuts
  with those orders that a side has on the dim, over any axes joined; by home at most one, over a
  number of ranks that divides that of a side, so a Packing that says where is home will do.
- A factor of a fused dim is cut by a number of ranks that divides what a side cuts it by, so it can
  be dealt whole if the sides can.
- A packed dim has the cuts of a side, or those with the last ones taken away.

Steps undo the last axes of a sequence, or one cut with an order, where nothing is cut afterwards of
what it left, and cut so again. An exchange makes any cuts of any others, but where the ones are the
others with more behind them, which is a slice or a gather.

The ``narrow`` rules are for many axes: contiguous blocks are joined only as a side joins them,
orders go with the axes that a side gives them, and an exchange that might cut over four axes and
more leads to the cuts of a side, or those with the last ones taken away.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import combinations, permutations
from math import prod
from typing import NamedTuple

from vlshard.language import Dim, Group
from vlshard.programs.states import Axes, Cut, Cuts, used_axes

Part = tuple[int, ...]
MANY = 4


class Kind(Enum):
    """How a tensor dim is made, as far as cuts go."""

    FIXED = "fixed"
    PLAIN = "plain"
    FUSED = "fused"
    PACKED = "packed"


class Undone(NamedTuple):
    """The last cuts less: their axes, the same as bits, and the number of what is left."""

    axes: Axes
    mask: int
    left: int


class Landed(NamedTuple):
    """Cuts more: their axes, and the number of all."""

    axes: Axes
    cuts: int


class DimRules(NamedTuple):
    """What cuts a dim may have; equal ones share their tables.

    Attributes:
      kind: how it is made.
      dim: its brackets, without names and splits.
      orders: those that a side has on it.
      homes: by how many ranks a side cuts it by home.
      limits: for each factor that is cut, by how many ranks on either side.
      written: the cuts of both sides, where they restrict: on packed dims, and by narrow rules.
      joins: for narrow rules, the axes that one step may cut by, joined; None for any.
      axes: the parts of the mesh that are movable, and the ranks of all that are cut.
    """

    kind: Kind
    dim: Dim
    orders: tuple[str, ...]
    homes: tuple[int, ...]
    limits: tuple[tuple[Part, tuple[int, int]], ...]
    written: tuple[Cuts, ...]
    joins: tuple[Axes, ...] | None
    axes: tuple[str, ...]
    ranks: tuple[tuple[str, int], ...]


class DimSpace:
    """All cuts that a dim may have, numbered as they are met."""

    def __init__(self, rules: DimRules) -> None:
        self.rules = rules
        self._bits = {axis: 1 << i for i, axis in enumerate(rules.axes)}
        self._ranks = dict(rules.ranks)
        self._limits = dict(rules.limits)
        self._parts = [*_parts(rules.dim, ())] if rules.kind is Kind.FUSED else [()]
        self._place = {part: i for i, part in enumerate(self._parts)}
        self._joins: dict[frozenset[str], list[Axes]] = {}
        for some in rules.joins or ():
            self._joins.setdefault(frozenset(some), []).append(some)
        self._starts = dict.fromkeys(
            side[:n] for side in rules.written for n in range(len(side) + 1)
        )
        self._ordered = [c for side in rules.written for c in side if c.order]
        self._numbers: dict[Cuts, int] = {}
        self._cuts: list[Cuts] = []
        self._masks: list[int] = []
        self._used: list[Axes] = []
        self._spans: list[int] = []
        self._texts: list[str] = []
        self._undone: dict[int, tuple[Undone, ...]] = {}
        self._landed: dict[tuple[int, int], tuple[Landed, ...]] = {}
        self._exchanged: dict[tuple[int, int], tuple[int, ...]] = {}
        self._over: dict[tuple[int, Cuts], tuple[Cuts, ...]] = {}

    def number(self, cuts: Cuts) -> int:
        """The number of some cuts."""
        found = self._numbers.get(cuts)
        if found is None:
            found = self._numbers[cuts] = len(self._cuts)
            self._cuts.append(cuts)
            self._masks.append(self._mask(cuts))
            self._used.append(used_axes(cuts))
            self._spans.append(prod(self._ranks[axis] for axis in self._used[-1]))
            self._texts.append("".join(map(_text, cuts)))
        return found

    def cuts(self, number: int) -> Cuts:
        """The cuts of a number."""
        return self._cuts[number]

    def mask(self, number: int) -> int:
        """The movable axes of some cuts, as bits."""
        return self._masks[number]

    def used(self, number: int) -> Axes:
        """All axes of some cuts, in the order of application."""
        return self._used[number]

    def span(self, number: int) -> int:
        """By how many ranks some cuts cut the dim."""
        return self._spans[number]

    def text(self, number: int) -> str:
        """Some cuts as text, by which programs that cost as much are told apart."""
        return self._texts[number]

    # ------------------------------------------------------------ steps

    def undone(self, number: int) -> tuple[Undone, ...]:
        """What can be had by undoing the last cuts."""
        found = self._undone.get(number)
        if found is None:
            found = self._undone[number] = tuple(self._less(self._cuts[number]))
        return found

    def _less(self, cuts: Cuts) -> Iterator[Undone]:
        """The last cuts of each part, one more at a time."""
        parts = dict.fromkeys(cut.part for cut in cuts)
        if self.rules.kind is Kind.PACKED:
            parts = dict.fromkeys(cut.part for cut in cuts[-1:])
        for part in parts:
            own = [i for i, cut in enumerate(cuts) if cut.part == part]
            if any(_encloses(cut.part, part) for cut in cuts) or not own:
                continue
            for n, i in enumerate(reversed(own), 1):
                axes = used_axes(cuts[i : i + n])
                mask = self._mask(cuts[i : i + n])
                if self._staying(cuts[i : i + 1]) or (n > 1 and cuts[i].order):
                    break
                yield Undone(axes, mask, self.number((*cuts[:i], *cuts[i + n :])))
                if cuts[i].order or self.rules.kind is Kind.PACKED:
                    break

    def landed(self, number: int, mask: int) -> tuple[Landed, ...]:
        """What can be had by cutting once more, over just these axes."""
        key = (number, mask)
        found = self._landed.get(key)
        if found is None:
            made = self._more(self._cuts[number], self._axes(mask))
            found = self._landed[key] = tuple(
                Landed(axes, self.number(cuts)) for axes, cuts in made
            )
        return found

    def _more(self, cuts: Cuts, axes: Axes) -> Iterator[tuple[Axes, Cuts]]:
        """Cuts with more behind them over some axes, in any order of the axes."""
        kind = self.rules.kind
        if kind is Kind.PACKED:
            for start in self._starts:
                if start[:-1] == cuts and start and {*start[-1].axes} == {*axes}:
                    yield start[-1].axes, start
            return
        if kind is Kind.FIXED:
            return
        for some in self._in_order(axes):
            for part in self._parts:
                if self._allows(part, cuts, some):
                    yield some, self._with(cuts, part, [Cut(part, (axis,)) for axis in some])
        for cut in self._with_order(axes):
            if cut.order != "home" or self._goes_home(cut, cuts):
                yield cut.axes, self._with(cuts, (), [cut])

    def _goes_home(self, cut: Cut, cuts: Cuts) -> bool:
        """Whether rows may be brought home: once, and where a Packing for the sides says so."""
        ranks = prod(self._ranks[axis] for axis in cut.axes)
        return any(limit % ranks == 0 for limit in self.rules.homes) and all(
            other.order != "home" for other in cuts
        )

    def _in_order(self, axes: Axes) -> Iterable[Axes]:
        """The orders in which a step may cut by some axes in contiguous blocks."""
        if self.rules.joins is None:
            return permutations(axes)
        return [axes] if len(axes) == 1 else self._joins.get(frozenset(axes), [])

    def _with_order(self, axes: Axes) -> Iterator[Cut]:
        """The cuts with an order over some axes."""
        if self.rules.joins is not None:
            yield from (cut for cut in self._ordered if {*cut.axes} == {*axes})
        elif self.rules.orders:
            for some in permutations(axes):
                yield from (Cut((), some, order) for order in self.rules.orders)

    def _allows(self, part: Part, cuts: Cuts, axes: Axes) -> bool:
        """Whether a part may be cut over more axes."""
        if not part:
            return True
        if part not in self._limits or any(_encloses(cut.part, part) for cut in cuts):
            return False
        own = used_axes([cut for cut in cuts if cut.part == part])
        ranks = prod(self._ranks[axis] for axis in (*own, *axes))
        return any(limit % ranks == 0 for limit in self._limits[part])

    def _with(self, cuts: Cuts, part: Part, more: Sequence[Cut]) -> Cuts:
        """Cuts with more behind those of a part."""
        if not part:
            return (*cuts, *more)
        place = self._place[part]
        at = sum(self._place[cut.part] <= place for cut in cuts)
        return (*cuts[:at], *more, *cuts[at:])

    def exchanged(self, number: int, free: int) -> tuple[int, ...]:
        """What one exchange can make of some cuts, over their axes and free ones.

        Args:
          number: the cuts before.
          free: axes that nothing uses, as bits.
        """
        before = self._cuts[number]
        if self.rules.kind is Kind.FIXED or not before:
            return ()
        key = (number, free)
        found = self._exchanged.get(key)
        if found is None:
            mask = self._masks[number] | free
            many = self.rules.joins is not None and mask.bit_count() >= MANY
            narrow = self.rules.kind is Kind.PACKED or many
            targets: Iterable[Cuts] = self._starts if narrow else self._all_over(mask, before)
            staying = self._staying(before)
            found = self._exchanged[key] = tuple(
                self.number(after)
                for after in targets
                if not self._mask(after) & ~mask
                and staying == self._staying(after)
                and not self._goes_on(before, after)
                and not self._goes_on(after, before)
            )
        return found

    def _goes_on(self, cuts: Cuts, more: Cuts) -> bool:
        """Whether some cuts are others, or those with more behind them."""
        if self.rules.kind is Kind.PACKED:
            return cuts == more
        for part in self._parts:
            own, longer = ([cut for cut in side if cut.part == part] for side in (cuts, more))
            if longer[: len(own)] != own:
                return False
            if len(longer) > len(own) and any(_encloses(cut.part, part) for cut in cuts):
                return False
        return True

    def _all_over(self, mask: int, before: Cuts) -> tuple[Cuts, ...]:
        """All cuts that the dim may have over some of the axes, behind those that stay."""
        kept = tuple(cut for cut in before if not self._mask((cut,)))
        key = (mask, kept)
        if key not in self._over:
            found: dict[Cuts, None] = {kept: None}
            new: list[Cuts] = [kept]
            while new:
                cuts = new.pop()
                left = [axis for axis in self._axes(mask) if axis not in used_axes(cuts)]
                most = len(left) if self.rules.orders else min(len(left), 1)
                for n in range(1, most + 1):
                    for axes in combinations(left, n):
                        for _, more in self._more(cuts, axes):
                            if more not in found:
                                found[more] = None
                                new.append(more)
            self._over[key] = tuple(found)
        return self._over[key]

    # ------------------------------------------------------------ axes

    def _axes(self, mask: int) -> Axes:
        """The axes of bits, in mesh order."""
        return tuple(axis for axis, bit in self._bits.items() if bit & mask)

    def _mask(self, cuts: Cuts) -> int:
        """The movable axes of cuts, as bits."""
        return sum(self._bits.get(axis, 0) for axis in used_axes(cuts))

    def _staying(self, cuts: Cuts) -> list[str]:
        """The axes of cuts that are not movable."""
        return [axis for axis in used_axes(cuts) if axis not in self._bits]


def frozen_cuts(kind: Kind, src: Cuts, dst: Cuts) -> frozenset[Cut]:
    """The cuts that both sides have and before which nothing changes; narrow rules leave them."""
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


def limits_of(sides: tuple[Cuts, Cuts], ranks: Mapping[str, int]) -> dict[Part, tuple[int, int]]:
    """By how many ranks each side cuts each factor that one of them cuts."""
    parts = dict.fromkeys(cut.part for side in sides for cut in side if cut.part)
    cut_by = [
        {p: prod(ranks[a] for a in used_axes([c for c in side if c.part == p])) for p in parts}
        for side in sides
    ]
    return {part: (cut_by[0][part], cut_by[1][part]) for part in parts}


def _parts(dim: Dim, part: Part) -> Iterator[Part]:
    """The parts of a dim that can be cut, in the order in which their cuts apply."""
    if isinstance(dim, Group):
        for i, item in enumerate(dim.items):
            yield from _parts(item, (*part, i))
    yield part


def _encloses(outer: Part, inner: Part) -> bool:
    """Whether a part stands inside another one."""
    return len(outer) < len(inner) and inner[: len(outer)] == outer


def _text(cut: Cut) -> str:
    """A cut as text."""
    return f"{' '.join(map(str, cut.part))}@{' '.join(cut.axes)}" + (
        f".{cut.order}" * bool(cut.order)
    )

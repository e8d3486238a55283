"""The states between two layouts, the steps that lead from one to another, and what each costs.

A state is the cuts of each dim, as ``dim_space`` allows them, and the axes over which a sum is
pending, over the axes that the two sides name. What leads from one to another:

- ``AllGather`` undoes the last cuts of a dim, ``Slice`` makes such over axes that nothing uses;
- ``AllToAll`` undoes the last cuts of one dim and makes such of another over the same axes, in any
  order of them;
- ``ReduceScatter`` turns pending sums into last cuts, ``AllReduce`` takes sums away;
- ``Exchange`` changes the cuts of one dim.

A step costs the bytes that the rank which sends most sends, at symbolic even sizes: with x the part
of the tensor that a rank has before and n the ranks of the step's axes, (n-1)x for an AllGather,
(n-1)x/n for a ReduceScatter or an AllToAll, 2(n-1)x/n for an AllReduce, nothing for a Slice, and
for an Exchange what ``exchange_cost`` counts. A program costs the sum of its steps. Costs are
integers, in units in which all are whole; the sizes do not depend on the sides, so the programs of
different sides compare.

By ``narrow`` rules, for many axes, cuts that both sides have, and before which nothing changes,
stay; and fewer axes are joined (``dim_space`` says which).
"""

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import NamedTuple

from vlshard.language import MeshShape
from vlshard.programs.changes import Change, Cost, Node, StepKind
from vlshard.programs.dim_space import Kind, frozen_cuts
from vlshard.programs.rules import (
    KnownDim,
    dim_space_of,
    exchange_cost_of,
    joins_of,
    pack_of,
    rules_of,
)
from vlshard.programs.states import Axes, Cuts, State, used_axes

# Up to so many ranks of the axes of an exchange it is counted at once; what that takes, and what it
# takes with more, in steps that are only looked at.
SMALL, COUNTED, COUNTED_LONG = 1024, 20, 400


class Overlap(NamedTuple):
    """How much of what a rank has of a dim it wants, too.

    Attributes:
      mean: on average over ranks, in some unit.
      most: at most.
      axes: those whose places decide about it, as bits.
    """

    mean: int
    most: int
    axes: int


class ProgramSpace:
    """The states between two sides, in numbers, and the steps between them.

    A node is the number of each dim's cuts, and the pending axes as bits.

    Attributes:
      start: the state before.
      goal: the state after.
      ranks: ranks of all axes that the sides name, but for those pending on both.
      dims: the cuts that each dim may have.
      axes: those that may move.
      bits: a bit for each of them.
      unit: what the whole tensor counts.
      parts: the parts of the mesh and their ranks.
    """

    def __init__(
        self, dims: Sequence[KnownDim], src: State, dst: State, mesh: MeshShape, *, narrow: bool
    ) -> None:
        """Number everything.

        Args:
          dims: what is known of the dims.
          src: the state before; contiguous cuts are one for each axis.
          dst: the state after, so too; what is pending there is pending before, too.
          mesh: the parts of the mesh and their ranks.
          narrow: whether the rules for many axes hold.
        """
        sides = list(zip(src.dims, dst.dims, strict=True))
        named = {*src.pending, *(a for side in sides for cuts in side for a in used_axes(cuts))}
        named -= {*dst.pending}
        frozen = [frozen_cuts(dim.kind, *side) for dim, side in zip(dims, sides, strict=True)]
        staying = {a for cuts in frozen for a in used_axes([*cuts])} if narrow else set[str]()
        self._known, self._mesh, self.parts = dims, mesh, mesh.parts
        self._texts: dict[Axes, str] = {}
        self._play = tuple(axis for axis in mesh.parts if axis in named)
        self.axes = tuple(axis for axis in self._play if axis not in staying)
        self.bits = {axis: 1 << i for i, axis in enumerate(self.axes)}
        self._left = dst.pending
        self._spans: dict[int, int] = {0: 1}
        self._rests: dict[Node, tuple[int, int]] = {}
        self._priced: set[tuple[int, int, int]] = set()
        self.ranks = prod(mesh.parts[axis] for axis in self._play)
        self._still = prod(mesh.parts[axis] for axis in staying)
        joins = joins_of(self.axes, sides, src.pending, dst.pending) if narrow else None
        self._groups = None if joins is None else self._grouped(joins)
        ranks = tuple(mesh.parts.items())
        self.dims = [
            dim_space_of(rules_of(dim, side, self.axes, ranks, joins))
            for dim, side in zip(dims, sides, strict=True)
        ]
        self._costs = [
            exchange_cost_of(dim.dim, ranks, pack_of(dim, side, mesh))
            for dim, side in zip(dims, sides, strict=True)
        ]
        rows = [max(cost.rows, 1) for cost in self._costs]
        self.unit = self.ranks**2 * lcm(*rows)
        self._wholes = [self.ranks * n for n in rows]
        self._whole = prod(self._wholes)
        self._hopes: list[dict[int, int]] = [{} for _ in dims]
        self._overlaps: list[dict[int, Overlap]] = [{} for _ in dims]
        self._alike = [
            i
            for _, i in sorted((dim.label, i) for i, dim in enumerate(dims))
            if dims[i].kind in (Kind.PLAIN, Kind.FUSED) and sides[i] == ((), ())
        ]
        self.start, self.goal = self._node(src), self._node(dst)
        self._goal_masks = self._masks(self.goal)
        self._placed = sum(self._goal_masks)
        self._wanted = self._share(self._placed)

    # ------------------------------------------------------------ numbers

    def _node(self, state: State) -> Node:
        """A state in numbers."""
        numbers = [space.number(cuts) for space, cuts in zip(self.dims, state.dims, strict=True)]
        return (*numbers, sum(self.bits.get(axis, 0) for axis in state.pending))

    def state(self, node: Node) -> State:
        """The state of a node."""
        pending = {*self._left, *self.named(node[-1])}
        dims = tuple(space.cuts(n) for space, n in zip(self.dims, node, strict=False))
        return State(dims, tuple(axis for axis in self.parts if axis in pending))

    def _masks(self, node: Node) -> list[int]:
        """The movable axes that cut each dim, as bits."""
        return [space.mask(n) for space, n in zip(self.dims, node, strict=False)]

    def named(self, mask: int) -> Axes:
        """The axes of bits, in mesh order."""
        return tuple(axis for axis in self.axes if self.bits[axis] & mask)

    def _span(self, mask: int) -> int:
        """Ranks of axes given as bits."""
        found = self._spans.get(mask)
        if found is None:
            found = self._spans[mask] = prod(self.parts[axis] for axis in self.named(mask))
        return found

    def _share(self, mask: int) -> int:
        """What a rank has of the tensor if it is cut over some axes, and those that stay."""
        return self.unit // (self._still * self._span(mask))

    def _grouped(self, joins: Sequence[Axes]) -> tuple[int, ...]:
        """The sets of axes that one step may be over, as bits."""
        every = sum(self.bits.values())
        joined = [sum(self.bits[axis] for axis in some) for some in joins]
        return tuple(dict.fromkeys([*self.bits.values(), *joined, every]))

    def _subsets(self, mask: int) -> Iterator[int]:
        """The sets of some axes that one step may be over, as bits."""
        if self._groups is not None:
            yield from (group for group in self._groups if not group & ~mask)
            if mask and mask not in self._groups:
                yield mask
            return
        some = mask
        while some:
            yield some
            some = (some - 1) & mask

    # ------------------------------------------------------------ steps

    def text(self, change: Change) -> tuple[str, ...]:
        """A change as it counts among others that cost as much: as its step writes itself."""
        over = self._texts.get(change.axes)
        if over is None:
            over = self._texts[change.axes] = self._mesh.text(change.axes)
        over = over.strip("()") if change.kind == StepKind.EXCHANGE else over
        labels = [self._known[i].label for i in change.dims]
        return (*labels, over, *(self.dims[i].text(change.after[i]) for i in change.dims))

    def free(self, node: Node) -> int:
        """The axes that nothing uses, as bits."""
        return sum(self.bits.values()) & ~sum(self._masks(node)) & ~node[-1]

    def cost(self, kind: StepKind, before: Node, mask: int) -> int:
        """What a step over some axes, as bits, costs; no exchange."""
        share, ranks = self._share(sum(self._masks(before))), self._span(mask)
        once = share - share // ranks
        return {
            StepKind.ALL_GATHER: (ranks - 1) * share,
            StepKind.REDUCE_SCATTER: once,
            StepKind.ALL_TO_ALL: once,
            StepKind.SLICE: 0,
            StepKind.ALL_REDUCE: 2 * once,
        }[kind]

    def exchange_axes(self, before: Node, after: Node, i: int) -> Axes:
        """The axes of the cuts that an exchange changes: not those that both begin with."""
        have, want = (self.dims[i].cuts(node[i]) for node in (before, after))
        same = 0
        while same < min(len(have), len(want)) and have[same] == want[same]:
            same += 1
        used = {*used_axes(have[same:]), *used_axes(want[same:])}
        return tuple(axis for axis in self.parts if axis in used)

    def changes(self, node: Node) -> Iterator[Change]:
        """All steps from a state but exchanges."""
        masks, pending = self._masks(node), node[-1]
        used = sum(masks)
        share, free = self._share(used), sum(self.bits.values()) & ~used & ~pending
        targets = self._targets(node)
        landings = [(i, node[:i], node[i], node[i + 1 :], self.dims[i]) for i in targets]
        for i, mask in enumerate(masks):
            if not mask:
                continue
            for axes, moved, left in self.dims[i].undone(node[i]):
                ranks, less = self._span(moved), _put(node, i, left)
                yield Change(0, axes, (i,), less, (ranks - 1) * share)
                cost = share - share // ranks
                for j, *_, space in landings:
                    if j != i:
                        for _, number in space.landed(node[j], moved):
                            yield Change(2, axes, (i, j), _put(less, j, number), cost)
        for some in self._subsets(free):
            for i, front, own, back, space in landings:
                for axes, number in space.landed(own, some):
                    yield Change(3, axes, (i,), (*front, number, *back), 0)
        for some in self._subsets(pending):
            cost = share - share // self._span(some)
            summed = pending & ~some
            for i, _, own, _, space in landings:
                for axes, number in space.landed(own, some):
                    after = (*node[:i], number, *node[i + 1 : -1], summed)
                    yield Change(1, axes, (i,), after, cost)
            yield Change(4, self.named(some), (), (*node[:-1], summed), 2 * cost)

    def exchangeable(self, node: Node) -> list[int]:
        """The dims whose cuts an exchange may change."""
        masks = self._masks(node)
        free = sum(self.bits.values()) & ~sum(masks) & ~node[-1]
        found: list[int] = []
        for i, space in enumerate(self.dims):
            if masks[i] and (space.rules.kind is not Kind.PLAIN or space.rules.orders):
                found.append(i)
            elif masks[i] and (masks[i] | free).bit_count() > 1:
                found.append(i)
        return found

    def exchanges(self, node: Node, i: int) -> Iterator[Change]:
        """The exchanges of a dim; what each costs at least."""
        masks = self._masks(node)
        used, space = sum(masks), self.dims[i]
        free = sum(self.bits.values()) & ~used & ~node[-1]
        for number in space.exchanged(node[i], free):
            after, mask = _put(node, i, number), space.mask(number)
            gained = self._share(used - masks[i] + mask) - self._share(used | mask)
            yield Change(5, self.exchange_axes(node, after, i), (i,), after, gained)

    def _targets(self, node: Node) -> list[int]:
        """The dims that may get a cut more.

        Of dims that nothing cuts, on neither side nor now, one is like another: the first by text.
        """
        empty = [i for i in self._alike if not self.dims[i].cuts(node[i])][1:]
        return [
            i
            for i, space in enumerate(self.dims)
            if i not in empty and space.rules.kind is not Kind.FIXED
        ]

    def price(self, before: Node, after: Node, i: int) -> int:
        """What it takes to count an exchange, in steps that are only looked at; 0 the next time."""
        key = (i, before[i], after[i])
        if key in self._priced:
            return 0
        self._priced.add(key)
        sides = (self.dims[i].cuts(node[i]) for node in (before, after))
        group = prod(self.parts[axis] for axis in {a for cuts in sides for a in used_axes(cuts)})
        return COUNTED if group <= SMALL else COUNTED_LONG

    def counted(self, before: Node, after: Node, i: int) -> Cost:
        """What the exchange of a dim between two states costs."""
        have, want = (self.dims[i].cuts(node[i]) for node in (before, after))
        rows = self._costs[i].sent(have, want)
        own = prod(self.parts[axis] for axis in used_axes(have))
        group = prod(self.parts[axis] for axis in {*used_axes(have), *used_axes(want)})
        # What a rank has of the other dims, for one row of this one.
        row = self._share(sum(self._masks(before))) * own // max(self._costs[i].rows, 1)
        return Cost(rows.most * row, rows.total * row * self.ranks // group)

    # ------------------------------------------------------------ what is left to do

    def rest(self, node: Node) -> tuple[int, int]:
        """What is still to be sent at least, and in how many steps at least.

        Each element must come to the ranks that want it and do not have it, in one message each;
        the T terms of a sum, of which W ranks want the result, meet in T - 1 messages and go out
        in W - 1; one more if no rank that wants the sum has a term. A rank sends the mean of all
        messages at least.
        """
        found = self._rests.get(node)
        if found is None:
            have = self._kept(node)
            if node[-1]:
                part = self.unit // self.ranks
                terms = (self._span(node[-1]) - 2) * part
                cost = self._wanted + terms + max(0, part - have)
            else:
                cost = self._wanted - have
            found = self._rests[node] = (max(cost, 0), self._steps(node))
        return found

    def _kept(self, node: Node) -> int:
        """What a rank has of the tensor and wants, on average at most."""
        product, met = self.unit, 0
        for i, number in enumerate(node[:-1]):
            known = self._overlaps[i].get(number)
            if known is None:
                known = self._overlaps[i][number] = self._overlap(i, number)
            product *= known.most if known.axes & met else known.mean
            met |= known.axes
        return -(-product // self._whole)

    def _overlap(self, i: int, number: int) -> Overlap:
        """What a rank has of a dim and wants, in a fraction of ``self._wholes``."""
        space, whole = self.dims[i], self._wholes[i]
        have, want = space.cuts(number), space.cuts(self.goal[i])
        own, wanted = (prod(self.parts[a] for a in used_axes(cuts)) for cuts in (have, want))
        most, same = whole // max(own, wanted), 0
        while same < min(len(have), len(want)) and have[same] == want[same]:
            same += 1
        if same in (len(have), len(want)):
            return Overlap(most, most, 0)
        old, new = {*used_axes(have[same:])}, {*used_axes(want[same:])}
        bits = sum(self.bits.get(axis, 0) for axis in old | new)
        group = prod(self.parts[axis] for axis in {*used_axes(have), *used_axes(want)})
        # As if ranks that share axes had just what they want, where it takes long to count.
        mean = whole // group
        if old & new and (group <= SMALL or space.rules.kind is Kind.PACKED):
            rows = self._costs[i].sent(have, want)
            mean = whole // wanted - rows.total * self.ranks // group
        return Overlap(mean, most, bits)

    def hoped(self, node: Node) -> int:
        """In how many steps about the rest can be done: half of what has to be undone or made."""
        found = bool(node[-1])
        for i, number in enumerate(node[:-1]):
            known = self._hopes[i].get(number)
            if known is None:
                sides = self.dims[i].cuts(number), self.dims[i].cuts(self.goal[i])
                known = self._hopes[i][number] = _runs_apart(*sides)
            found += known
        return (found + 1) // 2

    def _steps(self, node: Node) -> int:
        """The steps that are still to come at least.

        Axes that belong on other dims leave theirs in one step a dim at least, and come to the
        others so; a step changes two dims at most.
        """
        leaving = coming = differ = 0
        for i, number in enumerate(node[:-1]):
            if number != self.goal[i]:
                differ += 1
                mask, goal = self.dims[i].mask(number), self._goal_masks[i]
                leaving += bool(mask & ~goal)
                coming += bool(goal & ~mask)
        return max((differ + 1) // 2, leaving, coming, bool(node[-1]))


def _runs_apart(have: Cuts, want: Cuts) -> int:
    """How many sequences, and cuts with an order, come behind what both begin with."""
    same = 0
    while same < min(len(have), len(want)) and have[same] == want[same]:
        same += 1
    return sum(
        bool(cut.order) or not i or bool(cuts[i - 1].order) or cuts[i - 1].part != cut.part
        for cuts in (have[same:], want[same:])
        for i, cut in enumerate(cuts)
    )


def _put(node: Node, dim: int, number: int) -> Node:
    """A state with other cuts of a dim."""
    return (*node[:dim], number, *node[dim + 1 :])
